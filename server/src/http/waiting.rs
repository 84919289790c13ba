//! The limit of open connections. At the limit, a new connection replaces the one that has waited longest for a complete request.
//! Otherwise one client could keep all others out by sending nothing.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{Request, Response};
use hyper::body::{Frame, SizeHint};
use tokio::sync::Notify;

/// The connections that are open, and those of them that wait, by when they began to. Costs `O(log n)` per request.
pub struct Waiting {
    most: usize,
    line: Mutex<Line>,
}

#[derive(Default)]
struct Line {
    /// Number of open connections, without those that have given way.
    open: usize,
    next: u64,
    waiting: BTreeMap<u64, Arc<End>>,
}

/// How a connection learns that it gives way.
#[derive(Default)]
struct End {
    notify: Notify,
    is_over: AtomicBool,
}

impl Waiting {
    /// Allows `most` open connections.
    pub fn new(most: usize) -> Waiting {
        Waiting { most, line: Mutex::default() }
    }

    /// Returns a place for a new connection. At the limit, the connection that has waited longest is ended; `None` if none waits.
    pub fn admit(self: &Arc<Waiting>) -> Option<Arc<Place>> {
        {
            let mut line = self.line();
            if line.open < self.most {
                line.open += 1;
            } else {
                let (_, longest) = line.waiting.pop_first()?;
                longest.is_over.store(true, Ordering::Relaxed);
                longest.notify.notify_one();
            }
        }
        let place = Place { waiting: self.clone(), end: Arc::default(), at: Mutex::default() };
        place.wait();
        Some(Arc::new(place))
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of one connection. It waits from the beginning.
pub struct Place {
    waiting: Arc<Waiting>,
    end: Arc<End>,
    /// Its key while it waits.
    at: Mutex<Option<u64>>,
}

impl Place {
    /// Waits until the connection has to end.
    pub async fn ended(&self) {
        self.end.notify.notified().await;
    }

    /// A request that takes the connection out of the line once it has arrived in full, or nobody reads the rest.
    pub fn arriving<B>(self: &Arc<Place>, request: Request<B>) -> Request<Body>
    where
        B: HttpBody<Data = Bytes, Error: std::error::Error + Send + Sync + 'static> + Send + Unpin + 'static,
    {
        let place = self.clone();
        request.map(|body| Body::new(Watched { body, _at_end: AtEnd(Some(Box::new(move || place.work()))) }))
    }

    /// A response that puts the connection back into the line when it has been sent.
    pub fn leaving(self: &Arc<Place>, response: Response<Body>) -> Response<Body> {
        // The rest of the request may not have been read.
        self.work();
        let place = self.clone();
        response.map(|body| Body::new(Watched { body, _at_end: AtEnd(Some(Box::new(move || place.wait()))) }))
    }

    fn wait(&self) {
        let mut line = self.waiting.line();
        if self.end.is_over.load(Ordering::Relaxed) {
            return;
        }
        let key = line.next;
        line.next += 1;
        line.waiting.insert(key, self.end.clone());
        if let Some(earlier) = self.at().replace(key) {
            line.waiting.remove(&earlier);
        }
    }

    /// Takes the connection out of the line.
    fn work(&self) {
        let mut line = self.waiting.line();
        if let Some(key) = self.at().take() {
            line.waiting.remove(&key);
        }
    }

    fn at(&self) -> MutexGuard<'_, Option<u64>> {
        self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.work();
        let mut line = self.waiting.line();
        // The place of a connection that gave way has another one now.
        if !self.end.is_over.load(Ordering::Relaxed) {
            line.open -= 1;
        }
    }
}

/// A body that does something when it is dropped.
struct Watched<B> {
    body: B,
    _at_end: AtEnd,
}

struct AtEnd(Option<Box<dyn FnOnce() + Send>>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        if let Some(act) = self.0.take() {
            act();
        }
    }
}

impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for Watched<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

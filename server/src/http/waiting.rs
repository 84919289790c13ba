//! Connections that wait for a request: one that is idle, or whose request has not arrived in full, gives way to a new one if
//! there are as many as may be open. Otherwise one client could keep all others out by sending nothing.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{Request, Response};
use hyper::body::{Frame, SizeHint};
use tokio::sync::Notify;

/// All connections that wait, by when they began to. Costs `O(log n)` per request.
#[derive(Default)]
pub struct Waiting(Mutex<Line>);

#[derive(Default)]
struct Line {
    next: u64,
    connections: BTreeMap<u64, Arc<Notify>>,
}

impl Waiting {
    /// Ends the connection that has waited longest. Returns whether there is one.
    pub fn end_longest(&self) -> bool {
        let longest = self.line().connections.pop_first();
        longest.inspect(|(_, end)| end.notify_one()).is_some()
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of one connection. It waits from the beginning.
pub struct Place {
    waiting: Arc<Waiting>,
    end: Arc<Notify>,
    /// Its key while it waits.
    at: Mutex<Option<u64>>,
}

impl Place {
    /// Place behind all others.
    pub fn new(waiting: Arc<Waiting>) -> Arc<Place> {
        let place = Place { waiting, end: Arc::default(), at: Mutex::default() };
        place.wait();
        Arc::new(place)
    }

    /// Waits until the connection has to end.
    pub async fn ended(&self) {
        self.end.notified().await;
    }

    /// A request that takes the connection out of the line once it has arrived in full, or nobody reads the rest.
    pub fn arriving<B>(self: &Arc<Place>, request: Request<B>) -> Request<Body>
    where
        B: HttpBody<Data = Bytes, Error: std::error::Error + Send + Sync + 'static> + Send + Unpin + 'static,
    {
        let place = self.clone();
        request.map(|body| Body::new(Watched { body, _at_end: AtEnd(Some(Box::new(move || place.leave()))) }))
    }

    /// A response that puts the connection back into the line when it has been sent.
    pub fn leaving(self: &Arc<Place>, response: Response<Body>) -> Response<Body> {
        // The rest of the request may not have been read.
        self.leave();
        let place = self.clone();
        response.map(|body| Body::new(Watched { body, _at_end: AtEnd(Some(Box::new(move || place.wait()))) }))
    }

    fn wait(&self) {
        let mut line = self.waiting.line();
        let key = line.next;
        line.next += 1;
        line.connections.insert(key, self.end.clone());
        if let Some(earlier) = self.at().replace(key) {
            line.connections.remove(&earlier);
        }
    }

    /// Takes the connection out of the line.
    pub fn leave(&self) {
        let mut line = self.waiting.line();
        if let Some(key) = self.at().take() {
            line.connections.remove(&key);
        }
    }

    fn at(&self) -> MutexGuard<'_, Option<u64>> {
        self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.leave();
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

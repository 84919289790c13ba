//! Connections that know whether their client still has an answer to take.
//!
//! - A stop can tell a slow reader, who is waited for, from a request that never arrives, who is not.
//! - A client that reads nothing is given up on.
//! - A client that has closed its sending side gets its answer; one that has gone altogether looks the same, until it is
//!   written to. So the first byte of the answer, which is that of every answer, goes out before the answer is known: the
//!   system of a client that has gone refuses it, and the call under way is dropped.
//! - What `hyper` says by itself to a request that it can not read, a status without a body, is held back; `serve` says it
//!   with the error object.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Interval, Sleep, interval, sleep};

/// The header of the id, both ways.
pub const REQUEST_ID: &str = "x-request-id";

/// How often it is looked whether a client that sends nothing more has gone.
const LOOK: Duration = Duration::from_millis(50);

/// The first byte of every answer: of `HTTP/1.1` and of `HTTP/1.0`.
const FIRST: &[u8] = b"H";

/// Longer than any answer without a body that `hyper` gives by itself.
const MAX_BARE: usize = 256;

/// Counts what a stop waits for beside the engine: answers in the making and answers that are being written.
#[derive(Clone, Debug, Default)]
pub struct Activity(Arc<AtomicUsize>);

impl Activity {
    /// Counts until the guard is dropped.
    pub fn begin(&self) -> Busy {
        self.0.fetch_add(1, Ordering::AcqRel);
        Busy(self.0.clone())
    }

    /// Nothing is counted now.
    pub fn is_idle(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

/// Something that a stop waits for.
#[derive(Debug)]
pub struct Busy(Arc<AtomicUsize>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Whether a call is under way on a connection: told by the side that answers, read by the side that writes.
#[derive(Clone, Debug, Default)]
pub struct Exchange(Arc<AtomicU8>);

/// No call, or all of its answer has been taken over for writing.
const NONE: u8 = 0;
/// A call, and no byte of its answer.
const CALLED: u8 = 1;
/// A call that is being answered.
const ANSWERING: u8 = 2;

impl Exchange {
    /// A call begins; it ends when the guard is dropped.
    pub fn begin(&self) -> Call {
        self.0.store(CALLED, Ordering::Release);
        Call(self.clone())
    }

    fn state(&self) -> u8 {
        self.0.load(Ordering::Acquire)
    }

    fn answers(&self, bytes: &[u8]) {
        // An interim answer asks for the body; the answer itself is still to come.
        if !bytes.starts_with(b"HTTP/1.1 100 ") {
            let _ = self.0.compare_exchange(CALLED, ANSWERING, Ordering::AcqRel, Ordering::Acquire);
        }
    }
}

/// A call under way.
#[derive(Debug)]
pub struct Call(Exchange);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.0.store(NONE, Ordering::Release);
    }
}

/// A client's connection.
pub struct Connection {
    stream: TcpStream,
    activity: Activity,
    exchange: Exchange,
    /// There is once the client has closed its sending side: when to look whether it has gone.
    looks: Option<Interval>,
    /// The first byte of the next answer is out.
    ahead: bool,
    /// The status that `hyper` has answered by itself and that was held back.
    bare: Option<StatusCode>,
    /// Bytes may wait for so long.
    patience: Duration,
    /// There is while bytes wait for the client to read.
    blocked: Option<Blocked>,
}

struct Blocked {
    _busy: Busy,
    until: Pin<Box<Sleep>>,
}

impl Connection {
    /// A connection that reports to `activity`, whose calls are told in `exchange`, and which fails once bytes have waited
    /// for `patience`.
    pub fn new(stream: TcpStream, activity: Activity, exchange: Exchange, patience: Duration) -> Connection {
        // Tokens are small writes that must not wait for each other; without the option they only come late.
        let _ = stream.set_nodelay(true);
        Connection { stream, activity, exchange, looks: None, ahead: false, bare: None, patience, blocked: None }
    }

    /// The connection, for a last word, and the status of the answer that was held back, if one was.
    pub fn into_parts(self) -> (TcpStream, Option<StatusCode>) {
        (self.stream, self.bare)
    }

    /// While a call is under way, fails if its client has gone.
    fn watch(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let state = self.exchange.state();
        if state == NONE {
            return Ok(());
        }
        let looks = match &mut self.looks {
            Some(looks) => looks,
            None => match self.stream.poll_peek(cx, &mut ReadBuf::new(&mut [0])) {
                Poll::Ready(Ok(0)) => self.looks.insert(interval(LOOK)),
                Poll::Ready(Ok(_)) | Poll::Pending => return Ok(()),
                Poll::Ready(Err(error)) => return Err(error),
            },
        };
        if state == CALLED && !self.ahead {
            self.ahead = self.stream.try_write(FIRST).is_ok();
        }
        while looks.poll_tick(cx).is_ready() {
            if let Some(error) = self.stream.take_error()? {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Whether these bytes are an answer of `hyper`'s own, which has no id. Then they are held back.
    fn holds_back(&mut self, bytes: &[u8]) -> bool {
        let is_bare = self.exchange.state() == NONE
            && bytes.len() < MAX_BARE
            && bytes.starts_with(b"HTTP/1.")
            && bytes.ends_with(b"\r\n\r\n")
            && !bytes.windows(REQUEST_ID.len()).any(|part| part == REQUEST_ID.as_bytes());
        let status = bytes.get(9..12).filter(|_| is_bare).and_then(|digits| StatusCode::from_bytes(digits).ok());
        self.bare = status.filter(StatusCode::is_client_error).or(self.bare);
        self.bare.is_some()
    }

    fn written<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.blocked = None;
            return result;
        }
        let Connection { activity, patience, blocked, .. } = self;
        let blocked =
            blocked.get_or_insert_with(|| Blocked { _busy: activity.begin(), until: Box::pin(sleep(*patience)) });
        match blocked.until.as_mut().poll(cx) {
            Poll::Ready(()) => {
                self.blocked = None;
                let message = format!("the client has read nothing for {} s", self.patience.as_secs_f64());
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if bytes.is_empty() || self.holds_back(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        let ahead = usize::from(self.ahead);
        let result = match &bytes[ahead..] {
            [] => Poll::Ready(Ok(0)),
            rest => Pin::new(&mut self.stream).poll_write(cx, rest),
        };
        let written = ready!(self.written(cx, result))?;
        self.exchange.answers(bytes);
        self.ahead = false;
        Poll::Ready(Ok(ahead + written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let first: &[u8] = slices.iter().find(|slice| !slice.is_empty()).map_or(&[], |slice| slice);
        if self.ahead || self.exchange.state() == CALLED || self.holds_back(first) {
            return self.poll_write(cx, first);
        }
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.written(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.watch(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A last word is still to come.
        if self.bare.is_some() { Poll::Ready(Ok(())) } else { Pin::new(&mut self.stream).poll_shutdown(cx) }
    }
}

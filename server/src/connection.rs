//! TCP connections that detect clients that have disconnected or do not read.
//!
//! - A shutdown waits for slow readers, but not for requests that never arrive in full.
//! - A client that reads nothing for too long is disconnected.
//! - A client that has closed its sending side may still read its response, or may be gone; only a write tells the
//!   difference. So the first byte of the response, which is the same for all responses, is sent ahead of it: the
//!   system of a client that is gone rejects it, and the running call is dropped.
//! - The status without a body that `hyper` sends for an unreadable request is suppressed: `serve` sends the error object.

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

/// Header of the call's id, in requests and responses.
pub const REQUEST_ID: &str = "x-request-id";

/// Interval of checks whether a client that has closed its sending side is gone.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// First byte of every response, `HTTP/1.1` or `HTTP/1.0`.
const FIRST: &[u8] = b"H";

/// Upper bound of the size of responses that `hyper` sends itself.
const MAX_SUPPRESSED: usize = 256;

/// Counter of what a shutdown waits for besides the engine: responses that are computed or written.
#[derive(Clone, Debug, Default)]
pub struct Activity(Arc<AtomicUsize>);

impl Activity {
    /// Increments the counter until the guard is dropped.
    pub fn begin(&self) -> Busy {
        self.0.fetch_add(1, Ordering::AcqRel);
        Busy(self.0.clone())
    }

    /// Whether the counter is zero.
    pub fn is_idle(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

/// Guard of [`Activity::begin`].
#[derive(Debug)]
pub struct Busy(Arc<AtomicUsize>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// State of the call on a connection, set by the handler and read by the writer.
#[derive(Clone, Debug, Default)]
pub struct Exchange(Arc<AtomicU8>);

/// No call, or its response is completely handed to the writer.
const NONE: u8 = 0;
/// A call without a response yet.
const CALLED: u8 = 1;
/// A call whose response is being written.
const ANSWERING: u8 = 2;

impl Exchange {
    /// Begins a call, which ends when the guard is dropped.
    pub fn begin(&self) -> Call {
        self.0.store(CALLED, Ordering::Release);
        Call(self.clone())
    }

    fn state(&self) -> u8 {
        self.0.load(Ordering::Acquire)
    }

    fn answers(&self, bytes: &[u8]) {
        // The interim response 100 requests the body; the response itself follows.
        if !bytes.starts_with(b"HTTP/1.1 100 ") {
            let _ = self.0.compare_exchange(CALLED, ANSWERING, Ordering::AcqRel, Ordering::Acquire);
        }
    }
}

/// Guard of [`Exchange::begin`].
#[derive(Debug)]
pub struct Call(Exchange);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.0.store(NONE, Ordering::Release);
    }
}

/// Connection of a client.
pub struct Connection {
    stream: TcpStream,
    activity: Activity,
    exchange: Exchange,
    /// Timer of the checks, once the client has closed its sending side.
    checks: Option<Interval>,
    /// The first byte of the next response has been sent ahead.
    first_sent: bool,
    /// Status of a suppressed response of `hyper`.
    suppressed: Option<StatusCode>,
    /// Maximum time without progress of a write.
    send_timeout: Duration,
    /// Set while a write waits for the client.
    blocked: Option<Blocked>,
}

struct Blocked {
    _busy: Busy,
    until: Pin<Box<Sleep>>,
}

impl Connection {
    /// Connection that counts waiting writes in `activity` and reads the state of its calls from `exchange`. A write
    /// fails after `send_timeout` without progress.
    pub fn new(stream: TcpStream, activity: Activity, exchange: Exchange, send_timeout: Duration) -> Connection {
        // Tokens are small writes that must not wait for each other. Without the option they are only late.
        let _ = stream.set_nodelay(true);
        Connection {
            stream,
            activity,
            exchange,
            checks: None,
            first_sent: false,
            suppressed: None,
            send_timeout,
            blocked: None,
        }
    }

    /// Returns the TCP stream and the status of a suppressed response.
    pub fn into_parts(self) -> (TcpStream, Option<StatusCode>) {
        (self.stream, self.suppressed)
    }

    /// Fails if the client is gone while a call runs.
    fn check_client(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let state = self.exchange.state();
        if state == NONE {
            return Ok(());
        }
        let checks = match &mut self.checks {
            Some(checks) => checks,
            None => match self.stream.poll_peek(cx, &mut ReadBuf::new(&mut [0])) {
                Poll::Ready(Ok(0)) => self.checks.insert(interval(CHECK_INTERVAL)),
                Poll::Ready(Ok(_)) | Poll::Pending => return Ok(()),
                Poll::Ready(Err(error)) => return Err(error),
            },
        };
        if state == CALLED && !self.first_sent {
            self.first_sent = self.stream.try_write(FIRST).is_ok();
        }
        while checks.poll_tick(cx).is_ready() {
            if let Some(error) = self.stream.take_error()? {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Whether these bytes are a response that `hyper` sends itself, which has no id. They are suppressed.
    fn suppresses(&mut self, bytes: &[u8]) -> bool {
        let is_own = self.exchange.state() == NONE
            && bytes.len() < MAX_SUPPRESSED
            && bytes.starts_with(b"HTTP/1.")
            && bytes.ends_with(b"\r\n\r\n")
            && !bytes.windows(REQUEST_ID.len()).any(|part| part == REQUEST_ID.as_bytes());
        let status = bytes.get(9..12).filter(|_| is_own).and_then(|digits| StatusCode::from_bytes(digits).ok());
        self.suppressed = status.filter(StatusCode::is_client_error).or(self.suppressed);
        self.suppressed.is_some()
    }

    fn written<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.blocked = None;
            return result;
        }
        let Connection { activity, send_timeout, blocked, .. } = self;
        let blocked =
            blocked.get_or_insert_with(|| Blocked { _busy: activity.begin(), until: Box::pin(sleep(*send_timeout)) });
        match blocked.until.as_mut().poll(cx) {
            Poll::Ready(()) => {
                self.blocked = None;
                let seconds = self.send_timeout.as_secs_f64();
                let message = format!("the client has read nothing for {seconds} s (--send-timeout)");
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
        if bytes.is_empty() || self.suppresses(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        let ahead = usize::from(self.first_sent);
        let result = match &bytes[ahead..] {
            [] => Poll::Ready(Ok(0)),
            rest => Pin::new(&mut self.stream).poll_write(cx, rest),
        };
        let written = ready!(self.written(cx, result))?;
        self.exchange.answers(bytes);
        self.first_sent = false;
        Poll::Ready(Ok(ahead + written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let first: &[u8] = slices.iter().find(|slice| !slice.is_empty()).map_or(&[], |slice| slice);
        if self.first_sent || self.exchange.state() == CALLED || self.suppresses(first) {
            return self.poll_write(cx, first);
        }
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.written(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_client(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // `serve` still sends the error object.
        if self.suppressed.is_some() { Poll::Ready(Ok(())) } else { Pin::new(&mut self.stream).poll_shutdown(cx) }
    }
}

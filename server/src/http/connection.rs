//! Connections that disconnect clients which do not read.
//!
//! - A shutdown waits for slow readers, but not for requests that never arrive in full.
//! - A client that reads nothing for too long is disconnected.
//! - The status without a body that `hyper` sends for an unreadable request is suppressed: `serve` sends the error object.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use super::Stream;

/// Header of the call's id, in requests and responses.
pub const REQUEST_ID: &str = "x-request-id";

/// Upper bound of the size of responses that `hyper` sends itself.
const MAX_SUPPRESSED: usize = 256;

/// Connection of a client.
pub struct Connection {
    stream: Stream,
    /// Upgraded and held by what a shutdown waits for.
    activity: Weak<()>,
    /// Status of a suppressed response of `hyper`.
    suppressed: Option<StatusCode>,
    /// Maximum time without progress of a write.
    send_timeout: Duration,
    /// Set while a write waits for the client.
    blocked: Option<Blocked>,
}

struct Blocked {
    _busy: Option<Arc<()>>,
    until: Pin<Box<Sleep>>,
}

impl Connection {
    /// Connection whose waiting writes hold `activity`. A write fails after `send_timeout` without progress.
    pub fn new(stream: Stream, activity: Weak<()>, send_timeout: Duration) -> Connection {
        Connection { stream, activity, suppressed: None, send_timeout, blocked: None }
    }

    /// Returns the stream and the status of a suppressed response.
    pub fn into_parts(self) -> (Stream, Option<StatusCode>) {
        (self.stream, self.suppressed)
    }

    /// Whether these bytes are a response that `hyper` sends itself, which has no id. They are suppressed.
    fn suppresses(&mut self, bytes: &[u8]) -> bool {
        let is_own = bytes.len() < MAX_SUPPRESSED
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
            blocked.get_or_insert_with(|| Blocked { _busy: activity.upgrade(), until: Box::pin(sleep(*send_timeout)) });
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
        if self.suppresses(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.written(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let first: &[u8] = slices.iter().find(|slice| !slice.is_empty()).map_or(&[], |slice| slice);
        if self.suppresses(first) {
            return Poll::Ready(Ok(first.len()));
        }
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.written(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // `serve` still sends the error object.
        if self.suppressed.is_some() { Poll::Ready(Ok(())) } else { Pin::new(&mut self.stream).poll_shutdown(cx) }
    }
}

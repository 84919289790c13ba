//! Connections that know whether their client still has an answer to take, so that a stop can tell a slow reader, who is
//! waited for, from a request that never arrives, who is not; and that give up on a client who reads nothing.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

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

/// A client's connection.
pub struct Connection {
    stream: TcpStream,
    activity: Activity,
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
    /// A connection that reports to `activity` and fails once bytes have waited for `patience`.
    pub fn new(stream: TcpStream, activity: Activity, patience: Duration) -> Connection {
        // Tokens are small writes that must not wait for each other; without the option they only come late.
        let _ = stream.set_nodelay(true);
        Connection { stream, activity, patience, blocked: None }
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
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.written(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
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
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

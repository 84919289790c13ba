//! Connections that know whether their client still has an answer to take, so that a stop can tell a slow reader, who is
//! waited for, from a request that never arrives, who is not.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

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

/// A listener whose connections report to an [`Activity`].
pub struct Connections {
    /// Where clients come in.
    pub listener: TcpListener,
    /// Where writes are counted.
    pub activity: Activity,
}

impl Listener for Connections {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        // Trouble with one connection, or too many open files, is waited out there.
        let (stream, address) = Listener::accept(&mut self.listener).await;
        // Tokens are small writes that must not wait for each other; without the option they only come late.
        let _ = stream.set_nodelay(true);
        (Connection { stream, activity: self.activity.clone(), blocked: None }, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A client's connection.
pub struct Connection {
    stream: TcpStream,
    activity: Activity,
    /// There is while bytes wait for the client to read.
    blocked: Option<Busy>,
}

impl Connection {
    fn written<T>(&mut self, result: Poll<T>) -> Poll<T> {
        if result.is_ready() {
            self.blocked = None;
        } else if self.blocked.is_none() {
            self.blocked = Some(self.activity.begin());
        }
        result
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
        self.written(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.written(result)
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

//! Streams: a body of server-sent events (`data:` lines), or of JSON lines, pulled as the client reads.
//!
//! A slow client delays only itself; a client that disconnects drops the body and with it the source of its events. All
//! events that are ready become one frame of the body, so that a step of the engine is one write to the connection.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use hyper::body::Frame;
use tokio::time::{Instant, Sleep, sleep};

/// Something is sent after this much silence, so that proxies keep the connection open while a request is queued.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Events beyond this many bytes wait for the next frame.
const FRAME_BYTES: usize = 16 << 10;

/// How a stream is written.
#[derive(Clone, Copy, Debug)]
pub struct Framing {
    /// Its media type.
    pub media_type: &'static str,
    /// What is sent after some silence; empty: nothing.
    pub keep_alive: &'static str,
}

impl Framing {
    /// Server-sent events, with comments in silence.
    pub const EVENTS: Framing = Framing { media_type: "text/event-stream", keep_alive: ":\n\n" };
    /// JSON lines, which have no comments.
    pub const LINES: Framing = Framing { media_type: "application/x-ndjson", keep_alive: "" };
}

/// A source of events.
pub trait EventSource: Send + Unpin + 'static {
    /// How the stream is written.
    const FRAMING: Framing = Framing::EVENTS;

    /// Appends the next events to `lines`, if any; `false` at the end.
    fn poll_events(&mut self, cx: &mut Context<'_>, lines: &mut Vec<u8>) -> Poll<bool>;
}

impl<S: Stream<Item = Vec<u8>> + Send + 'static> EventSource for Pin<Box<S>> {
    fn poll_events(&mut self, cx: &mut Context<'_>, lines: &mut Vec<u8>) -> Poll<bool> {
        let event = ready!(self.as_mut().poll_next(cx));
        Poll::Ready(event.map(|mut event| lines.append(&mut event)).is_some())
    }
}

/// Appends an event. `write` appends its data, which must be one line.
pub fn event(lines: &mut Vec<u8>, name: Option<&str>, write: impl FnOnce(&mut Vec<u8>)) {
    if let Some(name) = name {
        for part in [b"event: ", name.as_bytes(), b"\n"] {
            lines.extend_from_slice(part);
        }
    }
    lines.extend_from_slice(b"data: ");
    write(lines);
    lines.extend_from_slice(b"\n\n");
}

/// The HTTP response that streams events.
pub fn respond<S: EventSource>(source: S) -> Response {
    let body = EventBody { source, is_over: false, next_capacity: 0, keep_alive: Box::pin(sleep(KEEP_ALIVE)) };
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(S::FRAMING.media_type)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // Otherwise nginx buffers the stream.
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, Body::new(body)).into_response()
}

/// The body of a stream.
struct EventBody<S> {
    source: S,
    is_over: bool,
    /// Size of the last frame, about which the next one will have.
    next_capacity: usize,
    keep_alive: Pin<Box<Sleep>>,
}

impl<S: EventSource> hyper::body::Body for EventBody<S> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let EventBody { source, is_over, next_capacity, keep_alive } = &mut *self;
        let mut lines = Vec::with_capacity(*next_capacity);
        while !*is_over && lines.len() < FRAME_BYTES {
            match source.poll_events(cx, &mut lines) {
                Poll::Ready(goes_on) => *is_over = !goes_on,
                Poll::Pending => break,
            }
        }
        if lines.is_empty() {
            if *is_over {
                return Poll::Ready(None);
            }
            if S::FRAMING.keep_alive.is_empty() {
                return Poll::Pending;
            }
            ready!(keep_alive.as_mut().poll(cx));
            lines.extend_from_slice(S::FRAMING.keep_alive.as_bytes());
        } else {
            *next_capacity = lines.len() + lines.len() / 8;
        }
        keep_alive.as_mut().reset(Instant::now() + KEEP_ALIVE);
        Poll::Ready(Some(Ok(Frame::data(lines.into()))))
    }
}

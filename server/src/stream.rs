//! Server-sent events: the events of a [`Run`] as `data:` lines, which end with `[DONE]`.
//!
//! Invalid requests are rejected with a status before the stream begins. If the engine fails later, the stream has one
//! error object and ends without `[DONE]`. Events are pulled as the client reads, so that a slow client delays only
//! itself; a client that disconnects drops the stream and with it the run.
//!
//! All events that are ready become one frame of the body, so that a step of the engine is one write to the connection.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use engine::{Delta, Event, TokenLogprobs};
use futures_util::Stream;
use hyper::body::Frame;
use serde::Serialize;
use serde_json::Value;
use tokio::time::{Instant, Sleep, sleep};

use super::error::ApiError;
use super::json::put;
use super::options::StreamUsage;
use super::reply::{Envelope, Field, Usage};
use super::run::{self, Run};

/// A comment is sent after this much silence, so that proxies keep the connection open while a request is queued.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Events beyond this many bytes wait for the next frame.
const FRAME_BYTES: usize = 16 << 10;

/// Deltas with more tokens than this, such as those of a beam search, are written while another thread serves
/// connections.
const LARGE_DELTA: usize = 32;

/// A source of server-sent events.
pub trait Source: Send + Unpin + 'static {
    /// Appends the next events to `lines`, if any; `false` at the end.
    fn poll_events(&mut self, cx: &mut Context<'_>, lines: &mut Vec<u8>) -> Poll<bool>;
}

impl<S: Stream<Item = Vec<u8>> + Send + 'static> Source for Pin<Box<S>> {
    fn poll_events(&mut self, cx: &mut Context<'_>, lines: &mut Vec<u8>) -> Poll<bool> {
        let event = ready!(self.as_mut().poll_next(cx));
        Poll::Ready(event.map(|mut event| lines.append(&mut event)).is_some())
    }
}

/// Writer of an API's chunks.
pub trait Chunks: Send + Unpin + 'static {
    /// Writes the chunks before the first event.
    fn opening(&mut self, _writer: &mut Writer) {}

    /// Receives the log probabilities of a prompt, before its first delta.
    fn prompt_logprobs(&mut self, _prompt: usize, _logprobs: Vec<Option<TokenLogprobs>>) {}

    /// Writes the chunk of a delta, unless it would be empty.
    fn delta(&mut self, prompt: usize, delta: &Delta, writer: &mut Writer);
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

/// The response that streams a run.
pub fn respond(
    run: Run,
    mut chunks: impl Chunks,
    envelope: Envelope,
    stream_usage: StreamUsage,
    prompt_tokens: usize,
) -> Response {
    let usage = Usage { prompt_tokens, ..Usage::default() };
    let mut writer = Writer { envelope, usage, stream_usage, lines: Vec::new() };
    chunks.opening(&mut writer);
    answer(Driver { source: Some((run, chunks)), writer })
}

/// The HTTP response that streams events.
pub fn answer(source: impl Source) -> Response {
    let body = EventBody { source, is_over: false, next_capacity: 0, keep_alive: Box::pin(sleep(KEEP_ALIVE)) };
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
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

impl<S: Source> hyper::body::Body for EventBody<S> {
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
            ready!(keep_alive.as_mut().poll(cx));
            lines.extend_from_slice(b":\n\n");
        } else {
            *next_capacity = lines.len() + lines.len() / 8;
        }
        keep_alive.as_mut().reset(Instant::now() + KEEP_ALIVE);
        Poll::Ready(Some(Ok(Frame::data(lines.into()))))
    }
}

/// Writes chunks, and counts the tokens of the response.
pub struct Writer {
    envelope: Envelope,
    usage: Usage,
    stream_usage: StreamUsage,
    /// Events that have not been sent.
    lines: Vec<u8>,
}

impl Writer {
    /// Writes a chunk with these choices and further fields.
    pub fn chunk(&mut self, choices: impl IntoIterator<Item: Serialize>, more: &[(&str, Field)]) {
        // With `include_usage` all chunks have the field, which is `null` in all but the last unless every chunk has a
        // usage.
        let usage = match self.stream_usage {
            StreamUsage { in_all: true, .. } => Some(self.usage.to_json()),
            StreamUsage { at_end, .. } => at_end.then_some(Value::Null),
        };
        event(&mut self.lines, None, |text| self.envelope.write(text, ("choices", choices), more, usage));
    }

    /// Writes the last event: `[DONE]` after the usage if it was requested, or the error.
    fn end(&mut self, failure: Option<ApiError>) {
        if let Some(error) = failure {
            return event(&mut self.lines, None, |text| put(text, &error.to_json()));
        }
        if self.stream_usage.at_end {
            let (none, usage) = (("choices", [(); 0]), Some(self.usage.to_json()));
            event(&mut self.lines, None, |text| self.envelope.write(text, none, &[], usage));
        }
        event(&mut self.lines, None, |text| text.extend_from_slice(b"[DONE]"));
    }
}

struct Driver<C> {
    /// `None` after the run has ended.
    source: Option<(Run, C)>,
    writer: Writer,
}

impl<C: Chunks> Source for Driver<C> {
    fn poll_events(&mut self, cx: &mut Context<'_>, lines: &mut Vec<u8>) -> Poll<bool> {
        let Driver { source, writer } = self;
        // The chunks of the opening come first.
        if writer.lines.is_empty() {
            let Some((run, chunks)) = source else { return Poll::Ready(false) };
            match ready!(run.poll_next(cx)) {
                Some((prompt, Event::PromptLogprobs(logprobs))) => chunks.prompt_logprobs(prompt, logprobs),
                // A stream cannot request one.
                Some((_, Event::Embedding(_))) => {}
                Some((_, Event::Started { cached_tokens })) => writer.usage.cached_tokens += cached_tokens,
                Some((prompt, Event::Delta(delta))) => {
                    writer.usage.completion_tokens += delta.tokens.len();
                    writer.usage.drafts += delta.drafts;
                    match run::failed(&delta) {
                        Ok(()) => block_if_large(&delta, || chunks.delta(prompt, &delta, writer)),
                        Err(error) => self.end(Some(error)),
                    }
                }
                None => {
                    let failure = run.failure();
                    self.end(failure);
                }
            }
        }
        lines.append(&mut self.writer.lines);
        Poll::Ready(true)
    }
}

impl<C> Driver<C> {
    /// Ends the stream. Dropping the run cancels the rest of it.
    fn end(&mut self, failure: Option<ApiError>) {
        self.writer.end(failure);
        self.source = None;
    }
}

/// Runs `write`. If the delta is large, other tasks of the thread continue on another one.
pub fn block_if_large<T>(delta: &Delta, write: impl FnOnce() -> T) -> T {
    if delta.tokens.len() > LARGE_DELTA { tokio::task::block_in_place(write) } else { write() }
}

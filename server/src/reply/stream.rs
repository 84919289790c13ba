//! Server-sent events: the events of a [`Run`] as `data:` lines, which end with `[DONE]`.
//!
//! Invalid requests are rejected with a status before the stream begins. If the engine fails later, the stream has one
//! error object and ends without `[DONE]`. Events are pulled as the client reads, so that a slow client delays only
//! itself; a client that disconnects drops the stream and with it the run.
//!
//! All events that are ready become one frame of the body, so that a step of the engine is one write to the connection.

use std::task::{Context, Poll, ready};

use axum::response::Response;
use engine::{Delta, Event, TokenLogprobs};
use serde::Serialize;
use serde_json::Value;

use super::choice::{Envelope, Field, Usage};
use super::run::{self, Run};
use crate::http::ApiError;
use crate::http::json::put;
use crate::http::sse::{self, EventSource};
use crate::request::StreamUsage;

/// Deltas with more tokens than this, such as those of a beam search, are written while another thread serves
/// connections.
const LARGE_DELTA: usize = 32;

/// Writer of an API's chunks.
pub trait Chunks: Send + Unpin + 'static {
    /// Writes the chunks before the first event.
    fn opening(&mut self, _writer: &mut Writer) {}

    /// Receives the log probabilities of a prompt, before its first delta.
    fn prompt_logprobs(&mut self, _prompt: usize, _logprobs: Vec<Option<TokenLogprobs>>) {}

    /// Writes the chunk of a delta, unless it would be empty.
    fn delta(&mut self, prompt: usize, delta: &Delta, writer: &mut Writer);
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
    sse::respond(Driver { source: Some((run, chunks)), writer })
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
        sse::event(&mut self.lines, None, |text| self.envelope.write(text, ("choices", choices), more, usage));
    }

    /// Writes the last event: `[DONE]` after the usage if it was requested, or the error.
    fn end(&mut self, failure: Option<ApiError>) {
        if let Some(error) = failure {
            return sse::event(&mut self.lines, None, |text| put(text, &error.to_json()));
        }
        if self.stream_usage.at_end {
            let (none, usage) = (("choices", [(); 0]), Some(self.usage.to_json()));
            sse::event(&mut self.lines, None, |text| self.envelope.write(text, none, &[], usage));
        }
        sse::event(&mut self.lines, None, |text| text.extend_from_slice(b"[DONE]"));
    }
}

struct Driver<C> {
    /// `None` after the run has ended.
    source: Option<(Run, C)>,
    writer: Writer,
}

impl<C: Chunks> EventSource for Driver<C> {
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

//! Server-sent events: converts the events of a [`Run`] to `data:` lines, which end with `[DONE]`.
//!
//! Invalid requests are rejected with a status before the stream begins. If the engine fails later, the stream has one
//! error object and ends without `[DONE]`. Events are pulled as the client reads, so that a slow client delays only
//! itself; a client that disconnects drops the stream and with it the run.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderValue, header};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use engine::{Delta, Event, TokenLogprobs};
use futures_util::{Stream, stream};
use serde_json::Value;

use super::json::Json;
use super::options::StreamUsage;
use super::reply::{Envelope, Usage, choices};
use super::run::{self, Run};

/// A comment is sent after this much silence, so that proxies keep the connection open while a request is queued.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Deltas with more tokens than this, such as those of a beam search, are written while another thread serves
/// connections.
const LARGE_DELTA: usize = 32;

/// Fields of a chunk besides those of its envelope.
pub type Chunk = Vec<(&'static str, Json)>;

/// Writer of an API's chunks.
pub trait Chunks: Send + 'static {
    /// Chunks to send before the first event.
    fn opening(&mut self) -> Vec<Chunk> {
        Vec::new()
    }

    /// Receives the log probabilities of a prompt, before its first delta.
    fn prompt_logprobs(&mut self, _prompt: usize, _logprobs: Vec<Option<TokenLogprobs>>) {}

    /// The chunk of a delta, or `None` if it would be empty.
    fn chunk(&mut self, prompt: usize, delta: &Delta) -> Option<Chunk>;
}

/// The response that streams a run.
pub fn respond(
    run: Run,
    mut chunks: impl Chunks,
    envelope: Envelope,
    stream_usage: StreamUsage,
    prompt_tokens: usize,
) -> Response {
    let mut driver = Driver {
        stream_usage,
        usage: Usage { prompt_tokens, ..Usage::default() },
        queue: VecDeque::new(),
        source: None,
        envelope,
    };
    for chunk in chunks.opening() {
        driver.push(chunk);
    }
    driver.source = Some((run, chunks));
    let events = stream::unfold(driver, |mut driver| async move {
        let line = driver.next().await?;
        Some((Ok::<_, Infallible>(sse::Event::default().data(line)), driver))
    });
    answer(events)
}

/// The HTTP response that streams `events`.
pub fn answer(events: impl Stream<Item = Result<sse::Event, Infallible>> + Send + 'static) -> Response {
    let mut response = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    // Otherwise nginx buffers the stream.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

struct Driver<C> {
    /// `None` after the run has ended; queued lines are still sent.
    source: Option<(Run, C)>,
    envelope: Envelope,
    usage: Usage,
    stream_usage: StreamUsage,
    queue: VecDeque<String>,
}

impl<C: Chunks> Driver<C> {
    async fn next(&mut self) -> Option<String> {
        while self.queue.is_empty() {
            let (run, chunks) = self.source.as_mut()?;
            match run.next().await {
                Some((prompt, Event::PromptLogprobs(logprobs))) => chunks.prompt_logprobs(prompt, logprobs),
                // A stream cannot request one.
                Some((_, Event::Embedding(_))) => {}
                Some((_, Event::Started { cached_tokens })) => self.usage.cached_tokens += cached_tokens,
                Some((prompt, Event::Delta(delta))) => {
                    self.usage.completion_tokens += delta.tokens.len();
                    self.usage.drafts += delta.drafts;
                    match run::failed(&delta) {
                        Ok(()) => {
                            if let Some(chunk) = block_if_large(&delta, || chunks.chunk(prompt, &delta)) {
                                self.push(chunk);
                            }
                        }
                        Err(error) => self.end(error.to_json().to_string()),
                    }
                }
                None => {
                    if let Some(error) = run.failure() {
                        self.end(error.to_json().to_string());
                        continue;
                    }
                    if self.stream_usage.at_end {
                        let last = self.envelope.wrap(choices(Vec::new()), Some(self.usage.to_json()));
                        self.queue.push_back(last.write());
                    }
                    self.end("[DONE]".to_string());
                }
            }
        }
        self.queue.pop_front()
    }

    fn push(&mut self, chunk: Chunk) {
        // With `include_usage` all chunks have the field, which is `null` in all but the last unless every chunk has a
        // usage.
        let usage = match self.stream_usage {
            StreamUsage { in_all: true, .. } => Some(self.usage.to_json()),
            StreamUsage { at_end, .. } => at_end.then_some(Value::Null),
        };
        self.queue.push_back(self.envelope.wrap(chunk, usage).write());
    }

    /// Ends the stream with this line. Dropping the run cancels the rest of it.
    fn end(&mut self, last: String) {
        self.queue.push_back(last);
        self.source = None;
    }
}

/// Runs `write`. If the delta is large, other tasks of the thread continue on another one.
pub fn block_if_large<T>(delta: &Delta, write: impl FnOnce() -> T) -> T {
    if delta.tokens.len() > LARGE_DELTA { tokio::task::block_in_place(write) } else { write() }
}

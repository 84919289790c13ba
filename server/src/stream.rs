//! Server-sent events: a [`Run`] becomes `data:` lines, ended by `[DONE]`.
//!
//! Whatever can be refused has been refused with a status before this begins. If the engine fails later, the stream
//! carries one error object and ends without `[DONE]`. Events are pulled as the client reads, so a slow reader waits for
//! itself alone; a client that goes away drops the stream and with it the run.

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
use super::options::Options;
use super::reply::{Envelope, Usage, choices};
use super::run::{self, Run};

/// A comment is sent after this much silence, so that proxies keep the connection while a request waits its turn.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Deltas of more tokens than this, as those of a beam search are, are written while another thread takes over serving.
const LARGE_DELTA: usize = 32;

/// The fields of a chunk beside those of its envelope.
pub type Chunk = Vec<(&'static str, Json)>;

/// How one of the two APIs writes its chunks.
pub trait Chunks: Send + 'static {
    /// Chunks to send before any event.
    fn opening(&mut self) -> Vec<Chunk> {
        Vec::new()
    }

    /// The prompt's log-probabilities have come; they precede its first delta.
    fn prompt_logprobs(&mut self, prompt: usize, logprobs: Vec<Option<TokenLogprobs>>);

    /// The chunk for a delta, or `None` if a client would learn nothing from it.
    fn chunk(&mut self, prompt: usize, delta: &Delta) -> Option<Chunk>;
}

/// Answers with the stream.
pub fn respond(
    run: Run,
    mut chunks: impl Chunks,
    envelope: Envelope,
    options: &Options,
    prompt_tokens: usize,
) -> Response {
    let mut driver = Driver {
        include_usage: options.include_usage,
        continuous_usage: options.continuous_usage,
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

/// The HTTP answer that carries `events`.
pub fn answer(events: impl Stream<Item = Result<sse::Event, Infallible>> + Send + 'static) -> Response {
    let mut response = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    // nginx would collect the stream otherwise.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

struct Driver<C> {
    /// `None` once the run has ended; what is queued is still sent.
    source: Option<(Run, C)>,
    envelope: Envelope,
    usage: Usage,
    include_usage: bool,
    continuous_usage: bool,
    queue: VecDeque<String>,
}

impl<C: Chunks> Driver<C> {
    async fn next(&mut self) -> Option<String> {
        while self.queue.is_empty() {
            let (run, chunks) = self.source.as_mut()?;
            match run.next().await {
                Some((prompt, Event::PromptLogprobs(logprobs))) => chunks.prompt_logprobs(prompt, logprobs),
                // Nobody asks for one in a stream.
                Some((_, Event::Embedding(_))) => {}
                Some((_, Event::Started { cached_tokens })) => self.usage.cached_tokens += cached_tokens,
                Some((prompt, Event::Delta(delta))) => {
                    self.usage.completion_tokens += delta.tokens.len();
                    match run::failed(&delta) {
                        Ok(()) => {
                            if let Some(chunk) = aside(&delta, || chunks.chunk(prompt, &delta)) {
                                self.push(chunk);
                            }
                        }
                        Err(error) => self.end(error.to_json().to_string()),
                    }
                }
                None => {
                    if let Some(error) = run.broke_off() {
                        self.end(error.to_json().to_string());
                        continue;
                    }
                    if self.include_usage {
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
        // With `include_usage` every chunk has the field; it is `null` until the last one unless asked for in each.
        let usage = match (self.include_usage, self.continuous_usage) {
            (_, true) => Some(self.usage.to_json()),
            (true, false) => Some(Value::Null),
            (false, false) => None,
        };
        self.queue.push_back(self.envelope.wrap(chunk, usage).write());
    }

    /// Ends the stream with this line; dropping the run cancels what is left of it.
    fn end(&mut self, last: String) {
        self.queue.push_back(last);
        self.source = None;
    }
}

/// Runs `write`; where that takes long, the thread's other tasks go on elsewhere.
pub fn aside<T>(delta: &Delta, write: impl FnOnce() -> T) -> T {
    if delta.tokens.len() > LARGE_DELTA { tokio::task::block_in_place(write) } else { write() }
}

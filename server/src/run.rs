//! Engine requests of one HTTP call: their events are merged into one stream, tagged with the index of the prompt.
//!
//! Dropping a [`Run`] cancels its unfinished requests: because the client disconnected, or because one of them was
//! rejected.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use axum::http::StatusCode;
use engine::{Delta, DraftCounts, Event, FinishReason, GenerationRequest, OutputStream, SubmitError, TokenLogprobs};
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream, SelectAll};
use tokio::time::timeout_at;

use super::app::App;
use super::error::ApiError;
use super::observe::{Arrival, Observer};

/// The running requests of a call.
pub struct Run {
    events: SelectAll<BoxStream<'static, (usize, Event)>>,
    /// Number of sequences by prompt.
    sequences: Vec<usize>,
    /// Number of unfinished sequences.
    open: usize,
    app: Arc<App>,
    deadline: Option<Instant>,
    timed_out: bool,
    fell_behind: Arc<AtomicBool>,
}

impl Run {
    /// Submits all requests. If one is rejected, those before it are cancelled.
    pub async fn submit(app: &Arc<App>, requests: Vec<GenerationRequest>) -> Result<Run, ApiError> {
        let mut run = Run {
            events: SelectAll::new(),
            sequences: Vec::new(),
            open: 0,
            deadline: app.options.limits.request_timeout.map(|limit| Instant::now() + limit),
            app: app.clone(),
            timed_out: false,
            fell_behind: Arc::default(),
        };
        for (prompt, request) in requests.into_iter().enumerate() {
            let (arrival, n) = (Arrival::new(app, &request), request.params.n);
            let events = app.engine.submit(request).await.inspect_err(|error| {
                if matches!(error, SubmitError::QueueFull { .. }) {
                    app.metrics.rejected("queue");
                }
            })?;
            run.events.push(observed(prompt, events, arrival.accepted(app.clone()), run.fell_behind.clone()));
            run.sequences.push(n);
            run.open += n;
        }
        Ok(run)
    }

    /// Returns the next event with the index of its prompt; `None` at the end or after the time limit.
    pub async fn next(&mut self) -> Option<(usize, Event)> {
        let next = match self.deadline {
            None => self.events.next().await,
            Some(deadline) => timeout_at(deadline.into(), self.events.next()).await.unwrap_or_else(|_| {
                self.timed_out = true;
                // Dropping the streams cancels their requests.
                self.events.clear();
                None
            }),
        };
        if let Some((_, Event::Delta(Delta { finish: Some(_), .. }))) = next {
            self.open = self.open.saturating_sub(1);
        }
        next
    }

    /// Why [`Run::next`] returned `None` although sequences are unfinished; `None` if all have finished.
    pub fn failure(&self) -> Option<ApiError> {
        if self.open == 0 {
            return None;
        }
        Some(if self.timed_out {
            self.app.metrics.rejected("timeout");
            let seconds = self.app.options.limits.request_timeout.unwrap_or_default().as_secs_f64();
            let message = format!(
                "the response is incomplete, expected it within {seconds} s (--request-timeout); request fewer tokens"
            );
            ApiError::new(StatusCode::GATEWAY_TIMEOUT, message).with_code("request_timeout")
        } else if self.fell_behind.load(Ordering::Acquire) {
            self.app.metrics.rejected("slow_reader");
            ApiError::unavailable("too many events of the response are unread (--max-unread-events); read it faster")
        } else {
            ApiError::unavailable("the engine stopped before the response was complete; try again later")
        })
    }

    /// Waits for the end and returns one [`Answer`] per prompt. Its tokens are dropped unless `keep_tokens`.
    pub async fn collect(mut self, keep_tokens: bool) -> Result<Vec<Answer>, ApiError> {
        let mut answers: Vec<Answer> = self.sequences.iter().map(|&n| Answer::empty(n)).collect();
        while let Some((prompt, event)) = self.next().await {
            match event {
                Event::PromptLogprobs(logprobs) => answers[prompt].prompt_logprobs = Some(logprobs),
                Event::Embedding(vector) => answers[prompt].embedding = Some(vector),
                Event::Started { cached_tokens } => answers[prompt].cached_tokens = cached_tokens,
                Event::Delta(delta) => {
                    failed(&delta)?;
                    answers[prompt].add(delta, keep_tokens);
                }
            }
        }
        self.failure().map_or(Ok(answers), Err)
    }
}

/// The result of one prompt.
#[derive(Debug, Default)]
pub struct Answer {
    /// Log probabilities of the prompt, if requested.
    pub prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    /// Embedding of the prompt, if requested.
    pub embedding: Option<Vec<f32>>,
    /// Number of prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// Number of tokens generated by all sequences.
    pub completion_tokens: usize,
    /// Drafts that were verified for all sequences.
    pub drafts: DraftCounts,
    /// All deltas of each sequence, merged.
    pub sequences: Vec<Delta>,
}

impl Answer {
    fn empty(n: usize) -> Answer {
        let sequences = (0..n).map(|index| Delta { index: index as u32, ..Delta::default() }).collect();
        Answer { sequences, ..Answer::default() }
    }

    fn add(&mut self, mut delta: Delta, keep_tokens: bool) {
        self.completion_tokens += delta.tokens.len();
        self.drafts += delta.drafts;
        if !keep_tokens {
            delta.tokens = Vec::new();
        }
        if let Some(whole) = self.sequences.get_mut(delta.index as usize) {
            whole.extend(delta);
        }
    }
}

/// Fails if the sequence ended with an error.
pub fn failed(delta: &Delta) -> Result<(), ApiError> {
    match &delta.finish {
        Some(FinishReason::Grammar(message)) => {
            Err(ApiError::bad_request(format!("the grammar of this request failed: {message}")))
        }
        Some(FinishReason::Error(message)) => Err(ApiError::internal(message.clone())),
        _ => Ok(()),
    }
}

fn observed(
    prompt: usize,
    events: OutputStream,
    observer: Observer,
    fell_behind: Arc<AtomicBool>,
) -> BoxStream<'static, (usize, Event)> {
    stream::unfold((events, observer), move |(mut events, mut observer)| {
        let fell_behind = fell_behind.clone();
        async move {
            let Some(event) = events.next().await else {
                fell_behind.fetch_or(events.fell_behind(), Ordering::AcqRel);
                return None;
            };
            observer.record(&event, &events);
            Some(((prompt, event), (events, observer)))
        }
    })
    .boxed()
}

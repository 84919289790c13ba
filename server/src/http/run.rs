//! The requests behind one HTTP call, run together: their events arrive as one stream, tagged with the prompt.
//!
//! Dropping a [`Run`] (the client went away, or one of several prompts was refused) cancels whatever has not ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use engine::{Delta, Event, FinishReason, GenerationRequest, OutputStream, SubmitError, TokenLogprobs};
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream, SelectAll};
use tokio::time::timeout_at;

use super::app::App;
use super::error::ApiError;
use super::observe::{Arrival, Watch};

/// All prompts of a call in flight.
pub struct Run {
    events: SelectAll<BoxStream<'static, (usize, Event)>>,
    /// Sequences per prompt.
    sequences: Vec<usize>,
    /// Sequences that have not said how they ended.
    open: usize,
    app: Arc<App>,
    deadline: Option<Instant>,
    timed_out: bool,
    fell_behind: Arc<AtomicBool>,
}

impl Run {
    /// Submits every request, or none: a refusal cancels those before it.
    pub async fn submit(app: &Arc<App>, requests: Vec<GenerationRequest>) -> Result<Run, ApiError> {
        let mut run = Run {
            events: SelectAll::new(),
            sequences: Vec::new(),
            open: 0,
            deadline: app.limits.request_timeout.map(|limit| Instant::now() + limit),
            app: app.clone(),
            timed_out: false,
            fell_behind: Arc::default(),
        };
        for (prompt, request) in requests.into_iter().enumerate() {
            let (arrival, n) = (Arrival::note(app, &request), request.params.n);
            let events = app.engine.submit(request).await.inspect_err(|error| {
                if matches!(error, SubmitError::QueueFull { .. }) {
                    app.metrics.rejected("queue");
                }
            })?;
            run.events.push(watched(prompt, events, arrival.accepted(app.clone()), run.fell_behind.clone()));
            run.sequences.push(n);
            run.open += n;
        }
        Ok(run)
    }

    /// The next event and the index of its prompt; `None` once everything has ended, or the time is over.
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

    /// Why `None` has come from [`Run::next`] although sequences are open; `None` if they are not.
    pub fn broke_off(&self) -> Option<ApiError> {
        if self.open == 0 {
            return None;
        }
        Some(if self.timed_out {
            self.app.metrics.rejected("timeout");
            ApiError::timed_out(
                "the answer was not complete within the time that a request may take (--request-timeout)",
            )
        } else if self.fell_behind.load(Ordering::Acquire) {
            self.app.metrics.rejected("slow_reader");
            ApiError::unavailable("the answer was read too slowly (--max-unread-events)")
        } else {
            ApiError::unavailable("the engine ended before the request was complete")
        })
    }

    /// Waits for everything: one [`Answer`] per prompt.
    pub async fn collect(mut self) -> Result<Vec<Answer>, ApiError> {
        let mut answers: Vec<Answer> = self.sequences.iter().map(|&n| Answer::empty(n)).collect();
        while let Some((prompt, event)) = self.next().await {
            match event {
                Event::PromptLogprobs(logprobs) => answers[prompt].prompt_logprobs = Some(logprobs),
                Event::Embedding(vector) => answers[prompt].embedding = Some(vector),
                Event::Started { cached_tokens } => answers[prompt].cached_tokens = cached_tokens,
                Event::Delta(delta) => {
                    failed(&delta)?;
                    answers[prompt].add(delta);
                }
            }
        }
        self.broke_off().map_or(Ok(answers), Err)
    }
}

/// Everything that came of one prompt.
#[derive(Debug)]
pub struct Answer {
    /// Log-probabilities of the prompt, if asked for.
    pub prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    /// The embedding of the prompt, if asked for.
    pub embedding: Option<Vec<f32>>,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: usize,
    /// Per sequence, all of its deltas as one.
    pub sequences: Vec<Delta>,
}

impl Answer {
    fn empty(n: usize) -> Answer {
        let sequences = (0..n).map(|index| Delta { index: index as u32, ..Delta::default() }).collect();
        Answer { prompt_logprobs: None, embedding: None, cached_tokens: 0, sequences }
    }

    fn add(&mut self, delta: Delta) {
        if let Some(whole) = self.sequences.get_mut(delta.index as usize) {
            whole.extend(delta);
        }
    }

    /// Tokens generated by all sequences.
    pub fn completion_tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.tokens.len()).sum()
    }
}

/// The sequence ended through no fault of the client.
pub fn failed(delta: &Delta) -> Result<(), ApiError> {
    match &delta.finish {
        Some(FinishReason::Grammar(message)) => Err(ApiError::body(format!("the grammar of this request: {message}"))),
        Some(FinishReason::Error(message)) => Err(ApiError::internal(message.clone())),
        _ => Ok(()),
    }
}

fn watched(
    prompt: usize,
    events: OutputStream,
    watch: Watch,
    fell_behind: Arc<AtomicBool>,
) -> BoxStream<'static, (usize, Event)> {
    stream::unfold((events, watch), move |(mut events, mut watch)| {
        let fell_behind = fell_behind.clone();
        async move {
            let Some(event) = events.next().await else {
                fell_behind.fetch_or(events.fell_behind(), Ordering::AcqRel);
                return None;
            };
            watch.saw(&event, &events);
            Some(((prompt, event), (events, watch)))
        }
    })
    .boxed()
}

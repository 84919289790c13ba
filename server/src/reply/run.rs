//! Engine requests of one HTTP call: their events are merged into one stream, tagged with the index of the prompt.
//!
//! Dropping a [`Run`] cancels its unfinished requests: because the client disconnected, or because one of them was
//! rejected.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::http::StatusCode;
use engine::{
    BACKGROUND, Delta, DraftCounts, Event, FinishReason, GenerationRequest, OutputStream, SubmitError, TokenLogprobs,
};
use serde_json::{Map, Value};
use text::ReasoningParser;
use tokio::time::{Sleep, sleep};

use crate::app::{App, Registered};
use crate::http::ApiError;
use crate::http::call::{self, StoredWork};
use crate::metrics::{Arrival, Observer};

/// The running requests of a call.
pub struct Run {
    events: OutputStream,
    /// One per prompt.
    observers: Vec<Observer>,
    /// Number of sequences by prompt.
    sequences: Vec<usize>,
    /// Number of unfinished sequences.
    open: usize,
    /// Counts the tokens of the reasoning of each sequence of each prompt, of those prompts whose sequences have any.
    reasoning: Vec<Vec<ReasoningCount>>,
    app: Arc<App>,
    /// The time limit.
    deadline: Option<Pin<Box<Sleep>>>,
    timed_out: bool,
    /// Receives the order to end.
    registered: Registered,
    aborted: bool,
}

impl Run {
    /// Submits all requests. If one is rejected, those before it are cancelled.
    pub async fn submit(app: &Arc<App>, mut requests: Vec<GenerationRequest>) -> Result<Run, ApiError> {
        if let Some(stored) = call::stored_work() {
            requests.iter_mut().zip(0..).for_each(|(request, index)| fix(request, stored, index));
        }
        let deadline = app.options.limits.request_timeout.map(|limit| Box::pin(sleep(limit)));
        let arrival = |request: &GenerationRequest| {
            let prompt = app.options.log_prompts.and_then(|limit| {
                let text = app.tokenizer().decode(&request.prompt, true).ok()?;
                Some(text.chars().take(limit).collect())
            });
            Arrival::new(request, prompt)
        };
        let arrivals: Vec<Arrival> = requests.iter().map(arrival).collect();
        let sequences: Vec<usize> = requests.iter().map(|request| request.params.n).collect();
        let events = app.engine.submit_all(requests).await.inspect_err(|error| {
            if matches!(error, SubmitError::QueueFull { .. }) {
                app.metrics.rejected("queue");
            }
        })?;
        call::name_unenforced(events.unenforced());
        Ok(Run {
            events,
            observers: arrivals
                .into_iter()
                .map(|arrival| arrival.accepted(app.metrics.clone(), call::id(), call::trace_parent()))
                .collect(),
            open: sequences.iter().sum(),
            sequences,
            reasoning: Vec::new(),
            app: app.clone(),
            deadline,
            timed_out: false,
            registered: app.running.register(call::sent_id().unwrap_or_else(call::id)),
            aborted: false,
        })
    }

    /// Counts the tokens that are reasoning, as the parser of each prompt finds it.
    pub fn counting(mut self, parsers: Vec<Option<ReasoningParser>>) -> Run {
        let count = |parser| ReasoningCount { parser, pending: Vec::new(), count: 0 };
        let of_prompt = |(parser, &n): (Option<_>, &usize)| parser.map_or(Vec::new(), |parser| vec![count(parser); n]);
        self.reasoning = parsers.into_iter().zip(&self.sequences).map(of_prompt).collect();
        self
    }

    /// Number of tokens so far that are reasoning.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning.iter().flatten().map(|sequence| sequence.count).sum()
    }

    /// Returns the next event with the index of its prompt; `None` at the end or after the time limit.
    pub async fn next(&mut self) -> Option<(usize, Event)> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Polls for the result of [`Run::next`]. The events of a step become ready together.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<(usize, Event)>> {
        let Poll::Ready(next) = self.events.poll_next(cx) else {
            if self.aborted || Pin::new(&mut self.registered.ended).poll(cx).is_ready() {
                self.aborted = true;
                return Poll::Ready(None);
            }
            let Some(deadline) = &mut self.deadline else { return Poll::Pending };
            ready!(deadline.as_mut().poll(cx));
            self.timed_out = true;
            return Poll::Ready(None);
        };
        if let Some((prompt, event)) = &next {
            self.observers[*prompt].record(event, &self.events);
            if let Event::Delta(delta) = event {
                let of_prompt = self.reasoning.get_mut(*prompt);
                if let Some(sequence) = of_prompt.and_then(|sequences| sequences.get_mut(delta.index as usize)) {
                    sequence.read(delta);
                }
                self.open = self.open.saturating_sub(usize::from(delta.finish.is_some()));
            }
        }
        Poll::Ready(next)
    }

    /// Why [`Run::next`] returned `None` although sequences are unfinished; `None` if all have finished.
    pub fn failure(&self) -> Option<ApiError> {
        if self.open == 0 {
            return None;
        }
        Some(if self.aborted {
            ApiError::bad_request("the request was ended by POST /abort_requests").with_code("aborted")
        } else if self.timed_out {
            self.app.metrics.rejected("timeout");
            let seconds = self.app.options.limits.request_timeout.unwrap_or_default().as_secs_f64();
            let message = format!(
                "the response is incomplete, expected it within {seconds} s (--request-timeout); request fewer tokens"
            );
            ApiError::new(StatusCode::GATEWAY_TIMEOUT, message).with_code("request_timeout")
        } else if self.events.fell_behind() {
            self.app.metrics.rejected("slow_reader");
            ApiError::unavailable("too many events of the response are unread (--max-unread-events); read it faster")
        } else {
            ApiError::unavailable("the engine stopped before the response was complete; try again later")
        })
    }

    /// Waits for the end and returns the vector of each prompt: an embedding, or the logits of labels. Also returns how many tokens of the
    /// prompts were found in the prefix cache.
    pub async fn collect_vectors(self) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
        let answers = self.collect(false).await?;
        let cached = answers.iter().map(|answer| answer.cached_tokens).sum();
        let vectors: Option<Vec<Vec<f32>>> = answers.into_iter().map(|answer| answer.embedding).collect();
        let vectors = vectors.ok_or_else(|| ApiError::internal("the engine returned no embedding; try again"))?;
        Ok((vectors, cached))
    }

    /// Waits for the end and returns one [`PromptOutput`] per prompt. Its tokens are dropped unless `keep_tokens`.
    pub(crate) async fn collect(mut self, keep_tokens: bool) -> Result<Vec<PromptOutput>, ApiError> {
        let mut answers: Vec<PromptOutput> = self.sequences.iter().map(|&n| PromptOutput::empty(n)).collect();
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
        if let Some(first) = answers.first_mut() {
            first.reasoning_tokens = self.reasoning_tokens();
        }
        self.failure().map_or(Ok(answers), Err)
    }
}

/// Gives a request of stored work what it must not draw again: its seed, if it has none, which differs for each prompt.
pub fn fix(request: &mut GenerationRequest, stored: StoredWork, index: u64) {
    request.params.sampling.seed.get_or_insert(stored.seed ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    if stored.yields {
        request.priority = BACKGROUND;
    }
}

/// Counts the tokens of the reasoning of a sequence: those whose text begins before the answer does.
#[derive(Clone)]
struct ReasoningCount {
    parser: ReasoningParser,
    /// Offsets of tokens of which it is not known whether they are reasoning.
    pending: Vec<usize>,
    count: usize,
}

impl ReasoningCount {
    fn read(&mut self, delta: &Delta) {
        self.pending.extend(delta.tokens.iter().map(|token| token.text_offset));
        self.parser.push(&delta.text);
        let (end, decided) = (self.parser.num_reasoning_chars(), self.parser.num_decided_chars());
        self.count += self.pending.iter().filter(|offset| **offset < end).count();
        self.pending.retain(|offset| *offset >= end.max(decided));
    }
}

/// The result of one prompt.
#[derive(Debug, Default)]
pub struct PromptOutput {
    /// Log probabilities of the prompt, if requested.
    pub prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    /// Embedding of the prompt, if requested.
    pub embedding: Option<Vec<f32>>,
    /// Number of prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// Number of tokens generated by all sequences.
    pub completion_tokens: usize,
    /// Number of these that are reasoning.
    pub reasoning_tokens: usize,
    /// Drafts that were verified for all sequences.
    pub drafts: DraftCounts,
    /// All deltas of each sequence, merged.
    pub sequences: Vec<Delta>,
}

impl PromptOutput {
    fn empty(n: usize) -> PromptOutput {
        let sequences = (0..n).map(|index| Delta { index: index as u32, ..Delta::default() }).collect();
        PromptOutput { sequences, ..PromptOutput::default() }
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

/// Token counts of a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of all prompts, each counted once.
    pub prompt_tokens: usize,
    /// Tokens of all returned sequences, including end-of-sequence tokens. Sequences that `best_of` or a beam search
    /// discards do not count.
    pub completion_tokens: usize,
    /// Those that are reasoning, where it is parsed.
    pub reasoning_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// Drafts of speculative decoding.
    pub drafts: DraftCounts,
}

impl Usage {
    /// Adds the generated and the cached tokens of one prompt.
    pub fn add(&mut self, output: &PromptOutput) {
        self.completion_tokens += output.completion_tokens;
        self.reasoning_tokens += output.reasoning_tokens;
        self.cached_tokens += output.cached_tokens;
        self.drafts += output.drafts;
    }

    /// The numbers of drafts among the details of the output, if there were any.
    pub fn draft_details(&self) -> Map<String, Value> {
        let DraftCounts { accepted, rejected } = self.drafts;
        let numbers = [("accepted_prediction_tokens", accepted), ("rejected_prediction_tokens", rejected)];
        let numbers = numbers.into_iter().filter(|_| accepted + rejected > 0);
        numbers.map(|(name, count)| (name.to_string(), count.into())).collect()
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

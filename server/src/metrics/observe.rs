//! Log record and metrics of each request.
//!
//! Times are taken by the engine, so that a client that reads slowly does not distort them:
//!
//! ```text
//! arrived      scheduled         first token            last token
//!    ├─ queue ────┼──── prefill ────┼────── decode ─────────┤
//!    ├───────── first token ────────┤
//!                 ├───────────── inference ────────────────┤
//!    ├───────────────── end to end ────────────────────────┤
//! ```

use std::sync::Arc;
use std::time::Instant;

use engine::{Event, FinishReason, GenerationRequest, OutputStream};
use tracing::Span;
use tracing::field::Empty;

use super::{ABORT, AdapterRequest, Metrics};

/// Reason of a finished sequence, as named in metrics and logs.
pub fn reason(finish: &FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop(_) => "stop",
        FinishReason::Length => "length",
        FinishReason::Grammar(_) | FinishReason::Error(_) => "error",
    }
}

/// A request before the engine has accepted it.
pub struct Arrival {
    at: Instant,
    n: usize,
    max_tokens: Option<usize>,
    prompt_tokens: usize,
    prompt: Option<String>,
    adapter: Option<String>,
}

impl Arrival {
    /// Records the arrival of a request; `prompt` is its text for the log.
    pub fn new(request: &GenerationRequest, prompt: Option<String>) -> Arrival {
        Arrival {
            at: Instant::now(),
            n: request.params.n,
            max_tokens: request.params.max_tokens,
            prompt_tokens: request.prompt.len(),
            prompt,
            adapter: request.adapter.clone(),
        }
    }

    /// Records that the engine has accepted the request of the call with this id and trace context.
    pub fn accepted(self, metrics: Arc<Metrics>, id: String, trace_parent: Option<String>) -> Observer {
        let span = tracing::info_span!(
            target: "quire::request",
            "request",
            id,
            traceparent = trace_parent,
            prompt_tokens = self.prompt_tokens,
            prompt = Empty,
            cached_tokens = Empty,
            generation_tokens = Empty,
            queue_seconds = Empty,
            prefill_seconds = Empty,
            decode_seconds = Empty,
            first_token_seconds = Empty,
            total_seconds = Empty,
            finish_reason = Empty,
        );
        if let Some(prompt) = &self.prompt {
            span.record("prompt", prompt.as_str());
        }
        metrics.accepted(self.prompt_tokens, self.n, self.max_tokens);
        Observer {
            adapter: self.adapter.map(|name| metrics.adapter_request(name)),
            metrics,
            span,
            arrived: self.at,
            last_token: vec![None; self.n],
            first_token: None,
            ended: self.at,
            scheduled: None,
            cached_tokens: 0,
            generated: vec![0; self.n],
            open: self.n,
            reason: ABORT,
        }
    }
}

/// Records the times of a request. When it is dropped, unfinished sequences count as aborted.
pub struct Observer {
    adapter: Option<AdapterRequest>,
    metrics: Arc<Metrics>,
    span: Span,
    arrived: Instant,
    scheduled: Option<Instant>,
    first_token: Option<Instant>,
    /// Time of the last token by sequence.
    last_token: Vec<Option<Instant>>,
    generated: Vec<usize>,
    ended: Instant,
    cached_tokens: usize,
    open: usize,
    /// Reason of the sequence that ended last.
    reason: &'static str,
}

impl Observer {
    /// Records an event read from `events`.
    pub fn record(&mut self, event: &Event, events: &OutputStream) {
        let (now, metrics) = (events.last_event(), &self.metrics);
        self.ended = now;
        self.scheduled = self.scheduled.or_else(|| events.scheduled());
        let delta = match event {
            Event::Started { cached_tokens } => {
                self.cached_tokens = *cached_tokens;
                self.adapter.iter_mut().for_each(AdapterRequest::started);
                return;
            }
            Event::Delta(delta) => delta,
            _ => return,
        };
        let index = delta.index as usize;
        if !delta.tokens.is_empty() {
            if self.first_token.is_none() {
                self.first_token = Some(now);
                metrics.first_token.observe((now - self.arrived).as_secs_f64());
            }
            if let Some(last) = self.last_token.get_mut(index) {
                if let Some(last) = *last {
                    // Tokens of one delta share the time since the previous one.
                    let each = ((now - last) / delta.tokens.len() as u32).as_secs_f64();
                    delta.tokens.iter().for_each(|_| metrics.inter_token.observe(each));
                }
                *last = Some(now);
            }
            if let Some(generated) = self.generated.get_mut(index) {
                *generated += delta.tokens.len();
            }
        }
        if let Some(finish) = &delta.finish {
            self.reason = reason(finish);
            metrics.finished(self.reason);
            self.open = self.open.saturating_sub(1);
            if self.open == 0 {
                let scheduled = self.scheduled.unwrap_or(self.arrived);
                let first = self.first_token.unwrap_or(now);
                let (prefill, decode) =
                    (first.saturating_duration_since(scheduled), now.saturating_duration_since(first));
                metrics.ended([scheduled - self.arrived, prefill, decode], &self.generated);
            }
        }
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        (0..self.open).for_each(|_| self.metrics.finished(ABORT));
        if self.open > 0 {
            (self.reason, self.ended) = (ABORT, Instant::now());
        }
        let seconds = |from: Option<Instant>, to: Option<Instant>| {
            from.zip(to).map(|(from, to)| to.saturating_duration_since(from).as_secs_f64())
        };
        let (arrived, ended) = (Some(self.arrived), Some(self.ended));
        self.span.record("queue_seconds", seconds(arrived, self.scheduled.or(ended)));
        self.span.record("prefill_seconds", seconds(self.scheduled, self.first_token));
        self.span.record("decode_seconds", seconds(self.first_token, ended));
        self.span.record("first_token_seconds", seconds(arrived, self.first_token));
        self.span.record("total_seconds", seconds(arrived, ended));
        self.span.record("cached_tokens", self.cached_tokens);
        self.span.record("generation_tokens", self.generated.iter().sum::<usize>());
        self.span.record("finish_reason", self.reason);
        self.span.in_scope(|| tracing::info!(target: "quire::request", "ended"));
    }
}

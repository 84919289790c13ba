//! `/metrics`: the Prometheus text format, under vLLM's names and with its buckets where the thing is the same.
//!
//! `docs/metrics.md` lists every name with its type and meaning; a test compares that page with what is served, so a name
//! can not change by accident. Every sample carries the label `model_name`. Recording is a handful of atomic additions;
//! what the engine counts itself is read when the page is asked for.

mod buckets;
mod engine_page;
mod tests;

use std::collections::HashMap;
use std::time::Duration;

use engine::{EngineStats, ModelInfo};
use prometheus::core::Collector;
use prometheus::{Histogram, HistogramOpts, IntCounterVec, Opts, Registry, TextEncoder};

use buckets::{FIRST_TOKEN, INTER_TOKEN, REQUEST, one_two_five};

/// A sequence that nobody waited for any more.
pub const ABORT: &str = "abort";

/// The parts of a request's life, once it has ended.
pub struct Times<'a> {
    /// In the queue.
    pub queue: Duration,
    /// From the queue to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// From the arrival to the last token.
    pub total: Duration,
    /// Tokens of each sequence.
    pub generated: &'a [usize],
}

/// Every reason for which a sequence ends.
const REASONS: [&str; 4] = ["stop", "length", ABORT, "error"];

/// Every reason for which a request is refused, or loses its answer, because of a limit or of who sent it.
const REJECTED: [&str; 6] = ["queue", "streams", "connections", "timeout", "slow_reader", "origin"];

/// Latencies and outcomes since the start.
#[derive(Debug)]
pub struct Metrics {
    model: String,
    registry: Registry,
    first_token: Histogram,
    inter_token: Histogram,
    per_output_token: Histogram,
    end_to_end: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    prompt_tokens: Histogram,
    generation_tokens: Histogram,
    max_generation_tokens: Histogram,
    params_n: Histogram,
    params_max_tokens: Histogram,
    finished: IntCounterVec,
    rejected: IntCounterVec,
}

impl Metrics {
    /// Nothing counted yet, for a model of this name and context.
    pub fn new(model: &str, info: &ModelInfo) -> Metrics {
        let registry = registry(model);
        let histogram = |name: &str, help: &str, bounds: &[f64]| {
            let made = Histogram::with_opts(HistogramOpts::new(name, help).buckets(bounds.to_vec()));
            register(&registry, made)
        };
        let counter = |name: &str, help: &str, label: &str, values: &[&str]| {
            let counter = register(&registry, IntCounterVec::new(Opts::new(name, help), &[label]));
            // What has not occurred shows as 0 rather than not at all.
            values.iter().for_each(|value| drop(counter.with_label_values(&[value])));
            counter
        };
        let tokens = one_two_five(info.max_model_len);
        let seconds = |name: &str, help: &str| histogram(&format!("vllm:request_{name}_time_seconds"), help, &REQUEST);
        Metrics {
            model: model.to_string(),
            first_token: histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", &FIRST_TOKEN),
            inter_token: histogram(
                "vllm:inter_token_latency_seconds",
                "Between two tokens of a sequence.",
                &INTER_TOKEN,
            ),
            per_output_token: histogram(
                "vllm:time_per_output_token_seconds",
                "Decode time of a request by its tokens after the first.",
                &INTER_TOKEN,
            ),
            end_to_end: histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", &REQUEST),
            queue: seconds("queue", "Arrival to the first step with the request."),
            prefill: seconds("prefill", "First step to first token."),
            decode: seconds("decode", "First token to last."),
            inference: seconds("inference", "First step to last token."),
            prompt_tokens: histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", &tokens),
            generation_tokens: histogram("vllm:request_generation_tokens", "Tokens made for a request.", &tokens),
            max_generation_tokens: histogram(
                "vllm:request_max_num_generation_tokens",
                "Tokens of a request's longest sequence.",
                &tokens,
            ),
            params_n: histogram("vllm:request_params_n", "n of a request.", &[1.0, 2.0, 5.0, 10.0, 20.0]),
            params_max_tokens: histogram("vllm:request_params_max_tokens", "max_tokens of a request.", &tokens),
            finished: counter("vllm:request_success_total", "Sequences that ended.", "finished_reason", &REASONS),
            rejected: counter(
                "quire:requests_rejected_total",
                "Requests that a limit ended, or that came from another site.",
                "reason",
                &REJECTED,
            ),
            registry,
        }
    }

    /// The engine has taken a request.
    pub fn accepted(&self, prompt_tokens: usize, n: usize, max_tokens: Option<usize>) {
        self.prompt_tokens.observe(prompt_tokens as f64);
        self.params_n.observe(n as f64);
        if let Some(max_tokens) = max_tokens {
            self.params_max_tokens.observe(max_tokens as f64);
        }
    }

    /// A request's first token has come.
    pub fn first_token(&self, after: Duration) {
        self.first_token.observe(after.as_secs_f64());
    }

    /// A further token of a sequence has come.
    pub fn inter_token(&self, after: Duration) {
        self.inter_token.observe(after.as_secs_f64());
    }

    /// A request has ended by itself.
    pub fn ended(&self, times: &Times<'_>) {
        self.queue.observe(times.queue.as_secs_f64());
        self.prefill.observe(times.prefill.as_secs_f64());
        self.decode.observe(times.decode.as_secs_f64());
        self.inference.observe((times.prefill + times.decode).as_secs_f64());
        self.end_to_end.observe(times.total.as_secs_f64());
        let longest = times.generated.iter().copied().max().unwrap_or(0);
        self.generation_tokens.observe(times.generated.iter().sum::<usize>() as f64);
        self.max_generation_tokens.observe(longest as f64);
        if longest > 1 {
            self.per_output_token.observe(times.decode.as_secs_f64() / (longest - 1) as f64);
        }
    }

    /// Counts a sequence that ended for one of the reasons of `observe`.
    pub fn finished(&self, reason: &'static str) {
        self.finished.with_label_values(&[reason]).inc();
    }

    /// Counts a request that a limit turned away or ended.
    pub fn rejected(&self, reason: &'static str) {
        self.rejected.with_label_values(&[reason]).inc();
    }

    /// The whole page.
    pub fn render(&self, engine: &EngineStats, info: &ModelInfo, step_age: Option<Duration>) -> String {
        let now = registry(&self.model);
        engine_page::fill(&now, engine, info, step_age);
        let mut families = [now.gather(), self.registry.gather()].concat();
        families.push(engine_page::step_tokens(&engine.step_tokens, &self.model));
        TextEncoder::new().encode_to_string(&families).unwrap_or_default()
    }
}

/// An empty registry whose samples carry the model's name.
fn registry(model: &str) -> Registry {
    let labels = HashMap::from([("model_name".to_string(), model.to_string())]);
    Registry::new_custom(None, Some(labels)).unwrap_or_default()
}

/// Puts a metric into a registry. Names and buckets are constants of this module and differ; its tests use them all.
fn register<T: Collector + Clone + 'static>(registry: &Registry, made: prometheus::Result<T>) -> T {
    let metric = made.unwrap_or_else(|error| unreachable!("a constant of this module: {error}"));
    if let Err(error) = registry.register(Box::new(metric.clone())) {
        unreachable!("a constant of this module: {error}");
    }
    metric
}

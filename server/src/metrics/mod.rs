//! `/metrics` in Prometheus' text format, with vLLM's names and buckets for the same quantities.
//!
//! `docs/metrics.md` lists every name with its type and meaning; a test compares that page with the response. Every
//! sample has the label `model_name`. Recording costs a few atomic additions; the engine's own counters are read when
//! the page is requested.

mod adapters;
mod buckets;
mod engine_page;
mod observe;
mod stored;

use std::collections::HashMap;
use std::time::Duration;

use engine::{EngineStats, ModelInfo, SleepLevel};
use prometheus::core::Collector;
use prometheus::{Histogram, HistogramOpts, IntCounterVec, Opts, Registry, TextEncoder};

pub use adapters::AdapterRequest;
use adapters::AdapterRequests;
use buckets::{FIRST_TOKEN, INTER_TOKEN, REQUEST, one_two_five};
pub use observe::{Arrival, Observer};
pub use stored::StoredStats;

/// Reason of sequences whose client disconnected.
pub const ABORT: &str = "abort";

/// Values of `finished_reason`.
const REASONS: [&str; 4] = ["stop", "length", ABORT, "error"];

/// Values of `reason` of rejected requests.
const REJECTED: [&str; 7] = ["queue", "streams", "connections", "inflight", "timeout", "slow_reader", "origin"];

/// Latencies and outcomes of requests since the start.
#[derive(Debug)]
pub struct Metrics {
    model: String,
    registry: Registry,
    /// Seconds to the first token of a request.
    pub first_token: Histogram,
    /// Seconds between two tokens of a sequence.
    pub inter_token: Histogram,
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
    adapters: AdapterRequests,
}

impl Metrics {
    /// Metrics for a model of this name.
    pub fn new(model: &str, info: &ModelInfo) -> Metrics {
        let registry = registry(model);
        let histogram = |name: &str, help: &str, bounds: &[f64]| {
            let made = Histogram::with_opts(HistogramOpts::new(name, help).buckets(bounds.to_vec()));
            register(&registry, made)
        };
        let counter = |name: &str, help: &str, label: &str, values: &[&str]| {
            let counter = register(&registry, IntCounterVec::new(Opts::new(name, help), &[label]));
            // Values that have not occurred are 0, not absent.
            values.iter().for_each(|value| drop(counter.with_label_values(&[value])));
            counter
        };
        let bounds = one_two_five(info.max_model_len);
        let tokens = |name: &str, help: &str| histogram(&format!("vllm:request_{name}"), help, &bounds);
        let seconds = |name: &str, help: &str| histogram(&format!("vllm:{name}_seconds"), help, &REQUEST);
        let between = |name: &str, help: &str| histogram(&format!("vllm:{name}_seconds"), help, &INTER_TOKEN);
        let first_token = "Time from arrival to the first token.";
        let per_token = "Decode time of a request divided by the tokens of its longest sequence after the first.";
        let rejected = "Number of requests rejected or ended by a limit, or rejected because of their origin.";
        Metrics {
            model: model.to_string(),
            first_token: histogram("vllm:time_to_first_token_seconds", first_token, &FIRST_TOKEN),
            inter_token: between("inter_token_latency", "Time between two tokens of a sequence."),
            per_output_token: between("time_per_output_token", per_token),
            end_to_end: seconds("e2e_request_latency", "Time from arrival to the last token."),
            queue: seconds("request_queue_time", "Time from arrival to the first step with the request."),
            prefill: seconds("request_prefill_time", "Time from the first step to the first token."),
            decode: seconds("request_decode_time", "Time from the first to the last token."),
            inference: seconds("request_inference_time", "Time from the first step to the last token."),
            prompt_tokens: tokens("prompt_tokens", "Number of tokens of a prompt."),
            generation_tokens: tokens("generation_tokens", "Number of tokens generated for a request."),
            max_generation_tokens: tokens(
                "max_num_generation_tokens",
                "Number of tokens of a request's longest sequence.",
            ),
            params_n: histogram("vllm:request_params_n", "Parameter n of a request.", &[1.0, 2.0, 5.0, 10.0, 20.0]),
            params_max_tokens: tokens("params_max_tokens", "Parameter max_tokens of a request."),
            finished: counter(
                "vllm:request_success_total",
                "Number of finished sequences.",
                "finished_reason",
                &REASONS,
            ),
            rejected: counter("quire:requests_rejected_total", rejected, "reason", &REJECTED),
            adapters: AdapterRequests::default(),
            registry,
        }
    }

    /// Counts a request of a LoRA adapter until the result is dropped.
    pub fn adapter_request(&self, name: String) -> AdapterRequest {
        self.adapters.add(name)
    }

    /// Numbers of running and of waiting requests of a LoRA adapter.
    pub fn requests_of_adapter(&self, name: &str) -> [usize; 2] {
        self.adapters.of(name)
    }

    /// Records a request accepted by the engine.
    pub fn accepted(&self, prompt_tokens: usize, n: usize, max_tokens: Option<usize>) {
        self.prompt_tokens.observe(prompt_tokens as f64);
        self.params_n.observe(n as f64);
        if let Some(max_tokens) = max_tokens {
            self.params_max_tokens.observe(max_tokens as f64);
        }
    }

    /// Records a finished request: the times that it spent in the queue, in prefill and in decode, as pictured in `observe`, and the number
    /// of generated tokens by sequence.
    pub fn ended(&self, times: [Duration; 3], generated: &[usize]) {
        let [queue, prefill, decode] = times.map(|time| time.as_secs_f64());
        self.queue.observe(queue);
        self.prefill.observe(prefill);
        self.decode.observe(decode);
        self.inference.observe(prefill + decode);
        self.end_to_end.observe(queue + prefill + decode);
        let longest = generated.iter().copied().max().unwrap_or(0);
        self.generation_tokens.observe(generated.iter().sum::<usize>() as f64);
        self.max_generation_tokens.observe(longest as f64);
        if longest > 1 {
            self.per_output_token.observe(decode / (longest - 1) as f64);
        }
    }

    /// Counts a finished sequence.
    pub fn finished(&self, reason: &'static str) {
        self.finished.with_label_values(&[reason]).inc();
    }

    /// Counts a rejected request, or one ended by a limit.
    pub fn rejected(&self, reason: &'static str) {
        self.rejected.with_label_values(&[reason]).inc();
    }

    /// Returns all metrics as text.
    pub fn render(
        &self,
        engine: &EngineStats,
        info: &ModelInfo,
        progress: (Option<Duration>, Option<SleepLevel>),
        stored: &StoredStats,
    ) -> String {
        let now = registry(&self.model);
        engine_page::fill(&now, engine, info, progress);
        stored::fill(&now, stored);
        if let Some(max_loras) = info.max_loras {
            engine_page::lora(&now, max_loras, self.adapters.names());
        }
        let mut families = [now.gather(), self.registry.gather()].concat();
        families.push(engine_page::step_tokens(&engine.step_tokens, &self.model));
        TextEncoder::new().encode_to_string(&families).unwrap_or_default()
    }
}

/// An empty registry whose samples have the model's name.
fn registry(model: &str) -> Registry {
    let labels = HashMap::from([("model_name".to_string(), model.to_string())]);
    Registry::new_custom(None, Some(labels)).unwrap_or_default()
}

/// Registers a metric. Names and buckets are constants of this module that tests exercise, so that this cannot fail.
fn register<T: Collector + Clone + 'static>(registry: &Registry, made: prometheus::Result<T>) -> T {
    let metric = made.unwrap_or_else(|error| unreachable!("a constant of this module: {error}"));
    if let Err(error) = registry.register(Box::new(metric.clone())) {
        unreachable!("a constant of this module: {error}");
    }
    metric
}

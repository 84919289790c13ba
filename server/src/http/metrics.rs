//! `/metrics`: the Prometheus text format, under vLLM's names where the thing is the same.
//!
//! | name | type | what |
//! |---|---|---|
//! | `vllm:num_requests_running` | gauge | requests that hold blocks |
//! | `vllm:num_requests_waiting` | gauge | requests that wait for them |
//! | `vllm:num_requests_swapped` | gauge | requests that wait in host memory |
//! | `vllm:kv_cache_usage_perc` | gauge | share of blocks owned by live sequences, 0 to 1 |
//! | `quire:kv_cache_cached_perc` | gauge | share of blocks kept only for their cached prefix; what is left is free |
//! | `vllm:cpu_cache_usage_perc` | gauge | share of the host blocks that swapped requests own, 0 to 1 |
//! | `vllm:prefix_cache_queries_total` | counter | prompt tokens looked up in the prefix cache |
//! | `vllm:prefix_cache_hits_total` | counter | prompt tokens found there |
//! | `vllm:prompt_tokens_total` | counter | prompt tokens |
//! | `vllm:generation_tokens_total` | counter | tokens drawn |
//! | `vllm:num_preemptions_total` | counter | requests that gave their blocks back, to be recomputed or swapped |
//! | `quire:num_swap_preemptions_total` | counter | those of them that were swapped |
//! | `quire:engine_steps_total` | counter | steps of the engine |
//! | `vllm:request_success_total` | counter | sequences that ended, by `finished_reason` |
//! | `vllm:time_to_first_token_seconds` | histogram | arrival to first token |
//! | `vllm:inter_token_latency_seconds` | histogram | time between two tokens of a sequence |
//! | `vllm:e2e_request_latency_seconds` | histogram | arrival to last token |
//!
//! Every sample carries the label `model_name`. Recording is a handful of atomic additions; what the engine counts
//! itself is read when the page is asked for.

use std::collections::HashMap;
use std::time::Duration;

use engine::{EngineStats, FinishReason};
use prometheus::core::Collector;
use prometheus::{Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry, TextEncoder};

const FIRST_TOKEN: [f64; 15] = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0];
const INTER_TOKEN: [f64; 13] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0];
const END_TO_END: [f64; 15] = [0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0];

const STOP: &str = "stop";
const LENGTH: &str = "length";
const ABORT: &str = "abort";
const ERROR: &str = "error";

/// Latencies and outcomes since the start.
#[derive(Debug)]
pub struct Metrics {
    model: String,
    registry: Registry,
    first_token: Histogram,
    inter_token: Histogram,
    end_to_end: Histogram,
    finished: IntCounterVec,
}

impl Metrics {
    /// Nothing counted yet.
    pub fn new(model: &str) -> Metrics {
        let registry = registry(model);
        let histogram = |name: &str, help: &str, bounds: &[f64]| {
            let made = Histogram::with_opts(HistogramOpts::new(name, help).buckets(bounds.to_vec()));
            register(&registry, made)
        };
        let finished = Opts::new("vllm:request_success_total", "Sequences that ended.");
        let metrics = Metrics {
            model: model.to_string(),
            first_token: histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", &FIRST_TOKEN),
            inter_token: histogram("vllm:inter_token_latency_seconds", "Between two tokens.", &INTER_TOKEN),
            end_to_end: histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", &END_TO_END),
            finished: register(&registry, IntCounterVec::new(finished, &["finished_reason"])),
            registry,
        };
        // A reason that has not occurred shows as 0 rather than not at all.
        for reason in [STOP, LENGTH, ABORT, ERROR] {
            metrics.finished.with_label_values(&[reason]);
        }
        metrics
    }

    /// A request's first token has come.
    pub fn first_token(&self, after: Duration) {
        self.first_token.observe(after.as_secs_f64());
    }

    /// A further token of a sequence has come.
    pub fn inter_token(&self, after: Duration) {
        self.inter_token.observe(after.as_secs_f64());
    }

    /// A request's last token has come.
    pub fn end_to_end(&self, after: Duration) {
        self.end_to_end.observe(after.as_secs_f64());
    }

    /// Counts a sequence that ended.
    pub fn finished(&self, reason: &FinishReason) {
        let reason = match reason {
            FinishReason::Stop(_) => STOP,
            FinishReason::Length => LENGTH,
            FinishReason::Grammar(_) | FinishReason::Error(_) => ERROR,
        };
        self.finished.with_label_values(&[reason]).inc();
    }

    /// Counts a sequence that nobody waited for any more.
    pub fn aborted(&self) {
        self.finished.with_label_values(&[ABORT]).inc();
    }

    /// The whole page.
    pub fn render(&self, engine: &EngineStats) -> String {
        let now = registry(&self.model);
        for (name, help, value) in [
            ("vllm:num_requests_running", "Requests that hold blocks.", engine.num_running as f64),
            ("vllm:num_requests_waiting", "Requests that wait for blocks.", engine.num_waiting as f64),
            ("vllm:num_requests_swapped", "Requests that wait in host memory.", engine.num_swapped as f64),
            ("vllm:kv_cache_usage_perc", "Share of blocks owned by live sequences.", engine.kv_cache_usage),
            ("quire:kv_cache_cached_perc", "Share of blocks kept for their prefix.", engine.kv_cache_cached),
            ("vllm:cpu_cache_usage_perc", "Share of host blocks of swapped requests.", engine.host_cache_usage),
        ] {
            register(&now, Gauge::new(name, help)).set(value);
        }
        for (name, help, value) in [
            ("vllm:prefix_cache_queries_total", "Prompt tokens looked up.", engine.prefix_cache_queries),
            ("vllm:prefix_cache_hits_total", "Prompt tokens found in the cache.", engine.prefix_cache_hits),
            ("vllm:prompt_tokens_total", "Prompt tokens.", engine.prompt_tokens),
            ("vllm:generation_tokens_total", "Tokens drawn.", engine.generation_tokens),
            ("vllm:num_preemptions_total", "Requests that gave their blocks back.", engine.num_preemptions),
            ("quire:num_swap_preemptions_total", "Requests that were swapped out.", engine.num_swap_preemptions),
            ("quire:engine_steps_total", "Steps of the engine.", engine.steps),
        ] {
            register(&now, IntCounter::new(name, help)).inc_by(value);
        }
        let families = [now.gather(), self.registry.gather()].concat();
        TextEncoder::new().encode_to_string(&families).unwrap_or_default()
    }
}

/// An empty registry whose samples carry the model's name.
fn registry(model: &str) -> Registry {
    let labels = HashMap::from([("model_name".to_string(), model.to_string())]);
    Registry::new_custom(None, Some(labels)).unwrap_or_default()
}

/// Puts a metric into a registry. Names and buckets are constants of this file and differ; its tests use them all.
fn register<T: Collector + Clone + 'static>(registry: &Registry, made: prometheus::Result<T>) -> T {
    let metric = made.unwrap_or_else(|error| unreachable!("a constant of this file: {error}"));
    if let Err(error) = registry.register(Box::new(metric.clone())) {
        unreachable!("a constant of this file: {error}");
    }
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_end_at_infinity() {
        let metrics = Metrics::new("m");
        for millis in [0, 1, 3, 70_000] {
            metrics.first_token(Duration::from_millis(millis));
        }
        let page = metrics.render(&EngineStats::default());
        assert!(page.contains("vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"0.001\"} 2\n"));
        assert!(page.contains("vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"0.005\"} 3\n"));
        assert!(page.contains("vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"+Inf\"} 4\n"));
        assert!(page.contains("vllm:time_to_first_token_seconds_count{model_name=\"m\"} 4\n"));
        assert!(page.contains("vllm:time_to_first_token_seconds_sum{model_name=\"m\"} 70.004\n"));
    }

    #[test]
    fn outcomes_are_counted_by_reason() {
        let metrics = Metrics::new("a\"b");
        metrics.finished(&FinishReason::Length);
        metrics.finished(&FinishReason::Stop(None));
        metrics.finished(&FinishReason::Length);
        let page = metrics.render(&EngineStats::default());
        assert!(page.contains("vllm:request_success_total{finished_reason=\"length\",model_name=\"a\\\"b\"} 2\n"));
        assert!(page.contains("vllm:request_success_total{finished_reason=\"stop\",model_name=\"a\\\"b\"} 1\n"));
    }

    #[test]
    fn every_name_on_the_page_is_in_the_table_of_this_module_and_the_other_way_round() {
        let page = Metrics::new("m").render(&EngineStats::default());
        let mut served: Vec<(&str, &str)> =
            page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
        let mut listed: Vec<(&str, &str)> = include_str!("metrics.rs")
            .lines()
            .filter_map(|line| line.strip_prefix("//! | `")?.split_once("` | "))
            .filter_map(|(name, rest)| Some((name, rest.split_once(" |")?.0)))
            .collect();
        served.sort_unstable();
        listed.sort_unstable();
        assert_eq!(served, listed);
    }
}

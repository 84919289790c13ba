//! `/metrics`: the Prometheus text format, under vLLM's names where the thing is the same.
//!
//! | name | type | what |
//! |---|---|---|
//! | `vllm:num_requests_running` | gauge | requests that hold blocks |
//! | `vllm:num_requests_waiting` | gauge | requests that wait for them |
//! | `vllm:kv_cache_usage_perc` | gauge | share of blocks owned by live sequences, 0 to 1 |
//! | `quire:kv_cache_cached_perc` | gauge | share of blocks kept only for their cached prefix; what is left is free |
//! | `vllm:prefix_cache_queries_total` | counter | prompt tokens looked up in the prefix cache |
//! | `vllm:prefix_cache_hits_total` | counter | prompt tokens found there |
//! | `vllm:prompt_tokens_total` | counter | prompt tokens |
//! | `vllm:generation_tokens_total` | counter | tokens drawn |
//! | `vllm:num_preemptions_total` | counter | requests that gave their blocks back and started over |
//! | `quire:engine_steps_total` | counter | steps of the engine |
//! | `vllm:request_success_total` | counter | sequences that ended, by `finished_reason` |
//! | `vllm:time_to_first_token_seconds` | histogram | arrival to first token |
//! | `vllm:inter_token_latency_seconds` | histogram | time between two tokens of a sequence |
//! | `vllm:e2e_request_latency_seconds` | histogram | arrival to last token |
//!
//! Every sample carries the label `model_name`. Recording is a handful of relaxed atomic additions.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use engine::{EngineStats, FinishReason};

const FIRST_TOKEN: [f64; 15] = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0];
const INTER_TOKEN: [f64; 13] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0];
const END_TO_END: [f64; 15] = [0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0];

const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

/// Latencies and outcomes since the start.
#[derive(Debug)]
pub struct Metrics {
    /// Arrival to first token of a request.
    pub first_token: Histogram,
    /// Between two tokens of a sequence.
    pub inter_token: Histogram,
    /// Arrival to last token of a request.
    pub end_to_end: Histogram,
    finished: [AtomicU64; REASONS.len()],
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            first_token: Histogram::new(&FIRST_TOKEN),
            inter_token: Histogram::new(&INTER_TOKEN),
            end_to_end: Histogram::new(&END_TO_END),
            finished: Default::default(),
        }
    }
}

impl Metrics {
    /// Counts a sequence that ended.
    pub fn finished(&self, reason: &FinishReason) {
        let index = match reason {
            FinishReason::Stop(_) => 0,
            FinishReason::Length => 1,
            FinishReason::Abort => 2,
            FinishReason::Error(_) => 3,
        };
        self.finished[index].fetch_add(1, Relaxed);
    }

    /// The whole page.
    pub fn render(&self, engine: &EngineStats, model: &str) -> String {
        let mut page = Page { text: String::new(), label: format!("model_name=\"{}\"", escape(model)) };
        page.gauge("vllm:num_requests_running", "Requests that hold blocks.", engine.num_running as f64);
        page.gauge("vllm:num_requests_waiting", "Requests that wait for blocks.", engine.num_waiting as f64);
        page.gauge("vllm:kv_cache_usage_perc", "Share of blocks owned by live sequences.", engine.kv_cache_usage);
        page.gauge("quire:kv_cache_cached_perc", "Share of blocks kept for their prefix.", engine.kv_cache_cached);
        for (name, help, value) in [
            ("vllm:prefix_cache_queries_total", "Prompt tokens looked up.", engine.prefix_cache_queries),
            ("vllm:prefix_cache_hits_total", "Prompt tokens found in the cache.", engine.prefix_cache_hits),
            ("vllm:prompt_tokens_total", "Prompt tokens.", engine.prompt_tokens),
            ("vllm:generation_tokens_total", "Tokens drawn.", engine.generation_tokens),
            ("vllm:num_preemptions_total", "Requests that started over.", engine.num_preemptions),
            ("quire:engine_steps_total", "Steps of the engine.", engine.steps),
        ] {
            page.head(name, "counter", help);
            page.sample(name, "", value as f64);
        }
        page.head("vllm:request_success_total", "counter", "Sequences that ended.");
        for (reason, count) in REASONS.iter().zip(&self.finished) {
            let label = format!(",finished_reason=\"{reason}\"");
            page.sample("vllm:request_success_total", &label, count.load(Relaxed) as f64);
        }
        page.histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", &self.first_token);
        page.histogram("vllm:inter_token_latency_seconds", "Between two tokens.", &self.inter_token);
        page.histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", &self.end_to_end);
        page.text
    }
}

/// Durations counted in fixed buckets.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// One per bound and one for what lies beyond the last; not cumulative.
    counts: Vec<AtomicU64>,
    sum_micros: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Histogram {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { bounds, counts, sum_micros: AtomicU64::new(0) }
    }

    /// Counts one duration.
    pub fn observe(&self, duration: Duration) {
        let bucket = self.bounds.partition_point(|&bound| bound < duration.as_secs_f64());
        self.counts[bucket].fetch_add(1, Relaxed);
        self.sum_micros.fetch_add(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }
}

struct Page {
    text: String,
    label: String,
}

// Writing to a `String` can not fail, so the results of `writeln!` below carry nothing.
impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: f64) {
        let _ = writeln!(self.text, "{name}{{{}{labels}}} {value}", self.label);
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.head(name, "gauge", help);
        self.sample(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        let bounds = histogram.bounds.iter().map(f64::to_string).chain(["+Inf".to_string()]);
        let mut cumulative = 0;
        for (bound, count) in bounds.zip(&histogram.counts) {
            cumulative += count.load(Relaxed);
            self.sample(&format!("{name}_bucket"), &format!(",le=\"{bound}\""), cumulative as f64);
        }
        self.sample(&format!("{name}_sum"), "", histogram.sum_micros.load(Relaxed) as f64 / 1e6);
        self.sample(&format!("{name}_count"), "", cumulative as f64);
    }
}

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_end_at_infinity() {
        let metrics = Metrics::default();
        for millis in [0, 1, 3, 70_000] {
            metrics.first_token.observe(Duration::from_millis(millis));
        }
        let page = metrics.render(&EngineStats::default(), "m");
        assert!(page.contains("vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"0.001\"} 2\n"));
        assert!(page.contains("vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"0.005\"} 3\n"));
        assert!(page.contains("vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"+Inf\"} 4\n"));
        assert!(page.contains("vllm:time_to_first_token_seconds_count{model_name=\"m\"} 4\n"));
        assert!(page.contains("vllm:time_to_first_token_seconds_sum{model_name=\"m\"} 70.004\n"));
    }

    #[test]
    fn outcomes_are_counted_by_reason() {
        let metrics = Metrics::default();
        metrics.finished(&FinishReason::Length);
        metrics.finished(&FinishReason::Stop(None));
        metrics.finished(&FinishReason::Length);
        let page = metrics.render(&EngineStats::default(), "a\"b");
        assert!(page.contains("vllm:request_success_total{model_name=\"a\\\"b\",finished_reason=\"length\"} 2\n"));
        assert!(page.contains("vllm:request_success_total{model_name=\"a\\\"b\",finished_reason=\"stop\"} 1\n"));
    }

    #[test]
    fn every_name_on_the_page_is_in_the_table_of_this_module_and_the_other_way_round() {
        let page = Metrics::default().render(&EngineStats::default(), "m");
        let served: Vec<(&str, &str)> =
            page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
        let listed: Vec<(&str, &str)> = include_str!("metrics.rs")
            .lines()
            .filter_map(|line| line.strip_prefix("//! | `")?.split_once("` | "))
            .filter_map(|(name, rest)| Some((name, rest.split_once(" |")?.0)))
            .collect();
        assert_eq!(served, listed);
    }
}

//! The engine's counters as metrics, made for each page.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use engine::{EngineStats, ModelInfo, SchedulerStats, SleepLevel, StepTokens};
use prometheus::proto::{Bucket, Histogram, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Gauge, GaugeVec, IntCounter, IntCounterVec, Opts, Registry};

use super::register;

/// Adds the gauges and counters to an empty registry.
pub fn fill(
    registry: &Registry,
    engine: &EngineStats,
    info: &ModelInfo,
    (step_age, sleeping): (Option<Duration>, Option<SleepLevel>),
) {
    let (counts, drafts) = (&engine.scheduler, &engine.spec_decode);
    let (age, prompt_budget) = (step_age.map_or(0.0, |age| age.as_secs_f64()), engine.prompt_budget as f64);
    let (queries, device_hits) = (counts.prefix_queries, counts.prefix_hits - counts.host_prefix_hits);
    let messages_dropped = engine.kv_event_messages_dropped;
    for (name, help, value) in [
        ("vllm:num_requests_running", "Number of requests that hold blocks.", counts.num_running as f64),
        ("vllm:num_requests_waiting", "Number of requests that wait for blocks.", counts.num_waiting as f64),
        ("vllm:num_requests_swapped", "Number of requests swapped to host memory.", counts.num_swapped as f64),
        ("vllm:kv_cache_usage_perc", "Fraction of blocks owned by running sequences.", counts.kv_cache_usage()),
        ("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc.", counts.kv_cache_usage()),
        ("quire:kv_cache_cached_perc", "Fraction of blocks kept only as cached prefixes.", counts.kv_cache_cached()),
        ("vllm:cpu_cache_usage_perc", "Fraction of host blocks owned by swapped requests.", counts.host_cache_usage()),
        ("quire:kv_blocks_peak", "Maximum number of blocks in use at once since the start.", counts.blocks_peak as f64),
        ("quire:step_prompt_budget_tokens", "Maximum prompt tokens in a step while sequences decode.", prompt_budget),
        (
            "quire:inter_token_latency_target_seconds",
            "Time between two tokens of a sequence that this number is chosen for, 0 without a target.",
            engine.itl_target,
        ),
        ("quire:engine_step_age_seconds", "Seconds since the last completed step while there is work, else 0.", age),
    ] {
        register(registry, Gauge::new(name, help)).set(value);
    }
    let blocks = [("in_use", counts.blocks_in_use), ("cached", counts.blocks_cached), ("free", counts.blocks_free)];
    let help = "Number of blocks by state; the states sum to all blocks.";
    gauges(registry, "quire:kv_blocks", help, blocks);
    let SchedulerStats { host_blocks_in_use, host_blocks_cached, host_blocks_total, .. } = *counts;
    let host_free = host_blocks_total - host_blocks_in_use - host_blocks_cached;
    let blocks = [("in_use", host_blocks_in_use), ("cached", host_blocks_cached), ("free", host_free)];
    gauges(registry, "quire:kv_host_blocks", "Number of blocks of host memory by state.", blocks);
    for (name, help, value) in [
        ("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", queries),
        ("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache on the device.", device_hits),
        (
            "vllm:external_prefix_cache_queries_total",
            "Prompt tokens looked up in host memory.",
            engine.host_prefix_queries,
        ),
        ("vllm:external_prefix_cache_hits_total", "Prompt tokens found in host memory alone.", counts.host_prefix_hits),
        ("quire:kv_blocks_offloaded_total", "Blocks copied to host memory on their eviction.", counts.blocks_offloaded),
        ("quire:kv_blocks_loaded_total", "Blocks copied back from host memory for a request.", counts.blocks_loaded),
        ("vllm:gpu_prefix_cache_queries_total", "Older name of vllm:prefix_cache_queries_total.", queries),
        ("vllm:gpu_prefix_cache_hits_total", "Older name of vllm:prefix_cache_hits_total.", counts.prefix_hits),
        ("vllm:prompt_tokens_total", "Number of prompt tokens.", counts.prompt_tokens),
        ("vllm:generation_tokens_total", "Number of generated tokens.", engine.generation_tokens),
        ("vllm:num_preemptions_total", "Number of preemptions.", counts.preemptions),
        ("quire:num_swap_preemptions_total", "Number of preemptions by swapping.", counts.swap_preemptions),
        (
            "quire:num_priority_preemptions_total",
            "Preemptions in favor of a higher priority.",
            counts.preemptions_by_priority,
        ),
        ("quire:preemption_tokens_lost_total", "Computed tokens discarded by preemptions.", counts.tokens_lost),
        ("quire:kv_blocks_copied_total", "Number of blocks copied on write.", counts.blocks_copied),
        ("quire:engine_steps_total", "Number of engine steps.", engine.steps),
        (
            "vllm:spec_decode_num_drafts_total",
            "Number of times that drafts of a sequence were verified.",
            drafts.num_drafts,
        ),
        ("vllm:spec_decode_num_draft_tokens_total", "Number of draft tokens.", drafts.num_draft_tokens),
        ("vllm:spec_decode_num_accepted_tokens_total", "Draft tokens that became output.", drafts.num_accepted_tokens),
        (
            "quire:kv_event_steps_dropped_total",
            "Steps whose KV events found the queue full.",
            engine.kv_event_steps_dropped,
        ),
        ("quire:kv_event_messages_dropped_total", "KV events that a slow subscriber did not get.", messages_dropped),
        ("quire:engine_failed_steps_total", "Number of failed engine steps.", engine.failed_steps),
    ] {
        register(registry, IntCounter::new(name, help)).inc_by(value);
    }
    let lookups = &engine.prefix_lookups;
    let misses = [
        ("not_read", lookups.not_read),
        ("shorter_than_block", lookups.shorter_than_block),
        ("no_shared_prefix", lookups.no_shared_prefix),
        ("evicted", lookups.evicted),
        ("collision", lookups.collisions),
    ];
    let misses = misses.map(|(reason, count)| (reason.to_string(), count));
    let help = "Lookups that matched only a part of the prompt.";
    counters(registry, "quire:prefix_cache_misses_total", help, "reason", misses);
    // The first position is always listed.
    let accepted = drafts.accepted_per_pos.iter().copied().chain([0]);
    let positions = drafts.accepted_per_pos.len().max(1);
    let accepted = accepted.take(positions).enumerate().map(|(position, count)| (position.to_string(), count));
    let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
    counters(registry, name, "Accepted draft tokens by their position.", "position", accepted);
    let sleep = Opts::new("vllm:engine_sleep_state", "Whether the engine is in a state of sleep.");
    let sleep = register(registry, GaugeVec::new(sleep, &["sleep_state"]));
    let current = match sleeping {
        None => "awake",
        Some(SleepLevel::Pause | SleepLevel::Cache) => "weights_offloaded",
        Some(SleepLevel::CacheAndWeights) => "discard_all",
    };
    for state in ["awake", "weights_offloaded", "discard_all"] {
        sleep.with_label_values(&[state]).set(f64::from(u8::from(state == current)));
    }
    let config = Opts::new("vllm:cache_config_info", "Cache settings as labels.");
    let config = register(registry, GaugeVec::new(config, &["block_size", "num_gpu_blocks", "cache_dtype"]));
    let sizes = [info.block_size.to_string(), info.num_blocks.to_string()];
    config.with_label_values(&[sizes[0].as_str(), sizes[1].as_str(), "auto"]).set(1.0);
}

/// Adds a gauge of blocks by state.
fn gauges(registry: &Registry, name: &str, help: &str, blocks: [(&str, usize); 3]) {
    let gauge = register(registry, GaugeVec::new(Opts::new(name, help), &["state"]));
    blocks.into_iter().for_each(|(state, count)| gauge.with_label_values(&[state]).set(count as f64));
}

/// Adds a counter by the values of a label.
fn counters(registry: &Registry, name: &str, help: &str, label: &str, counts: impl IntoIterator<Item = (String, u64)>) {
    let counter = register(registry, IntCounterVec::new(Opts::new(name, help), &[label]));
    counts.into_iter().for_each(|(value, count)| counter.with_label_values(&[value]).inc_by(count));
}

/// Adds the adapters of running and of waiting requests. As in vLLM, the value is the time in seconds since 1970: a reader that finds
/// several samples takes the newest.
pub fn lora(registry: &Registry, max_loras: usize, [running, waiting]: [String; 2]) {
    let options = Opts::new("vllm:lora_requests_info", "LoRA adapters of running and waiting requests as labels.");
    let labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"];
    let info = register(registry, GaugeVec::new(options, &labels));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    info.with_label_values(&[max_loras.to_string(), running, waiting]).set(now);
}

/// The histogram recorded by the engine.
pub fn step_tokens(tokens: &StepTokens, model: &str) -> MetricFamily {
    let mut below = 0;
    // The encoder adds the bucket `+Inf`.
    let buckets = StepTokens::BOUNDS.iter().zip(tokens.counts).map(|(bound, count)| {
        below += count;
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(*bound as f64);
        bucket.set_cumulative_count(below);
        bucket
    });
    let mut histogram = Histogram::default();
    histogram.set_bucket(buckets.collect());
    histogram.set_sample_count(tokens.counts.iter().sum());
    histogram.set_sample_sum(tokens.sum as f64);
    let mut label = LabelPair::default();
    label.set_name("model_name".to_string());
    label.set_value(model.to_string());
    let mut metric = Metric::default();
    metric.set_label(vec![label]);
    metric.set_histogram(histogram);
    let mut family = MetricFamily::default();
    family.set_name("vllm:iteration_tokens_total".to_string());
    family.set_help("Number of tokens computed in a step.".to_string());
    family.set_field_type(MetricType::HISTOGRAM);
    family.set_metric(vec![metric]);
    family
}

//! The page of metrics: names, values, and the format.
#![cfg(test)]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use super::*;
use engine::StepTokens;

fn info() -> ModelInfo {
    ModelInfo {
        name: "m".to_string(),
        architecture: String::new(),
        num_parameters: 0,
        max_model_len: 300,
        vocab_size: 1,
        hidden_size: 1,
        pooling: None,
        eos_token_ids: Vec::new(),
        num_blocks: 9,
        block_size: 16,
        notes: Vec::new(),
    }
}

fn page(metrics: &Metrics, stats: &EngineStats) -> String {
    metrics.render(stats, &info(), None)
}

#[test]
fn buckets_are_cumulative_and_end_at_infinity() {
    let metrics = Metrics::new("m", &info());
    for millis in [0, 1, 3, 70_000] {
        metrics.first_token(Duration::from_millis(millis));
    }
    let page = page(&metrics, &EngineStats::default());
    assert!(page.contains("vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"0.001\"} 2\n"));
    assert!(page.contains("vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"0.005\"} 3\n"));
    assert!(page.contains("vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"+Inf\"} 4\n"));
    assert!(page.contains("vllm:time_to_first_token_seconds_count{model_name=\"m\"} 4\n"));
    assert!(page.contains("vllm:time_to_first_token_seconds_sum{model_name=\"m\"} 70.004\n"));
}

#[test]
fn outcomes_are_counted_by_reason() {
    let metrics = Metrics::new("a\"b", &info());
    ["length", "stop", "length"].into_iter().for_each(|reason| metrics.finished(reason));
    let page = page(&metrics, &EngineStats::default());
    assert!(page.contains("vllm:request_success_total{finished_reason=\"length\",model_name=\"a\\\"b\"} 2\n"));
    assert!(page.contains("vllm:request_success_total{finished_reason=\"stop\",model_name=\"a\\\"b\"} 1\n"));
}

#[test]
fn the_parts_of_a_request_are_told_apart() {
    let metrics = Metrics::new("m", &info());
    let seconds = Duration::from_secs;
    metrics.ended(&Times {
        queue: seconds(1),
        prefill: seconds(2),
        decode: seconds(8),
        total: seconds(11),
        generated: &[5, 2],
    });
    let page = page(&metrics, &EngineStats::default());
    for (name, sum) in [
        ("request_queue_time_seconds", 1),
        ("request_prefill_time_seconds", 2),
        ("request_decode_time_seconds", 8),
        ("request_inference_time_seconds", 10),
        ("e2e_request_latency_seconds", 11),
        ("time_per_output_token_seconds", 2),
        ("request_generation_tokens", 7),
        ("request_max_num_generation_tokens", 5),
    ] {
        assert!(page.contains(&format!("vllm:{name}_sum{{model_name=\"m\"}} {sum}\n")), "{name}\n{page}");
    }
}

#[test]
fn bounds_of_counts_go_up_to_the_context() {
    assert_eq!(one_two_five(300), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0]);
    assert_eq!(one_two_five(0), [1.0]);
}

#[test]
fn p15_the_states_of_blocks_are_shown_apart_and_sum_to_all() {
    let stats =
        EngineStats { blocks_in_use: 2, blocks_cached: 3, blocks_free: 4, blocks_total: 9, ..Default::default() };
    let page = page(&Metrics::new("m", &info()), &stats);
    let blocks = page.lines().filter(|line| line.starts_with("quire:kv_blocks{"));
    let counts: Vec<f64> = blocks.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    assert_eq!((counts.len(), counts.iter().sum::<f64>()), (3, 9.0));
}

#[test]
fn tokens_of_steps_are_a_histogram() {
    let mut step_tokens = StepTokens::default();
    step_tokens.counts[0] = 3;
    step_tokens.counts[1] = 1;
    step_tokens.sum = 11;
    let page = page(&Metrics::new("m", &info()), &EngineStats { step_tokens, ..Default::default() });
    assert!(page.contains("vllm:iteration_tokens_total_bucket{model_name=\"m\",le=\"8\"} 4\n"), "{page}");
    assert!(page.contains("vllm:iteration_tokens_total_sum{model_name=\"m\"} 11\n"));
}

/// Names and types as the page declares them.
fn served() -> Vec<(String, String)> {
    let page = page(&Metrics::new("m", &info()), &EngineStats::default());
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let mut served: Vec<(String, String)> = types.map(|(name, kind)| (name.to_string(), kind.to_string())).collect();
    served.sort_unstable();
    served
}

#[test]
fn p34_every_name_is_in_the_frozen_list_and_the_other_way_round() {
    let rows = include_str!("../../../docs/metrics.md").lines();
    let rows = rows.filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let mut listed: Vec<(String, String)> =
        rows.filter_map(|(name, rest)| Some((name.to_string(), rest.split_once(" |")?.0.to_string()))).collect();
    listed.sort_unstable();
    assert_eq!(served(), listed);
}

#[test]
fn every_query_of_the_dashboard_names_metrics_that_exist() {
    let dashboard: serde_json::Value =
        serde_json::from_str(include_str!("../../../deploy/grafana/quire.json")).unwrap();
    let names: BTreeMap<String, String> = served().into_iter().collect();
    let mut seen = 0;
    for target in dashboard["panels"].as_array().unwrap().iter().flat_map(|panel| panel["targets"].as_array().unwrap())
    {
        let query = target["expr"].as_str().unwrap();
        let words = query.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
        for word in words.filter(|word| word.starts_with("vllm:") || word.starts_with("quire:")) {
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| word.strip_suffix(suffix));
            let histogram = base.is_some_and(|base| names.get(base).is_some_and(|kind| kind == "histogram"));
            let plain = names.get(word).is_some_and(|kind| kind != "histogram");
            assert!(histogram || plain, "{word} in {query}");
            assert!(
                names.get(word).is_none_or(|kind| kind != "counter")
                    || query.contains("rate(")
                    || query.contains("increase("),
                "{query}"
            );
            seen += 1;
        }
    }
    assert!(seen > 20, "{seen} names in the dashboard");
}

#[test]
fn the_page_follows_the_text_format() {
    let stats = EngineStats { steps: 3, ..Default::default() };
    let page = page(&Metrics::new("a\\b\"c", &info()), &stats);
    assert!(page.ends_with('\n'));
    let mut family = "";
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# ") {
            let (word, rest) = rest.split_once(' ').unwrap();
            let name = rest.split(' ').next().unwrap();
            assert!(word == "HELP" || (word == "TYPE" && name == family), "{line}");
            family = name;
            continue;
        }
        let (name, rest) = line.split_once('{').unwrap();
        let (labels, value) = rest.rsplit_once("} ").unwrap();
        assert!(
            name.strip_prefix(family).is_some_and(|rest| ["", "_bucket", "_sum", "_count"].contains(&rest)),
            "{line}"
        );
        assert!(labels.contains("model_name=\"a\\\\b\\\"c\""), "{line}");
        let bound = labels.split("le=\"").nth(1).map(|rest| rest.trim_end_matches('"'));
        let written = |bound: &str| bound == "+Inf" || bound.parse().is_ok_and(f64::is_finite);
        assert!(bound.is_none_or(written), "{line}");
        assert!(value == "+Inf" || value.parse::<f64>().is_ok(), "{line}");
    }
}

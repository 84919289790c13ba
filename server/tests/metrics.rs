//! `/metrics`: names, values and the text format.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use crate::common::{Server, config};
use engine::{EngineConfig, LoraConfig};
use serde_json::{Value, json};
use server::ServerOptions;

/// With adapters, which have a metric of their own.
static SERVER: LazyLock<Server> = LazyLock::new(|| {
    let config = EngineConfig { lora: Some(LoraConfig::default()), ..config() };
    Server::with(config, ServerOptions::default(), Duration::ZERO)
});

/// A server that has answered one request: a prompt of 4 tokens, and two sequences of 5 tokens each.
fn after_one_request() -> Server {
    let config = EngineConfig { max_model_len: Some(300), ..config() };
    let server = Server::with(config, ServerOptions::default(), Duration::ZERO);
    let body = json!({"prompt": [40, 41, 42, 43], "n": 2, "max_tokens": 5, "ignore_eos": true});
    assert_eq!(server.ok("/v1/completions", body)["usage"]["total_tokens"], 14);
    server.until("the request is recorded", |server| server.metric("vllm:e2e_request_latency_seconds_count") == 1.0);
    server
}

/// Names and types of the metrics.
fn served() -> BTreeMap<String, String> {
    let page = SERVER.get("/metrics").body;
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types.map(|(name, kind)| (name.to_string(), kind.to_string())).collect()
}

#[test]
fn the_phases_and_tokens_of_a_request_are_recorded() {
    let server = after_one_request();
    let sum = |name: &str| server.metric(&format!("vllm:{name}_sum"));
    for (name, expected) in [
        ("request_prompt_tokens", 4.0),
        ("request_generation_tokens", 10.0),
        ("request_max_num_generation_tokens", 5.0),
        ("request_params_n", 2.0),
        ("request_params_max_tokens", 5.0),
        // The last token of a sequence is not computed.
        ("iteration_tokens_total", 4.0 + 2.0 * 4.0),
    ] {
        assert_eq!(sum(name), expected, "{name}");
    }
    let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
    let [queue, prefill, decode] =
        ["queue", "prefill", "decode"].map(|phase| sum(&format!("request_{phase}_time_seconds")));
    assert!(queue > 0.0 && prefill > 0.0 && decode > 0.0, "{queue} {prefill} {decode}");
    assert!(close(sum("request_inference_time_seconds"), prefill + decode));
    assert!(close(sum("time_to_first_token_seconds"), queue + prefill));
    assert!(close(sum("e2e_request_latency_seconds"), queue + prefill + decode));
    assert!(close(sum("time_per_output_token_seconds"), decode / 4.0));
    assert_eq!(server.metric("vllm:inter_token_latency_seconds_count"), 8.0);
    let page = server.get("/metrics").body;
    for (reason, count) in [("length", 2), ("stop", 0), ("abort", 0)] {
        let sample =
            format!("vllm:request_success_total{{finished_reason=\"{reason}\",model_name=\"quire-demo\"}} {count}");
        assert!(page.lines().any(|line| line == sample), "{sample}");
    }
}

#[test]
fn buckets_are_cumulative_and_end_at_infinity() {
    let server = after_one_request();
    let page = server.get("/metrics").body;
    let histograms: Vec<&str> =
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" histogram")).collect();
    assert!(histograms.len() > 10, "{histograms:?}");
    for name in histograms {
        let start = format!("{name}_bucket{{");
        let buckets: Vec<(f64, f64)> = page
            .lines()
            .filter(|line| line.starts_with(&start))
            .map(|line| {
                let bound = line.split("le=\"").nth(1).unwrap().split('"').next().unwrap();
                (bound.parse().unwrap(), line.rsplit(' ').next().unwrap().parse().unwrap())
            })
            .collect();
        assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{name}: {buckets:?}");
        assert_eq!(buckets.last(), Some(&(f64::INFINITY, server.metric(&format!("{name}_count")))), "{name}");
        let average = server.metric(&format!("{name}_sum")) / buckets.last().unwrap().1;
        let below = buckets.iter().filter(|bucket| bucket.0 < average).map(|bucket| bucket.1).fold(0.0, f64::max);
        assert!(buckets.last().unwrap().1 == 0.0 || below < buckets.last().unwrap().1, "{name}: {buckets:?}");
    }
    // The bounds of token counts end at the context length, 300.
    let bounds = page.lines().filter(|line| line.starts_with("vllm:request_prompt_tokens_bucket"));
    let bounds: Vec<&str> = bounds.map(|line| line.split("le=\"").nth(1).unwrap().split('"').next().unwrap()).collect();
    assert_eq!(bounds, ["1", "2", "5", "10", "20", "50", "100", "200", "+Inf"]);
}

#[test]
fn p15_the_states_of_blocks_are_shown_apart_and_sum_to_all() {
    let server = Server::start();
    server.ok("/v1/completions", json!({"prompt": vec![40; 100], "max_tokens": 2, "ignore_eos": true}));
    let page = server.get("/metrics").body;
    let blocks = page.lines().filter_map(|line| line.strip_prefix("quire:kv_blocks{"));
    let counts: BTreeMap<&str, f64> = blocks
        .map(|line| (line.split("state=\"").nth(1).unwrap().split('"').next().unwrap(), line))
        .map(|(state, line)| (state, line.rsplit(' ').next().unwrap().parse().unwrap()))
        .collect();
    assert_eq!(counts.keys().collect::<Vec<_>>(), [&"cached", &"free", &"in_use"]);
    assert!(counts["cached"] >= 6.0, "{counts:?}");
    assert_eq!(server.get("/quire/state").json()["blocks"]["total"].as_f64(), Some(counts.values().sum()));
}

#[test]
fn p34_every_name_is_in_the_frozen_list_and_the_other_way_round() {
    let rows = include_str!("../../docs/metrics.md").lines();
    let rows = rows.filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let listed: BTreeMap<String, String> =
        rows.filter_map(|(name, rest)| Some((name.to_string(), rest.split_once(" |")?.0.to_string()))).collect();
    assert_eq!(served(), listed);
}

#[test]
fn every_query_of_the_dashboard_names_metrics_that_exist() {
    let dashboard: Value = serde_json::from_str(include_str!("../../deploy/grafana/quire.json")).unwrap();
    let names = served();
    let mut seen = 0;
    let panels = dashboard["panels"].as_array().unwrap().iter();
    for target in panels.flat_map(|panel| panel["targets"].as_array().unwrap()) {
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
    let options = ServerOptions { served_model_names: vec!["a\\b\"c".into()], ..ServerOptions::default() };
    let page = Server::with(config(), options, Duration::ZERO).get("/metrics").body;
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

//! Frames of `quire top`.

use bench::top::Sort;
use bench::top::frame::draw;
use serde_json::{Value, json};

fn state() -> Value {
    let request = |id: u64, state: &str, age: f64, computed: u64, drawn: u64, blocks: u64| {
        json!({"id": id, "state": state, "age": age, "sequences": 1, "prompt_tokens": 100, "cached_tokens": 16,
               "computed_tokens": computed, "generated_tokens": drawn, "blocks": blocks, "preemptions": 0})
    };
    json!({
        "model": "m", "max_model_len": 1024, "uptime": 12.3,
        "blocks": {"total": 100, "in_use": 1, "cached": 49, "free": 50},
        "stats": {"running": 2, "waiting": 1, "swapped": 0, "preemptions": 3, "prefix_cache_queries": 200, "prefix_cache_hits": 50},
        "rates": {"prefill": 10.0, "decode": 20.5, "batch": 2.0, "steps": 9.0},
        "requests": [request(1, "running", 2.0, 120, 20, 8), request(2, "running", 3.0, 50, 0, 9), request(3, "waiting", 1.0, 0, 0, 0)],
        "requests_left_out": 4,
    })
}

#[test]
fn a_frame_has_the_speed_the_pool_and_every_request_that_fits() {
    let text = draw(&state(), Sort::Queue, (100, 40), false);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "m  context 1024  up 12 s  2 running  1 waiting  0 swapped");
    assert!(lines[1].contains("decode 20.5 tok/s") && lines[1].contains("cache hits 25 %"), "{}", lines[1]);
    assert!(
        lines[2].starts_with("blocks [#+") && lines[2].ends_with("free 50  of 100"),
        "one block shows: {}",
        lines[2]
    );
    let rows: Vec<Vec<&str>> = lines[5..8].iter().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["1", "running", "2.0", "1", "100", "16", "20", "8", "0"]);
    assert_eq!(rows[1][1..3], ["prefill", "50%"]);
    assert_eq!(lines[8], "… and 4 more");
    assert!(!text.contains('\x1b'));
}

#[test]
fn drafts_have_a_line_with_the_share_of_each_position_if_there_were_any() {
    let mut state = state();
    let with =
        |state: &Value| draw(state, Sort::Queue, (100, 40), false).lines().nth(3).unwrap_or_default().to_string();
    assert_eq!(with(&state), "");
    let drafts =
        json!({"num_drafts": 10, "num_draft_tokens": 30, "num_accepted_tokens": 12, "accepted_per_pos": [8, 4]});
    state["stats"]["spec_decode"] = drafts;
    assert_eq!(with(&state), "drafts 30  accepted 40 %  by position 80 40 %");
    state["stats"]["spec_decode"] = json!({"num_drafts": 1, "num_draft_tokens": 2, "accepted_per_pos": []});
    assert_eq!(with(&state), "drafts 2  accepted 0 %  by position %");
    state["stats"]["spec_decode"] = Value::Null;
    state["stored"] = json!({"records": 3, "bytes": 5_000_000, "running": 2, "resumed": 1, "left": 0});
    assert_eq!(with(&state), "stored 3  5 MB  in the background 2  resumed 1  left 0");
}

#[test]
fn ranks_the_host_tier_and_adapters_have_lines_if_there_are_any() {
    let mut state = state();
    state["ranks"] = json!({"tensor_parallel": 1, "pipeline_parallel": 1});
    state["adapters"] = json!([]);
    state["blocks"]["host_total"] = json!(0);
    let plain = draw(&state, Sort::Queue, (100, 40), false).lines().count();
    state["ranks"] = json!({"tensor_parallel": 2, "pipeline_parallel": 3});
    state["blocks"]["host_total"] = json!(300);
    state["blocks"]["host_in_use"] = json!(12);
    state["adapters"] = json!([
        {"name": "idle", "running": 0, "waiting": 0},
        {"name": "fr", "running": 0, "waiting": 1},
        {"name": "sql", "running": 2, "waiting": 0},
    ]);
    state["adapters_left_out"] = json!(7);
    let text = draw(&state, Sort::Queue, (100, 40), false);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[3], "ranks 6  tensor parallel 2  pipeline parallel 3");
    assert_eq!(lines[4], "host blocks 300  swapped 12  cached 0");
    assert_eq!(lines[5], "adapters 10  sql 2 running 0 waiting  fr 0 running 1 waiting");
    assert_eq!(lines.len(), plain + 3);
}

#[test]
fn orders_put_the_greatest_first_and_a_frame_fits_a_small_terminal() {
    let first = |sort| {
        let text = draw(&state(), sort, (100, 40), false);
        text.lines().nth(5).and_then(|line| line.split_whitespace().next()).map(str::to_string)
    };
    assert_eq!(first(Sort::Age).as_deref(), Some("2"));
    assert_eq!(first(Sort::Blocks).as_deref(), Some("2"));
    assert_eq!(first(Sort::Tokens).as_deref(), Some("1"));
    let small = draw(&state(), Sort::Queue, (40, 8), false);
    assert!(small.lines().count() <= 8 && small.contains("… and 6 more"), "{small}");
    assert!(small.lines().filter(|line| !line.starts_with("blocks")).all(|line| line.chars().count() <= 40));
    assert!(draw(&state(), Sort::Queue, (100, 40), true).contains("\x1b[34m#\x1b[0m"));
    assert!(
        draw(&json!({}), Sort::Queue, (0, 0), false).contains("no requests"),
        "a document of another program does not panic"
    );
}

#[test]
fn names_from_a_server_cannot_control_the_terminal() {
    let mut state = state();
    state["model"] = json!("m\x1b]0;evil\x07\u{9b}2J");
    state["max_model_len"] = json!("\x1b[31m");
    state["requests"][0]["state"] = json!("\x1b[2J");
    let text = draw(&state, Sort::Queue, (100, 40), false);
    assert!(text.contains("m]0;evil2J") && text.lines().all(|line| !line.contains(char::is_control)), "{text:?}");
}

#[test]
fn the_numbers_of_a_large_server_fit_in_100_columns() {
    let request = json!({"id": 4_123_456_789u32, "state": "running", "age": 86_399.9, "sequences": 128, "prompt_tokens": 1_048_576,
        "cached_tokens": 1_048_560, "computed_tokens": 1_040_000, "generated_tokens": 131_072, "blocks": 1_048_576, "preemptions": 9_999});
    let state = json!({
        "model": format!("/srv/checkpoints/{}/Llama-4-Maverick", "long/".repeat(20)), "max_model_len": 10_485_760, "uptime": 31_536_000.0,
        "blocks": {"total": 12_345_678, "in_use": 4_000_000, "cached": 4_345_678, "free": 4_000_000},
        "stats": {"running": 1024, "waiting": 65_536, "swapped": 1024, "preemptions": 99_999, "prefix_cache_queries": 10, "prefix_cache_hits": 10},
        "rates": {"prefill": 1_234_567.8, "decode": 234_567.8, "batch": 1023.96, "steps": 12_345.6},
        "requests": [request], "requests_left_out": 64_512,
    });
    let text = draw(&state, Sort::Queue, (100, 40), false);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.iter().all(|line| line.chars().count() <= 100), "{text}");
    // Nothing was cut at the right.
    assert!(lines[0].starts_with("/srv/") && lines[0].ends_with("65536 waiting  1024 swapped"), "{text}");
    let speed = "decode 235k tok/s  prefill 1235k tok/s  batch 1024  steps 12346/s  cache hits 100 %  preempted 99999";
    assert_eq!(lines[1], speed);
    assert!(lines[2].ends_with("free 4000000  of 12345678"), "{text}");
    let row: Vec<&str> = lines[5].split_whitespace().collect();
    let want = ["4123456789", "prefill", "99%", "86399.9", "128", "1048576", "1048560", "131072", "1048576", "9999"];
    assert_eq!(row, want);
}

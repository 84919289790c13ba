//! Values of flags: what is accepted, and what is refused with the name of the flag and what was expected.
use std::process::{Command, Output};

use serde_json::Value;

fn run(command: [&str; 2], flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_quire")).args(command).args(flags).output().unwrap()
}

fn plan(flag: &str) -> Output {
    run(["plan", "--json"], &[flag])
}

/// A field of the plan with this flag.
fn planned(flag: &str, field: &str) -> u64 {
    let output = plan(flag);
    assert!(output.status.success(), "{flag}: {output:?}");
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    plan[field].as_u64().unwrap()
}

/// The one line that refuses a flag.
fn refusal(flag: &str) -> String {
    let output = plan(flag);
    let line = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && output.stdout.is_empty() && line.lines().count() == 1, "{flag}: {line}");
    line
}

#[test]
fn bytes_have_an_optional_unit() {
    let blocks = |size: &str| planned(&format!("--kv-cache-memory-bytes={size}"), "num_blocks");
    let of_16m = blocks("16777216");
    // A small letter alone is a power of 1000, as in vLLM.
    for size in ["16M", "16777.216k", "16MiB", "16MB", "16mb", "16384 kB", "0.015625G"] {
        assert_eq!(blocks(size), of_16m, "{size}");
    }
    assert!(blocks("48M").abs_diff(3 * of_16m) <= 3);
    for bad in ["", "G", "-1", "2X", "1e400", "nan", "é", "9999999T"] {
        let line = refusal(&format!("--kv-cache-memory-bytes={bad}"));
        assert!(line.contains("--kv-cache-memory-bytes") && line.contains("expected bytes such as 512M"), "{line}");
    }
    // Zero is a number, so the message says what is wrong with it.
    assert!(refusal("--kv-cache-memory-bytes=0").contains("expected bytes above 0"));
}

#[test]
fn swap_space_is_in_gib_and_can_be_0() {
    let blocks = |gib: &str| planned(&format!("--swap-space={gib}"), "host_blocks");
    assert_eq!(blocks("0"), 0);
    assert!(blocks("0.5") > 0 && blocks("1").abs_diff(2 * blocks("0.5")) <= 1);
    for bad in ["", "-1", "4G", "nan", "inf", "1e9"] {
        assert!(refusal(&format!("--swap-space={bad}")).contains("expected a number of GiB"), "{bad}");
    }
}

#[test]
fn flags_of_vllm_without_effect_are_accepted_with_a_note() {
    let flags = ["--enable-auto-tool-choice", "--trust-remote-code", "--async-scheduling", "--load-format=auto"];
    // Names without a model, which are refused after the notes.
    let output = run(["serve", "--port=0"], &[&flags[..], &["-tp=1", "--served-model-name", "a", "b"]].concat());
    let text = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), flags.len() + 1, "{text}");
    for (flag, line) in flags.iter().zip(&lines) {
        assert!(line.starts_with(&format!("{} has no effect: ", flag.trim_end_matches("=auto"))), "{line}");
    }
    assert!(lines[flags.len()].contains("--served-model-name"), "{text}");
    assert!(refusal("-tp=0").contains("--tensor-parallel-size") && refusal("--headless").contains("docs/fleet.md"));
    for (tokens, expected) in [("1k", 1000), ("0.6k", 600), ("1.001k", 1001), ("2K", 2048), ("2048", 2048)] {
        assert_eq!(planned(&format!("--max-num-batched-tokens={tokens}"), "max_num_batched_tokens"), expected);
    }
    // The demo's weights are not quantised.
    assert!(refusal("--quantization=awq").contains("a checkpoint with weights that are not quantised"));
    assert!(refusal("--tokenizer=/nowhere").contains("--tokenizer: found /nowhere, expected a folder"));
}

#[test]
fn threads_are_at_most_the_cores() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    planned(&format!("--threads={cores}"), "num_blocks");
    for bad in ["0".to_string(), (cores + 1).to_string()] {
        let expected = format!("expected a whole number from 1 to {cores}, the cores");
        assert!(refusal(&format!("--threads={bad}")).contains(&expected), "{bad}");
    }
}

#[test]
fn a_target_between_tokens_is_a_possible_number_of_milliseconds_and_cuts_prompts() {
    let expected = "expected a number of milliseconds from 1 to 60000";
    for bad in ["0", "-1", "0.9", "nan", "inf", "1e300", "60001", "auto", "", "1s"] {
        let line = refusal(&format!("--itl-target-ms={bad}"));
        assert!(line.contains("--itl-target-ms") && line.contains(expected), "{line}");
    }
    assert!(refusal("--max-num-batched-tokens=most").contains("expected a whole number from 0 to"));
    for flag in ["--itl-target-ms=1", "--itl-target-ms=60000", "--max-num-batched-tokens=auto"] {
        assert_eq!(planned(flag, "max_num_batched_tokens"), 2048);
        let output = run(["plan", "--no-enable-chunked-prefill"], &[flag]);
        let line = String::from_utf8(output.stderr).unwrap();
        let name = flag.split('=').next().unwrap();
        assert!(line.contains(&format!("{name}: found ")) && line.lines().count() == 1, "{line}");
    }
}

#[test]
fn adapters_are_planned_for_and_their_flags_are_checked() {
    let output = run(["plan", "--json"], &["--enable-lora", "--max-loras=3", "--max-lora-rank=8"]);
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(plan["adapter_bytes"].as_u64() > Some(0) && planned("--max-loras=3", "adapter_bytes") == 0);
    for (flags, said) in [
        (&["--lora-modules=a=b"][..], "--enable-lora"),
        (&["--enable-lora", "--lora-modules=a"], "expected NAME=FOLDER"),
        (&["--enable-lora", "--lora-modules={\"name\": \"a\"}"], "expected NAME=FOLDER, or JSON"),
        (&["--enable-lora", "--max-loras=0"], "--max-loras: found 0"),
        (&["--enable-lora", "--lora-modules=a=/nowhere"], "--lora-modules a: /nowhere: no such folder"),
        (&["--enable-lora", "--lora-modules", "quire-demo=x"], "found the name of the base model"),
    ] {
        let output = run(["serve", "--port=0"], flags);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(said), "{flags:?}: {error}");
    }
}

#[test]
fn speculation_is_json_or_a_table_of_the_settings_file() {
    let refused = |flag: &str, expected: &str| {
        let line = refusal(&format!("--speculative-config={flag}"));
        assert!(line.contains("--speculative-config") && line.contains(expected), "{line}");
    };
    refused("ngram", "expected a JSON object such as");
    refused(r#"{"method": "mtp"}"#, "num_speculative_tokens: missing");
    refused(r#"{"method": "ngram", "num_speculative_tokens": 99}"#, "expected a whole number from 1 to 32");
    planned(r#"--speculative-config={"method": "ngram", "num_speculative_tokens": 4}"#, "num_blocks");
    let file = tempfile::NamedTempFile::new().unwrap();
    let with = |text: &str| {
        std::fs::write(file.path(), text).unwrap();
        plan(&format!("--config={}", file.path().display()))
    };
    assert!(
        with("[speculative_config]\nmethod = \"suffix\"\nsuffix_decoding_max_spec_factor = 2.5\n").status.success()
    );
    assert!(with("speculative_config = '{\"method\": \"suffix\"}'\n").status.success());
    let output = with("[speculative_config]\nmethod = \"suffix\"\ndepth = 3\n");
    let line = String::from_utf8(output.stderr).unwrap();
    assert!(line.contains("unknown key \"depth\"") && line.lines().count() == 1, "{line}");
}

#[test]
fn kv_events_are_json_or_a_table_of_the_settings_file() {
    let refused = |flag: &str, expected: &str| {
        let line = refusal(&format!("--kv-events-config={flag}"));
        assert!(line.contains("--kv-events-config") && line.contains(expected), "{line}");
    };
    refused("zmq", "expected a JSON object such as");
    refused(r#"{"enable": true}"#, "unknown key");
    refused(r#"{"endpoint": "ipc:///tmp/kv"}"#, "expected tcp://HOST:PORT");
    planned(r#"--kv-events-config={"enable_kv_cache_events": true, "endpoint": "tcp://*:0"}"#, "num_blocks");
    let file = tempfile::NamedTempFile::new().unwrap();
    let with = |text: &str| {
        std::fs::write(file.path(), text).unwrap();
        plan(&format!("--config={}", file.path().display()))
    };
    assert!(with("[kv_events_config]\nenable_kv_cache_events = true\nbuffer_steps = 100\n").status.success());
    let output = with("[kv_events_config]\nbuffer_step = 100\n");
    let line = String::from_utf8(output.stderr).unwrap();
    assert!(line.contains("did you mean \"buffer_steps\"?") && line.lines().count() == 1, "{line}");
}

#[test]
fn a_connector_to_other_replicas_is_json_or_a_table_of_the_settings_file() {
    let line = refusal(r#"--kv-transfer-config={"kv_connector": "NixlConnector"}"#);
    assert!(line.contains("--kv-transfer-config") && line.contains("expected \"SharedFolder\""), "{line}");
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = "[kv_transfer_config]\nkv_connector = \"SharedFolder\"\nkv_role = \"kv_both\"\n\
                kv_connector_extra_config = { shared_storage_path = \"/tmp/blocks\" }\n";
    std::fs::write(file.path(), text).unwrap();
    assert!(plan(&format!("--config={}", file.path().display())).status.success());
}

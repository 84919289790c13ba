//! A profile of the engine: names are the registry's, times nest and add up, and the tokens are those of an engine without one.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{config, on_sim, request, tokens};
use attention_kernels::{Operation, variants};
use device::profile::{Cost, Name, Recorded, Total, Track};
use engine::profile::{Best, table, trace};
use engine::{EngineConfig, Llm, PreemptionMode, Profile};
use serde_json::Value;

/// Runs a few requests with a profile and without, in a pool so small that some are swapped.
fn profiled(plain: EngineConfig) -> Recorded {
    let small = |config: EngineConfig| EngineConfig {
        preemption_mode: PreemptionMode::Swap,
        swap_space_bytes: 1 << 20,
        enable_prefix_caching: false,
        ..config
    };
    let requests = || (0..4).map(|i| request(i, 9 + i as usize, 12, 1)).collect();
    let profile = Arc::new(Profile::default());
    let mut llm = Llm::new(small(EngineConfig { profile: Some(profile.clone()), ..plain.clone() })).unwrap();
    let got = tokens(&mut llm, requests());
    assert!(llm.stats().scheduler.swap_preemptions > 0, "nothing was swapped: the test shows less");
    assert_eq!(got, tokens(&mut Llm::new(small(plain)).unwrap(), requests()));
    profile.recorded()
}

/// On each track, events are in order, and each event is either within the open one or after it.
fn assert_nested(events: &[Value]) {
    let nanoseconds = |event: &Value, key: &str| (event[key].as_f64().unwrap() * 1000.0).round() as u64;
    for track in 0..3 {
        let mut open: Vec<u64> = Vec::new();
        let mut last = 0;
        for event in events.iter().filter(|event| event["ph"] == "X" && event["tid"] == track) {
            let start = nanoseconds(event, "ts");
            let end = start + nanoseconds(event, "dur");
            assert!(last <= start, "{event} begins before the event in front of it");
            while open.last().is_some_and(|open| *open <= start) {
                open.pop();
            }
            assert!(open.last().is_none_or(|open| end <= *open), "{event} ends behind what it lies in");
            open.push(end);
            last = start;
        }
    }
}

fn assert_profile(recorded: &Recorded) {
    assert_eq!((recorded.lost, recorded.kept_steps), (0, recorded.steps));
    let registered: BTreeSet<(&str, &str)> = Operation::ALL
        .iter()
        .flat_map(|operation| variants(*operation).into_iter().map(|variant| (operation.key(), variant.name)))
        .collect();
    let layer = ["embed", "rope_table", "norm", "add_norm", "qk_rope", "activate", "keep", "gather"];
    let mut seen = BTreeSet::new();
    for name in recorded.totals.keys() {
        seen.insert(name.operation);
        let known = match name.track {
            Track::Host => ["step", "plan", "inputs", "memory", "launch", "wait", "sample", "publish", "commit"]
                .contains(&name.operation),
            Track::Compute if layer.contains(&name.operation) => {
                name.variant.ends_with(".layer") || registered.contains(&("cache_write", name.variant))
            }
            Track::Compute if name.operation == "sample" => name.variant == "cuda.sample",
            Track::Compute => registered.contains(&(name.operation, name.variant)),
            Track::Copy => ["swap_in", "swap_out"].contains(&name.operation),
        };
        assert!(known, "{name:?}");
    }
    for operation in ["step", "plan", "launch", "wait", "sample", "publish", "commit", "swap_in"]
        .into_iter()
        .chain(["linear", "decode", "prefill", "qk_rope", "embed", "add_norm", "activate"])
    {
        assert!(seen.contains(operation), "{operation} is not among {seen:?}");
    }
    let total = |operation| recorded.totals.iter().find(|(name, _)| name.operation == operation).unwrap().1;
    assert_eq!(total("step").calls, recorded.steps);
    assert_eq!(total("plan").calls, recorded.steps);
    // A graph would hide the operations that it replays.
    assert_eq!(total("embed").calls, recorded.steps);
    let host = recorded.totals.iter().filter(|(name, _)| name.track == Track::Host);
    assert_eq!(host.map(|(_, total)| total.own).sum::<std::time::Duration>(), total("step").time);
    for operation in ["linear", "decode", "prefill"] {
        let cost = total(operation).cost;
        assert!(cost.bytes > 0 && cost.operations > 0, "{operation}: {cost:?}");
    }

    let mut text = Vec::new();
    trace(recorded, &mut text).unwrap();
    let trace: Value = serde_json::from_slice(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    assert_eq!(events.len(), 3 + recorded.spans.len());
    assert_nested(events);
    let calls: u64 = recorded.totals.values().map(|total| total.calls).sum();
    assert_eq!(calls, recorded.spans.len() as u64);
    let table = table(recorded, &Best { bytes: Some(1e10), operations: Some(1e11), ..Best::default() });
    assert_eq!(table.lines().count(), 2 + 3 + recorded.totals.len() + 2, "{table}");
}

#[test]
fn a_profile_of_the_cpu_names_the_variants_and_adds_up() {
    let recorded = profiled(config(7));
    assert_profile(&recorded);
    assert!(recorded.totals.keys().any(|name| name.operation == "cache_write" && name.variant.starts_with("cpu.")));
}

#[test]
fn a_profile_on_cuda_sim_times_every_launch_and_has_no_graphs() {
    let Some(sim) = on_sim(config(7)) else { return };
    let recorded = profiled(sim);
    assert_profile(&recorded);
    let fused = |name: &device::profile::Name| name.operation == "qk_rope" && name.variant == "cuda.fused";
    assert!(recorded.totals.keys().any(fused), "{:?}", recorded.totals.keys());
}

#[test]
fn a_profile_counts_the_tokens_of_each_expert() {
    let model = engine::ModelSource::Folder(testkit::reference::folder("mixtral"));
    let recorded = profiled(EngineConfig { model, ..config(7) });
    let counts = &recorded.experts;
    // Four experts, of which each row has two, in two layers; a row of two experts touches at least two.
    assert_eq!((counts.rows.len(), counts.calls % 2), (4, 0));
    let rows: u64 = counts.rows.iter().sum();
    assert!(rows.is_multiple_of(2) && rows >= 2 * counts.calls, "{counts:?}");
    assert!(counts.touched >= 2 * counts.calls && counts.touched <= 4 * counts.calls, "{counts:?}");
    let text = table(&recorded, &Best::default());
    assert!(text.contains("tokens per expert, all layers: least ") && text.contains("  by expert: "), "{text}");
}

fn recorded() -> Recorded {
    let mut recorded = Recorded { steps: 2, ..Recorded::default() };
    let mut add = |track, operation, variant, calls, time, own, bytes, operations| {
        let ms = Duration::from_millis;
        let total = Total { calls, time: ms(time), own: ms(own), cost: Cost { bytes, operations } };
        recorded.totals.insert(Name { track, operation, variant }, total);
    };
    add(Track::Host, "step", "", 2, 100, 10, 0, 0);
    add(Track::Host, "launch", "", 4, 90, 90, 0, 0);
    add(Track::Compute, "linear", "cpu.avx2", 8, 50, 50, 500_000_000, 1_000_000_000);
    add(Track::Compute, "heads", "cpu.layer", 8, 20, 15, 0, 0);
    add(Track::Compute, "cache_write", "cpu.avx2", 8, 5, 5, 5_000_000, 0);
    recorded
}

#[test]
fn a_variant_that_rounds_is_compared_with_the_peak_of_rounded_products() {
    let mut recorded = recorded();
    let name = |operation, variant| Name { track: Track::Compute, operation, variant };
    let total = recorded.totals[&name("linear", "cpu.avx2")];
    recorded.totals.insert(name("decode", "cpu.portable_bf16"), total);
    // A billion operations in 50 ms.
    let text = table(&recorded, &Best { bytes: None, operations: Some(25e9), rounded: Some(100e9) });
    let line = |name: &str| text.lines().find(|line| line.contains(name)).unwrap_or_default().to_string();
    assert!(line("cpu.avx2").ends_with(" 80 %") && line("cpu.portable_bf16").ends_with(" 20 %"), "{text}");
}

#[test]
fn the_rows_of_a_track_add_up_to_the_steps_in_descending_order() {
    let text = table(&recorded(), &Best { bytes: Some(20e9), operations: Some(25e9), ..Best::default() });
    let cells: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let share = |line: &[&str]| {
        line.iter().position(|cell| *cell == "%").map(|at| line[at - 1].parse::<f64>().unwrap()).unwrap()
    };
    let device = cells.iter().position(|line| *line == ["device"]).unwrap();
    let host = cells.iter().position(|line| *line == ["host"]).unwrap();
    for section in [&cells[host + 1..device], &cells[device + 1..]] {
        let shares: Vec<f64> = section.iter().map(|line| share(line)).collect();
        assert!(shares.is_sorted_by(|a, b| a >= b) && (shares.iter().sum::<f64>() - 100.0).abs() < 0.3, "{text}");
    }
    // 10 GB/s of 20 and 20 GOP/s of 25: the operations decide.
    let linear = ["linear", "cpu.avx2", "8", "50.000", "6250.00", "50.0", "%", "10.0", "20.0", "80", "%"];
    assert!(cells.contains(&linear.to_vec()), "{text}");
    assert!(text.contains("idle") && !text.contains("copies beside"), "{text}");
}

#[test]
fn without_peak_rates_no_lower_bound_is_shown() {
    let text = table(&recorded(), &Best::default());
    assert!(text.lines().any(|line| line.contains("linear") && line.ends_with("10.0      20.0")), "{text}");
    assert!(table(&Recorded::default(), &Best::default()).starts_with("profile of 0 steps"));
}

//! A profile of the engine: names are the registry's, times nest and add up, and the tokens are those of an engine without one.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::common::{config, on_sim, request, tokens};
use attention_kernels::{Operation, variants};
use device::profile::{Recorded, Track};
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
    assert!(llm.stats().num_swap_preemptions > 0, "nothing was swapped: the test shows less");
    assert_eq!(got, tokens(&mut Llm::new(small(plain)).unwrap(), requests()));
    profile.recorded()
}

/// On each track events are in order, and each lies within the one that is open or behind it.
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
    let layer = ["embed", "rope_table", "rms_norm", "add_norm", "qk_rope", "silu_mul", "keep", "gather"];
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
        .chain(["linear", "decode", "prefill", "qk_rope", "embed", "add_norm", "silu_mul"])
    {
        assert!(seen.contains(operation), "{operation} is not among {seen:?}");
    }
    let total = |operation| recorded.totals.iter().find(|(name, _)| name.operation == operation).unwrap().1;
    assert_eq!(total("step").calls, recorded.steps);
    assert_eq!(total("plan").calls, recorded.steps);
    // A graph would hide what it replays.
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
    let table = table(recorded, &Best { bytes: Some(1e10), operations: Some(1e11) });
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

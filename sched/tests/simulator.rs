//! The simulator in `examples/simulate`.

#[allow(dead_code)]
#[path = "../examples/simulate/sim/mod.rs"]
pub mod sim;

use self::sim::Policy;
use self::sim::cost::{CostModel, Work};
use self::sim::measure::Run;
use self::sim::trace::{Arrival, Lengths, generate, parse_csv};

const AT_ONCE: f64 = f64::INFINITY;
const QUIRE: Policy = Policy::Quire { max_in_flight: 1 };

/// Requests that arrive together, with the lengths of these ranges in a mixed order.
fn spread(count: usize, prompts: std::ops::Range<usize>, outputs: std::ops::Range<usize>) -> Vec<Arrival> {
    let pick = |k: usize, range: &std::ops::Range<usize>, stride: usize| range.start + k * stride % range.len();
    (0..count).map(|k| Arrival { at: 0.0, prompt: pick(k, &prompts, 37), output: pick(k, &outputs, 61) }).collect()
}

#[test]
fn every_request_ends_once_with_all_of_its_tokens_under_every_policy() {
    let gpu = CostModel::opt_13b_on_a100();
    for lengths in Lengths::ALL {
        for (rate, batch) in [(AT_ONCE, 64), (3.0, 7), (0.05, 256)] {
            let trace = generate(lengths, 60, rate, 3);
            for policy in Policy::ALL {
                let run = policy.run(&trace, &gpu, batch);
                assert_eq!((run.queueing.len(), run.end_to_end.len()), (60, 60), "{policy:?}");
                assert_eq!(run.output_tokens, trace.iter().map(|a| a.output).sum::<usize>());
                assert!(run.largest_batch <= batch && run.queueing.iter().all(|s| *s >= 0.0));
                for share in [run.device_busy(), run.slots_busy(), run.kv_utilisation()] {
                    assert!(share > 0.0 && share <= 1.0 + 1e-9, "{policy:?}: {share}");
                }
                assert_eq!(run.elapsed, policy.run(&trace, &gpu, batch).elapsed, "not a function of its input");
            }
        }
    }
}

#[test]
fn blocks_of_16_are_96_percent_used_if_sequences_have_200_tokens_or_more() {
    let gpu = CostModel::opt_13b_on_a100();
    let traces = [spread(300, 150..251, 1..100), spread(300, 100..301, 50..250), spread(300, 1..400, 300..500)];
    let drawn = (0..10).map(|seed| generate(Lengths::ShareGpt, 300, AT_ONCE, seed));
    for trace in traces.into_iter().chain(drawn) {
        let run = QUIRE.run(&trace, &gpu, 256);
        assert!(run.kv_utilisation() >= 0.96, "{}", run.kv_utilisation());
        assert!(run.largest_batch > 20);
        // A step ahead, the blocks of a sequence are kept for one step after its end.
        let ahead = Policy::Quire { max_in_flight: 2 }.run(&trace, &gpu, 256);
        let steps = run.output_tokens as f64 / trace.len() as f64;
        assert!(ahead.kv_utilisation() * (1.0 + 2.0 / steps) >= run.kv_utilisation(), "{}", ahead.kv_utilisation());
    }
    // Half a block is wasted per sequence, so the share is lower for short sequences or long blocks.
    let run = sim::paged::run(&spread(300, 1..20, 1..50), &gpu, 256, 16, 1);
    assert!(run.kv_utilisation() < 0.9);
    let run = sim::paged::run(&spread(300, 100..301, 50..250), &gpu, 256, 128, 1);
    assert!(run.kv_utilisation() < 0.9);
}

#[test]
fn continuous_batching_is_at_least_as_fast_as_static_for_every_seed() {
    let gpu = CostModel::opt_13b_on_a100();
    for seed in 0..8 {
        for lengths in Lengths::ALL {
            let trace = generate(lengths, 80, AT_ONCE, seed);
            for batch in [1, 3, 7, 16, 64] {
                let speed = |policy: Policy| policy.run(&trace, &gpu, batch).throughput() * (1.0 + 1e-9);
                let (longest, oracle) = (speed(Policy::StaticMax), speed(Policy::Static));
                let (contiguous, quire) = (speed(Policy::Contiguous), speed(QUIRE));
                let what = format!("{lengths:?}, seed {seed}, batch {batch}");
                assert!(contiguous * (1.0 + 1e-9) >= longest, "{what}: {contiguous} < {longest}");
                assert!(quire * (1.0 + 1e-9) >= oracle, "{what}: {quire} < {oracle}");
            }
        }
    }
}

#[test]
fn with_steps_of_equal_cost_the_ratio_tends_to_longest_over_mean() {
    let flat = CostModel::flat(2048);
    let limit = 2000.0 / 1025.0;
    let mut last = 0.0;
    let mut batches = vec![(2, 0.65), (8, 0.86), (32, 0.94)];
    if std::env::var_os("QUIRE_TEST_ALL").is_some() {
        batches.push((128, 0.97));
    }
    for (batch, least) in batches {
        let trace = generate(Lengths::Uniform, 60 * batch, AT_ONCE, 1);
        let static_steps = Policy::Static.run(&trace, &flat, batch).steps as f64;
        for policy in [Policy::Contiguous, QUIRE] {
            let ratio = static_steps / policy.run(&trace, &flat, batch).steps as f64 / limit;
            assert!(ratio > least && ratio < 1.0 && ratio > last, "{policy:?}, batch {batch}: {ratio} of the limit");
        }
        last = least;
    }
}

#[test]
fn requests_of_equal_length_gain_only_memory_from_continuous_batching() {
    let trace = vec![Arrival { at: 0.0, prompt: 10, output: 30 }; 64];
    let flat = CostModel::flat(2048);
    let steps = |policy: Policy| policy.run(&trace, &flat, 16).steps;
    assert_eq!(
        Policy::ALL.map(steps),
        [120, 120, 120, 120, 120 + 4],
        "a step ahead, each of four waves computes one step too many"
    );
    let gpu = CostModel::opt_13b_on_a100();
    assert_eq!(Policy::StaticMax.run(&trace, &gpu, 64).largest_batch, 7, "15,728 tokens of cache hold 7 of 2,048");
    assert_eq!(QUIRE.run(&trace, &gpu, 64).largest_batch, 64);
}

#[test]
fn planning_a_step_ahead_hides_the_host() {
    let gpu = CostModel::opt_13b_on_a100();
    let trace = generate(Lengths::ShareGpt, 100, AT_ONCE, 1);
    for batch in [1, 8, 64] {
        let [one, two] = [1, 2].map(|max_in_flight| Policy::Quire { max_in_flight }.run(&trace, &gpu, batch));
        assert!(two.throughput() > one.throughput());
        assert!(one.device_busy() < 0.99 && two.device_busy() > 0.999, "{} {}", one.device_busy(), two.device_busy());
    }
}

#[test]
fn the_cost_of_a_step_is_the_greater_of_bytes_and_flops_plus_launches() {
    let gpu = CostModel::opt_13b_on_a100();
    let launches = 480.0 * 2e-6;
    let mut decode = Work::default();
    (0..4).for_each(|_| decode.add_span(99, 1));
    assert_eq!(decode, Work { rows: 4, context: 396, pairs: 400 });
    let bytes = 26e9 + 819_200.0 * 400.0;
    assert!((gpu.device_seconds(decode) - bytes / 1.555e12 - launches).abs() < 1e-12);
    let mut prefill = Work::default();
    prefill.add_span(0, 2000);
    let flops = 2.0 * 13e9 * 2000.0 + 4.0 * 40.0 * 5120.0 * 2_001_000.0;
    assert!((gpu.device_seconds(prefill) - flops / 312e12 - launches).abs() < 1e-12);
}

#[test]
fn an_invalid_csv_is_refused_with_the_line() {
    let trace = parse_csv("arrival,prompt,output\n0.5, 10, 20\n\n0,1,1\n", 2048).unwrap();
    let arrival = |at, prompt, output| Arrival { at, prompt, output };
    assert_eq!(trace, [arrival(0.0, 1, 1), arrival(0.5, 10, 20)]);
    let error = |text: &str| parse_csv(text, 2048).unwrap_err();
    assert_eq!(error("0,1,1\n0,1"), "line 2: found \"0,1\", expected arrival seconds, prompt tokens, output tokens");
    assert!(error("0,1,0").ends_with("times must be at least 0, token counts at least 1"));
    assert_eq!(error("0,2000,49"), "line 1: found 2000 + 49 tokens, expected at most 2048, the context length");
    assert_eq!(error("arrival,prompt,output"), "the trace is empty: expected at least one request");
}

#[test]
fn a_quantile_is_the_value_of_the_nearest_rank() {
    let seconds: Vec<f64> = (1..=100).rev().map(f64::from).collect();
    assert_eq!([0.5, 0.99, 1.0].map(|share| Run::quantile(&seconds, share)), [50.0, 99.0, 100.0]);
}

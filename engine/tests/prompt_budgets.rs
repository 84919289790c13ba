//! The number of prompt tokens of a step changes neither a token nor a log-probability, and follows a target.

use engine::speculate::Ngram;
use engine::{Engine, EngineConfig, ItlTarget, ParallelConfig, PreemptionMode, TokenEvent};

use crate::common::{config, overlapping, request, shared};
use crate::overlap::{Load, answers, answers_with};
use crate::recurrent;
use crate::speculate::{loads, plain, speculating};

fn load(config: &EngineConfig) -> Engine {
    shared::engine(config).unwrap()
}

/// The answers with another prompt budget before each step, most of them small.
fn with_random_budgets(mut engine: Engine, loads: &[Load], mut random: u64) -> (Engine, Vec<Vec<TokenEvent>>) {
    let events = answers_with(&mut engine, loads, |engine| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        engine.set_prompt_budget([0, 1, 2, 3, 5, 7, 11, usize::MAX][(random >> 61) as usize]);
    });
    (engine, events)
}

#[test]
fn any_budgets_of_steps_give_the_tokens_and_log_probabilities_of_a_fixed_one() {
    let loads = loads(3, 0, 40);
    let (mut fixed_steps, mut random_steps) = (0, 0);
    for (blocks, swaps) in [(200, false), (16, true)] {
        let swap_space_bytes = if swaps { config(64).kv_cache_memory_bytes.unwrap() } else { 0 };
        let preemption_mode = if swaps { PreemptionMode::Swap } else { PreemptionMode::Recompute };
        let fixed = EngineConfig { swap_space_bytes, preemption_mode, ..config(blocks) };
        let mut engine = load(&fixed);
        let want = answers(&mut engine, &loads);
        let steps = engine.stats().steps;
        let what = format!("{blocks} blocks, swaps {swaps}");
        let (engine, found) = with_random_budgets(load(&fixed), &loads, blocks);
        assert!(found == want, "{what}");
        fixed_steps += steps;
        random_steps += engine.stats().steps;
        let (engine, found) =
            with_random_budgets(speculating(&fixed, Box::new(Ngram::new(1, 3)), 4), &loads, 1 + blocks);
        assert!(plain(&engine, found) == want, "{what}, with drafts");
        let of_ranks = if swaps { &[][..] } else { &[(2, 1), (1, 3)] };
        for &(tensor_parallel_size, pipeline_parallel_size) in of_ranks {
            let parallel = ParallelConfig { tensor_parallel_size, pipeline_parallel_size, ..Default::default() };
            let ranks = EngineConfig { parallel, ..fixed.clone() };
            let (_, found) = with_random_budgets(load(&ranks), &loads, 2 + blocks);
            assert!(found == want, "{what}, {tensor_parallel_size} x {pipeline_parallel_size} ranks");
        }
    }
    println!("{fixed_steps} and {random_steps} steps");
    // A request whose mask is late misses a step, so the numbers depend on the clock, those with few blocks by more than they differ.
    assert!(random_steps > fixed_steps, "{fixed_steps} and {random_steps} steps: the budgets have changed none");
}

#[test]
fn any_budgets_give_the_same_with_recurrent_layers() {
    let loads: Vec<Load> = (0..6).map(|i| (recurrent::request(i, 30 + 40 * i as usize % 150, 20, 2), None)).collect();
    let want = answers(&mut load(&recurrent::config(64)), &loads);
    let (_, found) = with_random_budgets(load(&recurrent::config(64)), &loads, 5);
    assert!(found == want);
}

#[test]
fn any_budgets_give_the_same_on_cuda_sim_where_steps_are_planned_ahead() {
    let Some(config) = overlapping(100) else { return };
    let loads: Vec<Load> = (0..6).map(|i| (request(i, 9 + 5 * i as usize, 8, 1 + i as usize % 2), None)).collect();
    let want = answers(&mut load(&config), &loads);
    let (_, found) = with_random_budgets(load(&config), &loads, 6);
    assert!(found == want);
}

#[test]
fn targets_that_are_missed_and_met_give_the_same_answers() {
    let loads: Vec<Load> = (0..12).map(|i| (request(i, 60, 10 + i as usize, 1), None)).collect();
    let fixed = config(200);
    let want = answers(&mut load(&fixed), &loads);
    // A step of this model takes some tenths of a millisecond, in a busy moment more.
    for target in [ItlTarget::Millis(1.0), ItlTarget::Auto, ItlTarget::Millis(60_000.0)] {
        let mut engine = load(&EngineConfig { itl_target: Some(target), ..fixed.clone() });
        let found = answers_with(&mut engine, &loads, |engine| {
            let budget = engine.stats().prompt_budget;
            assert!((16..=64).contains(&budget), "{budget}");
        });
        assert!(found == want, "{target:?}");
        let seconds = engine.stats().itl_target;
        match target {
            ItlTarget::Millis(millis) => assert_eq!(seconds, millis / 1000.0),
            ItlTarget::Auto => assert!(seconds > 0.0),
        }
    }
    assert_eq!(load(&fixed).stats().itl_target, 0.0);
}

#[test]
fn an_impossible_target_is_refused_by_name() {
    let refused = |target, enable_chunked_prefill| {
        let config = EngineConfig { itl_target: Some(target), enable_chunked_prefill, ..config(200) };
        engine::plan(&config).unwrap_err().to_string()
    };
    for millis in [0.0, -1.0, 0.5, f64::NAN, f64::INFINITY, 60_001.0, 1e300] {
        let message = format!("--itl-target-ms: found {millis:?}, expected a number of milliseconds from 1 to 60000");
        assert_eq!(refused(ItlTarget::Millis(millis), true), message);
    }
    let chunks = "expected chunked prefill too, because a target cuts prompts into chunks; remove one of the two flags";
    assert_eq!(refused(ItlTarget::Auto, false), format!("--max-num-batched-tokens: found auto, {chunks}"));
    assert_eq!(refused(ItlTarget::Millis(200.0), false), format!("--itl-target-ms: found 200.0, {chunks}"));
}

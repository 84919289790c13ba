//! Faults of the memory and of steps in flight: whichever copy or forward pass fails, only the requests of that step fail,
//! and nothing that was to be copied or computed is ever read.
#![cfg(test)]
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::path::PathBuf;

use super::{Engine, overlap};
use crate::api::{EngineConfig, FinishReason, GenerationParams, GenerationRequest, ModelSource, TokenEvent};
use crate::worker::hooks;
use sampling::SamplingParams;
use sched::PreemptionMode;

/// Blocks of 8 tokens of the tiny reference model, and a swap space as large as three times that.
fn engine(blocks: u64) -> Engine {
    let bytes = blocks * 8 * 2 * 3 * 2 * 32 * 4;
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tests/reference/llama");
    Engine::load(
        &EngineConfig {
            model: ModelSource::Folder(folder),
            block_size: 8,
            kv_cache_memory_bytes: Some(bytes),
            swap_space_bytes: 3 * bytes,
            preemption_mode: PreemptionMode::Swap,
            max_num_seqs: 16,
            max_num_batched_tokens: 64,
            threads: Some(1),
            seed: Some(1),
            ..Default::default()
        },
        &|_, _| {},
    )
    .unwrap()
}

/// Samples that share a prompt whose last block is half full, so that there are copies on write besides the swaps.
fn requests() -> Vec<GenerationRequest> {
    let one = |which: u32| GenerationRequest {
        prompt: (0..20).map(|i| 3 + (which * 131 + i * 17) % 550).collect(),
        params: GenerationParams {
            sampling: SamplingParams { seed: Some(u64::from(which)), ..Default::default() },
            max_tokens: Some(24),
            ignore_eos: true,
            n: 2,
            ..Default::default()
        },
        ..Default::default()
    };
    (0..6).map(one).collect()
}

/// Tokens of each sequence of each request; `None` for a request that failed.
fn drive(engine: &mut Engine, requests: Vec<GenerationRequest>) -> Vec<Option<Vec<Vec<u32>>>> {
    let mut places = HashMap::new();
    let mut answers: Vec<Option<Vec<Vec<u32>>>> = Vec::new();
    for request in requests {
        answers.push(Some(vec![Vec::new(); request.params.n]));
        places.insert(engine.submit(request).unwrap(), answers.len() - 1);
    }
    while engine.has_work() {
        engine.step(|id, event| {
            if let TokenEvent::Token { index, token, finish } = event {
                let answer = &mut answers[places[&id]];
                match (finish, answer.as_mut()) {
                    (Some(FinishReason::Error(_)), _) => *answer = None,
                    (_, Some(answer)) => answer[index as usize].extend(token.map(|token| token.token)),
                    (_, None) => {}
                }
            }
        });
    }
    answers
}

#[test]
fn whichever_copy_fails_only_its_step_fails_and_nobody_reads_what_was_not_copied() {
    let want = drive(&mut engine(200), requests());
    let mut tight = engine(26);
    hooks::FAULT_AFTER.set(Some(usize::MAX));
    assert_eq!(drive(&mut tight, requests()), want);
    let operations = usize::MAX - hooks::FAULT_AFTER.take().unwrap();
    assert!(tight.stats().num_swap_preemptions > 0 && tight.stats().blocks_copied > 0, "{:?}", tight.stats());
    let (mut spared, mut failed) = (0, 0);
    for at in (0..operations).step_by(if testkit::everything() { 1 } else { 5 }) {
        let mut engine = engine(26);
        hooks::FAULT_AFTER.set(Some(at));
        let answers = drive(&mut engine, requests());
        assert_eq!(engine.stats().failed_steps, 1, "operation {at} of {operations}");
        for (answer, want) in answers.iter().zip(&want) {
            assert!(answer.is_none() || answer == want, "after the fault at operation {at} a token is wrong");
        }
        failed += answers.iter().filter(|answer| answer.is_none()).count();
        spared += answers.iter().filter(|answer| answer.is_some()).count();
        // What the prefix cache holds is right, too.
        hooks::FAULT_AFTER.set(None);
        assert_eq!(drive(&mut engine, requests()), want, "the cache after the fault at operation {at}");
        engine.scheduler.audit().unwrap();
        let stats = engine.stats();
        assert_eq!((stats.blocks_in_use, stats.num_running, stats.num_waiting, stats.num_swapped), (0, 0, 0, 0));
    }
    assert!(failed > 0 && spared > 0, "{failed} failed, {spared} were spared");
}

/// The same as [`engine`], on `cuda-sim`, where steps are planned ahead.
fn overlapped(blocks: u64) -> Option<Engine> {
    let config = overlap::config(blocks)?;
    let swap_space_bytes = 3 * config.kv_cache_memory_bytes.unwrap();
    let config = EngineConfig { swap_space_bytes, preemption_mode: PreemptionMode::Swap, ..config };
    Some(Engine::load(&config, &|_, _| {}).unwrap())
}

/// So many places, spread evenly over so many operations; all of them where everything is to be tested.
fn places(operations: usize, count: usize) -> impl Iterator<Item = usize> {
    (0..operations).step_by(if testkit::everything() { 1 } else { operations.div_ceil(count) })
}

/// Fewer and shorter than [`requests`]: each step of `cuda-sim` costs.
fn few() -> Vec<GenerationRequest> {
    let mut requests = requests();
    requests.truncate(4);
    requests.iter_mut().for_each(|request| request.params.max_tokens = Some(10));
    requests
}

/// Runs into a fault: who is spared gives the tokens of `want`, and afterwards everybody does.
fn meets(engine: &mut Engine, want: &[Option<Vec<Vec<u32>>>], what: &str) -> (usize, usize) {
    let answers = drive(engine, few());
    assert_eq!(engine.stats().failed_steps, 1, "{what}");
    for (answer, want) in answers.iter().zip(want) {
        assert!(answer.is_none() || answer == want, "after {what} a token is wrong");
    }
    assert_eq!(drive(engine, few()), want, "the cache after {what}");
    engine.scheduler.audit().unwrap();
    let stats = engine.stats();
    assert_eq!((stats.blocks_in_use, stats.num_running, stats.num_waiting, stats.num_swapped), (0, 0, 0, 0));
    assert!(engine.worker.num_sequences() == 0 && engine.flights.is_empty(), "{what}");
    (answers.iter().filter(|answer| answer.is_none()).count(), answers.iter().filter(|answer| answer.is_some()).count())
}

#[test]
fn a_copy_that_fails_while_the_step_before_it_runs_fails_its_own_step_alone() {
    let Some(mut large) = overlapped(200) else { return };
    let want = drive(&mut large, few());
    let mut tight = overlapped(11).unwrap();
    hooks::FAULT_AFTER.set(Some(usize::MAX));
    assert_eq!(drive(&mut tight, few()), want);
    let operations = usize::MAX - hooks::FAULT_AFTER.take().unwrap();
    assert!(tight.stats().num_swap_preemptions > 0 && tight.stats().blocks_copied > 0, "{:?}", tight.stats());
    let (mut failed, mut spared) = (0, 0);
    for at in places(operations, 2) {
        let mut engine = overlapped(11).unwrap();
        hooks::FAULT_AFTER.set(Some(at));
        let (few, many) = meets(&mut engine, &want, &format!("the fault at operation {at} of {operations}"));
        (failed, spared) = (failed + few, spared + many);
    }
    assert!(failed > 0 && spared > 0, "{failed} failed, {spared} were spared");
}

#[test]
fn a_step_that_fails_in_flight_ends_its_requests_and_the_step_behind_it_is_computed_again() {
    let Some(mut large) = overlapped(200) else { return };
    let want = drive(&mut large, few());
    let mut tight = overlapped(11).unwrap();
    hooks::SILENT_AFTER.set(Some(usize::MAX));
    assert_eq!(drive(&mut tight, few()), want);
    let passes = usize::MAX - hooks::SILENT_AFTER.take().unwrap();
    let (mut failed, mut spared) = (0, 0);
    for at in places(passes, 3) {
        let mut engine = overlapped(11).unwrap();
        hooks::SILENT_AFTER.set(Some(at));
        let (few, many) = meets(&mut engine, &want, &format!("the failure of forward pass {at} of {passes}"));
        (failed, spared) = (failed + few, spared + many);
    }
    assert!(failed > 0 && spared > 0, "{failed} failed, {spared} were spared");
}

#[test]
fn samples_whose_first_tokens_were_drawn_behind_a_failed_step_draw_them_again() {
    let Some(mut engine) = overlapped(200) else { return };
    let [first, samples] = &few()[..2] else { unreachable!() };
    let want = drive(&mut engine, vec![samples.clone()]);
    let first =
        engine.submit(GenerationRequest { params: GenerationParams { n: 1, ..first.params.clone() }, ..first.clone() });
    (0..3).for_each(|_| engine.step(|_, _| {}));
    // The next step fails when it is waited for; behind it the prompt of the samples is computed, and both draw.
    hooks::SILENT_AFTER.set(Some(0));
    engine.step(|_, _| {});
    let mut got = vec![Vec::new(); 2];
    let id = engine.submit(samples.clone()).unwrap();
    while engine.has_work() {
        engine.step(|of, event| {
            if let TokenEvent::Token { index, token: Some(token), .. } = event
                && of == id
            {
                got[index as usize].push(token.token);
            }
        });
    }
    assert_eq!((engine.stats().failed_steps, first.is_ok()), (1, true));
    assert_eq!(vec![Some(got)], want);
    assert_eq!(engine.worker.num_sequences(), 0);
}

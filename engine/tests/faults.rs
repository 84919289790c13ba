//! Faults of block copies and of steps in flight: whichever copy or forward pass fails, only the requests of that step fail,
//! and nothing that should have been copied or computed is ever read.

use std::collections::HashMap;

use engine::{
    Engine, EngineConfig, FinishReason, GenerationParams, GenerationRequest, KernelChoice, PreemptionMode,
    SamplingParams, TokenEvent,
};

use crate::common::faulty::{COPIES, PASSES, count, faulty};
use crate::common::{config, engine_on, opened, overlapping};

/// `blocks` blocks of 8 tokens and a swap space three times as large, on the CPU.
fn engine(blocks: u64) -> Engine {
    let config = config(blocks);
    let config = EngineConfig {
        swap_space_bytes: 3 * config.kv_cache_memory_bytes.unwrap(),
        preemption_mode: PreemptionMode::Swap,
        kernels: KernelChoice { block_copy: "test.faulty".into(), ..Default::default() },
        ..config
    };
    engine_on(&config, faulty(device::open("cpu", Some(1)).unwrap()))
}

/// The same on a device that launches kernels, where a step is planned while the one before it runs.
fn overlapped(blocks: u64) -> Option<Engine> {
    let config = overlapping(blocks)?;
    let swap_space_bytes = 3 * config.kv_cache_memory_bytes.unwrap();
    let config = EngineConfig { swap_space_bytes, preemption_mode: PreemptionMode::Swap, ..config };
    let options = device::Options { deterministic: config.deterministic, ..Default::default() };
    let device = faulty(opened::open(options)?);
    Some(engine_on(&config, device))
}

/// Samples that share a prompt whose last block is half full, so that blocks are copied on write besides the swaps.
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

/// Fewer and shorter than [`requests`], since each step of `cuda-sim` costs.
fn few() -> Vec<GenerationRequest> {
    let mut requests = requests();
    requests.truncate(4);
    requests.iter_mut().for_each(|request| request.params.max_tokens = Some(10));
    requests
}

/// Tokens of each sequence of each request; `None` for a request that failed.
type Answers = Vec<Option<Vec<Vec<u32>>>>;

fn drive(engine: &mut Engine, requests: Vec<GenerationRequest>) -> Answers {
    let mut places = HashMap::new();
    let mut answers: Answers = Vec::new();
    for request in requests {
        answers.push(Some(vec![Vec::new(); request.params.n]));
        places.insert(engine.submit(request).unwrap(), answers.len() - 1);
    }
    while engine.has_work() {
        engine.step(|id, event| {
            if let TokenEvent::Token { index, token, finish, .. } = event {
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

/// `count` places, spread evenly over that many operations; all of them where everything is to be tested.
fn places(operations: usize, count: usize) -> impl Iterator<Item = usize> {
    (0..operations).step_by(if testkit::everything() { 1 } else { operations.div_ceil(count) })
}

/// Numbers of requests that failed and that did not.
#[derive(Default)]
struct Fates {
    failed: usize,
    spared: usize,
}

impl Fates {
    /// Runs requests into a fault. Those that are spared get the tokens of `want`, and afterwards all requests do.
    fn meet(&mut self, engine: &mut Engine, requests: fn() -> Vec<GenerationRequest>, want: &Answers, what: &str) {
        let answers = drive(engine, requests());
        assert_eq!(engine.stats().failed_steps, 1, "{what}");
        for (answer, want) in answers.iter().zip(want) {
            assert!(answer.is_none() || answer == want, "after {what} a token is wrong");
        }
        engine.audit().unwrap();
        assert_eq!(&drive(engine, requests()), want, "the prefix cache after {what}");
        engine.audit().unwrap();
        self.failed += answers.iter().filter(|answer| answer.is_none()).count();
        self.spared += answers.iter().filter(|answer| answer.is_some()).count();
    }

    fn assert_both(&self) {
        assert!(self.failed > 0 && self.spared > 0, "{} failed, {} were spared", self.failed, self.spared);
    }
}

#[test]
fn whichever_copy_fails_only_its_step_fails_and_nobody_reads_what_was_not_copied() {
    let want = drive(&mut engine(200), requests());
    let mut tight = engine(26);
    let copies = count(&COPIES, || assert_eq!(drive(&mut tight, requests()), want));
    assert!(
        tight.stats().scheduler.swap_preemptions > 0 && tight.stats().scheduler.blocks_copied > 0,
        "{:?}",
        tight.stats()
    );
    let mut fates = Fates::default();
    for at in places(copies, 20) {
        let mut engine = engine(26);
        COPIES.set(Some(at));
        fates.meet(&mut engine, requests, &want, &format!("the fault at copy {at} of {copies}"));
    }
    fates.assert_both();
}

#[test]
fn whichever_copy_of_a_prefix_to_the_host_or_back_fails_it_is_computed_again() {
    // Each request shares the first block with another and evicts the blocks of a third.
    let requests = || {
        let mut requests = requests();
        requests.iter_mut().for_each(|request| request.params.n = 1);
        requests
    };
    let tiered = || {
        let config = config(14);
        let kv_offloading_bytes = 3 * config.kv_cache_memory_bytes.unwrap();
        let config = EngineConfig {
            kv_offloading_bytes,
            preemption_mode: PreemptionMode::Recompute,
            kernels: KernelChoice { block_copy: "test.faulty".into(), ..Default::default() },
            ..config
        };
        engine_on(&config, faulty(device::open("cpu", Some(1)).unwrap()))
    };
    // One at a time, so that those after a failed one are spared.
    let rounds = |engine: &mut Engine| -> Answers {
        let all = (0..3).flat_map(|_| requests());
        all.flat_map(|request| drive(engine, vec![request])).collect()
    };
    let want = rounds(&mut engine(200));
    let mut unharmed = tiered();
    let copies = count(&COPIES, || assert_eq!(rounds(&mut unharmed), want));
    let stats = unharmed.stats();
    assert!(stats.scheduler.blocks_offloaded > 10 && stats.scheduler.blocks_loaded > 10, "{stats:?}");
    for at in places(copies, 20) {
        let mut engine = tiered();
        COPIES.set(Some(at));
        let answers = rounds(&mut engine);
        assert_eq!(engine.stats().failed_steps, 1, "the fault at copy {at} of {copies}");
        let failed = answers.iter().zip(&want).filter(|(answer, _)| answer.is_none()).count();
        let right = answers.iter().zip(&want).filter(|(answer, want)| answer == want).count();
        assert_eq!((failed, right), (1, want.len() - 1), "the fault at copy {at} of {copies}");
        engine.audit().unwrap();
    }
}

#[test]
fn a_copy_that_fails_while_the_previous_step_runs_fails_only_its_own_step() {
    let Some(mut large) = overlapped(200) else { return };
    let want = drive(&mut large, few());
    let mut tight = overlapped(11).unwrap();
    let copies = count(&COPIES, || assert_eq!(drive(&mut tight, few()), want));
    assert!(
        tight.stats().scheduler.swap_preemptions > 0 && tight.stats().scheduler.blocks_copied > 0,
        "{:?}",
        tight.stats()
    );
    let mut fates = Fates::default();
    for at in places(copies, 2) {
        let mut engine = overlapped(11).unwrap();
        COPIES.set(Some(at));
        fates.meet(&mut engine, few, &want, &format!("the fault at copy {at} of {copies}"));
    }
    fates.assert_both();
}

#[test]
fn a_step_that_fails_in_flight_ends_its_requests_and_the_step_behind_it_is_computed_again() {
    let Some(mut large) = overlapped(200) else { return };
    let want = drive(&mut large, few());
    let mut tight = overlapped(11).unwrap();
    let passes = count(&PASSES, || assert_eq!(drive(&mut tight, few()), want));
    assert!(passes > 10, "{passes} forward passes were counted");
    let mut fates = Fates::default();
    for at in places(passes, 3) {
        let mut engine = overlapped(11).unwrap();
        PASSES.set(Some(at));
        fates.meet(&mut engine, few, &want, &format!("the failure of forward pass {at} of {passes}"));
    }
    fates.assert_both();
}

#[test]
fn samples_whose_first_tokens_were_drawn_behind_a_failed_step_draw_them_again() {
    let Some(mut engine) = overlapped(200) else { return };
    let [first, samples] = &few()[..2] else { unreachable!() };
    let want = drive(&mut engine, vec![samples.clone()]);
    let first =
        engine.submit(GenerationRequest { params: GenerationParams { n: 1, ..first.params.clone() }, ..first.clone() });
    (0..3).for_each(|_| engine.step(|_, _| {}));
    // The next step fails when it is collected; the step behind it computes the prompt of the samples, and both draw.
    PASSES.set(Some(0));
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
    engine.audit().unwrap();
}

//! Speculation changes neither a token nor a log-probability, whatever is proposed, and its numbers agree with each other.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use engine::speculate::{DraftScope, Ngram, Proposal, ProposeError, Proposer, Speculation, Suffix, SuffixLimits};
use engine::{
    DraftCounts, Engine, EngineConfig, EngineParts, GenerationParams, GenerationRequest, KvCacheDtype, ModelSource,
    PreemptionMode, SpecStats, TokenEvent,
};
use proptest::prelude::*;
use sched::SeqId;
use testkit::{everything, reference};

use crate::common::workers::counted_parts;
use crate::common::{VOCABULARY, config, on_sim, overlapping, request, shared};
use crate::overlap::{Load, answers, option_requests};

/// Proposes what a run without speculation has drawn, with a wrong token at one of `wrong` positions.
pub struct Oracle {
    truth: HashMap<SeqId, Vec<u32>>,
    drawn: HashMap<SeqId, usize>,
    wrong: usize,
}

impl Oracle {
    pub fn new(want: &[Vec<TokenEvent>], wrong: usize) -> Box<Oracle> {
        let mut truth: HashMap<SeqId, Vec<u32>> = HashMap::new();
        for (events, id) in want.iter().zip(0..) {
            for event in events {
                if let TokenEvent::Token { index, token: Some(token), .. } = event {
                    let seq = SeqId { request: sched::RequestId(id), index: *index };
                    truth.entry(seq).or_default().push(token.token);
                }
            }
        }
        Box::new(Oracle { truth, drawn: HashMap::new(), wrong })
    }
}

impl Proposer for Oracle {
    fn begin(&mut self, seq: SeqId, _: &DraftScope, _: &[u32]) {
        self.drawn.insert(seq, 0);
    }

    fn extend(&mut self, seq: SeqId, token: u32) {
        let drawn = self.drawn.get_mut(&seq).unwrap();
        assert_eq!(self.truth[&seq][*drawn], token, "{seq}: another token than without speculation");
        *drawn += 1;
    }

    fn end(&mut self, seq: SeqId) {
        self.drawn.remove(&seq);
    }

    fn propose(&mut self, wanted: &mut [Proposal]) -> Result<(), ProposeError> {
        for Proposal { seq, most, drafts } in wanted {
            for (at, token) in self.truth[seq].iter().enumerate().skip(self.drawn[seq]).take(*most) {
                let is_wrong = (at * 7 + seq.request.0 as usize).is_multiple_of(self.wrong);
                drafts.push((token + u32::from(is_wrong)) % VOCABULARY as u32);
            }
        }
        Ok(())
    }
}

pub fn speculating(config: &EngineConfig, proposer: Box<dyn Proposer>, most: usize) -> Engine {
    let parts = shared::parts(config).unwrap();
    let speculation = Some(Speculation { proposer, num_speculative_tokens: most, is_adaptive: false });
    Engine::new(EngineParts { speculation, ..parts }).unwrap()
}

fn load(config: &EngineConfig) -> Engine {
    shared::engine(config).unwrap()
}

/// Takes the numbers of drafts out of the events, and compares them with the engine's.
pub fn plain(engine: &Engine, mut events: Vec<Vec<TokenEvent>>) -> Vec<Vec<TokenEvent>> {
    let mut sum = DraftCounts::default();
    for event in events.iter_mut().flatten() {
        if let TokenEvent::Token { drafts, .. } = event {
            sum += std::mem::take(drafts);
        }
    }
    let SpecStats { num_drafts, num_draft_tokens, num_accepted_tokens, accepted_per_pos } = engine.stats().spec_decode;
    assert_eq!((sum.accepted as u64, (sum.accepted + sum.rejected) as u64), (num_accepted_tokens, num_draft_tokens));
    assert_eq!(accepted_per_pos.iter().sum::<u64>(), num_accepted_tokens);
    let is_bounded = accepted_per_pos.iter().all(|count| (1..=num_drafts).contains(count));
    assert!(is_bounded && accepted_per_pos.is_sorted_by(|a, b| a >= b), "{accepted_per_pos:?}");
    assert!(num_drafts <= num_draft_tokens);
    events
}

/// Requests with all sampling options, and a second round of some with the same prompts, so that cached blocks are read.
pub fn loads(seed: u64, first: usize, count: usize) -> Vec<Load> {
    let mut all = option_requests();
    for (request, _) in &mut all {
        let params = &mut request.params;
        params.sampling.seed = params.sampling.seed.map(|own| own + seed);
        // A request for no token has nothing to propose.
        params.max_tokens = params.max_tokens.map(|most| if most == 0 { 0 } else { most + 6 });
    }
    let len = all.len();
    let (mut all, others) = (all.clone(), all);
    all.rotate_left(first % len);
    all.truncate(count);
    let again = others.into_iter().skip(first % 4).take(2);
    all.extend(again);
    all
}

/// What a test varies.
#[derive(Clone, Debug)]
pub struct Case {
    pub seed: u64,
    pub first: usize,
    pub count: usize,
    pub method: usize,
    pub most: usize,
    pub wrong: usize,
    pub blocks: u64,
    pub budget: usize,
    pub swaps: bool,
    pub caches: bool,
}

/// A case in which drafts are accepted and requests preempted for certain.
pub const CERTAIN: Case = Case {
    seed: 3,
    first: 0,
    count: 6,
    method: 2,
    most: 3,
    wrong: 4,
    blocks: 14,
    budget: 30,
    swaps: true,
    caches: true,
};

pub fn case() -> impl Strategy<Value = Case> {
    let load = (0u64..1000, 0usize..10, 1usize..6);
    let drafts = (0usize..5, 1usize..7, 2usize..9);
    (load, drafts, 10u64..24, 13usize..40, any::<(bool, bool)>()).prop_map(
        |((seed, first, count), (method, most, wrong), blocks, budget, (swaps, caches))| Case {
            seed,
            first,
            count,
            method,
            most,
            wrong,
            blocks,
            budget,
            swaps,
            caches,
        },
    )
}

/// An engine that speculates by lookups or an oracle.
fn proposing(case: &Case, config: &EngineConfig, want: &[Vec<TokenEvent>]) -> Engine {
    let proposer: Box<dyn Proposer> = match case.method {
        0 => Box::new(Ngram::new(1, 3)),
        1 => Box::new(Suffix::new(SuffixLimits::default())),
        _ => Oracle::new(want, case.wrong),
    };
    speculating(config, proposer, case.most)
}

/// Runs a case with and without speculation; returns the number of accepted drafts and of preemptions.
pub fn check(case: &Case, on: impl Fn(EngineConfig) -> EngineConfig) -> Result<(u64, u64), TestCaseError> {
    let (engine, preemptions) = check_with(case, on, |config, want| proposing(case, config, want))?;
    Ok((engine.stats().spec_decode.num_accepted_tokens, preemptions))
}

/// Compares the events of a case with those of the engine that `speculating` loads, given the former. Returns that engine and its
/// number of preemptions.
pub fn check_with(
    case: &Case,
    on: impl Fn(EngineConfig) -> EngineConfig,
    speculating: impl Fn(&EngineConfig, &[Vec<TokenEvent>]) -> Engine,
) -> Result<(Engine, u64), TestCaseError> {
    let loads = loads(case.seed, case.first, case.count);
    let [large, small] = [200, case.blocks].map(|blocks| EngineConfig { max_model_len: Some(64), ..config(blocks) });
    compare_with(case, &loads, &on(large), small, on, speculating)
}

/// [`compare_with`] speculation by lookups or an oracle.
pub fn compare(
    case: &Case,
    loads: &[Load],
    large: &EngineConfig,
    small: EngineConfig,
    on: impl Fn(EngineConfig) -> EngineConfig,
) -> Result<(u64, u64), TestCaseError> {
    let (engine, preemptions) =
        compare_with(case, loads, large, small, on, |config, want| proposing(case, config, want))?;
    Ok((engine.stats().spec_decode.num_accepted_tokens, preemptions))
}

/// Compares the answers to `loads` without speculation in a large pool with those of the engine that `speculating` loads with a small
/// one, which `on` makes a configuration of the device.
pub fn compare_with(
    case: &Case,
    loads: &[Load],
    large: &EngineConfig,
    small: EngineConfig,
    on: impl Fn(EngineConfig) -> EngineConfig,
    speculating: impl Fn(&EngineConfig, &[Vec<TokenEvent>]) -> Engine,
) -> Result<(Engine, u64), TestCaseError> {
    let want = answers(&mut load(&EngineConfig { speculative: None, ..large.clone() }), loads);
    let config = on(EngineConfig {
        max_num_seqs: 12,
        max_num_batched_tokens: case.budget,
        swap_space_bytes: if case.swaps { small.kv_cache_memory_bytes.unwrap() } else { 0 },
        preemption_mode: if case.swaps { PreemptionMode::Swap } else { PreemptionMode::Recompute },
        enable_prefix_caching: case.caches,
        ..small
    });
    let mut engine = speculating(&config, &want);
    let got = answers(&mut engine, loads);
    let got = plain(&engine, got);
    for (place, (got, want)) in got.iter().zip(&want).enumerate() {
        prop_assert_eq!(got, want, "request {}", place);
    }
    let preemptions = engine.stats().scheduler.preemptions;
    Ok((engine, preemptions))
}

#[test]
fn speculation_changes_no_token_and_no_log_probability_of_any_load() {
    let (mut accepted, mut preemptions) = (0, 0);
    let config = ProptestConfig { cases: 40, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let sums = Mutex::new((&mut accepted, &mut preemptions));
    runner
        .run(&case(), |case| {
            let (accepted, preemptions) = check(&case, |config| config)?;
            let mut sums = sums.lock().unwrap();
            *sums.0 += accepted;
            *sums.1 += preemptions;
            Ok(())
        })
        .unwrap();
    assert!(
        accepted > 100 && preemptions > 0,
        "the test shows nothing: {accepted} accepted, {preemptions} preemptions"
    );
}

#[test]
fn on_cuda_sim_speculation_changes_no_token_and_no_log_probability_either() {
    if on_sim(config(200)).is_none() {
        return;
    }
    let on = |config| on_sim(config).unwrap();
    let (accepted, preemptions) = check(&CERTAIN, on).unwrap();
    assert!(accepted > 20 && preemptions > 0, "{accepted} accepted, {preemptions} preemptions");
    if everything() {
        check(&Case { first: 4, method: 0, blocks: 20, swaps: false, ..CERTAIN }, on).unwrap();
    }
}

#[test]
fn windows_and_quantised_caches_keep_their_bits_too() {
    let base = Case {
        seed: 1,
        first: 0,
        count: 5,
        method: 2,
        most: 6,
        wrong: 5,
        blocks: 20,
        budget: 20,
        swaps: false,
        caches: true,
    };
    for (case, kv_cache_dtype) in [
        ("mistral-sliding", KvCacheDtype::Auto),
        ("gemma2", KvCacheDtype::Auto),
        ("llama", KvCacheDtype::Int8),
        ("mixtral", KvCacheDtype::Auto),
    ] {
        let on =
            |config| EngineConfig { model: ModelSource::Folder(reference::folder(case)), kv_cache_dtype, ..config };
        let (accepted, _) = check(&base, on).unwrap();
        assert!(accepted > 20, "{case}: {accepted} accepted");
    }
}

#[test]
fn a_sequence_that_is_stopped_or_cancelled_among_its_drafts_leaves_nothing_behind() {
    let requests: Vec<Load> = (0..4).map(|i| (request(i, 9, 30, 1), None)).collect();
    let want = answers(&mut load(&config(60)), &requests);
    let mut engine = speculating(&config(60), Oracle::new(&want, 4), 5);
    let ids: Vec<_> = requests.iter().map(|(request, _)| engine.submit(request.clone()).unwrap()).collect();
    let mut drawn = HashMap::new();
    for step in 0.. {
        engine.step(|id, event| {
            if let TokenEvent::Token { token: Some(token), .. } = event {
                drawn.entry(id).or_insert_with(Vec::new).push(token.token);
            }
        });
        match step {
            3 => assert!(engine.abort(ids[1])),
            4 => assert!(engine.finish_sequence(ids[2], 0)),
            _ if !engine.has_work() => break,
            _ => {}
        }
        engine.audit().unwrap();
    }
    engine.audit().unwrap();
    for (id, want) in ids.iter().zip(&want) {
        let want: Vec<u32> = want
            .iter()
            .filter_map(|event| match event {
                TokenEvent::Token { token: Some(token), .. } => Some(token.token),
                _ => None,
            })
            .collect();
        assert!(want.starts_with(&drawn[id]) && drawn[id].len() > 4, "{id}");
    }
    assert_eq!((drawn[&ids[0]].len(), drawn[&ids[3]].len()), (30, 30));
}

/// A source of drafts that goes wrong in one of several ways.
struct Faulty(usize);

impl Proposer for Faulty {
    fn begin(&mut self, _: SeqId, _: &DraftScope, _: &[u32]) {}

    fn extend(&mut self, _: SeqId, _: u32) {
        assert!(self.0 != 0, "a panic that the test asks for");
    }

    fn end(&mut self, _: SeqId) {}

    fn propose(&mut self, wanted: &mut [Proposal]) -> Result<(), ProposeError> {
        match self.0 {
            1 => Err(ProposeError("a failure that the test asks for".into())),
            2 => panic!("a panic that the test asks for"),
            _ => {
                wanted.iter_mut().for_each(|proposal| proposal.drafts.extend([7, u32::MAX, 560, 9, 9, 9, 9, 9]));
                Ok(())
            }
        }
    }
}

#[test]
fn a_source_of_drafts_that_fails_ends_no_request() {
    let requests: Vec<Load> = (0..3).map(|i| (request(i, 9, 10, 1), None)).collect();
    let want = answers(&mut load(&config(60)), &requests);
    for kind in 0..4 {
        let mut engine = speculating(&config(60), Box::new(Faulty(kind)), 3);
        let got = answers(&mut engine, &requests);
        assert_eq!(plain(&engine, got), want, "{kind}");
        assert_eq!(engine.stats().spec_decode.num_drafts > 0, kind == 3);
    }
}

/// Request, source and prompt of a sequence that begins; no prompt when it ends.
pub type Told = (u64, DraftScope, Vec<u32>);

/// Notes the sources of requests, and proposes nothing.
#[derive(Clone, Default)]
pub struct Spy(pub Arc<Mutex<Vec<Told>>>);

impl Proposer for Spy {
    fn begin(&mut self, seq: SeqId, source: &DraftScope, prompt: &[u32]) {
        self.0.lock().unwrap().push((seq.request.0, source.clone(), prompt.to_vec()));
    }

    fn extend(&mut self, seq: SeqId, _: u32) {
        assert!(self.0.lock().unwrap().iter().any(|(id, ..)| *id == seq.request.0));
    }

    fn end(&mut self, seq: SeqId) {
        self.0.lock().unwrap().push((seq.request.0, DraftScope::default(), Vec::new()));
    }

    fn propose(&mut self, _: &mut [Proposal]) -> Result<(), ProposeError> {
        Ok(())
    }
}

#[test]
fn a_source_of_drafts_is_told_the_salt_of_each_request_that_allows_drafts_and_its_end() {
    let spy = Spy::default();
    let mut engine = speculating(&config(60), Box::new(spy.clone()), 3);
    let salted = GenerationRequest { cache_salt: Some("tenant".into()), ..request(1, 9, 4, 1) };
    let refuses = request(2, 9, 4, 1);
    let refuses =
        GenerationRequest { params: GenerationParams { speculative: false, ..refuses.params.clone() }, ..refuses };
    let loads = [salted.clone(), request(0, 9, 4, 1), refuses].map(|request| (request, None));
    answers(&mut engine, &loads);
    let mut told = spy.0.lock().unwrap().clone();
    told.sort_by_key(|(id, _, prompt)| (*id, prompt.is_empty()));
    let tenant = DraftScope { cache_salt: Some("tenant".into()), adapter: None };
    let end = |id| (id, DraftScope::default(), vec![]);
    assert_eq!(
        told,
        [(0, tenant, salted.prompt), end(0), (1, DraftScope::default(), request(0, 9, 4, 1).prompt), end(1)]
    );
}

#[test]
fn steps_overlap_again_if_nothing_is_found_or_nothing_is_right() {
    let Some(config) = overlapping(60) else { return };
    let requests: Vec<Load> = vec![(request(0, 9, 50, 1), None)];
    let want = answers(&mut load(&config), &requests);
    for proposer in [Box::new(Spy::default()) as Box<dyn Proposer>, Oracle::new(&want, 1)] {
        let parts = shared::parts(&config).unwrap();
        let speculation = Some(Speculation { proposer, num_speculative_tokens: 3, is_adaptive: true });
        let (mut engine, steps) = counted_parts(EngineParts { speculation, ..parts });
        engine.submit(requests[0].0.clone()).unwrap();
        let mut overlapped = 0;
        while engine.has_work() {
            engine.step(|_, _| {});
            overlapped += steps.now().0;
        }
        assert!(overlapped > 12, "{overlapped} of 50 steps overlapped");
    }
}

#[test]
fn drafts_that_are_always_wrong_are_proposed_ever_less() {
    let requests: Vec<Load> = vec![(request(0, 9, 400, 1), None)];
    let want = answers(&mut load(&config(60)), &requests);
    let parts = shared::parts(&config(60)).unwrap();
    let speculation = Speculation { proposer: Oracle::new(&want, 1), num_speculative_tokens: 8, is_adaptive: true };
    let mut engine = Engine::new(EngineParts { speculation: Some(speculation), ..parts }).unwrap();
    let got = answers(&mut engine, &requests);
    assert_eq!(plain(&engine, got), want);
    let drafts = engine.stats().spec_decode.num_draft_tokens;
    assert!((1..150).contains(&drafts), "{drafts} drafts for 400 tokens, of which none was right");
}

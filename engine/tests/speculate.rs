//! Speculation changes neither a token nor a log-probability, whatever is proposed, and its numbers agree with each other.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use engine::speculate::{Ngram, Proposal, ProposeError, Proposer, Source, Speculation, Suffix, SuffixLimits};
use engine::{
    DraftCounts, Engine, EngineConfig, EngineParts, GenerationParams, GenerationRequest, PreemptionMode,
    SamplingParams, SpecDecodeStats, TokenEvent,
};
use proptest::prelude::*;
use sched::SeqId;

use crate::common::{VOCABULARY, config, on_sim, request};
use crate::overlap::{Load, answers, option_requests};

/// Proposes what a run without speculation has drawn, with a wrong token at one of `wrong` positions.
struct Oracle {
    truth: HashMap<SeqId, Vec<u32>>,
    drawn: HashMap<SeqId, usize>,
    wrong: usize,
}

impl Oracle {
    fn new(want: &[Vec<TokenEvent>], wrong: usize) -> Box<Oracle> {
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
    fn begin(&mut self, seq: SeqId, _: &Source, _: &[u32]) {
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
            let known = &self.truth[seq];
            for at in self.drawn[seq]..(self.drawn[seq] + *most).min(known.len()) {
                let is_wrong = (at * 7 + seq.request.0 as usize) % self.wrong == 0;
                drafts.push((known[at] + u32::from(is_wrong)) % VOCABULARY as u32);
            }
        }
        Ok(())
    }
}

fn speculating(config: &EngineConfig, proposer: Box<dyn Proposer>, most: usize) -> Engine {
    let parts = EngineParts::load(config, &|_, _| {}).unwrap();
    let speculation = Some(Speculation { proposer, num_speculative_tokens: most, is_adaptive: false });
    Engine::new(EngineParts { speculation, ..parts }).unwrap()
}

fn load(config: &EngineConfig) -> Engine {
    Engine::load(config, &|_, _| {}).unwrap()
}

/// Takes the numbers of drafts out of the events, and compares them with the engine's.
fn plain(engine: &Engine, mut events: Vec<Vec<TokenEvent>>) -> Vec<Vec<TokenEvent>> {
    let mut sum = DraftCounts::default();
    for event in events.iter_mut().flatten() {
        if let TokenEvent::Token { drafts, .. } = event {
            sum += std::mem::take(drafts);
        }
    }
    let SpecDecodeStats { num_drafts, num_draft_tokens, num_accepted_tokens, accepted_per_pos } =
        engine.stats().spec_decode;
    assert_eq!((sum.accepted as u64, (sum.accepted + sum.rejected) as u64), (num_accepted_tokens, num_draft_tokens));
    assert_eq!(accepted_per_pos.iter().sum::<u64>(), num_accepted_tokens);
    assert!(accepted_per_pos[0] <= num_drafts && accepted_per_pos.is_sorted_by(|a, b| a >= b), "{accepted_per_pos:?}");
    assert!(num_drafts <= num_draft_tokens);
    events
}

/// Requests with all sampling options, and a second round of some with the same prompts, so that cached blocks are read.
fn loads(seed: u64, first: usize, count: usize) -> Vec<Load> {
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
struct Case {
    seed: u64,
    first: usize,
    count: usize,
    method: usize,
    most: usize,
    wrong: usize,
    blocks: u64,
    budget: usize,
    swaps: bool,
    caches: bool,
}

fn case() -> impl Strategy<Value = Case> {
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

/// Runs a case with and without speculation; returns the number of accepted drafts and of preemptions.
fn check(case: &Case, on: impl Fn(EngineConfig) -> EngineConfig) -> Result<(u64, u64), TestCaseError> {
    let loads = loads(case.seed, case.first, case.count);
    let mut without = load(&on(EngineConfig { max_model_len: Some(64), ..config(200) }));
    let want = answers(&mut without, &loads);
    let proposer: Box<dyn Proposer> = match case.method {
        0 => Box::new(Ngram::new(1, 3)),
        1 => Box::new(Suffix::new(SuffixLimits::default())),
        _ => Oracle::new(&want, case.wrong),
    };
    let config = config(case.blocks);
    let config = on(EngineConfig {
        max_model_len: Some(64),
        max_num_seqs: 12,
        max_num_batched_tokens: case.budget,
        swap_space_bytes: if case.swaps { config.kv_cache_memory_bytes.unwrap() } else { 0 },
        preemption_mode: if case.swaps { PreemptionMode::Swap } else { PreemptionMode::Recompute },
        enable_prefix_caching: case.caches,
        ..config
    });
    let mut engine = speculating(&config, proposer, case.most);
    let got = answers(&mut engine, &loads);
    let got = plain(&engine, got);
    for (place, (got, want)) in got.iter().zip(&want).enumerate() {
        prop_assert_eq!(got, want, "request {}", place);
    }
    let stats = engine.stats();
    Ok((stats.spec_decode.num_accepted_tokens, stats.num_preemptions))
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
    let base = Case {
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
    let (accepted, preemptions) = check(&base, on).unwrap();
    assert!(accepted > 20 && preemptions > 0, "{accepted} accepted, {preemptions} preemptions");
    check(&Case { first: 4, method: 0, blocks: 20, swaps: false, ..base }, on).unwrap();
}

/// A source of drafts that goes wrong in one of several ways.
struct Faulty(usize);

impl Proposer for Faulty {
    fn begin(&mut self, _: SeqId, _: &Source, _: &[u32]) {}

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

/// Notes the sources of requests, and proposes nothing.
#[derive(Clone, Default)]
struct Spy(Arc<Mutex<Vec<(u64, Source, Vec<u32>)>>>);

impl Proposer for Spy {
    fn begin(&mut self, seq: SeqId, source: &Source, prompt: &[u32]) {
        self.0.lock().unwrap().push((seq.request.0, source.clone(), prompt.to_vec()));
    }

    fn extend(&mut self, seq: SeqId, _: u32) {
        assert!(self.0.lock().unwrap().iter().any(|(id, ..)| *id == seq.request.0));
    }

    fn end(&mut self, seq: SeqId) {
        self.0.lock().unwrap().push((seq.request.0, Source::default(), Vec::new()));
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
    let tenant = Source { cache_salt: Some("tenant".into()), adapter: None };
    let end = |id| (id, Source::default(), vec![]);
    assert_eq!(told, [(0, tenant, salted.prompt), end(0), (1, Source::default(), request(0, 9, 4, 1).prompt), end(1)]);
}

#[test]
fn drafts_that_are_always_wrong_are_proposed_ever_less() {
    let requests: Vec<Load> = vec![(request(0, 9, 400, 1), None)];
    let want = answers(&mut load(&config(60)), &requests);
    let parts = EngineParts::load(&config(60), &|_, _| {}).unwrap();
    let speculation = Speculation { proposer: Oracle::new(&want, 1), num_speculative_tokens: 8, is_adaptive: true };
    let mut engine = Engine::new(EngineParts { speculation: Some(speculation), ..parts }).unwrap();
    let got = answers(&mut engine, &requests);
    assert_eq!(plain(&engine, got), want);
    let drafts = engine.stats().spec_decode.num_draft_tokens;
    assert!((1..150).contains(&drafts), "{drafts} drafts for 400 tokens, of which none was right");
}

#[test]
fn a_setting_of_speculation_that_cannot_be_used_is_one_line_that_says_what_is_allowed() {
    let parse = |text: &str| text.parse::<engine::SpeculativeConfig>();
    let refused = |text: &str| {
        let line = parse(text).unwrap_err();
        assert!(!line.contains('\n'), "{line}");
        line
    };
    for (text, message) in [
        ("ngram", "not valid JSON"),
        ("[]", "expected a JSON object such as"),
        ("{}", r#"method: missing, expected "ngram" or "suffix""#),
        (r#"{"method": "medusa"}"#, r#"method: found "medusa", expected "ngram" or "suffix""#),
        (r#"{"method": "eagle3"}"#, r#"method: found "eagle3", which is not built yet, expected "ngram" or "suffix""#),
        (r#"{"method": "draft_model", "model": "x"}"#, r#""draft_model", which is not built yet"#),
        (r#"{"method": "mtp"}"#, r#""mtp", which is not built yet"#),
        (r#"{"method": "ngram"}"#, "num_speculative_tokens: missing, expected a whole number from 1 to 32"),
        (
            r#"{"method": "ngram", "num_speculative_tokens": 33}"#,
            "num_speculative_tokens: found 33, expected a whole number from 1 to 32",
        ),
        (
            r#"{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 4, "prompt_lookup_max": 3}"#,
            "prompt_lookup_min: found 4, expected at most prompt_lookup_max, 3",
        ),
        (
            r#"{"method": "suffix", "prompt_lookup_max": 3}"#,
            r#"unknown key "prompt_lookup_max", expected one of method, num_speculative_tokens, suffix_decoding_max_tree_depth"#,
        ),
        (
            r#"{"method": "suffix", "suffix_decoding_min_token_prob": 2}"#,
            "suffix_decoding_min_token_prob: found 2, expected a number from 0 to 1",
        ),
    ] {
        let line = refused(text);
        assert!(line.contains(message), "{text}: {line}");
    }
    let config = parse(r#"{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}"#).unwrap();
    assert_eq!(config.method, engine::SpeculativeMethod::Ngram { min: 4, max: 4 }, "the one given is also the other");
    assert_eq!(parse(r#"{"method": "suffix"}"#).unwrap().num_speculative_tokens, 24);
    let sampling = SamplingParams::default();
    assert!(GenerationParams { sampling, ..Default::default() }.speculative);
}

/// The rules of prompt lookup, by looking at every place.
fn naive_ngram(tokens: &[u32], min: usize, max: usize, most: usize) -> Vec<u32> {
    let len = tokens.len();
    for n in (min..=max.min(len)).rev() {
        if let Some(at) = (n..len).find(|at| tokens[at - n..*at] == tokens[len - n..]) {
            return tokens[at..(at + most).min(len)].to_vec();
        }
    }
    Vec::new()
}

/// The rules of suffix decoding, by looking at every place: a draft and its score. `texts` are earlier outputs; `None`: the context's
/// own text, whose end is no earlier place.
fn naive_suffix(texts: Option<&[Vec<u32>]>, context: &[u32], most: usize, limits: &SuffixLimits) -> (Vec<u32>, f64) {
    let is_own_end = |at: usize, text: &[u32]| texts.is_none() && at == text.len();
    let own = [context.to_vec()];
    let mut best = (Vec::new(), 0.0);
    for length in 2..=limits.max_tree_depth.min(context.len()) {
        let end = &context[context.len() - length..];
        // What follows each occurrence, latest first.
        let mut behind: Vec<&[u32]> = texts
            .unwrap_or(&own)
            .iter()
            .flat_map(|text| {
                (length..=text.len())
                    .filter(|at| text[at - length..*at] == *end && !is_own_end(*at, text))
                    .map(|at| &text[at..])
            })
            .collect();
        behind.reverse();
        let (mut draft, mut probability, mut score) = (Vec::new(), 1.0, 0.0);
        while draft.len() < most.min((length as f64 * limits.max_spec_factor) as usize) {
            let next: Vec<u32> = behind.iter().filter_map(|text| text.get(draft.len()).copied()).collect();
            let count = |token: u32| next.iter().filter(|other| **other == token).count();
            let Some(&token) = next.iter().rev().max_by_key(|token| count(**token)) else { break };
            probability *= count(token) as f64 / behind.len() as f64;
            if probability < limits.min_token_prob {
                break;
            }
            score += probability;
            draft.push(token);
            behind.retain(|text| text.get(draft.len() - 1) == Some(&token));
        }
        if score >= best.1 {
            best = (draft, score);
        }
    }
    best
}

fn seq(id: u64) -> SeqId {
    SeqId { request: sched::RequestId(id), index: 0 }
}

fn ask(proposer: &mut dyn Proposer, seq: SeqId, most: usize) -> Vec<u32> {
    let mut wanted = [Proposal { seq, most, drafts: Vec::new() }];
    proposer.propose(&mut wanted).unwrap();
    let [Proposal { drafts, .. }] = wanted;
    drafts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn prompt_lookup_proposes_what_a_search_of_every_place_finds(
        prompt in prop::collection::vec(0u32..3, 1..20),
        output in prop::collection::vec(0u32..3, 1..20),
        (min, more) in (1usize..4, 0usize..4),
        most in 1usize..6,
    ) {
        let mut ngram = Ngram::new(min, min + more);
        ngram.begin(seq(0), &Source::default(), &prompt);
        let mut tokens = prompt;
        for token in output {
            ngram.extend(seq(0), token);
            tokens.push(token);
            prop_assert_eq!(ask(&mut ngram, seq(0), most), naive_ngram(&tokens, min, min + more, most));
        }
    }

    #[test]
    fn suffix_decoding_proposes_what_a_search_of_every_place_finds_and_nothing_of_another_source(
        texts in prop::collection::vec((0usize..3, prop::collection::vec(0u32..3, 0..4), prop::collection::vec(0u32..3, 1..12)), 1..9),
        depth in 2usize..8,
        kept in 0usize..4,
        factor in 0.5f64..3.0,
        least in 0.0f64..0.7,
        most in 1usize..8,
    ) {
        let limits = SuffixLimits {
            max_tree_depth: depth,
            max_cached_requests: kept,
            max_spec_factor: factor,
            min_token_prob: least,
        };
        let sources = [
            Source::default(),
            Source { cache_salt: Some("a".into()), adapter: None },
            Source { cache_salt: Some("a".into()), adapter: Some("b".into()) },
        ];
        let mut suffix = Suffix::new(limits);
        let mut earlier: Vec<(usize, Vec<u32>)> = Vec::new();
        for ((source, prompt, output), id) in texts.into_iter().zip(0..) {
            suffix.begin(seq(id), &sources[source], &prompt);
            let mut own = prompt;
            let of_source: Vec<Vec<u32>> =
                earlier.iter().filter(|(of, _)| *of == source).map(|(_, text)| text.clone()).collect();
            for token in &output {
                suffix.extend(seq(id), *token);
                own.push(*token);
                let (mine, score) = naive_suffix(None, &own, most, &limits);
                let (others, better) = naive_suffix(Some(&of_source), &own, most, &limits);
                let want = if better > score { others } else { mine };
                prop_assert_eq!(ask(&mut suffix, seq(id), most), want, "{:?} behind {:?}", own, of_source);
            }
            suffix.end(seq(id));
            earlier.push((source, output));
            let surplus = earlier.len().saturating_sub(kept);
            earlier.drain(..surplus);
        }
    }
}

//! Draws on the device and steps planned ahead give the same answers, to the bit, as draws on the host without planning ahead.
//!
//! Every launch is run by `cuda-sim`, or by `cuda` where `QUIRE_TEST_DEVICE` says so, on the tiny reference model in float32.

use std::collections::HashMap;

use engine::{
    BeamSearch, Constraint, ConstraintError, Engine, EngineConfig, GenerationParams, GenerationRequest, Mask, Pooling,
    PreemptionMode, RequestId, SamplingParams, TokenEvent, TokenSet,
};
use proptest::prelude::*;

use crate::common::workers::{counted, on_host};
use crate::common::{VOCABULARY, engine_on, opened, overlapping, shared};

fn load(config: &EngineConfig) -> Engine {
    shared::engine(config).unwrap()
}

/// Restricts every token to a class of ids that depends on the previous tokens, for `left` tokens.
#[derive(Clone)]
pub struct Classes {
    pub sum: u32,
    pub left: usize,
    /// Number of tokens of the model.
    pub vocabulary: usize,
}

impl Constraint for Classes {
    fn mask(&mut self) -> Result<Mask, ConstraintError> {
        let mut tokens = TokenSet::new(self.vocabulary);
        (0..self.vocabulary as u32).filter(|token| token % 7 == self.sum % 7).for_each(|token| tokens.insert(token));
        Ok(Mask { tokens, may_end: false })
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        assert_eq!(token % 7, self.sum % 7, "a token outside of its mask");
        (self.sum, self.left) = (self.sum + token + 1, self.left - 1);
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.left == 0
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// A request, with or without a constraint.
pub type Load = (GenerationRequest, Option<Classes>);

fn request(which: u32, len: usize, max_tokens: usize, n: usize, sampling: SamplingParams) -> GenerationRequest {
    GenerationRequest {
        prompt: (0..len as u32).map(|i| 3 + (which * 131 + i * 17) % 550).collect(),
        params: GenerationParams {
            sampling: SamplingParams { seed: Some(u64::from(which)), ..sampling },
            max_tokens: Some(max_tokens),
            ignore_eos: true,
            n,
            ..Default::default()
        },
        ..Default::default()
    }
}

/// Requests with every sampling option, drawn on the device and on the host.
pub fn option_requests() -> Vec<Load> {
    let plain = SamplingParams::default;
    let penalties = SamplingParams {
        repetition_penalty: 1.3,
        presence_penalty: 0.4,
        frequency_penalty: 0.2,
        logprobs: Some(3),
        ..plain()
    };
    let filters = SamplingParams { temperature: 1.4, top_k: 50, top_p: 0.9, min_p: 0.01, ..plain() };
    let lists = SamplingParams {
        logit_bias: vec![(7, 4.0), (9, -3.0), (7, 0.5)],
        bad_words: [vec![7], vec![11, 12]].into(),
        allowed_token_ids: Some((5..90).collect()),
        min_tokens: 4,
        logprobs: Some(0),
        ..plain()
    };
    let greedy = SamplingParams { temperature: 0.0, logprobs: Some(2), ..plain() };
    let too_many = SamplingParams { logprobs: Some(25), ..penalties.clone() };
    let mut option_requests: Vec<Load> = vec![
        (request(0, 20, 12, 2, penalties.clone()), None),
        (request(1, 9, 14, 1, filters.clone()), None),
        (request(2, 13, 12, 1, lists), None),
        (request(3, 30, 10, 1, greedy.clone()), None),
        (request(4, 12, 9, 2, penalties.clone()), Some(Classes { sum: 3, left: 7, vocabulary: VOCABULARY })),
        (request(5, 6, 8, 1, too_many), None),
        (request(6, 17, 6, 3, filters), None),
    ];
    option_requests[2].0.params.stop_token_ids = vec![5, 6, 7, 8, 30, 31];
    let mut beams = request(7, 11, 6, 2, greedy);
    beams.params.beam = Some(BeamSearch::new(3));
    let mut scored = request(8, 15, 5, 1, penalties);
    scored.params.prompt_logprobs = Some(2);
    let mut embedding = request(9, 14, 0, 1, plain());
    embedding.params = GenerationParams::pooled(Pooling::Mean);
    option_requests.extend([beams, scored, embedding].map(|request| (request, None)));
    option_requests
}

/// The events of each request, ordered by sequence, without the number of cached tokens. Audits the engine at the end.
pub fn answers(engine: &mut Engine, loads: &[Load]) -> Vec<Vec<TokenEvent>> {
    answers_with(engine, loads, |_| {})
}

/// The same, with something to do before each step.
pub fn answers_with(engine: &mut Engine, loads: &[Load], mut before: impl FnMut(&mut Engine)) -> Vec<Vec<TokenEvent>> {
    let mut places = HashMap::new();
    for (place, (request, constraint)) in loads.iter().enumerate() {
        let id = match constraint.clone() {
            Some(constraint) => engine.submit_constrained(request.clone(), Box::new(constraint)).unwrap(),
            None => engine.submit(request.clone()).unwrap(),
        };
        places.insert(id, place);
    }
    let mut events = vec![Vec::new(); loads.len()];
    while engine.has_work() {
        before(engine);
        engine.step(|id, event| {
            if !matches!(event, TokenEvent::Started { .. }) {
                events[places[&id]].push(event);
            }
        });
    }
    engine.audit().unwrap();
    // After a preemption, sequences may be drawn in another order.
    events.iter_mut().for_each(|events| {
        events.sort_by_key(|event| if let TokenEvent::Token { index, .. } = event { *index } else { 0 });
        join_ends(events);
    });
    events
}

/// Joins the end of a sequence that has an event of its own with its last token: whether the end of a constraint's text shows with the
/// token or with the next mask depends on how long a call took, and so on how busy the machine is.
fn join_ends(events: &mut Vec<TokenEvent>) {
    events.dedup_by(|end, last| match (end, last) {
        (
            TokenEvent::Token { index: of, token: None, finish: end, drafts: more },
            TokenEvent::Token { index, finish, drafts, .. },
        ) if of == index && finish.is_none() => {
            *finish = end.take();
            *drafts += *more;
            true
        }
        _ => false,
    });
}

#[test]
fn every_wish_drawn_on_the_device_gives_the_tokens_of_the_host_whatever_the_pool() {
    let Some(large) = overlapping(200) else { return };
    let loads = option_requests();
    let want = answers(&mut on_host(&large), &loads);
    assert!(want.iter().all(|events| !events.is_empty()));
    assert_eq!(answers(&mut load(&large), &loads), want, "in a large pool");
    for preemption_mode in [PreemptionMode::Recompute, PreemptionMode::Swap] {
        let mut engine = load(&EngineConfig { preemption_mode, ..overlapping(14).unwrap() });
        assert_eq!(answers(&mut engine, &loads), want, "{preemption_mode:?} in a small pool");
        let stats = engine.stats();
        assert!(stats.scheduler.preemptions > 0, "the pool was not too small: the test shows nothing");
        assert_eq!(stats.scheduler.swap_preemptions > 0, preemption_mode == PreemptionMode::Swap, "{stats:?}");
    }
}

#[test]
fn the_next_step_is_in_flight_during_publishing_unless_the_host_takes_part_in_it() {
    let Some(config) = overlapping(64) else { return };
    let in_flight = |load_of: &[Load]| {
        let (mut engine, steps) = counted(&config);
        for (request, constraint) in load_of.iter().cloned() {
            match constraint {
                Some(constraint) => engine.submit_constrained(request, Box::new(constraint)).unwrap(),
                None => engine.submit(request).unwrap(),
            };
        }
        // A mask that is late takes a call without a step.
        while steps.now().1 - steps.now().0 < 3 {
            engine.step(|_, _| {});
        }
        steps.now()
    };
    let plain = request(1, 9, 14, 1, SamplingParams::default());
    let held = (plain.clone(), Some(Classes { sum: 0, left: 20, vocabulary: VOCABULARY }));
    let host = request(1, 9, 14, 1, SamplingParams { logprobs: Some(21), ..Default::default() });
    assert_eq!(in_flight(&[(plain.clone(), None)]), (1, 4));
    assert_eq!(in_flight(std::slice::from_ref(&held)), (0, 3), "a mask depends on the token before it");
    assert_eq!(in_flight(&[(plain.clone(), None), (host, None)]), (0, 3), "the host reads its row of logits");
    let mut scored = plain.clone();
    scored.params.prompt_logprobs = Some(1);
    assert_eq!(in_flight(&[(scored, None)]), (1, 4), "the host reads rows of the prompt, not of what follows it");
    let mut beams = plain;
    beams.params.beam = Some(BeamSearch::new(2));
    assert_eq!(in_flight(&[(beams, None)]), (0, 3), "which beams live on is not known before");
}

#[test]
fn an_engine_uses_exactly_the_planned_memory_and_no_step_allocates() {
    let Some(config) = overlapping(30) else { return };
    // Drafts need more rows of the sampler, and graphs with as many sequences as rows.
    for speculative in
        [None, r#"{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}"#.parse().ok()]
    {
        let config = EngineConfig { speculative, ..config.clone() };
        let options = device::Options { deterministic: config.deterministic, ..Default::default() };
        let device = opened::open(options).unwrap();
        let mut engine = engine_on(&config, device.clone());
        let plan = engine::plan(&config).unwrap();
        let cache = plan.kv_bytes_per_token * plan.pool_tokens() as u64;
        let planned = plan.weight_bytes + plan.step_bytes + cache;
        assert_eq!(device.allocated(), Some(planned));
        for i in 0..3 {
            engine.submit(request(i, 12, 4, 2, SamplingParams::default())).unwrap();
        }
        while engine.has_work() {
            engine.step(|_, _| {});
        }
        assert_eq!(device.allocated(), Some(planned));
    }
}

/// The fate of a request between two steps.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Lives,
    /// Cancelled after this many tokens.
    Aborted(usize),
    /// Its first sequence is ended after this many tokens, as by a stop string.
    Stopped(usize),
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        3 => Just(Fate::Lives),
        1 => (0usize..6).prop_map(Fate::Aborted),
        1 => (1usize..6).prop_map(Fate::Stopped),
    ]
}

/// Tokens by sequence.
type Tokens = Vec<Vec<u32>>;

/// Runs requests that arrive between steps, each with its fate.
fn run(engine: &mut Engine, loads: &[(GenerationRequest, Fate, usize)]) -> Vec<Tokens> {
    let mut got: Vec<Tokens> = loads.iter().map(|(request, ..)| vec![Vec::new(); request.params.n]).collect();
    let mut ids: HashMap<RequestId, usize> = HashMap::new();
    for step in 0.. {
        for (place, (request, _, arrival)) in loads.iter().enumerate() {
            if *arrival == step {
                ids.insert(engine.submit(request.clone()).unwrap(), place);
            }
        }
        engine.step(|id, event| {
            if let TokenEvent::Token { index, token: Some(token), .. } = event {
                got[ids[&id]][index as usize].push(token.token);
            }
        });
        for (&id, &place) in &ids {
            let events = got[place].iter().map(Vec::len).max().unwrap_or(0);
            match loads[place].1 {
                Fate::Aborted(at) if events >= at => drop(engine.abort(id)),
                Fate::Stopped(at) if got[place][0].len() >= at => drop(engine.finish_sequence(id, 0)),
                _ => {}
            }
        }
        if !engine.has_work() && loads.iter().all(|load| load.2 <= step) {
            break;
        }
    }
    engine.audit().unwrap();
    got
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4, max_shrink_iters: 40, ..ProptestConfig::default() })]
    #[test]
    fn any_load_gives_each_request_the_tokens_it_gets_alone_and_leaves_every_block_free(
        shapes in prop::collection::vec((1usize..30, 1usize..12, 1usize..4, fate(), 0usize..6), 1..7),
        spare in 0u64..8,
        swaps: bool,
    ) {
        let Some(large) = overlapping(100) else { return Ok(()) };
        let sampling = |i: u32| SamplingParams { frequency_penalty: (i % 2) as f32, ..Default::default() };
        let loads: Vec<_> = shapes.iter().zip(0..).map(|(&(len, out, n, fate, arrival), i)| {
            (request(i % 3, len, out, n, sampling(i)), fate, arrival)
        }).collect();
        let mut alone = on_host(&large);
        let want: Vec<Tokens> = loads.iter().map(|load| {
            run(&mut alone, &[(load.0.clone(), Fate::Lives, 0)]).remove(0)
        }).collect();
        let blocks = |r: &GenerationRequest| {
            let (p, out) = (r.prompt.len(), r.params.max_tokens.unwrap_or(0));
            (p / 8 + r.params.n * ((p + out - 1).div_ceil(8) - p / 8)) as u64
        };
        let pool = loads.iter().map(|load| blocks(&load.0)).max().unwrap_or(1) + spare;
        let preemption_mode = if swaps { PreemptionMode::Swap } else { PreemptionMode::Recompute };
        let tight = EngineConfig { preemption_mode, max_model_len: None, ..overlapping(pool.max(6)).unwrap() };
        let got = run(&mut load(&tight), &loads);
        for ((got, want), (_, fate, _)) in got.iter().zip(&want).zip(&loads) {
            for (index, (got, want)) in got.iter().zip(want).enumerate() {
                let cut = match fate {
                    Fate::Lives => false,
                    Fate::Aborted(_) => true,
                    Fate::Stopped(_) => index == 0,
                };
                prop_assert!(want.starts_with(got) && (cut || got.len() == want.len()), "{got:?} of {want:?}, {fate:?}");
            }
        }
    }
}

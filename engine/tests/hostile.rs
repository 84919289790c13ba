//! Invalid arguments: every public call returns a value, and the engine continues with its other requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use engine::{
    AsyncEngine, BeamSearch, Constraint, ConstraintError, Engine, EngineConfig, FinishReason, GenerationParams,
    GenerationRequest, KvCacheDtype, Llm, Mask, Pooling, RequestId, SamplingParams, StructuredOutput, TokenEvent,
    TokenSet,
};
use text::Grammar;

use crate::common::{VOCABULARY, alone, config, on_sim, request, shared};

/// Where a constraint misbehaves, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Mask,
    Accept,
    Complete,
    Fork,
    Drop,
    /// A set that is larger than the vocabulary, with no id below it.
    Beyond,
    /// A set of no ids, where the text may not end.
    Nothing,
}

/// Allows everything and misbehaves at its second token.
struct Faulty {
    fault: Fault,
    accepted: usize,
}

impl Constraint for Faulty {
    fn mask(&mut self) -> Result<Mask, ConstraintError> {
        let now = self.accepted > 0;
        assert!(!now || self.fault != Fault::Mask, "asked for");
        let tokens = match self.fault {
            Fault::Beyond if now => {
                let mut beyond = TokenSet::new(VOCABULARY * 4);
                (VOCABULARY..VOCABULARY * 4).for_each(|token| beyond.insert(token as u32));
                beyond
            }
            Fault::Nothing if now => TokenSet::new(0),
            _ => TokenSet::from_words(vec![u32::MAX; 18], VOCABULARY),
        };
        Ok(Mask { tokens, may_end: false })
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        self.accepted += 1;
        assert!(self.fault != Fault::Accept || self.accepted < 2, "asked for");
        Ok(())
    }

    fn is_complete(&self) -> bool {
        assert!(self.fault != Fault::Complete || self.accepted < 2, "asked for");
        false
    }

    fn fork(&self) -> Box<dyn Constraint> {
        assert!(self.fault != Fault::Fork, "asked for");
        Box::new(Faulty { ..*self })
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        assert!(self.fault != Fault::Drop || std::thread::panicking(), "asked for");
    }
}

#[test]
fn a_constraint_that_panics_ends_its_own_request_and_nothing_else() {
    let others: Vec<GenerationRequest> = (0..3).map(|i| request(i, 12, 10, 1)).collect();
    let want = alone(&others);
    for config in [Some(config(64)), on_sim(config(64))].into_iter().flatten() {
        let mut engine = shared::engine(&config).unwrap();
        for fault in
            [Fault::Mask, Fault::Accept, Fault::Complete, Fault::Fork, Fault::Drop, Fault::Beyond, Fault::Nothing]
        {
            let ids: Vec<RequestId> = others.iter().map(|other| engine.submit(other.clone()).unwrap()).collect();
            let constraint = Box::new(Faulty { fault, accepted: 0 });
            let bad = engine.submit_constrained(request(7, 9, 10, 2), constraint).unwrap();
            let (mut tokens, mut ends) = (vec![Vec::new(); ids.len()], Vec::new());
            while engine.has_work() {
                engine.step(|id, event| {
                    let TokenEvent::Token { token, finish, .. } = event else { return };
                    match ids.iter().position(|own| *own == id) {
                        Some(place) => tokens[place].extend(token.map(|token| token.token)),
                        None => ends.extend(finish),
                    }
                    assert!(id != bad || ids.iter().all(|own| *own != id));
                });
            }
            assert_eq!(engine.stats().failed_steps, 0, "{fault:?}");
            assert_eq!(ends.len(), 2, "{fault:?}: each sequence of the request ends once");
            let by_grammar = |end: &FinishReason| matches!(end, FinishReason::Grammar(_));
            assert_eq!(
                ends.iter().all(by_grammar),
                !matches!(fault, Fault::Drop | Fault::Beyond),
                "{fault:?}: {ends:?}"
            );
            if matches!(fault, Fault::Mask | Fault::Accept | Fault::Complete | Fault::Fork) {
                let told =
                    ends.iter().all(|end| matches!(end, FinishReason::Grammar(text) if text.contains("asked for")));
                assert!(told, "{fault:?}: {ends:?}");
            }
            if config.device == "auto" {
                let tokens: Vec<_> = tokens.into_iter().map(|tokens| vec![tokens]).collect();
                assert_eq!(tokens, want, "{fault:?}");
            }
            assert_eq!((engine.num_unfinished(), engine.stats().scheduler.blocks_in_use), (0, 0), "{fault:?}");
        }
    }
}

/// Allows everything. The mask after the second token takes long, and each later call until the test opens them.
struct Late {
    is_open: Arc<AtomicBool>,
    accepted: usize,
}

impl Late {
    fn wait(&self, most: u64) {
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(most) && !self.is_open.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Constraint for Late {
    fn mask(&mut self) -> Result<Mask, ConstraintError> {
        self.wait(if self.accepted == 2 { 20 } else { 0 });
        Ok(Mask { tokens: TokenSet::from_words(vec![u32::MAX; 18], VOCABULARY), may_end: false })
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        self.accepted += 1;
        self.wait(if self.accepted > 2 { 2_000 } else { 0 });
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Late { is_open: self.is_open.clone(), ..*self })
    }
}

#[test]
fn masks_that_are_late_delay_their_own_sequences_alone() {
    let all: Vec<GenerationRequest> = (0..4).map(|i| request(i, 12, 10, 1 + usize::from(i == 0))).collect();
    let want = alone(&all);
    let ngram = r#"{"method": "ngram", "num_speculative_tokens": 3}"#.parse().ok();
    for config in [config(64), EngineConfig { speculative: ngram, ..config(64) }] {
        let mut engine = shared::engine(&config).unwrap();
        let [late, quick] = [false, true].map(|is_open| Arc::new(AtomicBool::new(is_open)));
        let mut submit = |(request, is_open): (&GenerationRequest, Option<&Arc<AtomicBool>>)| match is_open {
            Some(is_open) => {
                let constraint = Late { is_open: is_open.clone(), accepted: 0 };
                engine.submit_constrained(request.clone(), Box::new(constraint)).unwrap()
            }
            None => engine.submit(request.clone()).unwrap(),
        };
        let ids: Vec<RequestId> = all.iter().zip([Some(&late), Some(&quick), None, None]).map(&mut submit).collect();
        let mut tokens: Vec<Vec<Vec<u32>>> = all.iter().map(|request| vec![Vec::new(); request.params.n]).collect();
        while engine.has_work() {
            engine.step(|id, event| {
                let TokenEvent::Token { index, token, .. } = event else { return };
                let place = ids.iter().position(|own| *own == id).unwrap();
                tokens[place][index as usize].extend(token.map(|token| token.token));
            });
            if engine.num_unfinished() == 1 && !late.swap(true, Ordering::Relaxed) {
                assert_eq!(tokens[0], want[0].iter().map(|all| all[..3].to_vec()).collect::<Vec<_>>());
            }
        }
        assert!(late.load(Ordering::Relaxed), "the others waited for the masks");
        assert_eq!(tokens, want);
    }
}

/// Every field of a request at its edges and far outside of them.
fn hostile_requests() -> Vec<GenerationRequest> {
    let base = || request(1, 10, 4, 1);
    let params = |change: &dyn Fn(&mut GenerationParams)| {
        let mut request = base();
        change(&mut request.params);
        request
    };
    let sampling = |change: &dyn Fn(&mut SamplingParams)| params(&|params| change(&mut params.sampling));
    let mut all = Vec::new();
    for size in [0, 1, 2, 1000, 1001, usize::MAX / 2, usize::MAX - 1, usize::MAX] {
        all.extend([
            params(&|p| p.n = size),
            params(&|p| p.best_of = Some(size)),
            params(&|p| (p.n, p.best_of) = (size, Some(size))),
            params(&|p| p.max_tokens = Some(size)),
            params(&|p| p.prompt_logprobs = Some(size)),
            params(&|p| (p.prompt_logprobs, p.max_tokens) = (Some(size), Some(0))),
            params(&|p| (p.pooling, p.max_tokens, p.n) = (Some(Pooling::Last), Some(0), size)),
            sampling(&|s| s.logprobs = Some(size)),
            sampling(&|s| s.min_tokens = size),
            sampling(&|s| s.top_k = size as u32),
            sampling(&|s| s.seed = Some(size as u64)),
        ]);
        for length_penalty in [0.0, 1.0, -1.0, f32::MAX, f32::MIN, f32::NAN, f32::INFINITY] {
            all.push(params(&|p| p.beam = Some(BeamSearch { length_penalty, ..BeamSearch::new(size) })));
            all.push(params(&|p| {
                p.beam = Some(BeamSearch { length_penalty, early_stopping: true, ..BeamSearch::new(2) });
                p.max_tokens = Some(size);
            }));
        }
    }
    for number in [0.0, -0.0, 1.0, f32::MIN_POSITIVE, f32::MAX, f32::MIN, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        all.extend([
            sampling(&|s| s.temperature = number),
            sampling(&|s| s.top_p = number),
            sampling(&|s| s.min_p = number),
            sampling(&|s| s.typical_p = Some(number)),
            sampling(&|s| s.repetition_penalty = number),
            sampling(&|s| s.presence_penalty = number),
            sampling(&|s| s.frequency_penalty = number),
            sampling(&|s| s.logit_bias = vec![(0, number), (u32::MAX, number), (0, number)]),
        ]);
    }
    for id in [0, VOCABULARY as u32 - 1, VOCABULARY as u32, u32::MAX] {
        all.extend([
            GenerationRequest { prompt: vec![id; 5], ..base() },
            params(&|p| p.stop_token_ids = vec![id; 3]),
            sampling(&|s| s.allowed_token_ids = Some([id, id].into())),
            sampling(&|s| s.bad_words = [vec![id], vec![id; 90]].into()),
            sampling(&|s| s.logit_bias = vec![(id, 1.0)]),
        ]);
    }
    all.extend([
        GenerationRequest { prompt: vec![], ..base() },
        GenerationRequest { prompt: vec![5; 511], ..base() },
        GenerationRequest { prompt: vec![5; 512], ..base() },
        GenerationRequest { prompt: vec![5; 100_000], ..base() },
        GenerationRequest { priority: i32::MIN, ..base() },
        GenerationRequest { priority: i32::MAX, cache_salt: Some("\0".repeat(10_000)), ..base() },
        sampling(&|s| s.allowed_token_ids = Some([].into())),
        sampling(&|s| s.bad_words = [vec![]].into()),
        params(&|p| p.stop = [String::new()].into()),
        params(&|p| p.stop = ["a".repeat(100_000), "\u{0}".into()].into()),
        params(&|p| p.stop_token_ids = (0..VOCABULARY as u32).collect()),
    ]);
    for grammar in [
        Grammar::JsonObject,
        Grammar::JsonSchema(String::new()),
        Grammar::JsonSchema("[".repeat(100_000)),
        Grammar::JsonSchema("{\"$ref\": \"#\"}".into()),
        Grammar::Regex("(".into()),
        Grammar::Regex("((a*)*)*{9999999}".into()),
        Grammar::Choice(vec![]),
        Grammar::Choice(vec!["\0".into(); 100]),
        Grammar::Lark("start: start".into()),
        Grammar::Lark("\u{0}".into()),
    ] {
        all.push(params(&|p| {
            p.structured_outputs =
                Some(Arc::new(StructuredOutput { grammar: grammar.clone(), param: "structured_outputs" }));
        }));
    }
    all
}

#[test]
fn a_request_of_any_numbers_is_served_or_refused_in_one_line() {
    let mut llm = Llm::new(config(64)).unwrap();
    let (mut served, mut refused) = (0, 0);
    for request in hostile_requests() {
        match llm.run(vec![request.clone()]) {
            Ok(completions) => {
                served += 1;
                assert!(
                    completions[0].outputs.iter().all(|o| !matches!(o.finish_reason, Some(FinishReason::Error(_))))
                );
            }
            Err(error) => {
                refused += 1;
                let line = error.to_string();
                assert!(!line.is_empty() && !line.contains('\n') && line.len() < 1000, "{line}");
            }
        }
        assert_eq!(
            (llm.stats().scheduler.kv_cache_usage(), llm.stats().scheduler.num_waiting),
            (0.0, 0),
            "{request:?}"
        );
    }
    assert!(served > 50 && refused > 100, "{served} served, {refused} refused");
    assert_eq!(llm.stats().failed_steps, 0);
}

#[test]
fn a_request_of_any_numbers_is_served_or_refused_where_the_device_draws() {
    let Some(config) = on_sim(EngineConfig { max_model_len: Some(64), ..config(64) }) else { return };
    let mut engine = shared::engine(&config).unwrap();
    let mut accepted = 0;
    for mut request in hostile_requests() {
        // A full context of each is no more hostile than a few steps of it.
        request.params.max_tokens = request.params.max_tokens.map(|most| most.min(3));
        accepted += usize::from(engine.submit(request).is_ok());
    }
    assert!(accepted > 50, "{accepted} accepted");
    while engine.has_work() {
        engine.step(|_, event| {
            let failed = matches!(&event, TokenEvent::Token { finish: Some(FinishReason::Error(_)), .. });
            assert!(!failed, "{event:?}");
        });
    }
    assert_eq!((engine.stats().failed_steps, engine.stats().scheduler.blocks_in_use), (0, 0));
}

#[test]
fn calls_with_ids_and_indices_that_do_not_exist_change_nothing() {
    let mut engine = Engine::load(&config(64), &|_, _| {}).unwrap();
    let id = engine.submit(request(1, 10, 6, 2)).unwrap();
    let beams = engine
        .submit(GenerationRequest {
            params: GenerationParams { beam: Some(BeamSearch::new(2)), ..request(1, 10, 6, 2).params },
            ..request(2, 10, 6, 2)
        })
        .unwrap();
    let unknown = [RequestId(u64::MAX), RequestId(99)];
    for _ in 0..3 {
        for index in [2, 99, u32::MAX] {
            assert!(!engine.finish_sequence(id, index) && !engine.finish_sequence(beams, index));
        }
        assert!(!engine.finish_sequence(beams, 0), "results of a search are not known before its end");
        for unknown in unknown {
            assert!(!engine.finish_sequence(unknown, 0) && !engine.abort(unknown));
        }
        assert_eq!(engine.num_unfinished(), 2);
        engine.step(|_, _| {});
    }
    assert!(engine.finish_sequence(id, 1) && !engine.finish_sequence(id, 1));
    assert!(engine.abort(beams) && !engine.abort(beams));
    let mut tokens = 0;
    while engine.has_work() {
        engine.step(|of, event| {
            assert_eq!(of, id);
            tokens += usize::from(matches!(event, TokenEvent::Token { index: 0, token: Some(_), .. }));
        });
    }
    assert!(tokens > 0 && engine.stats().scheduler.blocks_in_use == 0);
    assert!(!engine.finish_sequence(id, 0) && !engine.abort(id), "it has ended");
}

#[test]
fn a_configuration_of_any_numbers_starts_an_engine_or_is_refused_in_one_line() {
    let mut all = Vec::new();
    let base = || EngineConfig { max_model_len: None, ..config(64) };
    for size in [0, 1, 3, 1 << 20, (1 << 20) + 1, usize::MAX / 2, usize::MAX] {
        all.extend([
            EngineConfig { block_size: Some(size), ..base() },
            EngineConfig { max_model_len: Some(size), ..base() },
            EngineConfig { kv_cache_memory_bytes: Some(size as u64), ..base() },
            EngineConfig { swap_space_bytes: size as u64, ..base() },
            EngineConfig { max_num_seqs: size, ..base() },
            EngineConfig { max_num_batched_tokens: size.min(1 << 21), ..base() },
            EngineConfig { max_num_seqs: size, max_num_batched_tokens: size, ..base() },
            EngineConfig { threads: Some(size.min(64)), ..base() },
            EngineConfig { max_queued_requests: size, max_unread_events: size, max_schema_bytes: size, ..base() },
        ]);
    }
    for share in [0.0, -1.0, 1.0, 2.0, f64::NAN, f64::INFINITY, f64::MIN_POSITIVE] {
        all.push(EngineConfig { gpu_memory_utilization: Some(share), kv_cache_memory_bytes: None, ..base() });
    }
    for device in ["", "\0", "cuda:99999999999999999999", "cpu "] {
        all.push(EngineConfig { device: device.into(), ..base() });
    }
    all.push(EngineConfig { calculate_kv_scales: true, kv_cache_dtype: KvCacheDtype::Auto, ..base() });
    for config in all {
        if let Err(error) = engine::plan(&config) {
            let line = error.to_string();
            assert!(!line.is_empty() && !line.contains('\n'), "{line}");
            let started = Engine::load(&config, &|_, _| {}).err().map(|error| error.to_string());
            assert!(started.is_some(), "a start is refused as its plan is: {line}");
        }
    }
}

#[test]
fn a_queue_of_any_limits_serves_a_request_or_refuses_it() {
    for size in [0, 1, usize::MAX] {
        let config = EngineConfig { max_queued_requests: size.max(1), max_unread_events: size, ..config(64) };
        let engine = AsyncEngine::start(config, &|_, _| {}).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for n in [0, 1, usize::MAX] {
            let mut request = request(1, 10, 4, 1);
            request.params.n = n;
            let stream = runtime.block_on(engine.submit(request));
            assert_eq!(stream.is_ok(), n == 1);
            if let Ok(mut stream) = stream {
                while stream.next_blocking().is_some() {}
            }
        }
        assert!(engine.is_alive() && engine.is_healthy(std::time::Duration::MAX));
    }
}

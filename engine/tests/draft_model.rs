//! Drafts of a second model: they change nothing, and a model is always right about itself.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use engine::speculate::{DraftScope, Proposal, ProposeError, Proposer, Speculation};
use engine::worker::{StepError, StepInput, StepOutput, Worker};
use engine::{
    Constraint, ConstraintError, DraftCheckpoint, Engine, EngineConfig, EngineParts, LoadOn, Mask, ModelSource,
    PreemptionMode, SpeculativeConfig, SpeculativeMethod, TokenSet,
};
use proptest::prelude::*;
use sched::SeqId;
use serde_json::json;
use tempfile::TempDir;
use testkit::reference;

use crate::common::{VOCABULARY, config, on_sim, request, shared};
use crate::overlap::{Load, answers};
use crate::speculate::{CERTAIN, case, check_with, loads, plain};

fn drafts_of(model: &Path, num_speculative_tokens: usize) -> Option<SpeculativeConfig> {
    let checkpoint = DraftCheckpoint { model: model.to_path_buf(), revision: None };
    Some(SpeculativeConfig { method: SpeculativeMethod::DraftModel(checkpoint), num_speculative_tokens })
}

/// An engine that always verifies as many drafts of a model as it may.
fn speculating(config: &EngineConfig, model: &Path, most: usize) -> Engine {
    let parts = shared::parts(&EngineConfig { speculative: drafts_of(model, most), ..config.clone() }).unwrap();
    let speculation = parts.speculation.map(|speculation| Speculation { is_adaptive: false, ..speculation });
    Engine::new(EngineParts { speculation, ..parts }).unwrap()
}

fn llama() -> PathBuf {
    reference::folder("llama")
}

/// A copy of a reference case with other values in its `config.json`.
fn changed(case: &str, values: &serde_json::Value) -> TempDir {
    let folder = TempDir::new().unwrap();
    for file in std::fs::read_dir(reference::folder(case)).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let path = folder.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config.as_object_mut().unwrap().extend(values.as_object().unwrap().clone());
    std::fs::write(path, config.to_string()).unwrap();
    folder
}

/// The cache of `blocks` blocks with a draft model of as many bytes per token.
fn twice(config: EngineConfig) -> EngineConfig {
    EngineConfig { kv_cache_memory_bytes: config.kv_cache_memory_bytes.map(|bytes| bytes * 2), ..config }
}

#[test]
fn drafts_of_a_model_change_no_token_and_no_log_probability_of_any_load() {
    let shorter = changed("llama", &json!({"num_hidden_layers": 2}));
    let mut sums = (0, 0, 0);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig { cases: 25, ..Default::default() });
    let totals = std::sync::Mutex::new(&mut sums);
    runner
        .run(&case(), |case| {
            let model = if case.method % 2 == 0 { llama() } else { shorter.path().to_path_buf() };
            let load = |config: &EngineConfig| speculating(&twice(config.clone()), &model, case.most);
            let (engine, preemptions) = check_with(&case, |config| config, |config, _| load(config))?;
            let spec = engine.stats().spec_decode;
            let mut totals = totals.lock().unwrap();
            totals.0 += spec.num_accepted_tokens;
            totals.1 += spec.num_draft_tokens - spec.num_accepted_tokens;
            totals.2 += preemptions;
            Ok(())
        })
        .unwrap();
    assert!(sums.0 > 100 && sums.1 > 100 && sums.2 > 0, "the test shows nothing: {sums:?}");
}

#[test]
fn on_cuda_sim_drafts_of_a_model_change_nothing_either() {
    if on_sim(config(200)).is_none() {
        return;
    }
    let load = |config: &EngineConfig| speculating(&twice(config.clone()), &llama(), 3);
    let (engine, _) = check_with(&CERTAIN, |config| on_sim(config).unwrap(), |config, _| load(config)).unwrap();
    assert!(engine.stats().spec_decode.num_accepted_tokens > 20);
}

/// Shares of right drafts of a model about itself.
fn own_drafts(config: EngineConfig, loads: &[Load], most: usize) -> (u64, u64) {
    let mut engine = speculating(&twice(config), &llama(), most);
    let got = answers(&mut engine, loads);
    plain(&engine, got);
    let spec = engine.stats().spec_decode;
    (spec.num_accepted_tokens, spec.num_draft_tokens)
}

#[test]
fn a_model_is_always_right_about_itself_with_every_sampling_option() {
    // A grammar forbids drafts that the draft model does not know to be forbidden.
    let loads: Vec<Load> = loads(5, 0, 30).into_iter().filter(|(_, constraint)| constraint.is_none()).collect();
    let roomy = EngineConfig { max_num_batched_tokens: 512, ..config(200) };
    for swaps in [false, true] {
        for blocks in [200, 24] {
            let config = EngineConfig {
                max_model_len: Some(64),
                swap_space_bytes: if swaps { 1 << 20 } else { 0 },
                preemption_mode: if swaps { PreemptionMode::Swap } else { PreemptionMode::Recompute },
                kv_cache_memory_bytes: config(blocks).kv_cache_memory_bytes,
                ..roomy.clone()
            };
            let (right, all) = own_drafts(config, &loads, 4);
            assert!(right == all && all > 100, "{blocks} blocks, swaps {swaps}: {right} of {all}");
        }
    }
}

/// Allows one token at each of the first positions, and every token later. Each mask takes at least as long as given.
#[derive(Clone)]
struct Forced(usize, Duration);

impl Constraint for Forced {
    fn mask(&mut self) -> Result<Mask, ConstraintError> {
        let mut tokens = TokenSet::new(VOCABULARY);
        let forced = 100 + self.0 as u32 * 31;
        let allowed = if self.0 < 8 { forced..forced + 1 } else { 0..VOCABULARY as u32 };
        allowed.for_each(|token| tokens.insert(token));
        std::thread::sleep(self.1);
        Ok(Mask { tokens, may_end: false })
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        self.0 += 1;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// Asks the worker for drafts in each third step.
struct Sometimes(usize);

impl Proposer for Sometimes {
    fn by_worker(&self) -> bool {
        true
    }

    fn begin(&mut self, _: SeqId, _: &DraftScope, _: &[u32]) {}

    fn extend(&mut self, _: SeqId, _: u32) {}

    fn end(&mut self, _: SeqId) {}

    fn propose(&mut self, wanted: &mut [Proposal]) -> Result<(), ProposeError> {
        self.0 += 1;
        let asks = self.0.is_multiple_of(3);
        wanted.iter_mut().for_each(|proposal| proposal.drafts.resize(if asks { proposal.most } else { 0 }, 0));
        Ok(())
    }
}

#[test]
fn a_draft_model_computes_what_was_drawn_instead_of_its_wrong_drafts() {
    let config = EngineConfig { speculative: drafts_of(&llama(), 4), ..twice(config(60)) };
    let parts = shared::parts(&config).unwrap();
    let speculation =
        Some(Speculation { proposer: Box::new(Sometimes(0)), num_speculative_tokens: 4, is_adaptive: false });
    let mut engine = Engine::new(EngineParts { speculation, ..parts }).unwrap();
    let mut drafts_of = |pause| {
        engine.submit_constrained(request(2, 12, 70, 1), Box::new(Forced(0, pause))).unwrap();
        while engine.has_work() {
            engine.step(|_, _| {});
        }
        engine.stats().spec_decode
    };
    // Nothing would be drawn behind the drafts of a slow constraint.
    let slow = drafts_of(Duration::from_millis(3));
    assert_eq!(slow.num_draft_tokens, 0);
    let spec = drafts_of(Duration::ZERO);
    let wrong = spec.num_draft_tokens - spec.num_accepted_tokens;
    // Drafts are wrong only while the constraint forces other tokens.
    assert!((4..=3 * 4).contains(&wrong) && spec.num_accepted_tokens > 28, "{spec:?}");
}

#[test]
fn a_draft_model_computes_prompts_in_chunks_and_what_a_cached_block_lacks() {
    // The first request has no drafts, so its blocks are cached without keys and values of the draft model.
    let mut without = request(1, 40, 20, 1);
    without.params.speculative = false;
    let mut engine = speculating(&twice(EngineConfig { max_num_batched_tokens: 24, ..config(60) }), &llama(), 3);
    answers(&mut engine, &[(without.clone(), None)]);
    assert_eq!(engine.stats().spec_decode.num_drafts, 0);
    let again = [(request(1, 40, 20, 1), None), (request(1, 40, 30, 2), None)];
    for load in &again {
        let hits = engine.stats().scheduler.prefix_hits;
        answers(&mut engine, std::slice::from_ref(load));
        assert!(engine.stats().scheduler.prefix_hits >= hits + 32, "the prompt was cached");
    }
    let spec = engine.stats().spec_decode;
    // What is lacking of a prompt may exceed the rows of one step; then the drafts of that step are placeholders.
    let wrong = spec.num_draft_tokens - spec.num_accepted_tokens;
    assert!(spec.num_accepted_tokens > 40 && wrong <= 9, "{spec:?}");
}

/// A worker that computes drafts a limited number of times.
struct Failing {
    worker: Box<dyn Worker>,
    good: usize,
    /// Fails after the step has begun.
    begins: bool,
}

impl Worker for Failing {
    fn draft(&mut self, input: &StepInput) -> Result<Vec<u32>, ProposeError> {
        let failure = ProposeError("a failure that the test asks for".into());
        if self.good == 0 && !self.begins {
            return Err(failure);
        }
        let drafts = self.worker.draft(input);
        if self.good == 0 {
            return Err(failure);
        }
        self.good -= 1;
        drafts
    }

    fn submit(&mut self, input: Arc<StepInput>) {
        self.worker.submit(input);
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        self.worker.collect(output)
    }

    fn num_sequences(&self) -> usize {
        self.worker.num_sequences()
    }
}

#[test]
fn a_draft_model_that_fails_ends_no_request() {
    let requests: Vec<Load> = (0..3).map(|i| (request(i, 9, 10, 1), None)).collect();
    let want = answers(&mut shared::engine(&config(60)).unwrap(), &requests);
    for (good, begins) in [(0, false), (0, true), (2, true), (3, false)] {
        let config = twice(EngineConfig { speculative: drafts_of(&llama(), 3), ..config(60) });
        let parts = engine::load(&config, LoadOn::Configured, &|_, _| {}).unwrap().parts;
        let worker = Box::new(Failing { worker: parts.worker, good, begins });
        let mut engine = Engine::new(EngineParts { worker, ..parts }).unwrap();
        let got = answers(&mut engine, &requests);
        assert_eq!(plain(&engine, got), want, "after {good}, {begins}");
        let spec = engine.stats().spec_decode;
        assert!(spec.num_drafts > 0 && (spec.num_accepted_tokens > 0) == (good > 0), "{spec:?}");
    }
}

#[test]
fn a_draft_model_that_cannot_be_used_is_one_line() {
    let load = |config: &EngineConfig, draft: &Path| {
        let config = EngineConfig { speculative: drafts_of(draft, 2), ..config.clone() };
        let line = shared::engine(&config).err().unwrap().to_string();
        assert!(!line.contains('\n'), "{line}");
        line
    };
    let other = load(&config(60), &reference::folder("qwen3"));
    assert!(other.contains("use a draft model with the same vocabulary"), "{other}");
    let next = reference::folder("qwen3-next");
    let recurrent = EngineConfig { model: ModelSource::Folder(next.clone()), block_size: None, ..config(600) };
    let recurrent = load(&recurrent, &next);
    assert!(recurrent.contains("attention with one window or none"), "{recurrent}");
    let windows = EngineConfig { model: ModelSource::Folder(reference::folder("mistral-sliding")), ..config(60) };
    let windows = load(&windows, &reference::folder("mistral-sliding"));
    assert!(windows.contains("a model for drafts beside a model of windows alone"), "{windows}");
    let missing = load(&config(60), Path::new("nowhere"));
    assert!(missing.contains("nowhere"), "{missing}");
}

#[test]
fn texts_longer_than_the_context_of_the_draft_model_go_on_without_drafts() {
    let short = changed("llama", &json!({"max_position_embeddings": 32}));
    // The last prompt alone is longer.
    let requests: Vec<Load> = vec![(request(3, 20, 40, 1), None), (request(4, 50, 10, 1), None)];
    let want = answers(&mut shared::engine(&config(60)).unwrap(), &requests);
    let mut engine = speculating(&twice(config(60)), short.path(), 4);
    let got = answers(&mut engine, &requests);
    assert_eq!(plain(&engine, got), want);
    let spec = engine.stats().spec_decode;
    assert!((6..=12).contains(&spec.num_draft_tokens), "{spec:?}");
}

#[test]
fn the_plan_counts_the_draft_model() {
    let with = EngineConfig { speculative: drafts_of(&llama(), 2), ..config(60) };
    let [plain, plan] = [config(60), with].map(|config| engine::plan(&config).unwrap());
    assert_eq!(plan.num_blocks, plain.num_blocks / 2, "half of a page is the draft model's");
    assert_eq!(plan.kv_bytes_per_token, 2 * plain.kv_bytes_per_token);
    assert_eq!(plan.draft, Some((plain.weight_bytes, plain.kv_bytes_per_token)));
    assert!(plan.to_string().contains("draft model        "), "{plan}");
}

//! A recorded run that a worker alone computes again gives equal outputs, to the bit.

use std::path::Path;

use engine::worker::StepInput;
use engine::{
    BeamSearch, Constraint, ConstraintError, Engine, EngineConfig, GenerationParams, GenerationRequest, Mask, Pooling,
    PreemptionMode, Recording, Replayed, SamplingParams, TokenSet,
};
use proptest::prelude::*;

use crate::common::{TOKEN_BYTES, VOCABULARY, config, on_sim, prompt, request};

/// Every token must be even; nothing ends it.
#[derive(Clone)]
struct Even;

impl Constraint for Even {
    fn mask(&mut self) -> Result<Mask, ConstraintError> {
        let mut tokens = TokenSet::new(VOCABULARY);
        (0..VOCABULARY as u32).step_by(2).for_each(|token| tokens.insert(token));
        Ok(Mask { tokens, may_end: false })
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// Runs requests of every kind in a pool that is too small for them, and cancels one. Gives the steps with work.
fn run(config: &EngineConfig) -> u64 {
    let mut engine = Engine::load(config, &|_, _| {}).unwrap();
    let with = |which, change: &dyn Fn(&mut GenerationParams)| {
        let mut request = request(which, 9 + 3 * which as usize, 10, 1);
        change(&mut request.params);
        request
    };
    engine.submit(with(0, &|params| params.n = 2)).unwrap();
    let penalised = SamplingParams { repetition_penalty: 1.3, bad_words: [vec![7, 9]].into(), ..Default::default() };
    engine.submit(with(1, &|params| params.sampling = penalised.clone())).unwrap();
    engine.submit(with(2, &|params| params.beam = Some(BeamSearch::new(3)))).unwrap();
    engine.submit(with(3, &|params| params.prompt_logprobs = Some(2))).unwrap();
    engine.submit(with(4, &|params| params.sampling.logprobs = Some(30))).unwrap();
    let embedding = GenerationParams::pooled(Pooling::Mean);
    engine.submit(GenerationRequest { prompt: prompt(5, 20), params: embedding, ..Default::default() }).unwrap();
    engine.submit_constrained(with(6, &|_| {}), Box::new(Even)).unwrap();
    let cancelled = engine.submit(with(7, &|_| {})).unwrap();
    let mut told = 0;
    while engine.has_work() {
        engine.step(|id, _| told += usize::from(id == cancelled));
        if told == 4 {
            engine.abort(cancelled);
        }
    }
    let stats = engine.stats();
    assert!(stats.scheduler.preemptions > 0 && stats.failed_steps == 0, "{stats:?}");
    stats.steps
}

fn recorded(config: EngineConfig, path: &Path, mode: PreemptionMode) -> (EngineConfig, u64) {
    let bytes = 22 * 8 * TOKEN_BYTES;
    let config = EngineConfig {
        kv_cache_memory_bytes: Some(bytes),
        swap_space_bytes: if mode == PreemptionMode::Swap { 4 * bytes } else { 0 },
        preemption_mode: mode,
        max_model_len: Some(64),
        record: Some(path.to_path_buf()),
        ..config
    };
    let steps = run(&config);
    (config, steps)
}

fn replay(path: &Path, change: impl FnOnce(&mut EngineConfig), watch: impl FnMut(&StepInput)) -> Replayed {
    let mut recording = Recording::open(path).unwrap();
    change(&mut recording.config);
    recording.replay(&|_, _| {}, watch).unwrap()
}

#[test]
fn a_recorded_run_is_computed_again_by_a_worker_alone_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    for (device, mode) in
        [("cpu", PreemptionMode::Swap), ("cpu", PreemptionMode::Recompute), ("sim", PreemptionMode::Swap)]
    {
        let speculative = r#"{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}"#.parse().ok();
        let config = |blocks| EngineConfig { speculative: speculative.clone(), ..config(blocks) };
        let Some(config) = (if device == "sim" { on_sim(config(22)) } else { Some(config(22)) }) else { continue };
        let path = folder.path().join(format!("{device} {mode:?}"));
        let (_, steps) = recorded(config, &path, mode);
        let mut with_work = 0;
        // Neither the engine's threads nor the order of a machine's cores are part of a result.
        let threads = |config: &mut EngineConfig| config.threads = Some(2);
        let mut drafts = 0;
        let replayed = replay(&path, threads, |input| {
            with_work += u64::from(!input.plan.spans.is_empty());
            drafts += input.plan.spans.iter().map(|span| span.drafts).sum::<usize>();
        });
        assert!(drafts > 0, "nothing was proposed");
        assert_eq!(replayed.difference, None);
        assert_eq!(with_work, steps);
        assert!(replayed.steps == steps && replayed.tokens > 60 && replayed.unrecorded.is_empty(), "{replayed:?}");
    }
}

/// The byte ranges of a recording's entries, without their lengths, and their kinds: 0 is the start, 1 an input, 2 an output.
fn entries(bytes: &[u8]) -> Vec<(std::ops::Range<usize>, u8)> {
    let mut at = b"quire recording 4\n".len();
    let mut entries = Vec::new();
    while at < bytes.len() {
        let length = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        entries.push((at + 4..at + 4 + length, bytes[at + 4]));
        at += 4 + length;
    }
    entries
}

#[test]
fn a_replay_ends_at_the_first_output_that_differs_and_says_what_differs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    recorded(config(22), &path, PreemptionMode::Recompute);
    let bytes = std::fs::read(&path).unwrap();
    let entries = entries(&bytes);
    // Step 1 computes prompts; its output has a first token after variant, result, count, request and index.
    let outputs: Vec<_> = entries.iter().filter(|(_, kind)| *kind == 2).map(|(place, _)| place.clone()).collect();
    let changed = |at: usize| {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        replay(&path, |_| {}, |_| {})
    };
    let first = changed(outputs[0].start + 5);
    let difference = first.difference.unwrap();
    assert!(first.steps == 0 && difference.starts_with("step 1: token "), "{difference}");
    assert!(difference.contains("; recorded is token "), "{difference}");
    // The last byte of a later one is of a number.
    let later = outputs.iter().rposition(|place| place.len() > 40).unwrap();
    let later = (later, changed(outputs[later].end - 6));
    assert!(later.1.difference.is_some() && (1..=later.0 as u64).contains(&later.1.steps), "{later:?}");
}

#[test]
fn the_step_in_which_a_program_died_is_computed_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    recorded(config(22), &path, PreemptionMode::Recompute);
    let bytes = std::fs::read(&path).unwrap();
    let last = entries(&bytes).into_iter().filter(|(_, kind)| *kind == 1).nth(4).unwrap().0;
    // The output of that step, and half of the next entry, were never written.
    std::fs::write(&path, &bytes[..last.end]).unwrap();
    let replayed = replay(&path, |_| {}, |_| {});
    assert_eq!((replayed.steps, replayed.difference), (4, None));
    assert_eq!(replayed.unrecorded.len(), 1);
    assert!(replayed.unrecorded[0].1.is_ok());
    std::fs::write(&path, &bytes[..last.end - 3]).unwrap();
    assert!(replay(&path, |_| {}, |_| {}).unrecorded.is_empty());
}

#[test]
fn a_recording_of_another_checkpoint_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    recorded(config(22), &path, PreemptionMode::Recompute);
    let mut recording = Recording::open(&path).unwrap();
    recording.config.model =
        engine::ModelSource::Folder(testkit::workspace::root().join("models/tests/reference/qwen3"));
    let error = recording.replay(&|_, _| {}, |_| {}).unwrap_err().to_string();
    assert!(error.contains("found another checkpoint in qwen3, expected the checkpoint that was recorded"), "{error}");
}

#[test]
fn an_existing_file_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    std::fs::write(&path, "mine").unwrap();
    let config = EngineConfig { record: Some(path.clone()), ..config(22) };
    let error = Engine::load(&config, &|_, _| {}).err().unwrap().to_string();
    assert!(
        error.starts_with("--record: found ") && error.contains("expected a file that does not exist yet"),
        "{error}"
    );
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
}

/// A recording, made once.
fn bytes() -> &'static [u8] {
    static BYTES: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    BYTES.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        recorded(config(22), &path, PreemptionMode::Recompute);
        std::fs::read(&path).unwrap()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if testkit::everything() { 2000 } else { 150 }))]

    #[test]
    fn a_damaged_recording_is_an_error_or_a_difference_and_never_a_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut damaged = bytes().to_vec();
        for (at, byte) in &flips {
            // The configuration is not changed: another one could request all memory of the machine.
            let from = entries(bytes())[0].0.end;
            let at = from + at.index(damaged.len() - from);
            damaged[at] = *byte;
        }
        if let Some(cut) = cut {
            damaged.truncate(cut.index(damaged.len()));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        std::fs::write(&path, damaged).unwrap();
        let error = match Recording::open(&path) {
            Err(error) => Some(error),
            Ok(recording) => recording.replay(&|_, _| {}, |_| {}).err(),
        };
        if let Some(error) = error {
            let line = error.to_string();
            prop_assert!(line.contains("expected") && !line.contains('\n'), "{}", line);
        }
    }
}

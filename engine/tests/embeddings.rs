//! Embeddings against `transformers` (`embedding_reference.json`: the last hidden states of the `llama` and `qwen3`
//! reference cases in float32, pooled and brought to length 1), and bit for bit the same in every company.

use engine::{
    Engine, EngineConfig, Event, GenerationParams, GenerationRequest, Llm, ModelSource, Policy, Pooling,
    PreemptionMode, SubmitError, TokenEvent,
};
use serde_json::Value;

use crate::common::{self, config, prompt};

/// Greatest difference of an element of a unit vector from the reference; its own digits end at 1e-7.
const TOLERANCE: f64 = 2e-6;

struct Case {
    prompt: Vec<u32>,
    expected: Vec<f64>,
    pooling: Pooling,
}

fn cases(model: &str) -> Vec<Case> {
    let reference: Value = serde_json::from_str(include_str!("embedding_reference.json")).unwrap();
    let numbers = |v: &Value| -> Vec<f64> { v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect() };
    let both = |entry: &Value| {
        let prompt: Vec<u32> = numbers(&entry["prompt"]).into_iter().map(|id| id as u32).collect();
        [(Pooling::Last, "last"), (Pooling::Mean, "mean")].map(|(pooling, name)| Case {
            prompt: prompt.clone(),
            expected: numbers(&entry[name]),
            pooling,
        })
    };
    reference[model].as_array().unwrap().iter().flat_map(both).collect()
}

fn request(case: &Case) -> GenerationRequest {
    let params = GenerationParams::pooled(case.pooling);
    GenerationRequest { prompt: case.prompt.clone(), params, ..Default::default() }
}

fn embedding(events: &[Event]) -> Vec<f32> {
    let vectors: Vec<_> =
        events.iter().filter_map(|e| if let Event::Embedding(v) = e { Some(v) } else { None }).collect();
    assert_eq!(vectors.len(), 1, "one embedding per request");
    vectors[0].clone()
}

fn run(llm: &mut Llm, requests: Vec<GenerationRequest>) -> Vec<Vec<Event>> {
    llm.run_with_events(requests).unwrap().into_iter().map(|(_, events)| events).collect()
}

#[test]
fn embeddings_are_those_of_transformers() {
    for model in ["llama", "qwen3"] {
        let folder = testkit::reference::folder(model);
        let config = EngineConfig { model: ModelSource::Folder(folder), ..crate::common::config(64) };
        let mut llm = Llm::new(config).unwrap();
        for case in cases(model) {
            let found = embedding(&run(&mut llm, vec![request(&case)])[0]);
            assert_eq!(found.len(), case.expected.len());
            // The greatest of them is NaN if one is.
            let errors = found.iter().zip(&case.expected).map(|(&a, b)| (f64::from(a) - b).abs());
            let worst = errors.max_by(f64::total_cmp).unwrap();
            assert!(worst < TOLERANCE, "{model} {:?} of {} tokens: off by {worst}", case.pooling, case.prompt.len());
        }
    }
}

#[test]
fn an_embedding_has_the_same_bits_in_chunks_in_a_batch_and_from_the_cache() {
    let bits = |vector: &[f32]| vector.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let cases = cases("llama");
    let mut alone = Llm::new(crate::common::config(256)).unwrap();
    let expected: Vec<_> =
        cases.iter().map(|case| bits(&embedding(&run(&mut alone, vec![request(case)])[0]))).collect();
    // Chunks of at most 20 tokens, a pool that is too small for all, generations beside; then the same from the cache.
    let config = EngineConfig { max_num_batched_tokens: 20, ..crate::common::config(24) };
    let mut crowded = Llm::new(config).unwrap();
    for round in 0..2 {
        let mut requests: Vec<_> = cases.iter().map(request).collect();
        requests.extend((10..14).map(|which| crate::common::request(which, 20, 24, 1)));
        let found = run(&mut crowded, requests);
        assert!(found.len() == cases.len() + 4 && expected.len() == cases.len());
        for ((case, events), expected) in cases.iter().zip(&found).zip(&expected) {
            assert_eq!(
                &bits(&embedding(events)),
                expected,
                "round {round}: {:?} of {}",
                case.pooling,
                case.prompt.len()
            );
        }
    }
}

#[test]
fn only_the_last_token_is_computed_if_the_rest_is_cached() {
    let mut llm = Llm::new(crate::common::config(64)).unwrap();
    let cached = |events: &[Event]| {
        events.iter().find_map(|e| if let Event::Started { cached_tokens } = e { Some(*cached_tokens) } else { None })
    };
    for (pooling, expected) in [(Pooling::Last, Some(88)), (Pooling::Mean, Some(0))] {
        let request = GenerationRequest {
            prompt: crate::common::prompt(7, 90),
            params: GenerationParams::pooled(pooling),
            ..Default::default()
        };
        let first = run(&mut llm, vec![request.clone()]);
        let second = run(&mut llm, vec![request]);
        assert_eq!(cached(&second[0]), expected, "{pooling:?}");
        assert_eq!(embedding(&first[0]), embedding(&second[0]));
    }
}

#[test]
fn an_embedding_with_an_output_is_refused() {
    let mut engine = Engine::load(&crate::common::config(16), &|_, _| {}).unwrap();
    let embedding = GenerationParams::pooled(Pooling::Last);
    for params in [
        GenerationParams { n: 2, ..embedding.clone() },
        GenerationParams { max_tokens: Some(1), ..embedding.clone() },
        GenerationParams { max_tokens: None, ..embedding },
    ] {
        let refused = engine.submit(GenerationRequest { prompt: vec![5], params, ..Default::default() });
        assert!(matches!(refused, Err(SubmitError::Invalid { param: "pooling", .. })), "{refused:?}");
    }
}

#[test]
fn a_prompt_that_is_preempted_halfway_is_pooled_once() {
    // Two tokens of the prompt in each step beside a request that decodes, in a pool too small for both.
    let small = EngineConfig {
        policy: Policy::Priority,
        preemption_mode: PreemptionMode::Recompute,
        max_num_seqs: 2,
        max_num_batched_tokens: 3,
        ..config(7)
    };
    let embedded = |engine: &mut Engine| {
        let params = GenerationParams::pooled(Pooling::Mean);
        let request = GenerationRequest { prompt: prompt(1, 40), params, priority: 1, ..Default::default() };
        let id = engine.submit(request).unwrap();
        let mut embedding = None;
        while engine.has_work() {
            engine.step(|of, event| match event {
                TokenEvent::Embedding(found) if of == id => embedding = Some(found),
                _ => {}
            });
        }
        engine.audit().unwrap();
        embedding.unwrap()
    };
    let mut engine = Engine::load(&small, &|_, _| {}).unwrap();
    let want = embedded(&mut engine);
    engine.submit(common::request(2, 16, 30, 1)).unwrap();
    assert_eq!(embedded(&mut engine), want);
    assert!(engine.stats().scheduler.preemptions > 0, "the prompt was not preempted: the test shows nothing");
}

#[test]
fn a_bare_decoder_gives_embeddings_and_refuses_to_generate() {
    let (source, bare) = (testkit::reference::folder("qwen3"), tempfile::TempDir::new().unwrap());
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"] {
        std::fs::copy(source.join(file), bare.path().join(file)).unwrap();
    }
    let path = bare.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["architectures"] = serde_json::json!(["Qwen3Model"]);
    config["warp_factor"] = serde_json::json!(9);
    std::fs::write(&path, config.to_string()).unwrap();
    let config = EngineConfig { model: ModelSource::Folder(bare.path().into()), ..crate::common::config(64) };
    let engine = engine::AsyncEngine::start(config.clone(), &|_, _| {}).unwrap();
    let notes = engine.info().notes.join("\n");
    assert!(
        notes.contains("not read, but perhaps of effect: warp_factor") && notes.contains("no output layer"),
        "{notes}"
    );
    drop(engine);
    let mut llm = Llm::new(config.clone()).unwrap();
    for case in cases("qwen3") {
        let found = embedding(&run(&mut llm, vec![request(&case)])[0]);
        assert!(found.iter().zip(&case.expected).all(|(a, b)| (f64::from(*a) - b).abs() <= TOLERANCE));
    }
    let mut engine = Engine::load(&config, &|_, _| {}).unwrap();
    let refused = engine.submit(common::request(1, 4, 4, 1));
    assert!(matches!(&refused, Err(SubmitError::Invalid { param: "model", .. })), "{refused:?}");
}

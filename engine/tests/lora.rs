//! Requests with LoRA adapters: batching, the prefix cache, loading and unloading while the engine runs.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use engine::{
    AdapterError, AsyncEngine, Dtype, Engine, EngineConfig, Event, FinishReason, GenerationRequest, Llm, LoraConfig,
    Recording, RequestId, SubmitError, TokenEvent,
};
use models::{ModelConfig, ModelFiles};
use tempfile::TempDir;
use testkit::adapters::{Module, simple};

use crate::common::slow::slow;
use crate::common::{config, on_sim, overlapping, request, shared};
use crate::speculate::{Spy, speculating};

pub const LORA: LoraConfig = LoraConfig { max_loras: 2, max_lora_rank: 16, max_cpu_loras: None };

pub fn with_lora(blocks: u64, lora: LoraConfig) -> EngineConfig {
    EngineConfig { lora: Some(lora), ..config(blocks) }
}

fn modules() -> Vec<Module> {
    let folder = testkit::reference::folder("llama");
    let decoder = ModelConfig::load(&ModelFiles::open(&folder).unwrap()).unwrap().decoder;
    let linears = decoder.linears().filter(|linear| linear.adapters);
    linears.flat_map(|linear| linear.parts.iter().map(|part| (part.name.clone(), linear.inputs, part.rows))).collect()
}

/// Folders `a`, `b`, `c` and so on of adapters with different contents, and `copy` with those of `a`.
pub fn adapters() -> TempDir {
    let folder = TempDir::new().unwrap();
    let modules = modules();
    for (i, name) in ["a", "b", "c", "d"].into_iter().enumerate() {
        simple(&folder.path().join(name), &modules[i..], 1 + 5 * i, i as u64);
    }
    simple(&folder.path().join("copy"), &modules, 1, 0);
    folder
}

fn of(name: Option<&str>, request: GenerationRequest) -> GenerationRequest {
    GenerationRequest { adapter: name.map(str::to_string), ..request }
}

fn load(llm: &mut Llm, folder: &Path, names: &[&str]) {
    names.iter().for_each(|name| llm.load_adapter(name, &folder.join(name), false).unwrap());
}

/// Tokens of each request, and how many prompt tokens came from the cache.
fn run(llm: &mut Llm, requests: Vec<GenerationRequest>) -> Vec<(Vec<u32>, usize)> {
    let completions = llm.run_with_events(requests).unwrap();
    let cached = |events: &[Event]| {
        events
            .iter()
            .find_map(|event| if let Event::Started { cached_tokens } = event { Some(*cached_tokens) } else { None })
    };
    completions.into_iter().map(|(it, events)| (it.outputs[0].token_ids.clone(), cached(&events).unwrap())).collect()
}

#[test]
fn requests_of_more_adapters_than_run_at_once_get_the_tokens_that_each_gets_alone() {
    let folder = adapters();
    // Two in a step and two in memory, of four: the others are read again when their turn comes.
    let start = || {
        let mut llm = Llm::new(EngineConfig { threads: Some(2), ..with_lora(256, LORA) }).unwrap();
        load(&mut llm, folder.path(), &["a", "b", "c", "d"]);
        llm
    };
    let names = [Some("a"), None, Some("b"), Some("c"), Some("d"), Some("a"), None, Some("c")];
    let requests: Vec<GenerationRequest> =
        names.iter().zip(0..).map(|(name, i)| of(*name, request(i % 3, 11 + i as usize, 9, 1))).collect();
    let mut together = start();
    let found = run(&mut together, requests.clone());
    let (mut alone, mut plain) = (start(), Llm::new(config(256)).unwrap());
    for ((request, name), (found, _)) in requests.into_iter().zip(names).zip(found) {
        let without = run(&mut plain, vec![of(None, request.clone())]).remove(0).0;
        let want = run(&mut alone, vec![request]).remove(0).0;
        assert_eq!(found, want, "{name:?}");
        assert_eq!(found == without, name.is_none(), "{name:?}");
    }
}

#[test]
fn cached_prefixes_are_shared_by_contents_not_by_names() {
    let folder = adapters();
    let mut llm = Llm::new(with_lora(256, LORA)).unwrap();
    load(&mut llm, folder.path(), &["a", "b", "copy"]);
    let cached = |name: Option<&str>, llm: &mut Llm| run(llm, vec![of(name, request(1, 33, 4, 1))]).remove(0);
    let (tokens, none) = cached(Some("a"), &mut llm);
    assert_eq!(none, 0);
    // Neither the model as it is nor another adapter reads what this one wrote.
    assert_eq!(cached(None, &mut llm).1, 0);
    assert_eq!(cached(Some("b"), &mut llm).1, 0);
    // The same contents under another name.
    assert_eq!(cached(Some("copy"), &mut llm), (tokens.clone(), 32));
    // Other contents under the same name.
    llm.load_adapter("a", &folder.path().join("c"), true).unwrap();
    let (others, none) = cached(Some("a"), &mut llm);
    assert!(others != tokens && none == 0);
    llm.load_adapter("a", &folder.path().join("a"), true).unwrap();
    assert_eq!(cached(Some("a"), &mut llm), (tokens, 32));
    assert_eq!(cached(None, &mut llm).1, 32);
}

#[test]
fn names_that_are_taken_or_unknown_are_refused() {
    let folder = adapters();
    let mut llm = Llm::new(with_lora(64, LoraConfig { max_lora_rank: 8, ..LORA })).unwrap();
    load(&mut llm, folder.path(), &["a"]);
    let message = |result: Result<(), AdapterError>| result.unwrap_err().to_string();
    let path = folder.path().join("a");
    assert_eq!(message(llm.load_adapter("a", &path, false)), "The lora adapter 'a' has already been loaded.");
    assert!(message(llm.load_adapter("", &path, false)).contains("name of an adapter is empty"));
    assert!(message(llm.load_adapter("c", &folder.path().join("c"), false)).contains("found rank 11"));
    assert!(message(llm.load_adapter("x", &folder.path().join("x"), false)).contains("no such folder"));
    assert_eq!(message(llm.unload_adapter("x")), "The lora adapter 'x' cannot be found.");
    let info = llm.adapters().remove(0);
    assert_eq!((info.name.as_str(), info.path, info.rank, info.is_unloading), ("a", path.clone(), 1, false));
    llm.unload_adapter("a").unwrap();
    assert!(llm.adapters().is_empty());
    let refused = llm.run(vec![of(Some("a"), request(0, 5, 5, 1))]).unwrap_err();
    assert_eq!(refused, SubmitError::UnknownAdapter("a".to_string()));
    let mut plain = Llm::new(config(64)).unwrap();
    assert!(matches!(plain.load_adapter("a", &path, false), Err(AdapterError::Disabled)));
}

#[test]
fn an_unloaded_adapter_serves_its_requests_to_the_end_and_takes_no_new_ones() {
    let folder = adapters();
    let engine = AsyncEngine::start(slow(with_lora(64, LORA)), &|_, _| {}).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let path = |name: &str| -> PathBuf { folder.path().join(name) };
        engine.load_adapter("a", path("a"), false).await.unwrap();
        engine.load_adapter("b", path("b"), false).await.unwrap();
        let mut stream = engine.submit(of(Some("a"), request(0, 10, 60, 1))).await.unwrap();
        let mut unload = pin!(engine.unload_adapter("a"));
        assert!(tokio::time::timeout(Duration::from_millis(20), &mut unload).await.is_err(), "it did not wait");
        let infos = engine.adapters();
        assert_eq!(
            infos.iter().map(|it| (it.name.as_str(), it.is_unloading)).collect::<Vec<_>>(),
            [("a", true), ("b", false)]
        );
        let refused = engine.submit(of(Some("a"), request(0, 10, 5, 1))).await.err().unwrap();
        assert_eq!(refused, SubmitError::UnknownAdapter("a".to_string()));
        let refused = engine.load_adapter("a", path("a"), true).await.unwrap_err();
        assert!(refused.to_string().contains("is being unloaded"), "{refused}");
        let mut tokens = 0;
        while let Some(event) = stream.next().await {
            tokens += if let Event::Delta(delta) = event { delta.tokens.len() } else { 0 };
        }
        unload.await.unwrap();
        assert_eq!((tokens, engine.adapters().len()), (60, 1));
        assert!(matches!(engine.unload_adapter("a").await, Err(AdapterError::NotFound(_))));
        // Without requests it is gone at once, and the name is free.
        engine.unload_adapter("b").await.unwrap();
        engine.load_adapter("b", path("c"), false).await.unwrap();
    });
}

/// Runs requests to their ends. Returns for each in order its number of tokens, and its error.
fn ends(engine: &mut Engine, requests: Vec<GenerationRequest>) -> Vec<(usize, Option<String>)> {
    let ids: Vec<RequestId> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let mut found = vec![(0, None); ids.len()];
    while engine.has_work() {
        engine.step(|id, event| {
            let TokenEvent::Token { token, finish, .. } = event else { return };
            let found = &mut found[ids.iter().position(|it| *it == id).unwrap()];
            found.0 += usize::from(token.is_some());
            if let Some(FinishReason::Error(error)) = finish {
                found.1 = Some(error);
            }
        });
    }
    engine.audit().unwrap();
    found
}

#[test]
fn a_request_whose_adapter_can_no_longer_be_read_ends_alone() {
    let folder = adapters();
    let path = |name: &str| folder.path().join(name);
    let mut engine = Engine::load(&with_lora(64, LoraConfig { max_loras: 1, ..LORA }), &|_, _| {}).unwrap();
    engine.load_adapter("a", &path("a"), false).unwrap();
    // One is kept in memory: now the other.
    engine.load_adapter("b", &path("b"), false).unwrap();
    simple(&path("a"), &modules(), 3, 77);
    let requests = |names: &[Option<&str>]| names.iter().map(|name| of(*name, request(0, 9, 6, 1))).collect();
    let found = ends(&mut engine, requests(&[None, Some("a"), Some("b"), Some("a"), None]));
    let error = found[1].1.clone().unwrap();
    assert!(
        error.starts_with("the adapter \"a\" could not be read again: its files are gone or have changed"),
        "{error}"
    );
    assert!(!error.contains(folder.path().to_str().unwrap()), "{error}");
    let failed = (0, Some(error));
    assert_eq!(found, [(6, None), failed.clone(), (6, None), failed, (6, None)]);
    assert_eq!(engine.stats().failed_steps, 0);
    // The name serves again once it is loaded again.
    engine.load_adapter("a", &path("a"), true).unwrap();
    assert_eq!(ends(&mut engine, requests(&[Some("b"), Some("a"), None])), vec![(6, None); 3]);
}

#[test]
fn requests_keep_the_contents_that_an_adapter_had_and_loading_the_same_again_drops_nothing() {
    let folder = adapters();
    let path = |name: &str| folder.path().join(name);
    let mut llm = Llm::new(with_lora(64, LORA)).unwrap();
    llm.load_adapter("a", &path("a"), false).unwrap();
    let want = run(&mut llm, vec![of(Some("a"), request(0, 9, 6, 1))]).remove(0).0;
    let mut engine = Engine::load(&with_lora(64, LORA), &|_, _| {}).unwrap();
    for replace in [false, true] {
        engine.load_adapter("a", &path("a"), replace).unwrap();
    }
    // In memory, so nobody misses the files; nor does a request that was accepted before they were replaced.
    std::fs::remove_dir_all(path("a")).unwrap();
    let id = engine.submit(of(Some("a"), request(0, 9, 6, 1))).unwrap();
    engine.load_adapter("a", &path("b"), true).unwrap();
    let mut tokens = Vec::new();
    while engine.has_work() {
        engine.step(|of, event| {
            if let TokenEvent::Token { token, finish, .. } = event {
                assert!(of == id && !matches!(finish, Some(FinishReason::Error(_))), "{finish:?}");
                tokens.extend(token.map(|token| token.token));
            }
        });
    }
    assert_eq!(tokens, want);
}

#[test]
fn a_recording_with_adapters_is_replayed_by_a_worker_alone() {
    let folder = adapters();
    let file = folder.path().join("recording");
    let mut config = with_lora(256, LORA);
    config.record = Some(file.clone());
    let mut engine = Engine::load(&config, &|_, _| {}).unwrap();
    for name in ["a", "b", "c"] {
        engine.load_adapter(name, &folder.path().join(name), false).unwrap();
        engine.submit(of(Some(name), request(0, 9, 6, 1))).unwrap();
    }
    engine.submit(of(None, request(0, 9, 6, 1))).unwrap();
    while engine.has_work() {
        engine.step(|_, _| {});
    }
    engine.audit().unwrap();
    drop(engine);
    let replayed = Recording::open(&file).unwrap().replay(&|_, _| {}, |_| {}).unwrap();
    assert_eq!((replayed.difference, replayed.tokens), (None, 24));
}

/// Tokens of requests with and without adapters; more adapters than a step has take turns in its slots.
fn run_all(config: EngineConfig, folder: &Path) -> Vec<Vec<u32>> {
    let mut llm = shared::llm(config).unwrap();
    load(&mut llm, folder, &["a", "b", "c", "d"]);
    let names = [Some("a"), None, Some("b"), Some("c"), Some("d"), None];
    let requests = names.iter().zip(0..).map(|(name, i)| of(*name, request(i % 3, 7 + i as usize, 5, 1))).collect();
    run(&mut llm, requests).into_iter().map(|(tokens, _)| tokens).collect()
}

#[test]
fn adapters_on_cuda_sim_give_the_tokens_of_the_cpu_with_and_without_graphs_and_steps_planned_ahead() {
    let folder = adapters();
    let lora = Some(LORA);
    let want = run_all(EngineConfig { threads: Some(2), ..with_lora(256, LORA) }, folder.path());
    let Some(ahead) = overlapping(256) else { return };
    assert_eq!(run_all(EngineConfig { lora, ..ahead.clone() }, folder.path()), want);
    let eager = on_sim(EngineConfig { enforce_eager: true, lora, ..config(256) }).unwrap();
    assert_eq!(run_all(eager, folder.path()), want);
    // The device has memory for two adapters of the greatest rank in its type.
    let plan = |dtype| engine::plan(&EngineConfig { lora, dtype, ..ahead.clone() }).unwrap().adapter_bytes;
    let numbers: usize = modules().iter().map(|(_, inputs, outputs)| 16 * (inputs + outputs)).sum();
    let (wide, narrow) = (plan(Some(Dtype::F32)), plan(Some(Dtype::Bf16)));
    assert!(wide - narrow >= 2 * 2 * numbers as u64 && wide - narrow < 3 * 2 * numbers as u64);
}

#[test]
fn the_plan_counts_adapters_and_sizes_that_make_no_sense_are_refused() {
    let plan = |lora| engine::plan(&EngineConfig { lora, ..config(64) });
    let [without, with] = [None, Some(LORA)].map(|lora| plan(lora).unwrap());
    let numbers: usize = modules().iter().map(|(_, inputs, outputs)| 16 * (inputs + outputs)).sum();
    assert_eq!(without.adapter_bytes, 0);
    // Two in a step, two in memory, one that is read; padded to panels.
    assert!(with.adapter_bytes >= 5 * 4 * numbers as u64 && with.adapter_bytes < 6 * 4 * numbers as u64);
    assert!(with.step_bytes > without.step_bytes);
    assert!(with.to_string().contains("2 in a step and 2 in host memory, of rank 16 at most"));
    for (lora, said) in [
        (LoraConfig { max_loras: 0, ..LORA }, "--max-loras: found 0, expected 1 to"),
        (LoraConfig { max_lora_rank: 0, ..LORA }, "--max-lora-rank: found 0, expected 1 to"),
        (LoraConfig { max_cpu_loras: Some(1), ..LORA }, "--max-cpu-loras: found 1, expected 2 (--max-loras) to"),
    ] {
        let error = plan(Some(lora)).unwrap_err().to_string();
        assert!(error.starts_with(said), "{error}");
    }
}

#[test]
fn a_source_of_drafts_is_told_the_contents_of_the_adapter_of_each_request() {
    let folder = adapters();
    let spy = Spy::default();
    let mut engine = speculating(&with_lora(60, LORA), Box::new(spy.clone()), 2);
    for (id, name) in [Some("a"), Some("b"), Some("copy"), None].into_iter().enumerate() {
        if let Some(name) = name {
            engine.load_adapter(name, &folder.path().join(name), false).unwrap();
        }
        engine.submit(of(name, request(id as u32, 9, 4, 1))).unwrap();
        while engine.has_work() {
            engine.step(|_, _| {});
        }
    }
    let told = spy.0.lock().unwrap();
    let begun = told.iter().filter(|(_, _, prompt)| !prompt.is_empty());
    let [a, b, copy, none] = &begun.map(|(_, source, _)| source.adapter.clone()).collect::<Vec<_>>()[..] else {
        panic!()
    };
    assert!(a.is_some() && b.is_some() && a != b && a == copy && none.is_none(), "{told:?}");
}

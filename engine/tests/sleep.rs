//! An engine that sleeps has given its memory back, and has the bits of before when it wakes.

use std::future::Future;

use crate::common::slow::slow;
use crate::common::{config, opened, overlapping, request};
use engine::{AsyncEngine, Delta, EngineConfig, Event, LoadOn, LoraConfig, SleepError, SleepLevel, SubmitError};

const LEVELS: [SleepLevel; 3] = [SleepLevel::Pause, SleepLevel::Cache, SleepLevel::CacheAndWeights];

fn wait<T>(task: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(task)
}

/// Everything that requests return: tokens and their log-probabilities.
fn answers(engine: &AsyncEngine) -> Vec<Delta> {
    let one = |which| {
        let mut stream = wait(engine.submit(request(which, 20, 12, 2))).unwrap();
        let mut deltas: Vec<Delta> = Vec::new();
        while let Some(event) = stream.next_blocking() {
            if let Event::Delta(delta) = event {
                match deltas.iter_mut().find(|whole| whole.index == delta.index) {
                    Some(whole) => whole.extend(delta),
                    None => deltas.push(delta),
                }
            }
        }
        deltas.sort_by_key(|delta| delta.index);
        deltas
    };
    (0..3).flat_map(one).collect()
}

fn check_bits(config: &EngineConfig, levels: &[SleepLevel]) {
    let engine = AsyncEngine::start(config.clone(), &|_, _| {}).unwrap();
    let before = answers(&engine);
    assert!(before.iter().all(|delta| delta.tokens.len() == 12));
    for &level in levels {
        assert_eq!((wait(engine.sleep(level, false)), engine.sleeping()), (Ok(()), Some(level)));
        assert_eq!(wait(engine.submit(request(1, 5, 2, 1))).err(), Some(SubmitError::Asleep));
        // Again, and deeper, and woken twice.
        assert_eq!(wait(engine.sleep(level, false)), Ok(()));
        assert_eq!((wait(engine.wake()), wait(engine.wake()), engine.sleeping()), (Ok(()), Ok(()), None));
        assert_eq!(answers(&engine), before, "{level:?}");
        assert!(engine.stats().scheduler.blocks_in_use == 0);
    }
}

#[test]
fn an_engine_that_slept_has_the_bits_of_before_at_every_level() {
    check_bits(&config(64), &LEVELS);
    check_bits(&EngineConfig { kv_offloading_bytes: 1 << 20, ..config(24) }, &LEVELS);
    // From one level to a deeper one.
    let engine = AsyncEngine::start(config(64), &|_, _| {}).unwrap();
    let before = answers(&engine);
    for level in LEVELS {
        assert_eq!((wait(engine.sleep(level, false)), engine.sleeping()), (Ok(()), Some(level)));
    }
    assert_eq!(wait(engine.sleep(SleepLevel::Cache, false)), Ok(()));
    assert_eq!(engine.sleeping(), Some(SleepLevel::CacheAndWeights), "a deeper sleep includes the other");
    assert_eq!(wait(engine.wake()), Ok(()));
    assert_eq!(answers(&engine), before);
}

#[test]
fn an_engine_that_slept_on_cuda_sim_has_the_bits_of_before() {
    let Some(graphs) = overlapping(64) else { return };
    let eager = EngineConfig { enforce_eager: true, ..graphs.clone() };
    check_bits(&eager, &[SleepLevel::Cache]);
    // Graphs contain the addresses of the cache, and go with the worker.
    check_bits(&graphs, &[SleepLevel::CacheAndWeights]);
    let engine = AsyncEngine::start(graphs, &|_, _| {}).unwrap();
    let before = answers(&engine);
    assert!(
        matches!(wait(engine.sleep(SleepLevel::Cache, false)), Err(SleepError::Unsupported(why)) if why.contains("graphs"))
    );
    assert_eq!((engine.sleeping(), answers(&engine)), (None, before), "a refused sleep changes nothing");
}

#[test]
fn a_sleeping_engine_has_given_its_memory_back() {
    let Some(config) = overlapping(64) else { return };
    let config = EngineConfig { enforce_eager: true, ..config };
    let options = device::Options { deterministic: config.deterministic, ..Default::default() };
    let device = opened::open(options).unwrap();
    let loaded = engine::load(&config, LoadOn::Device(device.clone()), &|_, _| {}).unwrap();
    let engine = AsyncEngine::run(&config, loaded).unwrap();
    let plan = engine::plan(&config).unwrap();
    let cache = plan.kv_bytes_per_token * plan.pool_tokens() as u64;
    let awake = device.allocated().unwrap();
    assert_eq!(wait(engine.sleep(SleepLevel::Pause, false)), Ok(()));
    assert_eq!(device.allocated(), Some(awake));
    assert_eq!(wait(engine.sleep(SleepLevel::Cache, false)), Ok(()));
    let left = device.allocated().unwrap();
    // A byte for each buffer is left.
    assert!(left >= awake - cache && left < awake - cache + 64, "{awake} - {cache}: {left}");
    assert_eq!(wait(engine.wake()), Ok(()));
    assert_eq!(device.allocated(), Some(awake));
    assert_eq!(wait(engine.sleep(SleepLevel::CacheAndWeights, false)), Ok(()));
    assert!(device.allocated().unwrap() < left, "the weights are gone too");
}

#[test]
fn unfinished_requests_are_ended_or_keep_the_engine_awake() {
    let engine = AsyncEngine::start(slow(config(64)), &|_, _| {}).unwrap();
    let mut stream = wait(engine.submit(request(1, 10, 300, 1))).unwrap();
    assert!(matches!(stream.next_blocking(), Some(Event::Started { .. })));
    assert_eq!(wait(engine.sleep(SleepLevel::Cache, false)), Err(SleepError::Busy(1)));
    assert!(stream.next_blocking().is_some(), "it goes on");
    assert_eq!(wait(engine.sleep(SleepLevel::Cache, true)), Ok(()));
    while let Some(event) = stream.next_blocking() {
        assert!(!matches!(event, Event::Delta(Delta { finish: Some(_), .. })), "it has not ended");
    }
    assert_eq!((engine.num_unfinished(), wait(engine.wake())), (0, Ok(())));
    assert_eq!(answers(&engine).len(), 6);
}

#[test]
fn a_level_that_a_configuration_excludes_is_refused_with_the_reason() {
    let lora = Some(LoraConfig { max_loras: 1, max_lora_rank: 8, max_cpu_loras: None });
    let engine = AsyncEngine::start(EngineConfig { lora, ..config(64) }, &|_, _| {}).unwrap();
    let refused = wait(engine.sleep(SleepLevel::CacheAndWeights, false)).unwrap_err().to_string();
    assert!(refused.contains("LoRA adapters") && refused.contains("use level 1"), "{refused}");
    assert_eq!((wait(engine.sleep(SleepLevel::Cache, false)), wait(engine.wake())), (Ok(()), Ok(())));
    assert_eq!(answers(&engine).len(), 6);
    engine.shutdown();
    assert!(matches!(wait(engine.sleep(SleepLevel::Cache, false)), Err(SleepError::Closed)));
}

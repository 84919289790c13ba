//! Shared by the engine's tests: a tiny reference model and requests to it.

#![allow(clippy::unwrap_used, dead_code)]

pub mod cases;
pub mod faulty;
#[path = "../../../device/tests/support/hooked.rs"]
pub mod hooked;
pub mod noop;
#[path = "../../../device/tests/support/opened.rs"]
pub mod opened;
pub mod shared;
pub mod slow;
pub mod workers;

use std::sync::Arc;

use device::Device;
use engine::{
    Engine, EngineConfig, EngineParts, GenerationParams, GenerationRequest, Llm, LoadOn, ModelSource, SamplingParams,
};
use serde_json::Value;
use tempfile::TempDir;
use testkit::kernels::host::device_for_tests;
use testkit::model::{Shape, write};

/// The `llama` reference case: 3 layers, 560 tokens, context 512.
pub fn model() -> ModelSource {
    ModelSource::Folder(testkit::workspace::root().join("models/tests/reference/llama"))
}

/// A checkpoint of random weights, with more keys in its `config.json`.
pub fn checkpoint(shape: &Shape, more: &Value) -> TempDir {
    let folder = TempDir::new().unwrap();
    write(shape, folder.path(), 7).unwrap();
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    std::fs::write(path, config.to_string()).unwrap();
    folder
}

/// Tokens of [`model`].
pub const VOCABULARY: usize = 560;

/// Bytes of cache of one token of [`model`]: keys and values, 3 layers, 2 heads of 32, float32.
pub const TOKEN_BYTES: u64 = 2 * 3 * 2 * 32 * 4;

/// An engine of `blocks` blocks of 8 tokens.
pub fn config(blocks: u64) -> EngineConfig {
    EngineConfig {
        model: model(),
        block_size: Some(8),
        kv_cache_memory_bytes: Some(blocks * 8 * TOKEN_BYTES),
        max_num_seqs: 16,
        max_num_batched_tokens: 64,
        threads: Some(1),
        seed: Some(1),
        ..Default::default()
    }
}

/// The parts of an engine on a device.
pub fn parts_on(config: &EngineConfig, device: Arc<dyn Device>) -> EngineParts {
    engine::load(config, LoadOn::Device(device), &|_, _| {}).unwrap().parts
}

/// An engine on a device.
pub fn engine_on(config: &EngineConfig, device: Arc<dyn Device>) -> Engine {
    Engine::new(parts_on(config, device)).unwrap()
}

/// The same on the device that launches kernels in tests, with bits that do not depend on the batch. `None`, reported, where there is
/// no compiler.
pub fn on_sim(config: EngineConfig) -> Option<EngineConfig> {
    let kernels_dir = Some(opened::kernels()?);
    Some(EngineConfig { device: device_for_tests().into(), kernels_dir, deterministic: true, ..config })
}

/// `blocks` blocks of 8 tokens on that device, where a step is planned while the one before it runs, and a swap space as large.
/// `None`, reported, where there is no compiler.
pub fn overlapping(blocks: u64) -> Option<EngineConfig> {
    let config = config(blocks);
    on_sim(EngineConfig {
        swap_space_bytes: config.kv_cache_memory_bytes.unwrap(),
        max_model_len: Some(64),
        max_num_seqs: 12,
        max_num_batched_tokens: 48,
        ..config
    })
}

/// `len` tokens that differ from prompt to prompt.
pub fn prompt(which: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 3 + (which * 131 + i * 17 + i * i * which) % 550).collect()
}

/// A sampled request of exactly `max_tokens` tokens.
pub fn request(which: u32, len: usize, max_tokens: usize, n: usize) -> GenerationRequest {
    let sampling = SamplingParams { seed: Some(u64::from(which)), logprobs: Some(2), ..Default::default() };
    let params = GenerationParams { sampling, max_tokens: Some(max_tokens), ignore_eos: true, n, ..Default::default() };
    GenerationRequest { prompt: prompt(which, len), params, ..Default::default() }
}

/// The token ids of each request's sequences when it runs alone in a large pool.
pub fn alone(requests: &[GenerationRequest]) -> Vec<Vec<Vec<u32>>> {
    alone_on(config(256), requests)
}

/// The same under that configuration.
pub fn alone_on(config: EngineConfig, requests: &[GenerationRequest]) -> Vec<Vec<Vec<u32>>> {
    let mut llm = shared::llm(config).unwrap();
    requests.iter().map(|request| tokens(&mut llm, vec![request.clone()]).remove(0)).collect()
}

/// Token ids of each request's sequences.
pub fn tokens(llm: &mut Llm, requests: Vec<GenerationRequest>) -> Vec<Vec<Vec<u32>>> {
    let completions = llm.run(requests).unwrap();
    completions.into_iter().map(|c| c.outputs.into_iter().map(|o| o.token_ids).collect()).collect()
}

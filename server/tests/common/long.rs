//! An engine for long answers that takes no time for the model: its device computes nothing. The benchmark of a token uses this file
//! too.

use std::sync::Arc;

use device::Device;
use engine::{AsyncEngine, EngineConfig, LoadOn, ModelSource};
use serde_json::{Value, json};
use tempfile::TempDir;

#[path = "../../../engine/tests/common/noop.rs"]
#[allow(dead_code)]
pub mod noop;

// What the module `noop` finds in the tests of the engine.
const VOCABULARY: usize = 0;
const TOKEN_BYTES: u64 = 0;
fn model() -> ModelSource {
    ModelSource::Demo
}

/// Starts an engine whose context has `context` tokens. Every token that it draws is `<|bos|>`.
pub fn start(device: Arc<dyn Device>, context: usize, sequences: usize) -> AsyncEngine {
    let (_folder, config) = configure(context, sequences);
    AsyncEngine::run(&config, engine::load(&config, LoadOn::Device(device), &|_, _| {}).unwrap()).unwrap()
}

/// The configuration of [`start`], and the folder of its model.
pub fn configure(context: usize, sequences: usize) -> (TempDir, EngineConfig) {
    let (folder, demo) = (TempDir::new().unwrap(), testkit::workspace::root().join("models/demo"));
    for name in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(demo.join(name), folder.path().join(name)).unwrap();
    }
    let mut config: Value = serde_json::from_slice(&std::fs::read(demo.join("config.json")).unwrap()).unwrap();
    config["max_position_embeddings"] = json!(context);
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let config = EngineConfig {
        model: ModelSource::Folder(folder.path().to_path_buf()),
        kv_cache_memory_bytes: Some((sequences * context) as u64 * 2 * 5 * 2 * 32 * 4),
        max_num_seqs: sequences,
        max_unread_events: 2 * context,
        threads: Some(1),
        dtype: Some(engine::Dtype::F32),
        ..EngineConfig::default()
    };
    (folder, config)
}

/// Fields of a request that shows each of `length` tokens.
pub fn request(length: usize, more: Value) -> Value {
    let mut body = json!({"max_tokens": length, "ignore_eos": true, "skip_special_tokens": false, "stream": true, "temperature": 1.0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

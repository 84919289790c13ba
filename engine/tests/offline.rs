//! The library's front door, as it stands in `examples/`, and with a GGUF file that has nothing beside it.

use engine::{EngineConfig, GenerationParams, Llm, ModelSource, SamplingParams};
use serde_json::Value;

#[path = "../examples/offline.rs"]
mod example;

#[test]
fn the_offline_example_runs() -> Result<(), Box<dyn std::error::Error>> {
    example::main()
}

#[test]
fn a_gguf_file_alone_completes_texts_as_the_reference_does() {
    let folder = testkit::workspace::root().join("models/tests/gguf/reference/gguf-llama-spm-q2_k");
    let expected: Value = serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let alone = tempfile::TempDir::new().unwrap();
    let path = alone.path().join("model.gguf");
    std::fs::copy(folder.join(expected["model_file"].as_str().unwrap()), &path).unwrap();
    let config = EngineConfig {
        model: ModelSource::Folder(path),
        kv_cache_memory_bytes: Some(1 << 20),
        threads: Some(2),
        ..Default::default()
    };
    let mut llm = Llm::new(config).unwrap();
    let prompts: Vec<&Value> =
        expected["prompts"].as_array().unwrap().iter().filter(|prompt| prompt["add_special_tokens"] == true).collect();
    assert!(prompts.len() > 1);
    let texts: Vec<&str> = prompts.iter().map(|prompt| prompt["text"].as_str().unwrap()).collect();
    let sampling = SamplingParams { temperature: 0.0, ..Default::default() };
    let params = GenerationParams { sampling, max_tokens: Some(48), ignore_eos: true, ..Default::default() };
    let completions = llm.generate(&texts, &params).unwrap();
    for (prompt, completion) in prompts.iter().zip(completions) {
        let want: Vec<u32> = serde_json::from_value(prompt["greedy"]["ids"].clone()).unwrap();
        assert_eq!(completion.outputs[0].token_ids, want);
        assert!(!completion.outputs[0].text.is_empty());
    }
}

//! Whole models on the CUDA path, every launch run by `cuda-sim`: the reference cases, token by token.

#![allow(clippy::unwrap_used)]

use engine::{EngineConfig, GenerationParams, GenerationRequest, Llm, ModelSource, SamplingParams};
use std::path::PathBuf;

#[test]
fn try_it() {
    let folder = xtask::kernels::host::folder_for_tests().unwrap();
    for case in ["llama", "llama31-rope", "mistral-sliding", "qwen2", "qwen3"] {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tests/reference").join(case);
        let expected: serde_json::Value = serde_json::from_slice(&std::fs::read(path.join("expected.json")).unwrap()).unwrap();
        let config = EngineConfig {
            model: ModelSource::Folder(path),
            device: "cuda-sim".into(),
            kernels_dir: Some(folder.clone()),
            max_num_batched_tokens: 64,
            max_num_seqs: 8,
            kv_cache_memory_bytes: Some(4 << 20),
            threads: Some(1),
            ..Default::default()
        };
        let mut llm = Llm::new(config).unwrap();
        let start = std::time::Instant::now();
        let p = &expected["prompts"][0];
        let ids: Vec<u32> = serde_json::from_value(p["ids"].clone()).unwrap();
        let want: Vec<u32> = serde_json::from_value(p["greedy"]["ids"].clone()).unwrap();
        let sampling = SamplingParams { temperature: 0.0, logprobs: Some(5), ..Default::default() };
        let params = GenerationParams { sampling, max_tokens: Some(48), ignore_eos: true, ..Default::default() };
        let got = llm.run(vec![GenerationRequest { prompt: ids.clone(), params, ..Default::default() }]).unwrap();
        println!("{case} {} tokens prompt, {:?}", ids.len(), start.elapsed());
        assert_eq!(got[0].outputs[0].token_ids, want, "{case} {:?}", got[0].outputs[0].finish_reason);
    }
}

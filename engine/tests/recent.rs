//! Prefix hits, forks, preemption, chunks and drafts change no token of models whose layers combine memories in other ways than the
//! reference cases of `reference.rs`: states beside keys in each layer, keys of other layers, index keys, keys of two widths.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use engine::{EngineConfig, GenerationRequest, Llm, ModelSource, PreemptionMode};
use models::{ModelConfig, ModelFiles};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::reference::folder;

use crate::common::{on_sim, tokens};
use crate::recurrent::request;

/// A checkpoint of this configuration with weights that depend on their places alone.
fn made(config: &Value) -> TempDir {
    let made = TempDir::new().unwrap();
    std::fs::write(made.path().join("config.json"), config.to_string()).unwrap();
    let decoder = ModelConfig::load(&ModelFiles::open(made.path()).unwrap()).unwrap().decoder;
    let (mut header, mut data, mut state) = (serde_json::Map::new(), Vec::new(), 1u64);
    for (name, shape) in decoder.tensors().collect::<BTreeSet<_>>() {
        let start = data.len();
        let inputs = *shape.last().unwrap() as f32;
        let (centre, spread) = if name.contains("norm") { (1.0, 0.3) } else { (0.0, (3.0 / inputs).sqrt().min(0.8)) };
        for _ in 0..shape.iter().product() {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            let random = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            data.extend_from_slice(&(centre + spread * random).to_le_bytes());
        }
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]}));
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(made.path().join("model.safetensors"), file).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(folder("deepseek-v32").join(name), made.path().join(name)).unwrap();
    }
    made
}

/// Mamba-2 and attention in each layer.
fn falcon_h1() -> TempDir {
    made(
        &json!({"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "vocab_size": 416, "hidden_size": 48,
        "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2,
        "max_position_embeddings": 512, "key_multiplier": 0.6, "ssm_multipliers": [0.7, 0.6, 1.4, 0.5, 1.7],
        "mlp_multipliers": [0.9, 0.6], "attention_in_multiplier": 0.8, "embedding_multiplier": 2.0, "eos_token_id": 2}),
    )
}

/// Delta nets with a decay of each channel, beside a latent without positions.
fn kimi_linear() -> TempDir {
    made(&json!({"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 416,
        "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "mla_use_nope": true, "num_experts": 5, "num_experts_per_token": 2, "moe_intermediate_size": 20,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.4,
        "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 8, "num_heads": 3,
            "short_conv_kernel_size": 4}, "model_max_length": 512, "eos_token_id": 2}))
}

/// Windows with sinks, and values narrower than keys.
fn mimo() -> TempDir {
    made(&json!({"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "vocab_size": 416,
        "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 16, "partial_rotary_factor": 0.334, "sliding_window": 20,
        "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "n_routed_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 20, "max_position_embeddings": 512, "eos_token_id": 2}))
}

fn config(folder: &Path, bytes: u64) -> EngineConfig {
    EngineConfig {
        dtype: Some(engine::Dtype::F32),
        model: ModelSource::Folder(folder.to_path_buf()),
        kv_cache_memory_bytes: Some(bytes),
        max_num_seqs: 8,
        max_num_batched_tokens: 48,
        max_model_len: Some(128),
        threads: Some(1),
        seed: Some(1),
        ..Default::default()
    }
}

/// Forks and single texts, with prefixes in common; longer than windows and choices of tokens.
fn requests() -> Vec<GenerationRequest> {
    [(1, 30, 3), (2, 65, 2), (1, 90, 1), (3, 40, 2), (2, 80, 1)]
        .map(|(which, len, n)| request(which, len, 24, n))
        .to_vec()
}

const LARGE: u64 = 8 << 20;

/// The tokens of each request alone in a large pool without a prefix cache, and the bytes of a pool that is too small for all of them
/// but not for any.
fn alone(large: &EngineConfig) -> (Vec<Vec<Vec<u32>>>, u64) {
    let mut llm = Llm::new(EngineConfig { enable_prefix_caching: false, ..large.clone() }).unwrap();
    let found = requests().into_iter().map(|request| tokens(&mut llm, vec![request]).remove(0)).collect();
    let blocks = engine::plan(large).unwrap().num_blocks as u64;
    let peak = llm.stats().scheduler.blocks_peak as u64;
    (found, (peak + peak / 3 + 1) * (large.kv_cache_memory_bytes.unwrap() / blocks))
}

fn check(folder: &Path) {
    let large = config(folder, LARGE);
    let (want, bytes) = alone(&large);
    let what = folder.display();
    assert!(want.iter().flatten().collect::<BTreeSet<_>>().len() > 6, "{what}: forks and prompts differ");
    // From the second round on prompts are in the cache.
    let mut llm = Llm::new(EngineConfig { max_num_batched_tokens: 37, ..large.clone() }).unwrap();
    for round in 0..2 {
        assert_eq!(tokens(&mut llm, requests()), want, "{what}: together, round {round}");
    }
    assert!(llm.stats().scheduler.prefix_hits > 0, "{what}");
    for (preemption_mode, swap_space_bytes) in [(PreemptionMode::Recompute, 0), (PreemptionMode::Swap, LARGE)] {
        let small = EngineConfig { preemption_mode, swap_space_bytes, ..config(folder, bytes) };
        let mut llm = Llm::new(small).unwrap();
        assert_eq!(tokens(&mut llm, requests()), want, "{what}: {preemption_mode:?}");
        let stats = llm.stats().scheduler;
        assert!(stats.preemptions > 0 && stats.kv_cache_usage() == 0.0, "{what}: {preemption_mode:?}, {stats:?}");
    }
    let speculative = r#"{"method": "suffix"}"#.parse().ok();
    let mut llm = Llm::new(EngineConfig { speculative, ..large }).unwrap();
    assert_eq!(tokens(&mut llm, requests()), want, "{what}: with drafts");
}

#[test]
fn states_beside_keys_keep_their_tokens() {
    check(falcon_h1().path());
}

#[test]
fn states_beside_latents_keep_their_tokens() {
    check(kimi_linear().path());
}

#[test]
fn keys_of_other_layers_and_index_keys_keep_their_tokens() {
    let folders: [PathBuf; 2] = ["gemma3n", "deepseek-v32"].map(folder);
    folders.iter().for_each(|folder| check(folder));
}

#[test]
fn keys_of_two_widths_keep_their_tokens() {
    check(mimo().path());
}

#[test]
fn states_beside_keys_and_latents_keep_their_tokens_on_cuda_sim() {
    for folder in [falcon_h1(), kimi_linear()] {
        let Some(large) = on_sim(config(folder.path(), LARGE)) else { return };
        let (want, bytes) = alone(&large);
        let mut llm = Llm::new(EngineConfig { kv_cache_memory_bytes: Some(bytes), ..large }).unwrap();
        assert_eq!(tokens(&mut llm, requests()), want);
        assert!(llm.stats().scheduler.preemptions > 0);
    }
}

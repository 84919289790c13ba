//! The reference checkpoints as they stand: configuration and weights. Tokenizers and templates: `text/tests/reference_texts.rs`.

use std::collections::BTreeSet;

use crate::common::{CASES, Copy, Opened, Summary, expected, files, folder, ids, list, summary, text};
use device::Dtype;
use models::decoder::{Heads, Rope, RopeScaling};
use models::{GenerationDefaults, ModelConfig, Weights};
use serde_json::Value;

fn rope(theta: f64, dims: usize, scaling: RopeScaling) -> Rope {
    Rope { theta, dims, interleaved: false, scaling }
}

#[test]
fn every_configuration_reads_as_it_is_meant() {
    let llama = Summary {
        architecture: "LlamaForCausalLM",
        vocab_size: 560,
        hidden_size: 64,
        intermediate_size: 128,
        heads: Heads { num_heads: 4, num_kv_heads: 2, head_dim: 32 },
        max_position_embeddings: 512,
        eps: 1e-5,
        rope: rope(10_000.0, 32, RopeScaling::None),
        tied: false,
        biases: [false; 3],
        head_norms: false,
        windows: vec![None; 3],
        eos_token_ids: vec![2],
    };
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 64.0,
    };
    let cases = [
        ("llama", llama.clone()),
        (
            "llama31-rope",
            Summary {
                vocab_size: 600,
                hidden_size: 128,
                intermediate_size: 192,
                rope: rope(500_000.0, 32, llama3),
                windows: vec![None; 2],
                eos_token_ids: vec![593, 597, 598],
                ..llama.clone()
            },
        ),
        (
            "mistral-sliding",
            Summary {
                architecture: "MistralForCausalLM",
                vocab_size: 576,
                intermediate_size: 144,
                heads: Heads { num_kv_heads: 1, ..llama.heads },
                windows: vec![Some(32); 3],
                ..llama.clone()
            },
        ),
        (
            "qwen2",
            Summary {
                architecture: "Qwen2ForCausalLM",
                vocab_size: 608,
                hidden_size: 96,
                heads: Heads { num_heads: 3, num_kv_heads: 1, head_dim: 32 },
                eps: 1e-6,
                rope: rope(1_000_000.0, 32, RopeScaling::None),
                tied: true,
                biases: [true, false, false],
                eos_token_ids: vec![587],
                ..llama.clone()
            },
        ),
        (
            "qwen3",
            Summary {
                architecture: "Qwen3ForCausalLM",
                vocab_size: 590,
                heads: Heads { num_heads: 2, num_kv_heads: 1, head_dim: 64 },
                eps: 1e-6,
                rope: rope(1_000_000.0, 64, RopeScaling::None),
                tied: true,
                head_norms: true,
                eos_token_ids: vec![585],
                ..llama
            },
        ),
    ];
    for (case, want) in cases {
        assert_eq!(summary(&ModelConfig::load(&files(case)).unwrap()), want, "{case}");
    }
}

#[test]
fn sampling_defaults_are_those_of_the_generation_config() {
    let files = files("qwen2");
    let defaults = GenerationDefaults::load(&files, &ModelConfig::load(&files).unwrap().eos_token_ids).unwrap();
    let stated: Value = files.read_json("generation_config.json").unwrap();
    assert_eq!(defaults.repetition_penalty, Some(1.05));
    assert_eq!(defaults.temperature, Some(0.7));
    assert_eq!(defaults.top_p.map(f64::from).map(|p| (p * 1e6).round() / 1e6), stated["top_p"].as_f64());
    assert_eq!(defaults.top_k.map(u64::from), stated["top_k"].as_u64());
    assert_eq!((defaults.min_p, defaults.max_new_tokens), (None, None));
}

/// What the architecture reads, by name and shape.
fn tensors_of(of: &Summary) -> Vec<(String, Vec<usize>)> {
    let Summary { vocab_size, hidden_size, intermediate_size, heads, .. } = *of;
    let (q, kv) = (heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim);
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_string(), vec![vocab_size, hidden_size]),
        ("model.norm.weight".to_string(), vec![hidden_size]),
    ];
    if !of.tied {
        tensors.push(("lm_head.weight".to_string(), vec![vocab_size, hidden_size]));
    }
    for layer in 0..of.windows.len() {
        let mut add =
            |name: &str, shape: &[usize]| tensors.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        add("input_layernorm.weight", &[hidden_size]);
        add("post_attention_layernorm.weight", &[hidden_size]);
        for (name, rows) in [("q", q), ("k", kv), ("v", kv)] {
            add(&format!("self_attn.{name}_proj.weight"), &[rows, hidden_size]);
            if of.biases[0] {
                add(&format!("self_attn.{name}_proj.bias"), &[rows]);
            }
        }
        add("self_attn.o_proj.weight", &[hidden_size, q]);
        add("mlp.gate_proj.weight", &[intermediate_size, hidden_size]);
        add("mlp.up_proj.weight", &[intermediate_size, hidden_size]);
        add("mlp.down_proj.weight", &[hidden_size, intermediate_size]);
        if of.head_norms {
            add("self_attn.q_norm.weight", &[heads.head_dim]);
            add("self_attn.k_norm.weight", &[heads.head_dim]);
        }
    }
    tensors
}

/// Tensors that published files of a family keep in float32: the case, and the ends of their names.
const KEPT_IN_FLOAT32: [(&str, &[&str]); 5] = [
    ("deepseek-v32", &["e_score_correction_bias"]),
    ("lfm2-moe", &["expert_bias"]),
    ("granite4-hybrid", &[".A_log", ".D", ".dt_bias"]),
    ("nemotron-h", &[".A_log", ".D", ".dt_bias"]),
    ("jamba", &[".A_log", ".D"]),
];

#[test]
fn the_configuration_accounts_for_every_tensor_of_the_checkpoint() {
    for case in CASES {
        let files = files(case);
        let weights = Weights::open(&files).unwrap();
        let config = ModelConfig::load(&files).unwrap();
        // Parts of one tensor name it several times.
        let declared: BTreeSet<_> = config.decoder.tensors().collect();
        if ["llama", "llama31-rope", "mistral-sliding", "qwen2", "qwen3"].contains(&case) {
            assert_eq!(declared, tensors_of(&summary(&config)).into_iter().collect(), "{case}");
        }
        let stored = match text(&expected(case)["stored_dtype"]) {
            "float32" => Dtype::F32,
            "float16" => Dtype::F16,
            _ => Dtype::Bf16,
        };
        let (mut elements, mut read) = (0, BTreeSet::new());
        for (name, shape) in &declared {
            let view = weights.expect(name, shape).unwrap();
            let is_kept =
                KEPT_IN_FLOAT32.iter().any(|(of, ends)| *of == case && ends.iter().any(|end| name.ends_with(end)));
            assert_eq!(view.dtype, if is_kept { Dtype::F32 } else { stored }, "{case} {name}");
            let values = view.to_f32();
            assert_eq!(values.len(), shape.iter().product::<usize>(), "{case} {name}");
            assert!(
                values.iter().all(|value| value.is_finite()) && values.iter().any(|value| *value != 0.0),
                "{case} {name}"
            );
            elements += values.len() as u64;
            assert!(read.insert(view.name), "{case} {name} is declared twice");
        }
        assert_eq!(config.decoder.num_parameters(), elements, "{case}");
        // What is left are buffers, parts for images and sounds, and modules of layers without keys, that the reference put there to be ignored.
        for unused in weights.names().filter(|name| !read.contains(*name)) {
            let is_buffer = unused.ends_with("bias") || unused.ends_with("inv_freq");
            let other_parts = ["vision_model", "multi_modal_projector", "model.audio_tower", "model.embed_vision"];
            let is_of_images = other_parts.iter().any(|part| unused.starts_with(part));
            // The last two layers read the keys and values of others.
            let is_unshared = case == "gemma3n"
                && ["4", "5"].iter().any(|layer| unused.contains(&format!("layers.{layer}.self_attn.")))
                && ["k_proj", "v_proj", "k_norm"].iter().any(|module| unused.contains(module));
            assert!(is_buffer || is_of_images || is_unshared, "{case}: {unused}");
        }
    }
}

#[test]
fn the_kept_logits_are_one_row_per_prompt() {
    for case in CASES {
        let bytes = std::fs::read(folder(case).join("expected.safetensors")).unwrap();
        let logits = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let vocab_size = ModelConfig::load(&files(case)).unwrap().decoder.vocab_size();
        for prompt in list(&expected(case)["prompts"]) {
            assert_eq!(logits.tensor(text(&prompt["logits"])).unwrap().shape(), [1, vocab_size], "{case}");
        }
    }
}

#[test]
fn end_tokens_are_those_of_the_generation_config_or_else_of_the_config() {
    let of_config = [u32::MAX];
    for case in CASES {
        let defaults = GenerationDefaults::load(&files(case), &of_config).unwrap();
        assert_eq!(defaults.eos_token_ids, ids(&expected(case)["eos_token_ids"]), "{case}");
    }
    let without = Copy::of("qwen3").drop_key("generation_config.json", "eos_token_id");
    assert_eq!(GenerationDefaults::load(&without.files(), &of_config).unwrap().eos_token_ids, of_config);
}

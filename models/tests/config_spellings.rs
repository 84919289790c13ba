//! `config.json` in the spellings and shapes that checkpoints come in.

use crate::common::{Copy, Opened, Summary, message, summary};
use models::decoder::{Rope, RopeScaling};
use models::{GenerationDefaults, ModelConfig};
use serde_json::{Value, json};

const FILE: &str = "config.json";

/// The configuration of a case with some keys set.
fn with(case: &str, keys: Value) -> ModelConfig {
    ModelConfig::load(&Copy::of(case).set(FILE, keys).files()).unwrap()
}

fn without(case: &str, keys: &[&str]) -> Summary {
    let copy = keys.iter().fold(Copy::of(case), |copy, key| copy.drop_key(FILE, key));
    summary(&ModelConfig::load(&copy.files()).unwrap())
}

/// The configuration in a folder of its own.
fn published(config: &Value) -> Result<ModelConfig, models::LoadError> {
    let folder = tempfile::TempDir::new().unwrap();
    std::fs::write(folder.path().join(FILE), config.to_string()).unwrap();
    ModelConfig::load(&models::ModelFiles::open(folder.path()).unwrap())
}

#[test]
fn configurations_of_published_checkpoints_declare_as_many_weights_as_their_authors_state() {
    let glm5 = json!({"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144,
        "num_hidden_layers": 78, "intermediate_size": 12288, "moe_intermediate_size": 2048, "vocab_size": 154880,
        "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "indexer_rope_interleave": true, "head_dim": 64,
        "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "kv_lora_rank": 512,
        "q_lora_rank": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "hidden_act": "silu",
        "num_attention_heads": 64, "num_key_value_heads": 64, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"}, "rope_interleave": true,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "ep_size": 1,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "max_position_embeddings": 202752, "moe_layer_freq": 1});
    let slides: Vec<u8> = (0..48).map(|layer| u8::from(layer > 0 && (layer + 1) % 6 > 0)).collect();
    let sparse: Vec<u8> = (0..48).map(|layer| u8::from(layer > 0)).collect();
    let mimo = json!({"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "vocab_size": 152576,
        "hidden_size": 4096, "num_hidden_layers": 48, "max_position_embeddings": 262144, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128, "partial_rotary_factor": 0.334,
        "rope_theta": 5000000, "swa_rope_theta": 10000, "sliding_window": 128, "sliding_window_size": 128,
        "attention_chunk_size": 128, "hybrid_layer_pattern": slides, "moe_layer_freq": sparse,
        "add_swa_attention_sink_bias": true, "add_full_attention_sink_bias": false, "intermediate_size": 16384,
        "n_routed_experts": 256, "n_shared_experts": null, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "routed_scaling_factor": null, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
        "norm_topk_prob": true, "layernorm_epsilon": 1e-5, "attention_value_scale": 0.707, "hidden_act": "silu",
        "use_qk_norm": false});
    let full: Vec<u8> = vec![4, 8, 12, 16, 20, 24, 27];
    let delta: Vec<u8> = (1..28).filter(|layer| !full.contains(layer)).collect();
    let kimi = json!({"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_act": "silu",
        "head_dim": 72, "q_lora_rank": null, "mla_use_nope": true, "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": true, "moe_layer_freq": 1, "hidden_size": 2304,
        "num_hidden_layers": 27, "vocab_size": 163840, "rms_norm_eps": 1e-5, "num_attention_heads": 32,
        "num_key_value_heads": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
        "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446, "moe_renormalize": true,
        "first_k_dense_replace": 1, "intermediate_size": 9216, "rope_theta": 10000.0, "model_max_length": 1048576,
        "num_nextn_predict_layers": 0, "linear_attn_config": {"full_attn_layers": full, "kda_layers": delta,
            "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}});
    let ling = json!({"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "num_hidden_layers": 20,
        "num_nextn_predict_layers": 0, "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
        "moe_shared_expert_intermediate_size": 512, "num_shared_experts": 1, "num_experts": 256,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": true, "use_bias": false,
        "moe_router_enable_expert_bias": true, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
        "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
        "partial_rotary_factor": 0.5, "rotary_dim": 64, "use_qk_norm": true, "use_qkv_bias": false, "use_rmsnorm": true,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 600000,
        "vocab_size": 157184, "tie_word_embeddings": false});
    let stated = [
        ("GLM-5", &glm5, 744.0),
        ("MiMo-V2-Flash", &mimo, 309.0),
        ("Kimi-Linear", &kimi, 49.1),
        ("Ling-mini", &ling, 16.26),
    ];
    for (name, config, billions) in stated {
        let found = published(config).unwrap_or_else(|error| panic!("{name}: {error}"));
        let weights = found.decoder.num_parameters() as f64 / 1e9;
        assert!((weights / billions - 1.0).abs() < 0.003, "{name}: {weights}");
        assert!(found.unread.is_empty(), "{name}: {:?}", found.unread);
    }
    let mut later = ling.clone();
    later["kv_lora_rank"] = json!(512);
    message(published(&later), &["kv_lora_rank", "512", "latent and linear attention are not supported"]);
}

#[test]
fn the_newer_spelling_of_rope_equals_the_older_one() {
    for case in ["llama", "llama31-rope", "mistral-sliding", "qwen2", "qwen3", "phi3-longrope", "gpt-oss"] {
        let older = with(case, json!({}));
        let newer = Copy::of(case).edit(FILE, |config| {
            let config = config.as_object_mut().unwrap();
            let theta = config.shift_remove("rope_theta").unwrap();
            let mut parameters = match config.shift_remove("rope_scaling") {
                Some(Value::Object(scaling)) => scaling,
                _ => json!({"rope_type": "default"}).as_object().unwrap().clone(),
            };
            parameters.insert("rope_theta".into(), theta);
            config.insert("rope_parameters".into(), parameters.into());
            let dtype = config.shift_remove("torch_dtype").unwrap();
            config.insert("dtype".into(), dtype);
        });
        assert_eq!(ModelConfig::load(&newer.files()).unwrap(), older, "{case}");
    }
}

#[test]
fn the_newer_name_of_the_number_of_experts_equals_the_older_one() {
    for case in ["qwen3-moe", "qwen2-moe", "qwen3-next"] {
        let newer = Copy::of(case).edit(FILE, |config| {
            let config = config.as_object_mut().unwrap();
            let count = config.shift_remove("num_experts").unwrap();
            config.insert("num_local_experts".into(), count);
        });
        assert_eq!(ModelConfig::load(&newer.files()).unwrap(), with(case, json!({})), "{case}");
    }
}

#[test]
fn rope_is_read_in_each_of_its_forms() {
    let rope = |keys: Value| summary(&with("llama", keys)).rope;
    let linear = rope(json!({"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 5000}));
    assert_eq!((linear.theta, linear.scaling), (5000.0, RopeScaling::Linear { factor: 4.0 }));
    let linear = rope(json!({"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 7.0}}));
    assert_eq!((linear.theta, linear.scaling), (7.0, RopeScaling::Linear { factor: 2.5 }));
    let empty = rope(json!({"rope_scaling": {}, "rope_parameters": {"rope_theta": 3.0}}));
    assert_eq!((empty.theta, empty.scaling), (3.0, RopeScaling::None));
    assert_eq!(without("llama", &["rope_theta", "rope_scaling"]).rope.theta, 10_000.0);

    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
    let original = |keys: Value| match rope(keys).scaling {
        RopeScaling::Llama3 { original_max_position_embeddings, .. } => original_max_position_embeddings,
        other => panic!("{other:?}"),
    };
    assert_eq!(original(json!({"rope_scaling": llama3})), 512.0, "the model's own length");
    assert_eq!(original(json!({"rope_scaling": llama3, "original_max_position_embeddings": 96})), 96.0);
}

#[test]
fn heads_follow_from_the_width_where_they_are_not_stated() {
    let llama = without("llama", &["head_dim", "num_key_value_heads"]);
    assert_eq!((llama.heads.head_dim, llama.heads.num_kv_heads), (16, 4));
    let llama = summary(&with("llama", json!({"head_dim": null, "num_key_value_heads": 1})));
    assert_eq!((llama.heads.head_dim, llama.heads.num_kv_heads), (16, 1));
    assert_eq!(without("qwen3", &["head_dim"]).heads.head_dim, 128, "the default of transformers for Qwen3");
}

#[test]
fn biases_are_where_the_family_has_them() {
    let biases = |config: ModelConfig| summary(&config).biases;
    let all = json!({"attention_bias": true, "mlp_bias": true});
    assert_eq!(biases(with("llama", all.clone())), [true, true, true]);
    assert_eq!(biases(with("mistral-sliding", all.clone())), [false, false, false]);
    assert_eq!(biases(with("qwen2", all.clone())), [true, false, false]);
    assert_eq!(biases(with("qwen3", all)), [true, true, false]);
    assert_eq!(biases(with("qwen2", json!({"attention_bias": false}))), [true, false, false]);
}

#[test]
fn windows_are_where_the_family_has_them() {
    let windows = |case: &str, keys: Value| summary(&with(case, keys)).windows;
    let w = Some(32);
    assert_eq!(windows("mistral-sliding", json!({"sliding_window": null})), [None; 3]);
    assert_eq!(without("mistral-sliding", &["sliding_window"]).windows, [Some(4096); 3], "transformers' default");
    assert_eq!(windows("qwen2", json!({"use_sliding_window": true})), [None, w, w]);
    assert_eq!(windows("qwen2", json!({"use_sliding_window": true, "max_window_layers": 0})), [w; 3]);
    assert_eq!(windows("qwen2", json!({"use_sliding_window": true, "max_window_layers": 3})), [None; 3]);
    assert_eq!(windows("qwen2", json!({"use_sliding_window": true, "sliding_window": null})), [None; 3]);
    assert_eq!(windows("llama", json!({"sliding_window": 32})), [None; 3]);

    let types = json!(["sliding_attention", "full_attention", "sliding_attention"]);
    assert_eq!(windows("qwen2", json!({"use_sliding_window": true, "layer_types": types})), [w, None, w]);
    assert_eq!(
        windows("qwen3", json!({"layer_types": ["full_attention", "full_attention", "full_attention"]})),
        [None; 3]
    );
    let keys = json!({"use_sliding_window": true, "sliding_window": 32, "max_window_layers": 2});
    assert_eq!(windows("qwen3", keys), [None, None, w]);
}

#[test]
fn absent_keys_have_the_defaults_of_transformers() {
    let config = without("qwen2", &["tie_word_embeddings", "rms_norm_eps", "hidden_act", "use_sliding_window"]);
    assert!(!config.tied);
    assert_eq!((config.eps, config.windows), (1e-6, vec![None; 3]));
    assert!(with("llama", json!({"tie_word_embeddings": true})).decoder.is_tied());
    assert_eq!(with("llama", json!({"hidden_act": "swish"})), with("llama", json!({})));
}

#[test]
fn end_tokens_are_a_number_a_list_or_nothing() {
    let ids = |keys: Value| with("llama", keys).eos_token_ids;
    assert_eq!(ids(json!({"eos_token_id": 7})), [7]);
    assert_eq!(ids(json!({"eos_token_id": [7, 8]})), [7, 8]);
    assert_eq!(ids(json!({"eos_token_id": null})), [0u32; 0]);

    let defaults = |copy: Copy| {
        let files = copy.files();
        GenerationDefaults::load(&files, &ModelConfig::load(&files).unwrap().eos_token_ids).unwrap()
    };
    let copy = || Copy::of("llama31-rope");
    assert_eq!(defaults(copy().remove("generation_config.json")).eos_token_ids, [593, 597, 598]);
    assert_eq!(defaults(copy().drop_key("generation_config.json", "eos_token_id")).eos_token_ids, [593, 597, 598]);
    assert_eq!(defaults(copy().set("generation_config.json", json!({"eos_token_id": 5}))).eos_token_ids, [5]);
}

#[test]
fn sampling_defaults_of_a_checkpoint_are_read_and_checked() {
    let load = |keys: Value| {
        let files = Copy::of("llama").set("generation_config.json", keys);
        GenerationDefaults::load(&files.files(), &with("llama", json!({})).eos_token_ids)
    };
    let defaults =
        load(json!({"temperature": 0, "top_p": null, "top_k": -1, "min_p": 0.1, "max_new_tokens": 9})).unwrap();
    assert_eq!((defaults.temperature, defaults.top_p, defaults.top_k), (Some(0.0), None, Some(0)));
    assert_eq!((defaults.min_p, defaults.max_new_tokens, defaults.repetition_penalty), (Some(0.1), Some(9), None));
    for (key, value) in [
        ("temperature", json!(-0.1)),
        ("temperature", json!("hot")),
        ("top_p", json!(0)),
        ("top_p", json!(1.5)),
        ("top_k", json!(-2)),
        ("min_p", json!(2)),
        ("repetition_penalty", json!(0)),
        ("max_new_tokens", json!(0)),
        ("eos_token_id", json!("</s>")),
    ] {
        message(load(json!({ key: value })), &["generation_config.json", &format!("`{key}` is {value}"), "expected"]);
    }
}

#[test]
fn the_family_is_found_by_its_model_type_where_architectures_is_absent() {
    for (case, architecture) in [("llama", "LlamaForCausalLM"), ("qwen3", "Qwen3ForCausalLM")] {
        assert_eq!(without(case, &["architectures"]).architecture, architecture);
    }
}

#[test]
fn rope_frequencies_follow_the_formula_and_its_scalings() {
    let rope = |scaling| Rope { theta: 10_000.0, dims: 64, interleaved: false, scaling }.frequencies();
    let plain = Rope { theta: 10_000.0, dims: 8, interleaved: false, scaling: RopeScaling::None }.frequencies();
    assert_eq!(plain.len(), 4);
    for (found, want) in plain.iter().zip([1.0, 0.1, 0.01, 0.001]) {
        assert!((found - want).abs() < 1e-7);
    }
    let (plain, linear) = (rope(RopeScaling::None), rope(RopeScaling::Linear { factor: 4.0 }));
    assert!(plain.iter().zip(&linear).all(|(plain, linear)| (plain / 4.0 - linear).abs() < 1e-8));
    let llama3 = rope(RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 64.0,
    });
    let mut kinds = [0; 3];
    for (plain, scaled) in plain.iter().zip(&llama3) {
        // Short wavelengths are kept, long ones scaled in full, those between interpolated.
        let (wavelength, factor) = (std::f32::consts::TAU / plain, plain / scaled);
        let (kind, as_expected) = match wavelength {
            w if w < 16.0 => (0, (factor - 1.0).abs() < 1e-5),
            w if w > 64.0 => (1, (factor - 8.0).abs() < 1e-4),
            w => {
                let smooth = (64.0 / w - 1.0) / 3.0;
                (2, (1.0 / factor - ((1.0 - smooth) / 8.0 + smooth)).abs() < 1e-5 && factor > 1.0 && factor < 8.0)
            }
        };
        assert!(as_expected, "wavelength {wavelength}: factor {factor}");
        kinds[kind] += 1;
    }
    assert!(kinds.iter().all(|count| *count > 0), "{kinds:?}");
}

#[test]
fn names_in_the_tree_of_a_decoder_are_apart_from_what_follows() {
    let tree = |case: &str| with(case, json!({})).decoder.to_string();
    let latent = tree("deepseek-v2-lite");
    assert!(latent.contains("latent norm self_attn") || latent.contains("latent norm model"), "{latent}");
    let shared = tree("qwen2-moe");
    let line = shared.lines().find(|line| line.contains("shared ")).unwrap();
    assert!(line.contains("shared     ") && !line.contains("shared      "), "{line}");
}

//! The checkpoints of `converted.rs`: of each architecture with transforms, each option once on and once off.

use serde_json::{Value, json};

use super::converted::Case;
use super::converted_plain;
use super::made::{array_value, f32_value, text_value, u32_value};
use super::made_vocabulary::{floats, truth};

fn skeleton(class: &str, changes: Value) -> Value {
    let mut config = json!({
        "architectures": [class], "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false, "eos_token_id": [],
    });
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config
}

/// A list of u32.
pub fn list(numbers: &[u32]) -> Vec<u8> {
    array_value(4, numbers.len() as u64, &numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>())
}

pub fn truths(list: &[bool]) -> Vec<u8> {
    array_value(7, list.len() as u64, &list.iter().map(|truth| u8::from(*truth)).collect::<Vec<u8>>())
}

pub type Keys = Vec<(&'static str, Vec<u8>)>;

/// Keys with those of `more` in their place or besides.
pub fn replaced(keys: Keys, more: Keys) -> Keys {
    let others = keys.into_iter().filter(|(key, _)| more.iter().all(|(own, _)| own != key)).collect();
    [others, more].concat()
}

pub fn case(name: &'static str, architecture: &'static str, class: &str, changes: Value, keys: Keys) -> Case {
    Case { name, architecture, config: skeleton(class, changes), keys }
}

pub fn cases() -> Vec<Case> {
    [latent(), delta(), mamba(), gemma(), kimi(), encoders(), converted_plain::cases()].into_iter().flatten().collect()
}

/// DeepSeek V2 and V3.
fn latent() -> Vec<Case> {
    let (u, f) = (u32_value, f32_value);
    let sizes = json!({
        "head_dim": null, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
        "v_head_dim": 10, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    });
    let with = |changes: Value| {
        let mut sizes = sizes.clone();
        sizes.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        sizes
    };
    let keys = |more: Keys| -> Keys {
        let keys = vec![
            ("attention.head_count_kv", u(1)),
            ("attention.kv_lora_rank", u(16)),
            ("rope.dimension_count", u(8)),
            ("expert_feed_forward_length", u(24)),
            ("expert_count", u(4)),
            ("expert_used_count", u(2)),
            ("expert_shared_count", u(2)),
            ("leading_dense_block_count", u(1)),
            ("expert_weights_scale", f(1.5)),
        ];
        keys.into_iter().chain(more).collect()
    };
    let of_latents = |more: Keys| {
        let sizes = [("key_length", 24), ("value_length", 16), ("key_length_mla", 20), ("value_length_mla", 10)];
        let names = [
            "attention.key_length",
            "attention.value_length",
            "attention.key_length_mla",
            "attention.value_length_mla",
        ];
        keys(names.into_iter().zip(sizes.map(|(_, size)| u(size))).chain(more).collect())
    };
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.5, "mscale_all_dim": 0.5});
    let scaled = vec![
        ("rope.scaling.type", text_value("yarn")),
        ("rope.scaling.factor", f(4.0)),
        ("rope.scaling.original_context_length", u(16)),
        ("rope.scaling.yarn_log_multiplier", f(0.05)),
    ];
    let groups = |n: u32, top: u32| vec![("expert_group_count", u(n)), ("expert_group_used_count", u(top))];
    vec![
        case(
            "deepseek v3, narrow queries, yarn",
            "deepseek2",
            "DeepseekV3ForCausalLM",
            with(
                json!({"q_lora_rank": 12, "n_group": 2, "topk_group": 1, "norm_topk_prob": true, "rope_scaling": yarn}),
            ),
            of_latents(
                [
                    scaled,
                    groups(2, 1),
                    vec![
                        ("attention.q_lora_rank", u(12)),
                        ("expert_gating_func", u(2)),
                        ("expert_weights_norm", truth(true)),
                    ],
                ]
                .concat(),
            ),
        ),
        case(
            "deepseek v2, joint latents, older keys",
            "deepseek2",
            "DeepseekV2ForCausalLM",
            with(json!({"older": true, "tie_word_embeddings": true})),
            keys(vec![("attention.key_length", u(20)), ("attention.value_length", u(10))]),
        ),
        case(
            "deepseek v2, groups",
            "deepseek2",
            "DeepseekV2ForCausalLM",
            with(json!({"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1})),
            of_latents([groups(2, 1), vec![("expert_gating_func", u(1))]].concat()),
        ),
        case(
            "kimi k2, no stated groups, no renormalisation",
            "deepseek2",
            "DeepseekV3ForCausalLM",
            with(json!({"n_group": 1, "topk_group": 1, "norm_topk_prob": false, "n_shared_experts": 1})),
            replaced(of_latents(vec![]), vec![("expert_gating_func", u(2)), ("expert_shared_count", u(1))]),
        ),
    ]
}

fn kimi() -> Vec<Case> {
    let (u, f) = (u32_value, f32_value);
    let config = json!({
        "num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": null, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 10, "mla_use_nope": true, "num_experts": 4, "num_experts_per_token": 2,
        "moe_intermediate_size": 24, "num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
        "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 10, "num_heads": 4,
            "short_conv_kernel_size": 3},
    });
    let keys = vec![
        ("attention.head_count_kv", list(&[0, 1, 0])),
        ("attention.kv_lora_rank", u(16)),
        ("attention.key_length", u(24)),
        ("attention.key_length_mla", u(20)),
        ("attention.value_length_mla", u(10)),
        ("rope.dimension_count", u(8)),
        ("ssm.conv_kernel", u(3)),
        ("kda.head_dim", u(10)),
        ("expert_count", u(4)),
        ("expert_used_count", u(2)),
        ("expert_feed_forward_length", u(24)),
        ("expert_shared_count", u(1)),
        ("leading_dense_block_count", u(1)),
        ("expert_weights_scale", f(2.5)),
        ("expert_gating_func", u(2)),
    ];
    vec![case("kimi-linear", "kimi-linear", "KimiLinearForCausalLM", config, keys)]
}

fn encoders() -> Vec<Case> {
    let (u, f) = (u32_value, f32_value);
    let plain = json!({"rms_norm_eps": null, "rope_theta": null, "head_dim": null, "num_key_value_heads": null});
    let bert = with(&plain, json!({"layer_norm_eps": 1e-12, "type_vocab_size": 2}));
    let keys = |more: Keys| -> Keys {
        let keys = vec![("attention.layer_norm_epsilon", f(1e-12)), ("attention.causal", truth(false))];
        keys.into_iter().chain(more).collect()
    };
    let nomic = with(
        &plain,
        json!({"n_embd": 32, "n_inner": 40, "n_layer": 2, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 1e-12,
            "rotary_emb_base": 1000.0, "type_vocab_size": 2, "activation_function": "swiglu"}),
    );
    let modern = with(
        &plain,
        json!({"num_hidden_layers": 4, "norm_eps": 1e-5, "local_attention": 8, "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "hidden_activation": "gelu"}),
    );
    let labels = json!({"id2label": {"0": "relevant"}});
    vec![
        case("bert", "bert", "BertModel", bert.clone(), keys(vec![])),
        case(
            "a reranker",
            "bert",
            "BertForSequenceClassification",
            with(&bert, labels),
            keys(vec![
                ("pooling_type", u(4)),
                ("classifier.output_labels", super::made_vocabulary::strings(&["relevant"])),
            ]),
        ),
        case("nomic-bert", "nomic-bert", "NomicBertModel", nomic, keys(vec![("rope.freq_base", f(1000.0))])),
        case(
            "modern-bert",
            "modern-bert",
            "ModernBertModel",
            modern,
            vec![
                ("attention.layer_norm_epsilon", f(1e-5)),
                ("attention.causal", truth(false)),
                ("attention.sliding_window", u(8)),
                ("attention.sliding_window_pattern", u(3)),
                ("rope.freq_base", f(160000.0)),
                ("rope.freq_base_swa", f(10000.0)),
                ("hidden_activation", text_value("gelu")),
            ],
        ),
    ]
}

/// Qwen3-Next and Qwen3.5.
fn delta() -> Vec<Case> {
    let u = u32_value;
    let sizes = |heads: u64, more: Value| {
        let mut sizes = json!({
            "num_hidden_layers": 3, "full_attention_interval": 2, "partial_rotary_factor": 0.5, "linear_num_key_heads": 2,
            "linear_num_value_heads": heads, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
            "linear_conv_kernel_dim": 3,
        });
        sizes.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        sizes
    };
    let keys = |heads: u32, more: Keys| -> Keys {
        let keys = vec![
            ("ssm.conv_kernel", u(3)),
            ("ssm.state_size", u(6)),
            ("ssm.group_count", u(2)),
            ("ssm.time_step_rank", u(heads)),
            ("ssm.inner_size", u(10 * heads)),
            ("full_attention_interval", u(2)),
            ("rope.dimension_count", u(4)),
        ];
        keys.into_iter().chain(more).collect()
    };
    let experts = json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20, "num_nextn_predict_layers": 0});
    let expert_keys = vec![
        ("expert_count", u(4)),
        ("expert_used_count", u(2)),
        ("expert_feed_forward_length", u(12)),
        ("expert_shared_feed_forward_length", u(20)),
    ];
    vec![
        case(
            "qwen3-next",
            "qwen3next",
            "Qwen3NextForCausalLM",
            sizes(6, experts.clone()),
            keys(6, expert_keys.clone()),
        ),
        case(
            "qwen3.5, three value heads for each key head, biases",
            "qwen35",
            "Qwen3_5ForCausalLM",
            sizes(6, json!({"num_nextn_predict_layers": 0, "attention_bias": true, "tie_word_embeddings": true})),
            keys(6, vec![]),
        ),
        case(
            "qwen3.5, with a predictor",
            "qwen35",
            "Qwen3_5ForCausalLM",
            sizes(4, json!({"num_nextn_predict_layers": 1})),
            keys(4, vec![("nextn_predict_layers", u(1)), ("block_count", u(4))]),
        ),
        case(
            "qwen3.5, as many value heads",
            "qwen35",
            "Qwen3_5ForCausalLM",
            sizes(2, json!({"num_nextn_predict_layers": 0})),
            keys(2, vec![]),
        ),
        case("qwen3.5, experts", "qwen35moe", "Qwen3_5MoeForCausalLM", sizes(4, experts), keys(4, expert_keys)),
    ]
}

/// Granite 4, Nemotron-H, Jamba and Falcon-H1.
fn mamba() -> Vec<Case> {
    let (u, f) = (u32_value, f32_value);
    let granite = |more: Value| {
        let mut config = json!({
            "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 28,
            "attention_multiplier": 0.25, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 4.0,
            "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_d_conv": 3,
            "mamba_expand": 2, "mamba_conv_bias": true, "mamba_proj_bias": false, "position_embedding_type": "nope",
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    let scales = vec![
        ("attention.scale", f(0.25)),
        ("embedding_scale", f(2.0)),
        ("residual_scale", f(0.5)),
        ("logit_scale", f(4.0)),
    ];
    let states = |heads: u32, inner: u32| {
        vec![
            ("ssm.conv_kernel", u(3)),
            ("ssm.state_size", u(6)),
            ("ssm.group_count", u(2)),
            ("ssm.inner_size", u(inner)),
            ("ssm.time_step_rank", u(heads)),
        ]
    };
    let granite_keys = |more: Keys| {
        [scales.clone(), states(8, 64), vec![("attention.head_count_kv", list(&[0, 2, 0]))], more].concat()
    };
    let granite_experts = json!({"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12});
    let nemotron = |more: Value| {
        let mut config = json!({
            "hybrid_override_pattern": "M-*M", "num_hidden_layers": 4, "layer_norm_epsilon": 1e-5, "rms_norm_eps": null,
            "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6, "conv_kernel": 3,
            "use_conv_bias": true, "use_bias": false, "rope_theta": null,
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    let nemotron_keys = |heads: &[u32], widths: &[u32], more: Keys| {
        let lists = vec![("attention.head_count_kv", list(heads)), ("feed_forward_length", list(widths))];
        [states(6, 48), lists, vec![("attention.layer_norm_rms_epsilon", f(1e-5))], more].concat()
    };
    vec![
        case(
            "granite 4, no experts, no rope",
            "granitehybrid",
            "GraniteMoeHybridForCausalLM",
            granite(json!({})),
            granite_keys(vec![("rope.scaling.finetuned", truth(false)), ("feed_forward_length", u(28))]),
        ),
        case(
            "granite 4, experts, rope, biases",
            "granitehybrid",
            "GraniteMoeHybridForCausalLM",
            granite(json!({"position_embedding_type": "rope", "mamba_conv_bias": false, "attention_bias": true,
                "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12})),
            granite_keys(vec![
                ("rope.scaling.finetuned", truth(true)),
                ("expert_count", u(4)),
                ("expert_used_count", u(2)),
                ("expert_shared_feed_forward_length", u(28)),
            ]),
        ),
        case(
            "granite 3, experts and a shared network",
            "granitemoe",
            "GraniteMoeSharedForCausalLM",
            with(
                &granite_experts,
                json!({"shared_intermediate_size": 28, "attention_multiplier": 0.25, "tie_word_embeddings": true}),
            ),
            vec![
                ("attention.scale", f(0.25)),
                ("expert_count", u(4)),
                ("expert_used_count", u(2)),
                ("expert_shared_feed_forward_length", u(28)),
            ],
        ),
        case(
            "nemotron-h",
            "nemotron_h",
            "NemotronHForCausalLM",
            nemotron(json!({})),
            nemotron_keys(&[0, 0, 2, 0], &[0, 40, 0, 0], vec![]),
        ),
        case(
            "nemotron 3",
            "nemotron_h_moe",
            "NemotronHForCausalLM",
            nemotron(
                json!({"hybrid_override_pattern": "MEM*", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
                "moe_shared_expert_intermediate_size": 28, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": true,
                "n_group": 1, "topk_group": 1, "use_conv_bias": false}),
            ),
            nemotron_keys(
                &[0, 0, 0, 2],
                &[0, 20, 0, 0],
                vec![
                    ("expert_count", u(4)),
                    ("expert_used_count", u(2)),
                    ("expert_feed_forward_length", u(20)),
                    ("expert_shared_feed_forward_length", u(28)),
                    ("expert_shared_count", u(1)),
                    ("expert_weights_scale", f(2.5)),
                    ("expert_weights_norm", truth(true)),
                    ("expert_group_count", u(1)),
                ],
            ),
        ),
        case(
            "nemotron 3, narrow experts, with a predictor",
            "nemotron_h_moe",
            "NemotronHForCausalLM",
            nemotron(json!({"hybrid_override_pattern": "EM*", "num_hidden_layers": 3, "num_nextn_predict_layers": 1,
                "mtp_hybrid_override_pattern": "*E", "n_routed_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 20, "moe_latent_size": 12, "moe_shared_expert_intermediate_size": 28,
                "n_shared_experts": 1, "norm_topk_prob": true, "n_group": 1, "topk_group": 1, "use_conv_bias": false})),
            nemotron_keys(
                &[0, 0, 2, 2],
                &[20, 0, 0, 20],
                vec![
                    ("block_count", u(4)),
                    ("nextn_predict_layers", u(1)),
                    ("expert_count", u(4)),
                    ("expert_used_count", u(2)),
                    ("expert_feed_forward_length", u(20)),
                    ("expert_shared_feed_forward_length", u(28)),
                    ("expert_shared_count", u(1)),
                    ("expert_weights_norm", truth(true)),
                    ("expert_group_count", u(1)),
                    ("moe_latent_size", u(12)),
                ],
            ),
        ),
        case(
            "jamba, experts in some layers",
            "jamba",
            "JambaForCausalLM",
            json!({"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
                "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 6, "mamba_d_conv": 3,
                "mamba_expand": 2, "mamba_dt_rank": 5, "rope_theta": null, "head_dim": null}),
            vec![
                ("attention.head_count_kv", list(&[0, 2, 0, 0])),
                ("expert_count", u(4)),
                ("expert_used_count", u(2)),
                ("ssm.conv_kernel", u(3)),
                ("ssm.state_size", u(6)),
                ("ssm.inner_size", u(64)),
                ("ssm.time_step_rank", u(5)),
            ],
        ),
        case(
            "falcon-h1, with a norm",
            "falcon-h1",
            "FalconH1ForCausalLM",
            falcon(json!({"mamba_rms_norm": true})),
            [states(8, 64), vec![("attention.head_count_kv", u(2))]].concat(),
        ),
        case(
            "falcon-h1, biases",
            "falcon-h1",
            "FalconH1ForCausalLM",
            falcon(
                json!({"mamba_rms_norm": false, "mlp_bias": true, "projectors_bias": true, "attention_bias": true, "mamba_proj_bias": true,
                "mamba_conv_bias": false}),
            ),
            states(8, 64),
        ),
    ]
}

fn falcon(more: Value) -> Value {
    let config = json!({
        "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_d_conv": 3,
        "mamba_norm_before_gate": false, "mamba_conv_bias": true,
    });
    with(&config, more)
}

pub fn with(config: &Value, more: Value) -> Value {
    let mut config = config.clone();
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

/// Gemma 3n and 4.
fn gemma() -> Vec<Case> {
    let (u, f) = (u32_value, f32_value);
    let types = json!(["sliding_attention", "full_attention", "sliding_attention", "full_attention"]);
    let slides = truths(&[true, false, true, false]);
    let nano = json!({
        "num_hidden_layers": 4, "layer_types": types, "sliding_window": 5, "num_kv_shared_layers": 2, "tie_word_embeddings": true,
        "altup_num_inputs": 4, "altup_active_idx": 0, "laurel_rank": 6, "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 48, "intermediate_size": [40, 40, 44, 44], "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "final_logit_softcapping": 30.0, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    });
    let rope = json!({"full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}});
    let four = json!({
        "num_hidden_layers": 4, "layer_types": types, "sliding_window": 5, "num_kv_shared_layers": 0, "tie_word_embeddings": true,
        "global_head_dim": 16, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "rope_theta": null,
        "rope_parameters": rope,
    });
    let four_keys = |more: Keys| {
        let keys = vec![
            ("attention.sliding_window", u(5)),
            ("attention.sliding_window_pattern", slides.clone()),
            ("attention.key_length", u(16)),
            ("attention.value_length", u(16)),
            ("attention.key_length_swa", u(8)),
            ("attention.value_length_swa", u(8)),
            ("rope.dimension_count", u(16)),
            ("rope.dimension_count_swa", u(8)),
            ("rope.freq_base", f(1e6)),
            ("rope.freq_base_swa", f(1e4)),
            ("final_logit_softcapping", f(30.0)),
        ];
        [keys, more].concat()
    };
    vec![
        case(
            "gemma 3n",
            "gemma3n",
            "Gemma3nForCausalLM",
            nano,
            vec![
                ("feed_forward_length", list(&[40, 40, 44, 44])),
                ("attention.sliding_window", u(5)),
                ("attention.sliding_window_pattern", slides.clone()),
                ("attention.shared_kv_layers", u(2)),
                ("altup.active_idx", u(0)),
                ("altup.num_inputs", u(4)),
                ("embedding_length_per_layer_input", u(12)),
                (
                    "activation_sparsity_scale",
                    floats(&[1.644_853_6, 1.644_853_6, f32::NEG_INFINITY, f32::NEG_INFINITY]),
                ),
                ("final_logit_softcapping", f(30.0)),
            ],
        ),
        case(
            "gemma 4, experts, keys as values",
            "gemma4",
            "Gemma4ForCausalLM",
            with(
                &four,
                json!({"enable_moe_block": true, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12,
                "attention_k_eq_v": true, "num_global_key_value_heads": 1}),
            ),
            four_keys(vec![
                ("attention.head_count_kv", list(&[2, 1, 2, 1])),
                ("attention.shared_kv_layers", u(0)),
                ("embedding_length_per_layer_input", u(0)),
                ("expert_count", u(4)),
                ("expert_used_count", u(2)),
                ("expert_feed_forward_length", u(12)),
            ]),
        ),
        case(
            "gemma 4, inputs of layers, shared keys of double width",
            "gemma4",
            "Gemma4ForCausalLM",
            with(
                &four,
                json!({"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 48,
                "use_double_wide_mlp": true}),
            ),
            four_keys(vec![
                ("feed_forward_length", list(&[40, 40, 80, 80])),
                ("attention.shared_kv_layers", u(2)),
                ("embedding_length_per_layer_input", u(12)),
            ]),
        ),
    ]
}

//! The checkpoints of `converted.rs` whose conversion changes little but names.

use serde_json::json;

use super::converted::Case;
use super::converted_cases::{Keys, case, list, replaced, truths, with};
use super::made::{f32_value, u32_value};
use super::made_vocabulary::truth;

pub fn cases() -> Vec<Case> {
    [plain(), classic(), sparse(), indexed()].into_iter().flatten().collect()
}

fn plain() -> Vec<Case> {
    let (u, f) = (u32_value, f32_value);
    let eps = || ("attention.layer_norm_epsilon", f(1e-3));
    let rotated = |count: u32| ("rope.dimension_count", u(count));
    let experts = || vec![("expert_count", u(4)), ("expert_used_count", u(2))];
    vec![
        case(
            "olmo, clipped",
            "olmo",
            "OlmoForCausalLM",
            json!({"clip_qkv": 0.25}),
            vec![("attention.clamp_kqv", f(0.25))],
        ),
        case(
            "olmoe",
            "olmoe",
            "OlmoeForCausalLM",
            json!({"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": false}),
            experts(),
        ),
        case(
            "nemotron, whole heads rotated, biases",
            "nemotron",
            "NemotronForCausalLM",
            json!({"norm_eps": 1e-3, "partial_rotary_factor": 1.0, "attention_bias": true, "mlp_bias": true}),
            vec![eps()],
        ),
        case(
            "nemotron, half of a head rotated",
            "nemotron",
            "NemotronForCausalLM",
            json!({"norm_eps": 1e-3, "partial_rotary_factor": 0.5}),
            vec![eps(), rotated(4)],
        ),
        case(
            "phi-2",
            "phi2",
            "PhiForCausalLM",
            json!({"layer_norm_eps": 1e-3, "partial_rotary_factor": 0.5, "rms_norm_eps": null}),
            vec![eps(), rotated(4)],
        ),
        case(
            "stablelm, parallel, biases",
            "stablelm",
            "StableLmForCausalLM",
            json!({"layer_norm_eps": 1e-3, "partial_rotary_factor": 0.25, "use_parallel_residual": true, "use_qkv_bias": true}),
            vec![eps(), rotated(2), ("use_parallel_residual", truth(true))],
        ),
        case(
            "stablelm, sequential",
            "stablelm",
            "StableLmForCausalLM",
            json!({"layer_norm_eps": 1e-3, "partial_rotary_factor": 1.0, "use_parallel_residual": false}),
            vec![eps(), ("use_parallel_residual", truth(false))],
        ),
        case(
            "glm 4, older",
            "chatglm",
            "GlmForCausalLM",
            json!({"partial_rotary_factor": 0.5, "attention_bias": true}),
            vec![rotated(4)],
        ),
        case(
            "ernie 4.5, experts",
            "ernie4_5-moe",
            "Ernie4_5_MoeForCausalLM",
            json!({"num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24,
                "moe_num_shared_experts": 1, "moe_layer_interval": 2, "moe_layer_start_index": 1}),
            [
                experts(),
                vec![
                    ("expert_feed_forward_length", u(24)),
                    ("expert_shared_count", u(1)),
                    ("interleave_moe_layer_step", u(2)),
                    ("leading_dense_block_count", u(1)),
                ],
            ]
            .concat(),
        ),
        case(
            "hunyuan, experts",
            "hunyuan-moe",
            "HunYuanMoEV1ForCausalLM",
            json!({"num_experts": 4, "moe_topk": 2}),
            experts(),
        ),
        case(
            "hunyuan, experts, no norms of heads",
            "hunyuan-moe",
            "HunYuanMoEV1ForCausalLM",
            json!({"num_experts": 4, "moe_topk": 2, "use_qk_norm": false}),
            experts(),
        ),
        case(
            "stablelm, a norm for each head",
            "stablelm",
            "StableLmForCausalLM",
            json!({"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "layer_norm_eps": 1e-3,
                "partial_rotary_factor": 0.25, "use_parallel_residual": true, "qk_layernorm": true}),
            vec![eps(), rotated(8), ("use_parallel_residual", truth(true))],
        ),
        case(
            "phi-2, joint queries, keys and values",
            "phi2",
            "PhiForCausalLM",
            json!({"layer_norm_eps": 1e-3, "partial_rotary_factor": 0.5, "rms_norm_eps": null, "older": true}),
            vec![eps(), rotated(4)],
        ),
        case(
            "glm 4, older, joint queries, keys and values",
            "chatglm",
            "GlmForCausalLM",
            json!({"partial_rotary_factor": 1.0, "attention_bias": true, "older": true}),
            vec![rotated(8)],
        ),
        case("internlm 2", "internlm2", "LlamaForCausalLM", json!({}), vec![]),
        case("internlm 2, joint", "internlm2", "LlamaForCausalLM", json!({"older": true}), vec![]),
        case(
            "an embedding model of llama's layers",
            "llama-embed",
            "LlamaForCausalLM",
            json!({"is_causal": false}),
            vec![("attention.causal", truth(false))],
        ),
        case(
            "apertus",
            "apertus",
            "ApertusForCausalLM",
            json!({"attention_bias": true, "hidden_act": "xielu", "rope_scaling": {"rope_type": "default"}}),
            vec![],
        ),
        case(
            "minicpm",
            "minicpm",
            "MiniCPMForCausalLM",
            json!({"scale_emb": 10.0, "scale_depth": 1.5, "dim_model_base": 8}),
            vec![
                ("embedding_scale", f(10.0)),
                ("residual_scale", f((1.5 / 2f64.sqrt()) as f32)),
                ("logit_scale", f(4.0)),
            ],
        ),
        case(
            "minicpm, no stated factors",
            "minicpm",
            "MiniCPMForCausalLM",
            json!({"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}),
            vec![],
        ),
        case(
            "minicpm 3",
            "minicpm3",
            "MiniCPM3ForCausalLM",
            json!({"head_dim": null, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 10,
                "qk_rope_head_dim": 6, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}),
            vec![
                ("attention.kv_lora_rank", u(16)),
                ("attention.q_lora_rank", u(12)),
                ("attention.key_length", u(16)),
                rotated(6),
            ],
        ),
        case(
            "olmo 3",
            "olmo2",
            "Olmo3ForCausalLM",
            json!({"num_hidden_layers": 4, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention",
                "sliding_attention", "full_attention"]}),
            vec![
                ("attention.sliding_window", u(5)),
                ("attention.sliding_window_pattern", truths(&[true, false, true, false])),
            ],
        ),
        case(
            "embeddinggemma",
            "gemma-embedding",
            "Gemma3TextModel",
            json!({"use_bidirectional_attention": true, "sliding_window": 6, "sliding_window_pattern": 6, "num_hidden_layers": 6,
                "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 8, "tie_word_embeddings": true}),
            vec![("attention.sliding_window", u(6))],
        ),
        case(
            "eurobert",
            "eurobert",
            "EuroBertModel",
            json!({"attention_bias": true}),
            vec![("attention.causal", truth(false))],
        ),
    ]
}

/// Models of 2019 to 2023.
fn classic() -> Vec<Case> {
    let (u, f) = (u32_value, f32_value);
    let eps = || ("attention.layer_norm_epsilon", f(1e-3));
    let sizes = || -> Keys {
        vec![
            ("context_length", u(64)),
            ("embedding_length", u(32)),
            ("block_count", u(2)),
            ("feed_forward_length", u(40)),
            ("attention.head_count", u(4)),
            eps(),
        ]
    };
    // The usual keys are not theirs.
    let other = json!({"max_position_embeddings": null, "hidden_size": null, "num_hidden_layers": null, "head_dim": null,
        "intermediate_size": null, "num_attention_heads": null, "num_key_value_heads": null, "rope_theta": null,
        "rms_norm_eps": null, "tie_word_embeddings": true});
    let gpt2 = with(
        &other,
        json!({"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_inner": 40, "n_head": 4, "layer_norm_epsilon": 1e-3}),
    );
    let neox = json!({"head_dim": null, "num_key_value_heads": null, "layer_norm_eps": 1e-3, "rms_norm_eps": null});
    let falcon = json!({"head_dim": null, "intermediate_size": null, "ffn_hidden_size": 40, "layer_norm_epsilon": 1e-3,
        "rms_norm_eps": null, "num_key_value_heads": null});
    let mpt = with(
        &other,
        json!({"max_seq_len": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "layer_norm_epsilon": 1e-3}),
    );
    vec![
        case(
            "starcoder",
            "starcoder",
            "GPTBigCodeForCausalLM",
            gpt2.clone(),
            [sizes(), vec![("attention.head_count_kv", u(1))]].concat(),
        ),
        case("gpt-2", "gpt2", "GPTBigCodeForCausalLM", with(&gpt2, json!({"multi_query": false})), sizes()),
        case(
            "bloom",
            "bloom",
            "BloomForCausalLM",
            with(&gpt2, json!({"n_positions": null, "max_position_embeddings": 64, "n_embed": 32})),
            [sizes(), vec![("attention.head_count_kv", u(4))]].concat(),
        ),
        case(
            "falcon, one key head",
            "falcon",
            "FalconForCausalLM",
            with(&falcon, json!({"num_kv_heads": 1, "tie_word_embeddings": true})),
            [sizes(), vec![("attention.head_count_kv", u(1))]].concat(),
        ),
        case(
            "falcon, two norms",
            "falcon",
            "FalconForCausalLM",
            with(&falcon, json!({"num_kv_heads": 2, "new_decoder_architecture": true})),
            [sizes(), vec![("attention.head_count_kv", u(2))]].concat(),
        ),
        case(
            "falcon 2",
            "falcon",
            "FalconForCausalLM",
            with(&falcon, json!({"num_kv_heads": 2, "new_decoder_architecture": true, "num_ln_in_parallel_attn": 1})),
            [sizes(), vec![("attention.head_count_kv", u(2))]].concat(),
        ),
        case(
            "gpt-neox, half of a head rotated",
            "gptneox",
            "GPTNeoXForCausalLM",
            with(&neox, json!({"rotary_pct": 0.5})),
            vec![eps(), ("use_parallel_residual", truth(true)), ("rope.dimension_count", u(4))],
        ),
        case(
            "gpt-neox, whole heads rotated, sequential",
            "gptneox",
            "GPTNeoXForCausalLM",
            with(&neox, json!({"rotary_pct": 1.0, "use_parallel_residual": false})),
            vec![eps(), ("use_parallel_residual", truth(false)), ("rope.dimension_count", u(8))],
        ),
        case(
            "mpt",
            "mpt",
            "MptForCausalLM",
            with(&mpt, json!({"attn_config": {"alibi": true, "alibi_bias_max": 4, "clip_qkv": 0.5}})),
            replaced(
                sizes(),
                vec![
                    ("feed_forward_length", u(64)),
                    ("attention.max_alibi_bias", f(4.0)),
                    ("attention.clamp_kqv", f(0.5)),
                ],
            ),
        ),
    ]
}

/// Experts in other names.
fn sparse() -> Vec<Case> {
    let (u, f) = (u32_value, f32_value);
    let experts = |width: u32| -> Keys {
        vec![("expert_count", u(4)), ("expert_used_count", u(2)), ("expert_feed_forward_length", u(width))]
    };
    let with_groups = |more: Keys| -> Keys {
        let groups =
            vec![("expert_group_count", u(2)), ("expert_group_used_count", u(1)), ("expert_gating_func", u(2))];
        [experts(24), groups, more].concat()
    };
    let mimo = json!({
        "num_hidden_layers": 3, "head_dim": 12, "v_head_dim": 8, "num_key_value_heads": 1, "swa_num_key_value_heads": 2,
        "partial_rotary_factor": 0.34, "sliding_window": 5, "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1],
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "layernorm_epsilon": 1e-5,
        "rms_norm_eps": null, "swa_rope_theta": 5000.0, "attention_value_scale": 0.7, "num_nextn_predict_layers": 0,
    });
    let mimo_keys = |blocks: usize| -> Keys {
        let keys = vec![
            ("attention.head_count_kv", list(&[1, 2, 2, 2][..blocks])),
            ("attention.sliding_window_pattern", list(&[0, 1, 1, 1][..blocks])),
            ("attention.value_length", u(8)),
            ("attention.sliding_window", u(5)),
            ("attention.value_scale", f(0.7)),
            ("attention.layer_norm_rms_epsilon", f(1e-5)),
            ("rope.freq_base_swa", f(5000.0)),
            ("rope.dimension_count", u(4)),
        ];
        [experts(24), keys].concat()
    };
    vec![
        case(
            "llama 4, every second layer dense, no chunks within reach",
            "llama4",
            "Llama4ForCausalLM",
            json!({"num_hidden_layers": 4, "intermediate_size": 24, "intermediate_size_mlp": 40, "num_local_experts": 4,
                "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}),
            replaced(
                experts(24),
                vec![("feed_forward_length", u(40)), ("expert_used_count", u(1)), ("interleave_moe_layer_step", u(2))],
            ),
        ),
        case(
            "ling 2, groups, with a predictor",
            "bailingmoe2",
            "BailingMoeV2ForCausalLM",
            json!({"num_nextn_predict_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_shared_experts": 1,
                "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "n_group": 2, "topk_group": 1,
                "routed_scaling_factor": 2.5, "norm_topk_prob": true, "score_function": "sigmoid"}),
            with_groups(vec![
                ("block_count", u(3)),
                ("nextn_predict_layers", u(1)),
                ("expert_shared_count", u(1)),
                ("expert_shared_feed_forward_length", u(24)),
                ("leading_dense_block_count", u(1)),
                ("expert_weights_scale", f(2.5)),
                ("expert_weights_norm", truth(true)),
                ("rope.dimension_count", u(4)),
            ]),
        ),
        case(
            "ling 2, biases, no norms of heads, no groups",
            "bailingmoe2",
            "BailingMoeV2ForCausalLM",
            json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_shared_experts": 2,
                "first_k_dense_replace": 0, "partial_rotary_factor": 1.0, "n_group": 1, "topk_group": 1,
                "routed_scaling_factor": 1.5, "norm_topk_prob": false, "use_qkv_bias": true, "use_bias": true,
                "use_qk_norm": false, "moe_router_enable_expert_bias": false}),
            [
                experts(24),
                vec![
                    ("expert_shared_count", u(2)),
                    ("leading_dense_block_count", u(0)),
                    ("expert_weights_scale", f(1.5)),
                    ("expert_weights_norm", truth(false)),
                ],
            ]
            .concat(),
        ),
        case(
            "afmoe",
            "afmoe",
            "AfmoeForCausalLM",
            json!({"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                "num_shared_experts": 1, "num_dense_layers": 2, "route_scale": 2.8, "route_norm": true, "n_group": 2,
                "topk_group": 1, "sliding_window": 5, "global_attn_every_n_layers": 4, "mup_enabled": true,
                "score_func": "sigmoid"}),
            with_groups(vec![
                ("expert_shared_count", u(1)),
                ("leading_dense_block_count", u(2)),
                ("expert_weights_scale", f(2.8)),
                ("expert_weights_norm", truth(true)),
                ("attention.sliding_window", u(5)),
            ]),
        ),
        case(
            "phi 3.5, experts, biases",
            "phimoe",
            "PhimoeForCausalLM",
            json!({"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": true, "lm_head_bias": true,
                "sliding_window": 7}),
            [experts(40), vec![("attention.sliding_window", u(7))]].concat(),
        ),
        case(
            "phi 3.5, experts, joint queries, keys and values",
            "phimoe",
            "PhimoeForCausalLM",
            json!({"num_local_experts": 4, "num_experts_per_tok": 2, "older": true}),
            experts(40),
        ),
        case("mimo 2", "mimo2", "MiMoV2FlashForCausalLM", mimo.clone(), mimo_keys(3)),
        case(
            "mimo 2, with predictors",
            "mimo2",
            "MiMoV2FlashForCausalLM",
            with(
                &mimo,
                json!({"add_full_attention_sink_bias": true, "add_swa_attention_sink_bias": false, "num_nextn_predict_layers": 1}),
            ),
            [mimo_keys(4), vec![("block_count", u(4)), ("nextn_predict_layers", u(1))]].concat(),
        ),
    ]
}

/// DeepSeek V3.2 and GLM-5.
fn indexed() -> Vec<Case> {
    let (u, f) = (u32_value, f32_value);
    let sizes = json!({
        "head_dim": null, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 10, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": true,
        "index_n_heads": 3, "index_head_dim": 16, "index_topk": 4,
    });
    let keys = |more: Keys| -> Keys {
        let keys = vec![
            ("attention.head_count_kv", u(1)),
            ("attention.kv_lora_rank", u(16)),
            ("attention.q_lora_rank", u(12)),
            ("attention.key_length", u(24)),
            ("attention.value_length", u(16)),
            ("attention.key_length_mla", u(20)),
            ("attention.value_length_mla", u(10)),
            ("attention.indexer.head_count", u(3)),
            ("attention.indexer.key_length", u(16)),
            ("attention.indexer.top_k", u(4)),
            ("rope.dimension_count", u(8)),
            ("expert_feed_forward_length", u(24)),
            ("expert_count", u(4)),
            ("expert_used_count", u(2)),
            ("expert_shared_count", u(1)),
            ("leading_dense_block_count", u(1)),
            ("expert_weights_scale", f(1.5)),
            ("expert_weights_norm", truth(true)),
            ("expert_gating_func", u(2)),
        ];
        keys.into_iter().chain(more).collect()
    };
    vec![
        case(
            "deepseek v3.2",
            "deepseek32",
            "DeepseekV32ForCausalLM",
            with(&sizes, json!({"n_group": 2, "topk_group": 1})),
            keys(vec![("expert_group_count", u(2)), ("expert_group_used_count", u(1))]),
        ),
        case(
            "deepseek v3.2, with a predictor",
            "deepseek32",
            "DeepseekV32ForCausalLM",
            with(&sizes, json!({"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1})),
            replaced(
                keys(vec![("expert_group_count", u(1)), ("expert_group_used_count", u(1))]),
                vec![("block_count", u(3)), ("nextn_predict_layers", u(1))],
            ),
        ),
        case(
            "glm 5, an indexer for two layers",
            "glm-dsa",
            "GlmMoeDsaForCausalLM",
            with(&sizes, json!({"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]})),
            keys(vec![("attention.indexer.types", truths(&[true, false, true]))]),
        ),
    ]
}

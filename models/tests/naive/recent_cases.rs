//! Cases of [`super::recent`], and of families that share a pass with others.

use serde_json::{Value, json};

use super::case::{Case, skeleton, with};

pub fn cases() -> Vec<Case> {
    let of = |class: &str, model_type: &str, changes: Value| with(&skeleton(class, model_type), "", changes).config;
    let granite = of(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        json!({"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 3.0,
            "head_dim": null, "layer_types": ["attention", "attention"], "shared_intermediate_size": 28}),
    );
    let minimax = of(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        json!({"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20, "rotary_dim": 8}),
    );
    let lite = of(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        json!({"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 20,
            "routed_scaling_factor": 1.8, "q_lora_rank": 20, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "v_head_dim": 24, "head_dim": null, "num_key_value_heads": 4,
            "first_k_dense_replace": 1}),
    );
    let ernie = of(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        json!({"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 20, "num_hidden_layers": 3, "head_dim": null,
            "tie_word_embeddings": true}),
    );
    let llama4 = of(
        "Llama4ForCausalLM",
        "llama4_text",
        json!({"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 20, "intermediate_size_mlp": 40,
            "attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.3, "no_rope_layer_interval": 2}),
    );
    let qwen3_vl_moe = of(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        json!({"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}),
    );
    let hunyuan = of(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        json!({"num_experts": 5, "moe_topk": 2, "intermediate_size": 20}),
    );
    let bailing = of(
        "BailingMoeV2ForCausalLM",
        "bailing_moe_v2",
        json!({"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 3, "topk_group": 2,
            "first_k_dense_replace": 1, "attention_bias": null, "routed_scaling_factor": 1.5}),
    );
    let afmoe = of(
        "AfmoeForCausalLM",
        "afmoe",
        json!({"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "sliding_window": 9,
            "num_dense_layers": 1, "attention_bias": null}),
    );
    let apertus = of("ApertusForCausalLM", "apertus", json!({"hidden_act": "xielu"}));
    let phimoe = of(
        "PhimoeForCausalLM",
        "phimoe",
        json!({"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20, "router_jitter_noise": 0.4}),
    );
    vec![
        with(
            &granite,
            "granite 4, dense, rope",
            json!({"position_embedding_type": "rope", "tie_word_embeddings": true}),
        ),
        with(
            &granite,
            "granite 4, experts, no rope, biased",
            json!({"num_local_experts": 5, "num_experts_per_tok": 2, "attention_bias": true, "num_attention_heads": 3,
                "num_key_value_heads": 1, "layer_types": null, "layers_block_type": ["attention", "full_attention"]}),
        ),
        with(&minimax, "minimax_m2, a part of a head", json!({"num_attention_heads": 3, "num_key_value_heads": 1})),
        with(
            &minimax,
            "minimax_m2, no norms, no bias",
            json!({"use_qk_norm": false, "use_routing_bias": false, "rotary_dim": null, "partial_rotary_factor": 0.25}),
        ),
        with(&lite, "glm4_moe_lite", json!({"num_attention_heads": 3, "num_key_value_heads": 3})),
        with(
            &lite,
            "glm4_moe_lite, types of networks, halves",
            json!({"mlp_layer_types": ["sparse", "dense"], "rope_interleave": false, "n_shared_experts": 2}),
        ),
        with(&ernie, "ernie moe, last layer dense", json!({"moe_layer_start_index": 0, "moe_layer_end_index": 1})),
        with(
            &ernie,
            "ernie moe, biased, every second, none shared, untied",
            json!({"use_bias": true, "moe_layer_interval": 2, "moe_num_shared_experts": 0, "tie_word_embeddings": false,
                "num_attention_heads": 3, "num_key_value_heads": 1, "moe_norm_min": 1e-12}),
        ),
        with(
            &llama4,
            "llama4, every second layer, two experts",
            json!({"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "num_experts_per_tok": 2,
                "num_attention_heads": 3, "num_key_value_heads": 1}),
        ),
        with(
            &llama4,
            "llama4, biased, no late norms, layer types",
            json!({"attention_bias": true, "use_qk_norm": false, "no_rope_layers": [1, 0], "moe_layers": [0],
                "layer_types": ["full_attention", "chunked_attention"], "attn_temperature_tuning": 4,
                "tie_word_embeddings": true}),
        ),
        with(
            &qwen3_vl_moe,
            "qwen3_vl_moe",
            json!({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": true},
                "num_attention_heads": 3, "num_key_value_heads": 1}),
        ),
        with(
            &qwen3_vl_moe,
            "qwen3_vl_moe, dense layer, no renorm",
            json!({"mlp_only_layers": [0], "norm_topk_prob": false, "attention_bias": true}),
        ),
        with(
            &hunyuan,
            "hunyuan moe, alpha",
            json!({"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}, "tie_word_embeddings": true,
                "num_attention_heads": 3, "num_key_value_heads": 1}),
        ),
        with(
            &hunyuan,
            "hunyuan moe, lists, biased, no norms",
            json!({"num_experts": [4, 5], "moe_topk": [1, 3], "attention_bias": true, "use_qk_norm": false}),
        ),
        with(&bailing, "bailing, groups", json!({"num_attention_heads": 3, "num_key_value_heads": 1})),
        with(
            &bailing,
            "bailing, every bias, one group, wide shared",
            json!({"use_qkv_bias": true, "use_bias": true, "use_qk_norm": false, "n_group": 1, "topk_group": 1,
                "moe_router_enable_expert_bias": false, "moe_shared_expert_intermediate_size": 28, "rotary_dim": 4,
                "norm_topk_prob": false, "first_k_dense_replace": 0, "tie_word_embeddings": true}),
        ),
        with(
            &afmoe,
            "afmoe, scaled embedding",
            json!({"mup_enabled": true, "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 1,
                "route_scale": 1.7}),
        ),
        with(
            &afmoe,
            "afmoe, layer types, none shared",
            json!({"layer_types": ["full_attention", "sliding_attention"], "num_shared_experts": 0,
                "num_dense_layers": 0, "tie_word_embeddings": true}),
        ),
        with(
            &phimoe,
            "phimoe, biased",
            json!({"attention_bias": true, "lm_head_bias": true, "num_attention_heads": 3, "num_key_value_heads": 1}),
        ),
        with(
            &apertus,
            "apertus, llama3 rope",
            json!({"num_attention_heads": 3, "num_key_value_heads": 1, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
        ),
        with(
            &apertus,
            "apertus, biased, tied",
            json!({"attention_bias": true, "tie_word_embeddings": true, "rope_parameters": {"rope_type": "default"}}),
        ),
        with(&phimoe, "phimoe, window, small jitter", json!({"sliding_window": 9, "router_jitter_noise": 0.1})),
    ]
}

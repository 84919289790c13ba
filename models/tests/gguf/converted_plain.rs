//! The checkpoints of `converted.rs` whose conversion changes little but names.

use serde_json::json;

use super::converted::Case;
use super::converted_cases::case;
use super::made::{f32_value, u32_value};
use super::made_vocabulary::truth;

pub fn cases() -> Vec<Case> {
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
    ]
}

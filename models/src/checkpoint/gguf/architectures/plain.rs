//! Further architectures whose tensors have other names, and a few other changes.

use super::{Architecture, BASE, CHOICE_BIAS, CHOICE_BIAS_ROW};

/// Norms that are no RMS norms.
const LAYER_EPS: &str = "attention.layer_norm_epsilon";

/// Files state the rotated share of a head only where it is not whole, and these families have another default.
const WHOLE: &[(&str, &str)] = &[("partial_rotary_factor", "1.0")];

pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "olmo",
        class: "OlmoForCausalLM",
        keys: &[("clip_qkv", "attention.clamp_kqv")],
        pairs: true,
        ..BASE
    },
    Architecture {
        name: "olmoe",
        class_of_experts: "OlmoeForCausalLM",
        keys: &[("num_experts", "expert_count"), ("num_experts_per_tok", "expert_used_count")],
        // The file's format knows only this form of the family.
        constants: &[("norm_topk_prob", "false")],
        modules: &[("ffn_gate_inp", "mlp.gate")],
        ..BASE
    },
    Architecture {
        name: "nemotron",
        class: "NemotronForCausalLM",
        keys: &[("norm_eps", LAYER_EPS)],
        flags: &[("attention_bias", "attn_q.bias"), ("mlp_bias", "ffn_up.bias")],
        constants: WHOLE,
        norms_plus_one: true,
        ..BASE
    },
    Architecture {
        name: "phi2",
        class: "PhiForCausalLM",
        keys: &[("layer_norm_eps", LAYER_EPS)],
        constants: WHOLE,
        modules: &[("attn_output", "self_attn.dense"), ("ffn_up", "mlp.fc1"), ("ffn_down", "mlp.fc2")],
        outer: &[("output_norm", "model.final_layernorm")],
        ..BASE
    },
    Architecture {
        name: "stablelm",
        class: "StableLmForCausalLM",
        keys: &[("layer_norm_eps", LAYER_EPS), ("use_parallel_residual", "use_parallel_residual")],
        flags: &[("use_qkv_bias", "attn_q.bias"), ("qk_layernorm", "attn_q_norm.weight")],
        constants: WHOLE,
        ..BASE
    },
    Architecture {
        name: "chatglm",
        class: "GlmForCausalLM",
        flags: &[("attention_bias", "attn_q.bias")],
        constants: WHOLE,
        modules: &[("ffn_up", "mlp.gate_up_proj")],
        ..BASE
    },
    // Its RoPE is interleaved in Hugging Face layout too.
    Architecture {
        name: "ernie4_5-moe",
        class_of_experts: "Ernie4_5_MoeForCausalLM",
        keys: &[
            ("moe_num_experts", "expert_count"),
            ("moe_k", "expert_used_count"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
            ("moe_num_shared_experts", "expert_shared_count"),
            ("moe_layer_interval", "interleave_moe_layer_step"),
            ("moe_layer_start_index", "leading_dense_block_count"),
        ],
        flags: &[("use_bias", "attn_q.bias")],
        modules: &[
            ("ffn_gate_inp", "mlp.gate"),
            (CHOICE_BIAS, CHOICE_BIAS_ROW),
            ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
            ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
        ],
        ..BASE
    },
    Architecture {
        name: "hunyuan-moe",
        class_of_experts: "HunYuanMoEV1ForCausalLM",
        keys: &[("num_experts", "expert_count"), ("moe_topk", "expert_used_count")],
        flags: &[("attention_bias", "attn_q.bias"), ("use_qk_norm", "attn_q_norm.weight")],
        modules: &[
            ("attn_q_norm", "self_attn.query_layernorm"),
            ("attn_k_norm", "self_attn.key_layernorm"),
            ("ffn_gate_inp", "mlp.gate.wg"),
            ("ffn_gate_shexp", "mlp.shared_mlp.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_mlp.up_proj"),
            ("ffn_down_shexp", "mlp.shared_mlp.down_proj"),
        ],
        ..BASE
    },
];

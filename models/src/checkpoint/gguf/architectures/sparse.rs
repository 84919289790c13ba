//! Architectures with experts, of which many have dense layers too.

use serde_json::{Map, Value as Json, json};

use super::{Architecture, BASE, CHOICE_BIAS, CHOICE_BIAS_ROW, EXPERT_MODULES, KEY_HEADS, Predictor, VALUES};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::gguf::metadata::Metadata;

const SHARED_WIDTH: &str = "expert_shared_feed_forward_length";
const SHARED: &str = "expert_shared_count";
const GATING: &str = "expert_gating_func";

pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "olmoe",
        class_of_experts: "OlmoeForCausalLM",
        keys: &[("num_experts", "expert_count"), ("num_experts_per_tok", "expert_used_count")],
        // The file's format knows only this form of the family.
        constants: &[("norm_topk_prob", "false")],
        modules: &[("ffn_gate_inp", "mlp.gate")],
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
    // Its RoPE is interleaved in Hugging Face layout too.
    Architecture {
        name: "llama4",
        class: "Llama4ForCausalLM",
        class_of_experts: "Llama4ForCausalLM",
        keys: &[
            ("intermediate_size_mlp", "feed_forward_length"),
            ("intermediate_size", "expert_feed_forward_length"),
            ("num_local_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("interleave_moe_layer_step", "interleave_moe_layer_step"),
        ],
        flags: &[("attention_bias", "attn_q.bias")],
        modules: &[
            ("ffn_gate_inp", "feed_forward.router"),
            ("ffn_gate", "feed_forward.gate_proj"),
            ("ffn_up", "feed_forward.up_proj"),
            ("ffn_down", "feed_forward.down_proj"),
            ("ffn_gate_shexp", "feed_forward.shared_expert.gate_proj"),
            ("ffn_up_shexp", "feed_forward.shared_expert.up_proj"),
            ("ffn_down_shexp", "feed_forward.shared_expert.down_proj"),
        ],
        experts: ("feed_forward.experts", ["gate_proj", "up_proj", "down_proj"]),
        refused: &[("attention.sliding_window", "absent: layers that see the whole context are not supported")],
        // Llama 4 Maverick, which has no norms of heads, is known by its number of experts.
        derive: |metadata, map| {
            map.insert("use_qk_norm".into(), json!(metadata.count("expert_count")? != Some(128)));
            Ok(())
        },
        ..BASE
    },
    Architecture {
        name: "bailingmoe2",
        class: "BailingMoeV2ForCausalLM",
        class_of_experts: "BailingMoeV2ForCausalLM",
        keys: &[
            ("num_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
            ("num_shared_experts", SHARED),
            ("first_k_dense_replace", "leading_dense_block_count"),
            ("routed_scaling_factor", "expert_weights_scale"),
            ("norm_topk_prob", "expert_weights_norm"),
            ("n_group", "expert_group_count"),
            ("topk_group", "expert_group_used_count"),
        ],
        flags: &[
            ("use_qkv_bias", "attn_qkv.bias"),
            ("use_bias", "attn_output.bias"),
            ("use_qk_norm", "attn_q_norm.weight"),
            ("moe_router_enable_expert_bias", CHOICE_BIAS),
        ],
        // Files state the rotated share of a head only where it is not whole.
        constants: &[("partial_rotary_factor", "1.0"), ("n_group", "1"), ("topk_group", "1")],
        modules: &[
            ("attn_qkv", "attention.query_key_value"),
            ("attn_output", "attention.dense"),
            ("attn_q_norm", "attention.query_layernorm"),
            ("attn_k_norm", "attention.key_layernorm"),
            (CHOICE_BIAS, "mlp.gate.expert_bias"),
            ("layer_output_norm", "final_layernorm"),
        ],
        shared_modules: EXPERT_MODULES,
        outer: &[("token_embd", "model.word_embeddings")],
        derive: |metadata, map| {
            if metadata.count(SHARED_WIDTH)?.is_some() {
                let width = metadata.quotient(SHARED_WIDTH, SHARED)?;
                map.insert("moe_shared_expert_intermediate_size".into(), json!(width));
            }
            sigmoid(metadata)
        },
        ..BASE
    },
    Architecture {
        name: "afmoe",
        class: "AfmoeForCausalLM",
        class_of_experts: "AfmoeForCausalLM",
        keys: &[
            ("num_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
            ("num_shared_experts", SHARED),
            ("num_dense_layers", "leading_dense_block_count"),
            ("route_scale", "expert_weights_scale"),
            ("route_norm", "expert_weights_norm"),
            ("n_group", "expert_group_count"),
            ("topk_group", "expert_group_used_count"),
            ("sliding_window", "attention.sliding_window"),
        ],
        // The file's format knows only this form of the family.
        constants: &[("mup_enabled", "true"), ("global_attn_every_n_layers", "4")],
        modules: &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("attn_gate", "self_attn.gate_proj"),
            ("ffn_norm", "pre_mlp_layernorm"),
            ("post_ffw_norm", "post_mlp_layernorm"),
            ("ffn_gate_inp", "mlp.router.gate"),
            (CHOICE_BIAS, "mlp.expert_bias"),
        ],
        shared_modules: EXPERT_MODULES,
        derive: |metadata, _| sigmoid(metadata),
        ..BASE
    },
    Architecture {
        name: "phimoe",
        class_of_experts: "PhimoeForCausalLM",
        keys: &[
            ("num_local_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("sliding_window", "attention.sliding_window"),
            ("original_max_position_embeddings", "rope.scaling.original_context_length"),
        ],
        flags: &[("attention_bias", "attn_output.bias")],
        modules: &[("ffn_gate_inp", "block_sparse_moe.gate")],
        experts: ("block_sparse_moe.experts", ["w1", "w3", "w2"]),
        derive: |metadata, map| {
            map.insert("lm_head_bias".into(), json!(metadata.shape("output.bias").is_some()));
            Ok(())
        },
        ..BASE
    },
    Architecture {
        name: "mimo2",
        class_of_experts: "MiMoV2FlashForCausalLM",
        keys: &[
            ("layernorm_epsilon", "attention.layer_norm_rms_epsilon"),
            ("n_routed_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
            ("n_shared_experts", SHARED),
            ("routed_scaling_factor", "expert_weights_scale"),
            ("norm_topk_prob", "expert_weights_norm"),
            ("n_group", "expert_group_count"),
            ("topk_group", "expert_group_used_count"),
            ("sliding_window", "attention.sliding_window"),
            ("v_head_dim", VALUES),
            ("swa_rope_theta", "rope.freq_base_swa"),
            ("attention_value_scale", "attention.value_scale"),
        ],
        lists: &[KEY_HEADS],
        constants: &[("partial_rotary_factor", "1.0"), ("num_nextn_predict_layers", "0")],
        modules: &[("attn_sinks.weight", "self_attn.attention_sink_bias")],
        predictor: Some(Predictor {
            root: "model.mtp",
            modules: &[("ffn_norm", "layers.0.pre_mlp_layernorm"), ("layer_output_norm", "layers.0.final_layernorm")],
            layer: 0,
        }),
        shared_modules: EXPERT_MODULES,
        derive: mimo,
        ..BASE
    },
];

/// Checks that experts are scored by a sigmoid, if the file says how.
fn sigmoid(metadata: &Metadata<'_>) -> Result<(), LoadError> {
    match metadata.count(GATING)? {
        None | Some(2) => Ok(()),
        Some(_) => Err(metadata.wrong(GATING, "2 (sigmoid)")),
    }
}

/// What differs between layers with a window and without one, and which have experts.
fn mimo(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    sigmoid(metadata)?;
    let layers = metadata.count("block_count")?.unwrap_or(0);
    let heads = metadata.of_layers(KEY_HEADS, layers)?;
    let slides = metadata.slides()?.unwrap_or_default();
    let has = |tensor: &str, layer: usize| metadata.shape(&format!("blk.{layer}.{tensor}")).is_some();
    for (window, number, sinks) in [
        (false, "num_key_value_heads", "add_full_attention_sink_bias"),
        (true, "swa_num_key_value_heads", "add_swa_attention_sink_bias"),
    ] {
        let of_kind = || (0..).zip(&slides).zip(&heads).filter(|((_, slides), _)| **slides == window);
        let mut counts = of_kind().map(|(_, heads)| *heads);
        let Some(first) = counts.next() else { continue };
        if counts.any(|heads| heads != first) {
            return Err(metadata.wrong(KEY_HEADS, "the same number for all layers of a kind"));
        }
        map.insert(number.into(), json!(first));
        map.insert(sinks.into(), json!(of_kind().any(|((layer, _), _)| has("attn_sinks.weight", layer))));
    }
    let sparse: Vec<u8> = (0..slides.len()).map(|layer| has("ffn_gate_inp.weight", layer).into()).collect();
    map.insert("moe_layer_freq".into(), json!(sparse));
    Ok(())
}

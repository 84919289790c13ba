//! Architectures with recurrent layers.

use serde_json::{Map, Value as Json, json};

use super::{Architecture, BASE, CHOICE_BIAS, KEY_HEADS, ONE_ROW, PREDICTORS, Predictor};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::gguf::metadata::Metadata;

const INNER: &str = "ssm.inner_size";
const HEADS: &str = "ssm.time_step_rank";

/// Sizes of Mamba-2 layers in the names of Granite 4.
const MAMBA: &[(&str, &str)] = &[
    ("mamba_n_heads", HEADS),
    ("mamba_d_state", "ssm.state_size"),
    ("mamba_n_groups", "ssm.group_count"),
    ("mamba_d_conv", "ssm.conv_kernel"),
];

const LFM2: Architecture = Architecture {
    keys: &[
        ("norm_eps", "attention.layer_norm_rms_epsilon"),
        ("conv_L_cache", "shortconv.l_cache"),
        ("num_experts", "expert_count"),
        ("num_experts_per_tok", "expert_used_count"),
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("num_dense_layers", "leading_dense_block_count"),
    ],
    // The file has the width that is computed.
    constants: &[("block_auto_adjust_ff_dim", "false")],
    modules: &[
        ("attn_norm", "operator_norm"),
        ("attn_output", "self_attn.out_proj"),
        ("attn_q_norm", "self_attn.q_layernorm"),
        ("attn_k_norm", "self_attn.k_layernorm"),
        ("shortconv.conv", "conv.conv"),
        ("shortconv.in_proj", "conv.in_proj"),
        ("shortconv.out_proj", "conv.out_proj"),
        ("ffn_norm", "ffn_norm"),
        ("ffn_gate", "feed_forward.w1"),
        ("ffn_up", "feed_forward.w3"),
        ("ffn_down", "feed_forward.w2"),
        ("ffn_gate_inp", "feed_forward.gate"),
        (CHOICE_BIAS, "feed_forward.expert_bias"),
    ],
    experts: ("feed_forward.experts", ["w1", "w3", "w2"]),
    layer_types: Some(("layer_types", ["conv", "full_attention"])),
    ..BASE
};

/// Keys of Qwen's gated delta nets and experts.
const DELTA: &[(&str, &str)] = &[
    ("linear_conv_kernel_dim", "ssm.conv_kernel"),
    ("linear_key_head_dim", "ssm.state_size"),
    ("linear_num_key_heads", "ssm.group_count"),
    ("linear_num_value_heads", HEADS),
    ("full_attention_interval", "full_attention_interval"),
    ("num_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
    ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
];

const DELTA_NET: Architecture = Architecture {
    keys: DELTA,
    flags: &[("attention_bias", "attn_q.bias")],
    constants: &[("num_nextn_predict_layers", "0")],
    modules: &[
        ("post_attention_norm", "post_attention_layernorm"),
        ("attn_qkv", "linear_attn.in_proj_qkv"),
        ("attn_gate", "linear_attn.in_proj_z"),
        ("ssm_in", "linear_attn.in_proj_qkvz"),
        ("ssm_ba", "linear_attn.in_proj_ba"),
        ("ssm_alpha", "linear_attn.in_proj_a"),
        ("ssm_beta", "linear_attn.in_proj_b"),
        ("ssm_conv1d", "linear_attn.conv1d"),
        ("ssm_a", "linear_attn.A_log"),
        ("ssm_dt.bias", "linear_attn.dt_bias"),
        ("ssm_norm", "linear_attn.norm"),
        ("ssm_out", "linear_attn.out_proj"),
        ("ffn_gate_inp", "mlp.gate"),
        ("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj"),
        (ONE_ROW, "mlp.shared_expert_gate"),
        ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
        ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
        ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ],
    predictor: Some(Predictor {
        root: "mtp",
        modules: &[
            ("nextn.eh_proj", "fc"),
            ("nextn.enorm", "pre_fc_norm_embedding"),
            ("nextn.hnorm", "pre_fc_norm_hidden"),
            ("nextn.shared_head_norm", "norm"),
        ],
        layer: 0,
    }),
    norms_plus_one: true,
    derive: |metadata, map| {
        let dim = metadata.quotient(INNER, HEADS)?;
        map.insert("linear_value_head_dim".into(), json!(dim));
        Ok(())
    },
    ..BASE
};

const NEMOTRON: Architecture = Architecture {
    class: "NemotronHForCausalLM",
    class_of_experts: "NemotronHForCausalLM",
    keys: &[
        ("layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
        ("mamba_num_heads", HEADS),
        ("ssm_state_size", "ssm.state_size"),
        ("n_groups", "ssm.group_count"),
        ("conv_kernel", "ssm.conv_kernel"),
        ("n_routed_experts", "expert_count"),
        ("num_experts_per_tok", "expert_used_count"),
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
        ("n_shared_experts", "expert_shared_count"),
        ("routed_scaling_factor", "expert_weights_scale"),
        ("norm_topk_prob", "expert_weights_norm"),
        ("n_group", "expert_group_count"),
        ("topk_group", "expert_group_used_count"),
        ("moe_latent_size", "moe_latent_size"),
    ],
    lists: &[KEY_HEADS, WIDTHS],
    flags: &[
        ("attention_bias", "attn_q.bias"),
        ("mlp_bias", "ffn_up.bias"),
        ("use_conv_bias", "ssm_conv1d.bias"),
        ("use_bias", "ssm_in.bias"),
    ],
    modules: &[
        ("attn_norm", "norm"),
        ("attn_q", "mixer.q_proj"),
        ("attn_k", "mixer.k_proj"),
        ("attn_v", "mixer.v_proj"),
        ("attn_output", "mixer.o_proj"),
        ("ssm_in", "mixer.in_proj"),
        ("ssm_conv1d", "mixer.conv1d"),
        ("ssm_dt.bias", "mixer.dt_bias"),
        ("ssm_a", "mixer.A_log"),
        ("ssm_d", "mixer.D"),
        ("ssm_norm", "mixer.norm"),
        ("ssm_out", "mixer.out_proj"),
        ("ffn_up", "mixer.up_proj"),
        ("ffn_down", "mixer.down_proj"),
        ("ffn_gate_inp", "mixer.gate"),
        (CHOICE_BIAS, "mixer.gate.e_score_correction_bias"),
        ("ffn_latent_down", "mixer.fc1_latent_proj"),
        ("ffn_latent_up", "mixer.fc2_latent_proj"),
        ("ffn_up_shexp", "mixer.shared_experts.up_proj"),
        ("ffn_down_shexp", "mixer.shared_experts.down_proj"),
    ],
    // Two layers of one mixer, which files have as one.
    predictor: Some(Predictor {
        root: "mtp",
        modules: &[
            ("nextn.enorm", "layers.0.enorm"),
            ("nextn.hnorm", "layers.0.hnorm"),
            ("nextn.eh_proj", "layers.0.eh_proj"),
            ("attn_norm", "layers.0.norm"),
            ("attn_q", "layers.0.mixer.q_proj"),
            ("attn_k", "layers.0.mixer.k_proj"),
            ("attn_v", "layers.0.mixer.v_proj"),
            ("attn_output", "layers.0.mixer.o_proj"),
            ("ffn_norm", "layers.1.norm"),
            ("post_attention_norm", "layers.1.norm"),
            ("nextn.shared_head_norm", "layers.1.final_layernorm"),
        ],
        layer: 1,
    }),
    outer: &[("token_embd", "backbone.embeddings"), ("output_norm", "backbone.norm_f")],
    layers: "backbone.layers",
    experts: ("mixer.experts", ["", "up_proj", "down_proj"]),
    derive: nemotron,
    ..BASE
};

const GRANITE_MOE: Architecture = Architecture {
    name: "granitemoe",
    class: "GraniteMoeForCausalLM",
    class_of_experts: "GraniteMoeForCausalLM",
    keys: GRANITE,
    flags: &[("attention_bias", "attn_q.bias")],
    modules: &[
        ("ffn_gate_inp", "block_sparse_moe.router.layer"),
        ("ffn_gate_shexp", "shared_mlp.gate_proj"),
        ("ffn_up_shexp", "shared_mlp.up_proj"),
        ("ffn_down_shexp", "shared_mlp.output_linear"),
    ],
    experts: ("block_sparse_moe.experts", ["gate_proj", "up_proj", "down_proj"]),
    pairs: true,
    ..BASE
};

const GRANITE: &[(&str, &str)] = &[
    ("attention_multiplier", "attention.scale"),
    ("embedding_multiplier", "embedding_scale"),
    ("residual_multiplier", "residual_scale"),
    ("logits_scaling", "logit_scale"),
    ("num_local_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("shared_intermediate_size", "expert_shared_feed_forward_length"),
];

const WIDTHS: &str = "feed_forward_length";

pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "qwen3next",
        class: "Qwen3NextForCausalLM",
        class_of_experts: "Qwen3NextForCausalLM",
        constants: &[("norm_topk_prob", "true"), ("decoder_sparse_step", "1"), ("num_nextn_predict_layers", "0")],
        ..DELTA_NET
    },
    Architecture { name: "qwen35", class: "Qwen3_5ForCausalLM", tiled: true, ..DELTA_NET },
    Architecture { name: "qwen35moe", class_of_experts: "Qwen3_5MoeForCausalLM", tiled: true, ..DELTA_NET },
    GRANITE_MOE,
    Architecture {
        name: "granitehybrid",
        class: "GraniteMoeHybridForCausalLM",
        class_of_experts: "GraniteMoeHybridForCausalLM",
        shared_keys: MAMBA,
        flags: &[
            ("attention_bias", "attn_q.bias"),
            ("mamba_conv_bias", "ssm_conv1d.bias"),
            ("mamba_proj_bias", "ssm_in.bias"),
        ],
        modules: &[
            // In layers without experts.
            ("ffn_gate", "shared_mlp.gate_proj"),
            ("ffn_up", "shared_mlp.up_proj"),
            ("ffn_down", "shared_mlp.output_linear"),
        ],
        shared_modules: GRANITE_MOE.modules,
        layer_types: Some(("layer_types", ["mamba", "attention"])),
        derive: granite,
        ..GRANITE_MOE
    },
    Architecture { name: "lfm2", class: "Lfm2ForCausalLM", ..LFM2 },
    Architecture { name: "lfm2moe", class_of_experts: "Lfm2MoeForCausalLM", ..LFM2 },
    Architecture { name: "nemotron_h", ..NEMOTRON },
    Architecture { name: "nemotron_h_moe", ..NEMOTRON },
    Architecture {
        name: "jamba",
        class: "JambaForCausalLM",
        class_of_experts: "JambaForCausalLM",
        keys: &[
            ("num_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("mamba_d_state", "ssm.state_size"),
            ("mamba_d_conv", "ssm.conv_kernel"),
            ("mamba_dt_rank", HEADS),
        ],
        lists: &[KEY_HEADS],
        flags: &[("mamba_conv_bias", "ssm_conv1d.bias"), ("mamba_proj_bias", "ssm_in.bias")],
        modules: &[
            ("ssm_x", "mamba.x_proj"),
            ("ssm_dt", "mamba.dt_proj"),
            ("ssm_dt.bias", "mamba.dt_proj.bias"),
            ("ssm_dt_norm", "mamba.dt_layernorm"),
            ("ssm_b_norm", "mamba.b_layernorm"),
            ("ssm_c_norm", "mamba.c_layernorm"),
            ("ffn_norm", "pre_ff_layernorm"),
            ("ffn_gate_inp", "feed_forward.router"),
            ("ffn_gate", "feed_forward.gate_proj"),
            ("ffn_up", "feed_forward.up_proj"),
            ("ffn_down", "feed_forward.down_proj"),
        ],
        outer: &[("output_norm", "model.final_layernorm")],
        experts: ("feed_forward.experts", ["gate_proj", "up_proj", "down_proj"]),
        derive: jamba,
        ..BASE
    },
    Architecture {
        name: "falcon-h1",
        class: "FalconH1ForCausalLM",
        keys: &[("mamba_d_ssm", INNER)],
        shared_keys: MAMBA,
        flags: &[
            ("attention_bias", "attn_q.bias"),
            ("mlp_bias", "ffn_up.bias"),
            ("mamba_conv_bias", "ssm_conv1d.bias"),
            ("mamba_proj_bias", "ssm_in.bias"),
            ("projectors_bias", "ssm_out.bias"),
            ("mamba_rms_norm", "ssm_norm.weight"),
        ],
        // All factors are in the weights.
        constants: &[("mamba_norm_before_gate", "false")],
        modules: &[
            // Files have it without the end that others have.
            ("ffn_norm", "pre_ff_layernorm.weight"),
            ("ffn_norm.weight", "pre_ff_layernorm.weight"),
            ("ffn_gate", "feed_forward.gate_proj"),
            ("ffn_up", "feed_forward.up_proj"),
            ("ffn_down", "feed_forward.down_proj"),
        ],
        outer: &[("output_norm", "model.final_layernorm")],
        derive: |metadata, map| {
            map.insert("mamba_d_head".into(), json!(metadata.quotient(INNER, HEADS)?));
            Ok(())
        },
        ..BASE
    },
];

fn granite(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    map.insert("mamba_d_head".into(), json!(metadata.quotient(INNER, HEADS)?));
    map.insert("mamba_expand".into(), json!(metadata.quotient(INNER, "embedding_length")?));
    // Files without the key rotate.
    let rotates = metadata.truth("rope.scaling.finetuned")?.unwrap_or(true);
    map.insert("position_embedding_type".into(), json!(if rotates { "rope" } else { "nope" }));
    let width = metadata.shape("blk.0.ffn_up.weight").and_then(|shape| shape.first());
    if let Some(width) = width.filter(|_| !map.contains_key("shared_intermediate_size")) {
        map.insert("shared_intermediate_size".into(), json!(width));
    }
    Ok(())
}

/// The mixers of all layers, from the numbers of key/value heads and the widths of networks, of which Mamba-2 has neither.
fn nemotron(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    let blocks = metadata.count("block_count")?.unwrap_or(0);
    let (heads, widths) = (metadata.of_layers(KEY_HEADS, blocks)?, metadata.of_layers(WIDTHS, blocks)?);
    let network = if map.contains_key("n_routed_experts") { 'E' } else { '-' };
    let kind = |(heads, width): (&u64, &u64)| match (*heads, *width) {
        (0, 0) => 'M',
        (0, _) => network,
        _ => '*',
    };
    let layers = blocks.saturating_sub(metadata.count(PREDICTORS)?.unwrap_or(0)) as usize;
    let pattern: String = heads.iter().zip(&widths).map(kind).take(layers).collect();
    map.insert("hybrid_override_pattern".into(), json!(pattern));
    map.insert("num_hidden_layers".into(), json!(layers));
    map.insert("mamba_head_dim".into(), json!(metadata.quotient(INNER, HEADS)?));
    let greatest = |list: &[u64]| list.iter().copied().max().filter(|number| *number > 0);
    for (name, list) in [("num_key_value_heads", heads), ("intermediate_size", widths)] {
        if let Some(number) = greatest(&list) {
            map.insert(name.into(), json!(number));
        }
    }
    Ok(())
}

fn jamba(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    let layers = metadata.count("block_count")?.unwrap_or(0);
    let heads = metadata.of_layers(KEY_HEADS, layers)?;
    map.insert("num_key_value_heads".into(), json!(heads.iter().copied().max().unwrap_or(0)));
    map.insert("mamba_expand".into(), json!(metadata.quotient(INNER, "embedding_length")?));
    let attention: Vec<u64> = (0..).zip(&heads).filter(|(_, heads)| **heads > 0).map(|(layer, _)| layer).collect();
    let mut sparse: Vec<u64> = metadata.in_layers("ffn_gate_inp.weight").collect();
    sparse.sort_unstable();
    for (name, chosen, key) in [("attn_layer", attention, KEY_HEADS), ("expert_layer", sparse, "expert_count")] {
        let Some(&first) = chosen.first() else {
            // No layer: the first that is one lies behind the last.
            map.insert(format!("{name}_period"), json!(layers + 1));
            map.insert(format!("{name}_offset"), json!(layers));
            continue;
        };
        let period = chosen.get(1).map_or(layers.max(first + 1), |second| second - first);
        let regular = (first..layers).step_by(period.max(1) as usize);
        if first >= period || !regular.eq(chosen.iter().copied()) {
            return Err(metadata.wrong(key, format!("layers at regular distances, not {chosen:?}")));
        }
        map.insert(format!("{name}_period"), json!(period));
        map.insert(format!("{name}_offset"), json!(first));
    }
    Ok(())
}

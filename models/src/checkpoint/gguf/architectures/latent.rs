//! Architectures with latent attention.

use serde_json::{Map, Value as Json, json};

use super::{Architecture, BASE, CHOICE_BIAS, DEEPSEEK_EXPERTS, EXPERT_MODULES, KEY_HEADS, ROTATED, VALUES};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::gguf::metadata::Metadata;

const RANK: &str = "attention.kv_lora_rank";
const GATING: &str = "expert_gating_func";
const RENORMALISED: &str = "expert_weights_norm";

/// Modules of latent attention, and of indexers.
const LATENT: &[(&str, &str)] = &[
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    ("attn_k_b", "self_attn.k_b_proj"),
    ("attn_v_b", "self_attn.v_b_proj"),
    ("indexer.attn_q_b", "self_attn.indexer.wq_b"),
    ("indexer.attn_k", "self_attn.indexer.wk"),
    ("indexer.k_norm", "self_attn.indexer.k_norm"),
    ("indexer.proj", "self_attn.indexer.weights_proj"),
];

pub(super) const ARCHITECTURES: &[Architecture] = &[
    DEEPSEEK,
    Architecture {
        name: "deepseek32",
        class: "DeepseekV32ForCausalLM",
        class_of_experts: "DeepseekV32ForCausalLM",
        derive: indexed,
        ..DEEPSEEK
    },
    Architecture {
        name: "glm-dsa",
        class: "GlmMoeDsaForCausalLM",
        class_of_experts: "GlmMoeDsaForCausalLM",
        derive: indexed,
        ..DEEPSEEK
    },
    Architecture {
        name: "minicpm3",
        class: "MiniCPM3ForCausalLM",
        keys: DEEPSEEK.keys,
        // The file's format knows only this model of the family.
        constants: &[("scale_emb", "12.0"), ("scale_depth", "1.4"), ("dim_model_base", "256")],
        shared_modules: LATENT,
        derive: |metadata, map| heads(metadata, map, Some(metadata.quotient("embedding_length", HEADS)?)),
        ..BASE
    },
    KIMI,
];

const HEADS: &str = "attention.head_count";

const DEEPSEEK: Architecture = Architecture {
    name: "deepseek2",
    class: "DeepseekV3ForCausalLM",
    class_of_experts: "DeepseekV3ForCausalLM",
    keys: &[
        ("kv_lora_rank", RANK),
        ("q_lora_rank", "attention.q_lora_rank"),
        ("qk_rope_head_dim", ROTATED),
        ("n_group", "expert_group_count"),
        ("topk_group", "expert_group_used_count"),
        ("index_n_heads", "attention.indexer.head_count"),
        ("index_head_dim", "attention.indexer.key_length"),
        ("index_topk", "attention.indexer.top_k"),
    ],
    shared_keys: DEEPSEEK_EXPERTS,
    flags: &[("attention_bias", "attn_kv_a_mqa.bias")],
    modules: EXPERT_MODULES,
    shared_modules: LATENT,
    // Scores grow by the logarithm of the factor; queries and keys do not.
    yarn: &[("attention_factor", "1.0")],
    derive: deepseek,
    ..BASE
};

const KIMI: Architecture = Architecture {
    name: "kimi-linear",
    class: "KimiLinearForCausalLM",
    class_of_experts: "KimiLinearForCausalLM",
    keys: &[
        ("num_experts", "expert_count"),
        ("num_experts_per_token", "expert_used_count"),
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("num_shared_experts", "expert_shared_count"),
        ("first_k_dense_replace", "leading_dense_block_count"),
        ("routed_scaling_factor", "expert_weights_scale"),
        ("moe_renormalize", RENORMALISED),
        ("num_expert_group", "expert_group_count"),
        ("topk_group", "expert_group_used_count"),
        ("kv_lora_rank", RANK),
        ("q_lora_rank", "attention.q_lora_rank"),
        ("qk_rope_head_dim", ROTATED),
    ],
    lists: &[KEY_HEADS],
    constants: &[("mla_use_nope", "true")],
    modules: &[
        ("ssm_conv1d_q", "self_attn.q_conv1d"),
        ("ssm_conv1d_k", "self_attn.k_conv1d"),
        ("ssm_conv1d_v", "self_attn.v_conv1d"),
        ("ssm_f_a", "self_attn.f_a_proj"),
        ("ssm_f_b", "self_attn.f_b_proj"),
        ("ssm_g_a", "self_attn.g_a_proj"),
        ("ssm_g_b", "self_attn.g_b_proj"),
        ("ssm_beta", "self_attn.b_proj"),
        ("ssm_a", "self_attn.A_log"),
        ("ssm_dt.bias", "self_attn.dt_bias"),
        ("ssm_norm", "self_attn.o_norm"),
        ("ffn_gate_inp", "block_sparse_moe.gate"),
        (CHOICE_BIAS, "block_sparse_moe.gate.e_score_correction_bias"),
        ("ffn_gate_shexp", "block_sparse_moe.shared_experts.gate_proj"),
        ("ffn_up_shexp", "block_sparse_moe.shared_experts.up_proj"),
        ("ffn_down_shexp", "block_sparse_moe.shared_experts.down_proj"),
    ],
    shared_modules: LATENT,
    experts: ("block_sparse_moe.experts", ["w1", "w3", "w2"]),
    derive: kimi,
    ..BASE
};

/// The sizes of both kinds of layers, and which have keys and values, and so are no delta nets.
fn kimi(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    heads(metadata, map, None)?;
    let layers = metadata.count("block_count")?.unwrap_or(0);
    let counts = metadata.of_layers(KEY_HEADS, layers)?;
    let listed = |full: bool| {
        let of_kind = (1..).zip(&counts).filter(|(_, heads)| (**heads > 0) == full);
        of_kind.map(|(layer, _)| layer).collect::<Vec<u64>>()
    };
    let number = |key: &str| metadata.count(key)?.ok_or_else(|| metadata.wrong(key, "a number"));
    let config = json!({
        "full_attn_layers": listed(true),
        "kda_layers": listed(false),
        "num_heads": number("attention.head_count")?,
        "head_dim": number("kda.head_dim")?,
        "short_conv_kernel_size": number("ssm.conv_kernel")?,
    });
    map.insert("linear_attn_config".into(), config);
    map.insert("num_key_value_heads".into(), json!(number("attention.head_count")?));
    match metadata.count(GATING)? {
        None | Some(2) => Ok(()),
        Some(_) => Err(metadata.wrong(GATING, "2 (sigmoid)")),
    }
}

fn deepseek(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    heads(metadata, map, None)?;
    router(metadata, map)?;
    growth(metadata, map)
}

/// Models with indexers, whose experts are scored by a sigmoid.
fn indexed(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    const TYPES: &str = "attention.indexer.types";
    heads(metadata, map, None)?;
    growth(metadata, map)?;
    if !matches!(metadata.count(GATING)?, None | Some(2)) {
        return Err(metadata.wrong(GATING, "2 (sigmoid)"));
    }
    map.insert("norm_topk_prob".into(), json!(metadata.truth(RENORMALISED)?.unwrap_or(false)));
    if let Some(own) = metadata.flags(TYPES)? {
        let types: Vec<&str> = own.iter().map(|own| if *own { "full" } else { "shared" }).collect();
        map.insert("indexer_types".into(), json!(types));
    }
    Ok(())
}

/// How much scores grow with the factor of YaRN.
fn growth(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    if let Some(scaling) = map.get_mut("rope_scaling").and_then(Json::as_object_mut) {
        // The files have a tenth of it.
        if let Some(tenth) = metadata.number("rope.scaling.yarn_log_multiplier")?.and_then(|number| number.as_f64()) {
            scaling.insert("mscale_all_dim".into(), json!((10.0 * tenth) as f32));
        }
    }
    Ok(())
}

/// The sizes of the heads; `values`: that of a value, if the file does not state it.
fn heads(metadata: &Metadata<'_>, map: &mut Map<String, Json>, values: Option<u64>) -> Result<(), LoadError> {
    let required = |key: &'static str| metadata.count(key)?.ok_or_else(|| metadata.wrong(key, "a number"));
    required(RANK)?;
    // Older files have the sizes of a head under the keys that later became those of latents.
    let stated = |key: &'static str, older: &'static str| match metadata.count(key)? {
        Some(size) => Ok((key, size)),
        None => Ok::<_, LoadError>((older, required(older)?)),
    };
    let (key, keys) = stated("attention.key_length_mla", "attention.key_length")?;
    let values = match values {
        Some(values) => values,
        None => stated("attention.value_length_mla", VALUES)?.1,
    };
    let rotated = required(ROTATED)?;
    let plain = keys.checked_sub(rotated).filter(|plain| *plain > 0);
    let plain =
        plain.ok_or_else(|| metadata.wrong(key, format!("more than `{}`, {rotated}", metadata.full(ROTATED))))?;
    map.insert("qk_nope_head_dim".into(), json!(plain));
    map.insert("v_head_dim".into(), json!(values));
    Ok(())
}

/// The family of the router, and its groups.
fn router(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    let Some(experts) = metadata.count("expert_count")?.filter(|count| *count > 0) else {
        // All layers are dense.
        let layers = map.get("num_hidden_layers").cloned().unwrap_or_default();
        let dense =
            [("first_k_dense_replace", layers), ("n_routed_experts", json!(1)), ("num_experts_per_tok", json!(1))];
        map.extend(dense.map(|(key, value)| (key.to_string(), value)));
        return Ok(());
    };
    let renormalises = metadata.truth(RENORMALISED)?.unwrap_or(false);
    match metadata.count(GATING)? {
        // Older files are of models that score by softmax.
        None | Some(0 | 1) if renormalises => {
            return Err(metadata.wrong(RENORMALISED, "false, if experts are scored by softmax"));
        }
        None | Some(0 | 1) => {
            map.insert("architectures".into(), json!(["DeepseekV2ForCausalLM"]));
            if map.get("n_group").and_then(Json::as_u64).is_some_and(|groups| groups > 1) {
                map.insert("topk_method".into(), json!("group_limited_greedy"));
            }
        }
        Some(2) => {
            map.insert("norm_topk_prob".into(), json!(renormalises));
            // Files of 2024 and 2025 do not state the groups of DeepSeek V3, the only model with so many experts in them.
            let [groups, top] = if experts == 256 { [8, 4] } else { [1, 1] };
            map.entry("n_group").or_insert(json!(groups));
            map.entry("topk_group").or_insert(json!(top));
        }
        Some(_) => return Err(metadata.wrong(GATING, "1 (softmax) or 2 (sigmoid)")),
    }
    Ok(())
}

//! Architectures with the layers of Llama under other names, and with a few other changes.

use serde_json::{Map, Value as Json, json};

use super::{Architecture, BASE, LAYER_EPS, LLAMA};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::gguf::Value;
use crate::checkpoint::gguf::metadata::Metadata;

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
        name: "nemotron",
        class: "NemotronForCausalLM",
        keys: &[("norm_eps", LAYER_EPS)],
        absent: &["rms_norm_eps"],
        flags: &[("attention_bias", "attn_q.bias"), ("mlp_bias", "ffn_up.bias")],
        constants: WHOLE,
        norms_plus_one: true,
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
    Architecture {
        name: "stablelm",
        class: "StableLmForCausalLM",
        keys: &[("layer_norm_eps", LAYER_EPS), ("use_parallel_residual", "use_parallel_residual")],
        flags: &[("use_qkv_bias", "attn_q.bias"), ("qk_layernorm", "attn_q_norm.weight")],
        constants: WHOLE,
        // A row for each head.
        modules: &[("attn_q_norm", "self_attn.q_layernorm.norms"), ("attn_k_norm", "self_attn.k_layernorm.norms")],
        ..BASE
    },
    // Its queries, keys and values are apart, as Llama's are.
    Architecture { name: "internlm2", ..LLAMA },
    Architecture { name: "llama-embed", constants: &[("is_causal", "false")], ..LLAMA },
    Architecture {
        name: "apertus",
        class: "ApertusForCausalLM",
        flags: &[("attention_bias", "attn_q.bias")],
        modules: &[("attn_norm", "attention_layernorm"), ("ffn_norm", "feedforward_layernorm")],
        arrays: &[("xielu.alpha_p", "mlp.act_fn.alpha_p"), ("xielu.alpha_n", "mlp.act_fn.alpha_n")],
        derive: apertus,
        ..BASE
    },
    Architecture {
        name: "minicpm",
        class: "MiniCPMForCausalLM",
        keys: &[("scale_emb", "embedding_scale")],
        flags: &[("attention_bias", "attn_q.bias")],
        // Files of 2024 state no factors.
        constants: &[("scale_emb", "12.0")],
        derive: minicpm,
        ..LLAMA
    },
];

/// The rotary embedding of a file without factors is not scaled, and the activation has the constants of the family.
fn apertus(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    map.entry("rope_scaling").or_insert(json!({"rope_type": "default"}));
    for (key, expected) in [("xielu.beta", 0.5), ("xielu.eps", -1e-6_f32)] {
        let Some(value) = metadata.gguf.value(key) else { continue };
        let is_it = |value: Value<'_>| value.float().is_some_and(|number| number as f32 == expected);
        let all = value.array().map_or_else(|| is_it(value), |list| list.iter().all(is_it));
        if !all {
            return Err(metadata.wrong_of(key, format!("{expected} for every layer")));
        }
    }
    Ok(())
}

/// The factors of branches and logits, in the terms of the family.
fn minicpm(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    const LOGITS: &str = "logit_scale";
    let number = |key: &str| Ok::<_, LoadError>(metadata.number(key)?.and_then(|number| number.as_f64()));
    let count = |key: &str| Ok::<_, LoadError>(metadata.count(key)?.unwrap_or(0) as f64);
    let depth = number("residual_scale")?.map(|scale| Ok::<_, LoadError>(scale * count("block_count")?.sqrt()));
    map.insert("scale_depth".into(), json!(depth.transpose()?.unwrap_or(1.4)));
    let base = match number(LOGITS)? {
        Some(scale) => count("embedding_length")? / scale,
        None => 256.0,
    };
    if !base.is_finite() || base.round() < 1.0 || (base - base.round()).abs() > 1e-3 {
        return Err(metadata.wrong(LOGITS, "the quotient of `minicpm.embedding_length` and a whole number"));
    }
    map.insert("dim_model_base".into(), json!(base.round() as u64));
    Ok(())
}

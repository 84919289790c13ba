//! Falcon 7B, 40B, 180B, Falcon 2 and Falcon-RW: one tensor for queries, keys and values by group, GELU without a gate.
//!
//! Most compute both branches from the same stream (`parallel_attn`), through one norm or two. Falcon-RW has ALiBi instead of a
//! rotary embedding. Falcon 3 checkpoints are Llama's.

use super::{Activation, Common, Decoder, Family, Fields, LoadError, Packing, Spec, alibi_slopes};
use half::bf16;

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["FalconForCausalLM", "RWForCausalLM"],
    model_types: &["falcon", "RefinedWebModel", "RefinedWeb"],
    positions: (&["max_position_embeddings"], Some(2048)),
    declare,
    largest: "tiiuae/falcon-180B",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    intermediate_size: "ffn_hidden_size",
    num_kv_heads: "num_kv_heads",
    sizes: &[("ffn_hidden_size", 0)],
    eps: ("layer_norm_epsilon", 1e-5),
    activation: (&["activation"], Activation::Gelu),
    tied: true,
    root: "transformer",
    tokens: "word_embeddings",
    layers: "h",
    final_norm: "ln_f",
    ..Spec::LAYER_NORM
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let mut common = Common::read(fields, max_positions, SPEC)?;
    let new_architecture = fields.boolean("new_decoder_architecture")?.unwrap_or(false);
    let alibi = fields.boolean("alibi")?.unwrap_or(false);
    let bias = fields.boolean("bias")?.unwrap_or(false);
    let parallel = new_architecture || fields.boolean("parallel_attn")?.unwrap_or(true);
    if !new_architecture {
        let multi_query = fields.boolean("multi_query")?.unwrap_or(true);
        common.heads.num_kv_heads = if multi_query { 1 } else { common.heads.num_heads };
    }
    let norms = match (parallel, new_architecture) {
        (true, true) if fields.integer("num_ln_in_parallel_attn", 1..=2)?.unwrap_or(2) == 2 => ["ln_attn", "ln_mlp"],
        (true, _) => ["input_layernorm"; 2],
        (false, _) => ["input_layernorm", "post_attention_layernorm"],
    };
    if alibi {
        common.rope = None;
    }
    Ok(common.decoder(|layer| {
        let name = common.at(layer, "self_attention");
        let mut attention = common.attention_of(name, Packing::Groups("query_key_value"), "dense").biased(bias, bias);
        if alibi {
            // The slopes are rounded to bfloat16, and the sum of product and slope is scaled.
            let slopes = alibi_slopes(common.heads.num_heads, 8.0).into_iter();
            let scaled = slopes.map(|slope| bf16::from_f32(slope).to_f32() * attention.scale);
            attention.alibi_slopes = Some(scaled.collect());
        }
        let mlp = common.plain(common.at(layer, "mlp"), ["dense_h_to_4h", "dense_4h_to_h"]).biased(bias);
        let declared = common.layer_with(layer, norms, attention, mlp);
        if parallel { declared.in_parallel() } else { declared }
    }))
}

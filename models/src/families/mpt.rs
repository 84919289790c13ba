//! MPT: ALiBi, layer norms without a bias, GELU without a gate, no biases.

use super::sizes::{self, MAX_WIDTH, positive};
use super::{Activation, Common, Decoder, Family, Fields, LoadError, Packing, Spec};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["MptForCausalLM", "MPTForCausalLM"],
    model_types: &["mpt"],
    positions: (&["max_seq_len"], Some(2048)),
    declare,
    largest: "mosaicml/mpt-30b",
    pickled: true,
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    hidden_size: "d_model",
    intermediate_size: "",
    num_layers: "n_layers",
    num_heads: "n_heads",
    sizes: &[("", 0)],
    eps: ("layer_norm_epsilon", 1e-5),
    activation: (&[], Activation::Gelu),
    tied: true,
    norm_bias: false,
    rope: None,
    root: "transformer",
    tokens: "wte",
    layers: "blocks",
    final_norm: "norm_f",
    ..Spec::LAYER_NORM
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let mut common = Common::read(fields, max_positions, SPEC)?;
    if let Some(ratio) = sizes::optional(fields, "expansion_ratio", 64)? {
        common.intermediate_size = ratio * common.hidden_size;
    }
    if common.intermediate_size as u64 > MAX_WIDTH {
        return Err(fields.wrong("expansion_ratio", format!("a feed-forward width of at most {MAX_WIDTH}")));
    }
    for (key, expected) in [("no_bias", true), ("learned_pos_emb", true)] {
        // Learned positions are an option of other implementations, which ALiBi replaces.
        if key == "no_bias" && fields.boolean(key)?.unwrap_or(expected) != expected {
            return Err(fields.wrong(key, "true"));
        }
    }
    let (mut clip, mut scale, mut bias_max) = (None, None, 8.0);
    if let Some(attention) = fields.object("attn_config")? {
        for (key, expected) in [("qk_ln", false), ("alibi", true)] {
            if attention.boolean(key)?.unwrap_or(expected) != expected {
                return Err(attention.wrong(key, expected.to_string()));
            }
        }
        clip = positive(&attention, "clip_qkv")?.map(|clip| clip as f32);
        scale = positive(&attention, "softmax_scale")?.map(|scale| scale as f32);
        bias_max = positive(&attention, "alibi_bias_max")?.unwrap_or(bias_max);
    }
    let slopes = slopes(common.heads.num_heads, bias_max);
    Ok(common.decoder(|layer| {
        let mut attention = common.attention_of(common.at(layer, "attn"), Packing::Rows("Wqkv"), "out_proj");
        attention.clip = clip;
        attention.scale = scale.unwrap_or(attention.scale);
        attention.alibi_slopes = Some(slopes.clone());
        let mlp = common.plain(common.at(layer, "ffn"), ["up_proj", "down_proj"]);
        common.layer_with(layer, ["norm_1", "norm_2"], attention, mlp)
    }))
}

/// MPT's slopes of ALiBi: those of the next power of two, every second one first.
fn slopes(num_heads: usize, bias_max: f64) -> Vec<f32> {
    let n = num_heads.next_power_of_two();
    let all: Vec<f32> = (1..=n).map(|k| (-bias_max * k as f64 / n as f64).exp2() as f32).collect();
    match n == num_heads {
        true => all,
        false => all.iter().skip(1).step_by(2).chain(all.iter().step_by(2)).take(num_heads).copied().collect(),
    }
}

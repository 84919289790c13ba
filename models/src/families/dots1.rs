//! dots.llm1: Qwen3's attention, and from some layer on the experts of DeepSeek V3.

use super::sizes::{self, MAX_LAYERS, MAX_WIDTH};
use super::{Common, Decoder, Family, Fields, LoadError, Mixer, Spec, Windows, deepseek};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["Dots1ForCausalLM"],
    model_types: &["dots1"],
    positions: (&["max_position_embeddings"], Some(2048)),
    declare,
    largest: "rednote-hilab/dots.llm1.inst (142B)",
    ..Family::BASE
}];

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, Spec { sizes: &[("num_key_value_heads", 32)], ..Spec::LLAMA })?;
    let windows = common.windows(fields, Windows::Always)?;
    let listed = fields.get("layer_types").is_some();
    let first_windowed = fields.integer("max_window_layers", 0..=MAX_LAYERS)?.unwrap_or(62) as usize;
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let first_sparse = fields.integer("first_k_dense_replace", 0..=MAX_LAYERS)?.unwrap_or(0) as usize;
    let width = sizes::required(fields, "moe_intermediate_size", MAX_WIDTH)?;
    let shared = width * fields.integer("n_shared_experts", 0..=64)?.unwrap_or(0) as usize;
    let (count, mut routing) = deepseek::routing_v3(fields, [1, 1])?;
    routing.renormalise = fields.boolean("norm_topk_prob")?.unwrap_or(false);
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer).biased(bias, bias).head_normed(&common, ["q_norm", "k_norm"]);
        attention.window = windows[layer].filter(|_| listed || layer >= first_windowed);
        let mlp = match layer < first_sparse {
            true => Mixer::Mlp(common.mlp(layer)),
            false => Mixer::Experts(deepseek::mixture(&common, layer, &routing, count, width, shared)),
        };
        common.layer(layer, attention, mlp)
    }))
}

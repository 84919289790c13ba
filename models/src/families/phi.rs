//! Phi-1, Phi-1.5 and Phi-2: attention and a feed-forward network without a gate read the same layer norm of the stream. All
//! projections and the head have biases.

use super::{Activation, Common, Decoder, Family, Fields, LoadError, Packing, RopeDefaults, Spec};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["PhiForCausalLM"],
    model_types: &["phi"],
    positions: (&["max_position_embeddings"], Some(2048)),
    declare,
    largest: "microsoft/phi-2 (2.7B)",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    activation: (&["hidden_act"], Activation::GeluTanh),
    rope: Some(RopeDefaults { partial: ("partial_rotary_factor", 0.5), ..RopeDefaults::LLAMA }),
    final_norm: "final_layernorm",
    head_bias: true,
    ..Spec::LAYER_NORM
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let head_norms = fields.boolean("qk_layernorm")?.unwrap_or(false);
    Ok(common.decoder(|layer| {
        let packing = Packing::Separate(["q_proj", "k_proj", "v_proj"]);
        let mut attention = common.attention_of(common.at(layer, "self_attn"), packing, "dense").biased(true, true);
        if head_norms {
            attention = attention.head_normed(&common, ["q_layernorm", "k_layernorm"]);
        }
        let mlp = common.plain(common.at(layer, "mlp"), ["fc1", "fc2"]).biased(true);
        common.layer_with(layer, ["input_layernorm"; 2], attention, mlp).in_parallel()
    }))
}

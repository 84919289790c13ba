//! Phi-3.5-MoE: Mixtral's layers with layer norms, biases and the router SparseMixer.

use super::experts;
use super::sizes::positive;
use super::{Common, Decoder, Family, Fields, LoadError, Mixer, RopeDefaults, Scores, Spec, Windows};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["PhimoeForCausalLM", "PhiMoEForCausalLM"],
    model_types: &["phimoe"],
    declare,
    largest: "microsoft/Phi-3.5-MoE-instruct (42B)",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    sizes: &[("num_key_value_heads", 8)],
    eps: ("rms_norm_eps", 1e-5),
    rope: Some(RopeDefaults::theta(1_000_000.0)),
    ..Spec::LAYER_NORM
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let head_bias = fields.boolean("lm_head_bias")?.unwrap_or(false);
    let common = Common::read(fields, max_positions, Spec { head_bias, ..SPEC })?;
    let windows = common.windows(fields, Windows::IfStated)?;
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let (count, top_k) = experts::counts(fields, ["num_local_experts", "num_experts_per_tok"])?;
    let threshold = 2.0 * positive(fields, "router_jitter_noise")?.unwrap_or(0.01) as f32;
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer).biased(bias, bias);
        attention.window = windows[layer];
        let module = common.at(layer, "block_sparse_moe");
        let networks = experts::separate(&common, &module, count, ["w1", "w3", "w2"], common.intermediate_size);
        let routing = experts::routing(Scores::SparseMixer { threshold }, top_k);
        let mixture = experts::mixture(&common, format!("{module}.gate"), routing, networks, None);
        common.layer(layer, attention, Mixer::Experts(mixture))
    }))
}

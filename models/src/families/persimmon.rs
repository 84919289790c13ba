//! Persimmon: layer norms, biases, a partial rotary embedding, layer norms of query and key heads, squared ReLU without a gate.

use super::{Activation, Common, Decoder, Family, Fields, LoadError, Packing, RopeDefaults, Spec};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["PersimmonForCausalLM"],
    model_types: &["persimmon"],
    positions: (&["max_position_embeddings"], Some(16384)),
    declare,
    largest: "adept/persimmon-8b-chat",
    pickled: true,
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    activation: (&["hidden_act"], Activation::Relu2),
    rope: Some(RopeDefaults { partial: ("partial_rotary_factor", 0.5), ..RopeDefaults::theta(25_000.0) }),
    final_norm: "final_layernorm",
    ..Spec::LAYER_NORM
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let head_norms = fields.boolean("qk_layernorm")?.unwrap_or(true);
    Ok(common.decoder(|layer| {
        let name = common.at(layer, "self_attn");
        let mut attention = common.attention_of(name, Packing::Groups("query_key_value"), "dense").biased(true, true);
        if head_norms {
            attention = attention.head_normed(&common, ["q_layernorm", "k_layernorm"]);
        }
        let mlp = common.plain(common.at(layer, "mlp"), ["dense_h_to_4h", "dense_4h_to_h"]).biased(true);
        common.layer(layer, attention, mlp)
    }))
}

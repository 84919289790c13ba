//! BLOOM: ALiBi, layer norms (one of the embedding too), biases, GELU without a gate.

use super::{Activation, Common, Decoder, Family, Fields, LoadError, Packing, Spec, alibi_slopes};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["BloomForCausalLM"],
    model_types: &["bloom"],
    positions: (&["max_position_embeddings", "seq_length"], Some(2048)),
    declare,
    reference: &["bloom"],
    largest: "bigscience/bloom (176B)",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    intermediate_size: "n_inner",
    num_layers: "n_layer",
    num_heads: "n_head",
    sizes: &[("n_inner", 0)],
    eps: ("layer_norm_epsilon", 1e-5),
    activation: (&[], Activation::GeluTanh),
    tied: true,
    rope: None,
    root: "transformer",
    tokens: "word_embeddings",
    layers: "h",
    final_norm: "ln_f",
    ..Spec::LAYER_NORM
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    // Older files name some sizes otherwise.
    let first = |keys: [&'static str; 2]| if fields.get(keys[0]).is_some() { keys[0] } else { keys[1] };
    let spec = Spec {
        hidden_size: first(["hidden_size", "n_embed"]),
        num_heads: first(["n_head", "num_attention_heads"]),
        num_layers: first(["n_layer", "num_hidden_layers"]),
        ..SPEC
    };
    let common = Common::read(fields, max_positions, spec)?;
    if fields.boolean("apply_residual_connection_post_layernorm")?.unwrap_or(false) {
        return Err(fields.wrong("apply_residual_connection_post_layernorm", "false"));
    }
    let mut decoder = common.decoder(|layer| {
        let name = common.at(layer, "self_attention");
        let mut attention = common.attention_of(name, Packing::Groups("query_key_value"), "dense").biased(true, true);
        attention.alibi_slopes = Some(alibi_slopes(common.heads.num_heads, 8.0));
        let mlp = common.plain(common.at(layer, "mlp"), ["dense_h_to_4h", "dense_4h_to_h"]).biased(true);
        common.layer(layer, attention, mlp)
    });
    decoder.embedding.norm = Some(common.norm("transformer.word_embeddings_layernorm".to_string()));
    Ok(decoder)
}

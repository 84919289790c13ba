//! Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: the layers of Llama with one tensor for queries, keys and values and one for gate and up.
//!
//! `partial_rotary_factor` and the lists of LongRoPE are options of the configuration.

use super::{Common, Decoder, Family, Fields, LoadError, Packing, Spec, Windows};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["Phi3ForCausalLM"],
    model_types: &["phi3"],
    positions: (&["max_position_embeddings"], Some(4096)),
    declare,
    reference: &["phi3-longrope"],
    largest: "microsoft/phi-4 (14B)",
    ..Family::BASE
}];

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, Spec { eps: ("rms_norm_eps", 1e-5), ..Spec::LLAMA })?;
    let windows = common.windows(fields, Windows::IfStated)?;
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    Ok(common.decoder(|layer| {
        let packing = Packing::Rows("qkv_proj");
        let mut attention = common.attention_of(common.at(layer, "self_attn"), packing, "o_proj").biased(bias, bias);
        attention.window = windows[layer];
        let mlp = common.gated_rows(common.at(layer, "mlp"), ["gate_up_proj", "down_proj"], common.intermediate_size);
        common.layer(layer, attention, mlp)
    }))
}

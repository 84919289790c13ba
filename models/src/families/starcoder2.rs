//! StarCoder 2: Llama's attention with layer norms and biases, and a feed-forward network without a gate.

use super::{Activation, Common, Decoder, Family, Fields, LoadError, Spec, Windows};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["Starcoder2ForCausalLM"],
    model_types: &["starcoder2"],
    declare,
    largest: "bigcode/starcoder2-15b",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    sizes: &[("num_key_value_heads", 2)],
    eps: ("norm_epsilon", 1e-5),
    activation: (&["hidden_act"], Activation::GeluTanh),
    tied: true,
    ..Spec::LAYER_NORM
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let windows = common.windows(fields, Windows::IfStated)?;
    let bias = fields.boolean("use_bias")?.unwrap_or(true);
    // Written by the training program; transformers does not read them either.
    for key in ["mlp_type", "norm_type"] {
        fields.get(key);
    }
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer).biased(bias, bias);
        attention.window = windows[layer];
        let mlp = common.plain(common.at(layer, "mlp"), ["c_fc", "c_proj"]).biased(bias);
        common.layer(layer, attention, mlp)
    }))
}

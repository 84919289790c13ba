//! ERNIE 4.5, the dense models: the layers of Llama with interleaved RoPE.

use super::{Common, Decoder, Family, Fields, LoadError, RopeDefaults, Spec};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["Ernie4_5ForCausalLM"],
    model_types: &["ernie4_5"],
    declare,
    largest: "baidu/ERNIE-4.5-0.3B-PT",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    sizes: &[("num_key_value_heads", 2), ("head_dim", 128)],
    eps: ("rms_norm_eps", 1e-5),
    tied: true,
    rope: Some(RopeDefaults { interleaved: true, ..RopeDefaults::theta(500_000.0) }),
    ..Spec::LLAMA
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let bias = fields.boolean("use_bias")?.unwrap_or(false);
    Ok(common.decoder(|layer| {
        common.layer(layer, common.attention(layer).biased(bias, bias), common.mlp(layer).biased(bias))
    }))
}

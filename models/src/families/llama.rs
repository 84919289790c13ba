//! Llama 2 and 3, and the many checkpoints with the same layers.
//!
//! An RMS norm before each branch, grouped-query attention with a rotary embedding, a feed-forward network gated by SiLU. Biases
//! are options of the configuration. There is no sliding window.

use super::{Common, Decoder, Family, Fields, LoadError, Spec, Windows};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["LlamaForCausalLM"],
    model_types: &["llama"],
    declare,
    reference: &["llama", "llama31-rope"],
    largest: "meta-llama/Llama-3.1-405B",
    ..Family::BASE
}];

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, Spec::LLAMA)?;
    let attention_bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let mlp_bias = fields.boolean("mlp_bias")?.unwrap_or(false);
    let windows = common.windows(fields, Windows::Never)?;
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer).biased(attention_bias, attention_bias);
        attention.window = windows[layer];
        common.layer(layer, attention, common.mlp(layer).biased(mlp_bias))
    }))
}

//! Llama 2 and 3, and the many checkpoints with the same layers.
//!
//! An RMS norm before each branch, grouped-query attention with a rotary embedding, a feed-forward network gated by SiLU. Biases
//! are options of the configuration. There is no sliding window.

use super::{Common, Decoder, Family, Fields, LoadError, Windows};

pub(super) const FAMILY: Family = Family { class: "LlamaForCausalLM", model_type: "llama", declare };

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, None)?;
    let attention_bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let mlp_bias = fields.boolean("mlp_bias")?.unwrap_or(false);
    let windows = common.windows(fields, Windows::Never)?;
    Ok(common.decoder(|layer| {
        let (mut attention, mut mlp) = (common.attention(layer), common.mlp(layer));
        (attention.qkv.bias, attention.output.bias) = (attention_bias, attention_bias);
        (mlp.gate_up.bias, mlp.down.bias) = (mlp_bias, mlp_bias);
        attention.window = windows[layer];
        common.layer(layer, attention, mlp)
    }))
}

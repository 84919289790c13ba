//! Qwen2 and Qwen2.5: the layers of Llama with biases of queries, keys and values. If `use_sliding_window` is set, the layers
//! from `max_window_layers` on have a sliding window.

use super::{Common, Decoder, Family, Fields, LoadError, Windows};

pub(super) const FAMILY: Family = Family { class: "Qwen2ForCausalLM", model_type: "qwen2", declare };

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, None)?;
    let windows = common.windows(fields, Windows::FromLayer)?;
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer);
        attention.qkv.bias = true;
        attention.window = windows[layer];
        common.layer(layer, attention, common.mlp(layer))
    }))
}

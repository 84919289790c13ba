//! Qwen2 and Qwen2.5: the layers of Llama with biases in queries, keys and values, and a sliding window in the layers from
//! `max_window_layers` on where `use_sliding_window` is set.

use super::Family;
use super::common::{Common, Windows};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::decoder::Decoder;

pub(super) const FAMILY: Family = Family { class: "Qwen2ForCausalLM", model_type: "qwen2", declare };

fn declare(fields: &Fields<'_>) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, None)?;
    let windows = common.windows(fields, Windows::FromLayer)?;
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer);
        attention.qkv.bias = true;
        attention.window = windows[layer];
        common.layer(layer, attention, common.mlp(layer))
    }))
}

//! Mistral: the layers of Llama without biases, all with a sliding window unless `sliding_window` is `null`.

use super::Family;
use super::common::{Common, Windows};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::decoder::Decoder;

pub(super) const FAMILY: Family = Family { class: "MistralForCausalLM", model_type: "mistral", declare };

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, None)?;
    let windows = common.windows(fields, Windows::Always)?;
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer);
        attention.window = windows[layer];
        common.layer(layer, attention, common.mlp(layer))
    }))
}

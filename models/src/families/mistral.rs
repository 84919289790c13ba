//! Mistral: the layers of Llama without biases, all with a sliding window unless `sliding_window` is `null`.

use super::{Common, Decoder, Family, Fields, LoadError, Windows};

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

//! EXAONE 4: norms of query and key heads and of the output of each branch. The 32B model has sliding windows in three layers of
//! four, and no rotary embedding in the fourth.

use super::sizes::MAX_LAYERS;
use super::{Common, Decoder, Family, Fields, LoadError, Spec, Windows};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["Exaone4ForCausalLM"],
    model_types: &["exaone4"],
    declare,
    largest: "LGAI-EXAONE/EXAONE-4.0-32B",
    ..Family::BASE
}];

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let spec = Spec { eps: ("rms_norm_eps", 1e-5), ..Spec::LLAMA };
    let common = Common::read(fields, max_positions, spec)?;
    // A number n, or a string such as "LLLG": the last layer of each period sees the whole context.
    let pattern = fields.read("sliding_window_pattern", "a number of layers, or \"LLLG\"", |value| {
        let text = value.as_str().filter(|text| text.trim_start_matches('L') == "G");
        let period = value.as_u64().or_else(|| text.map(|pattern| pattern.len() as u64))?;
        (1..=MAX_LAYERS).contains(&period).then_some(period as usize)
    })?;
    let windows = match fields.get("sliding_window") {
        None => vec![None; common.num_layers],
        Some(_) => common.windows(fields, Windows::AllButEach(pattern.unwrap_or(4)))?,
    };
    let windowed = windows.iter().any(Option::is_some);
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer).head_normed(&common, ["q_norm", "k_norm"]);
        attention.window = windows[layer];
        attention.rope = attention.rope.filter(|_| !windowed || windows[layer].is_some());
        common.post_norm_layer(layer, attention, common.mlp(layer))
    }))
}

//! SmolLM3: the layers of Llama, of which each fourth has no rotary embedding.

use super::sizes::{self, MAX_LAYERS};
use super::{Common, Decoder, Family, Fields, LoadError, RopeDefaults, Spec, Windows};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["SmolLM3ForCausalLM"],
    model_types: &["smollm3"],
    declare,
    reference: &["smollm3"],
    largest: "HuggingFaceTB/SmolLM3-3B",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    sizes: &[("num_key_value_heads", 4)],
    tied: true,
    rope: Some(RopeDefaults::theta(2_000_000.0)),
    ..Spec::LLAMA
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let windows = common.windows(fields, Windows::IfEnabled)?;
    let has_types = fields.get("layer_types").is_some();
    let attention_bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let mlp_bias = fields.boolean("mlp_bias")?.unwrap_or(false);
    let interval = sizes::optional(fields, "no_rope_layer_interval", MAX_LAYERS)?.unwrap_or(4);
    let expected = format!("a list of {} of 0 (no rotary embedding) and 1", common.num_layers);
    let rotated = fields.read("no_rope_layers", &expected, |value| {
        let layers = value.as_array()?.iter().map(|layer| layer.as_u64().filter(|flag| *flag <= 1));
        layers.collect::<Option<Vec<_>>>().filter(|layers| layers.len() == common.num_layers)
    })?;
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer).biased(attention_bias, attention_bias);
        let has_rope = match &rotated {
            Some(rotated) => rotated[layer] == 1,
            None => !(layer + 1).is_multiple_of(interval),
        };
        // Without `layer_types`, the layers without a rotary embedding slide.
        attention.window = windows[layer].filter(|_| has_types || !has_rope);
        attention.rope = attention.rope.filter(|_| has_rope);
        common.layer(layer, attention, common.mlp(layer).biased(mlp_bias))
    }))
}

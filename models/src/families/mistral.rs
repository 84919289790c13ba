//! Mistral: the layers of Llama without biases, all with a sliding window unless `sliding_window` is `null`. Ministral 3 has no
//! window, and its queries grow with their position.

use super::sizes::{self, MAX_POSITIONS};
use super::{Common, Decoder, Family, Fields, LoadError, QueryGrowth, RopeDefaults, Spec, Windows};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &["MistralForCausalLM"],
        model_types: &["mistral"],
        declare,
        reference: &["mistral-sliding"],
        largest: "mistralai/Mistral-Large-Instruct-2411 (123B)",
        ..Family::BASE
    },
    Family {
        architectures: &["Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"],
        model_types: &["ministral3"],
        declare: declare_3,
        largest: "mistralai/Ministral-3-14B-Instruct-2512",
        ..Family::BASE
    },
];

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    decoder(fields, max_positions, Spec::LLAMA, Windows::Always)
}

fn declare_3(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let spec = Spec {
        rope: Some(RopeDefaults::theta(1_000_000.0)),
        sizes: &[("num_key_value_heads", 8), ("head_dim", 128)],
        ..Spec::LLAMA
    };
    decoder(fields, max_positions, spec, Windows::IfStated)
}

fn decoder(fields: &Fields<'_>, max_positions: usize, spec: Spec, windows: Windows) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, spec)?;
    let windows = common.windows(fields, windows)?;
    let query_growth = match fields.object("rope_parameters")? {
        None => None,
        Some(rope) => match sizes::not_negative(&rope, "llama_4_scaling_beta")? {
            None => None,
            Some(beta) => {
                let original_max_position_embeddings =
                    sizes::required(&rope, "original_max_position_embeddings", MAX_POSITIONS)?;
                Some(QueryGrowth { beta: beta as f32, original_max_position_embeddings, first: 0 })
            }
        },
    };
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer);
        (attention.window, attention.query_growth) = (windows[layer], query_growth);
        common.layer(layer, attention, common.mlp(layer))
    }))
}

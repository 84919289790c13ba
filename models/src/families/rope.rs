//! The rotary embedding, from `rope_scaling` (older checkpoints) or `rope_parameters` (newer ones).

use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::decoder::{Rope, RopeScaling};

/// Default of transformers for an absent `rope_theta`.
const DEFAULT_THETA: f64 = 10_000.0;

/// Reads either spelling. A `rope_theta` inside the object takes precedence over one beside it.
pub(super) fn read(fields: &Fields<'_>, max_position_embeddings: usize) -> Result<Rope, LoadError> {
    let positive = |fields: &Fields<'_>, key: &str| fields.float(key, "a number above 0", |value| value > 0.0);
    let outer_theta = positive(fields, "rope_theta")?;
    let whole_heads =
        |fields: &Fields<'_>| fields.float("partial_rotary_factor", "1 (whole heads rotated)", |factor| factor == 1.0);
    whole_heads(fields)?;
    let parameters = match fields.object("rope_scaling")? {
        Some(parameters) if !parameters.is_empty() => Some(parameters),
        _ => fields.object("rope_parameters")?,
    };
    let Some(parameters) = parameters else {
        return Ok(Rope { theta: outer_theta.unwrap_or(DEFAULT_THETA), scaling: RopeScaling::None });
    };
    whole_heads(&parameters)?;

    let type_key = if parameters.get("rope_type").is_some() { "rope_type" } else { "type" };
    let number = |key: &str, expected: &str, in_range: fn(f64) -> bool| {
        parameters.float(key, expected, in_range)?.ok_or_else(|| parameters.wrong(key, expected))
    };
    let scaling = match parameters.string(type_key)? {
        None | Some("default") => RopeScaling::None,
        Some("linear") => {
            RopeScaling::Linear { factor: number("factor", "a number, at least 1", |value| value >= 1.0)? }
        }
        Some("llama3") => {
            let low_freq_factor = number("low_freq_factor", "a number above 0", |value| value > 0.0)?;
            let high_freq_factor = number("high_freq_factor", "a number above 0", |value| value > 0.0)?;
            if high_freq_factor <= low_freq_factor {
                let expected = format!("more than `low_freq_factor`, {low_freq_factor}");
                return Err(parameters.wrong("high_freq_factor", expected));
            }
            const ORIGINAL: &str = "original_max_position_embeddings";
            let original = positive(fields, ORIGINAL)?.or(positive(&parameters, ORIGINAL)?);
            RopeScaling::Llama3 {
                factor: number("factor", "a number, at least 1", |value| value >= 1.0)?,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original.unwrap_or(max_position_embeddings as f64),
            }
        }
        Some(_) => return Err(parameters.wrong(type_key, "\"default\", \"linear\" or \"llama3\"")),
    };
    let theta = positive(&parameters, "rope_theta")?.or(outer_theta).unwrap_or(DEFAULT_THETA);
    Ok(Rope { theta, scaling })
}

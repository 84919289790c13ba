//! Beam search, and the best of several samples.

use engine::BeamSearch;
use serde_json::Value;

use super::fields::Fields;
use crate::http::ApiError;

/// Reads `best_of` and the fields of a beam search. With `use_beam_search`, `best_of` is the older name of
/// `beam_width`.
pub fn search(
    fields: &Fields<'_>,
    n: usize,
    max_n: usize,
    stream: bool,
) -> Result<(Option<usize>, Option<BeamSearch>), ApiError> {
    let at_least_n = |name, description| match fields.count(name, (1, max_n), description)? {
        Some(found) if found < n => {
            Err(ApiError::wrong(name, &Value::from(found), format!("at least n, which is {n}")))
        }
        found => Ok(found),
    };
    let best_of = at_least_n("best_of", "Number of sequences to generate, of which the n most likely are returned.")?;
    let width = at_least_n("beam_width", "Number of beams of a beam search; default n.")?;
    let description = "Exponent of the length in a beam's score: above 0 favors long sequences; default 1.";
    let length_penalty = fields.number("length_penalty", .., description)?;
    let description = "End a beam search as soon as beam_width sequences are complete.";
    let early_stopping = fields.bool("early_stopping", description)?;
    if fields.flag("use_beam_search", false, "Use beam search instead of sampling.")? {
        if best_of.is_some() && width.is_some() {
            return Err(ApiError::conflict("best_of", "beam_width, its newer name in a beam search"));
        }
        let plain = BeamSearch::new(width.or(best_of).unwrap_or(n));
        let beam = BeamSearch {
            length_penalty: length_penalty.unwrap_or(plain.length_penalty),
            early_stopping: early_stopping.unwrap_or(plain.early_stopping),
            ..plain
        };
        return Ok((None, Some(beam)));
    }
    for (name, is_set) in [
        ("beam_width", width.is_some()),
        ("length_penalty", length_penalty.is_some_and(|penalty| penalty != 1.0)),
        ("early_stopping", early_stopping == Some(true)),
    ] {
        if is_set {
            return Err(ApiError::requires(name, "use_beam_search: true"));
        }
    }
    match best_of.filter(|&candidates| candidates > n) {
        Some(found) if stream => {
            let expected = format!("at most n, which is {n}; lower it or remove stream");
            Err(ApiError::found("best_of", &format!("{found} together with stream: true"), expected))
        }
        best_of => Ok((best_of, None)),
    }
}

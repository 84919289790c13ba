//! What a request may ask of one sampling step, and the ranges of it.

use std::sync::Arc;

/// Most alternatives per token that [`SamplingParams::logprobs`] may ask for.
pub const MAX_LOGPROBS: usize = 1000;

/// Temperatures below this mean "greedy", as in vLLM.
const GREEDY_BELOW: f32 = 1e-5;

/// How tokens are chosen. The default is plain sampling at temperature 1. Clones share the long lists.
///
/// Token ids at or above the length of the logits row are ignored wherever they occur.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SamplingParams {
    /// Divides the logits: 0 to 100. Below 1e-5 (as in vLLM) the likeliest token is taken.
    pub temperature: f32,
    /// Keeps the likeliest tokens until their probabilities reach this sum: over 0, up to 1 (off).
    pub top_p: f32,
    /// Keeps this many of the likeliest tokens, and all that equal the last of them; 0 is off.
    pub top_k: u32,
    /// Drops tokens with less than this share of the largest probability: 0 (off) to 1.
    pub min_p: f32,
    /// Keeps the tokens whose surprise is nearest to the expected one until their probabilities reach this sum
    /// (Meister et al., "Locally Typical Sampling", 2022): over 0, up to 1; `None` and 1 are off.
    pub typical_p: Option<f32>,
    /// Divides positive and multiplies other logits of tokens in prompt or output (Keskar et al., "CTRL", 2019): over 0;
    /// 1 is off.
    pub repetition_penalty: f32,
    /// Taken off once from each token that the output holds: -2 to 2.
    pub presence_penalty: f32,
    /// Taken off from a token for each time that the output holds it: -2 to 2.
    pub frequency_penalty: f32,
    /// Seed of the request. The sampler itself draws with [`Context::seed`](crate::Context::seed), which the caller
    /// takes from here or makes up.
    pub seed: Option<u64>,
    /// Output tokens before which no stop id can be drawn.
    pub min_tokens: usize,
    /// Added to the logits of these tokens: -100 to 100 each.
    pub logit_bias: Vec<(u32, f32)>,
    /// Only these tokens may be drawn, when given; not empty.
    pub allowed_token_ids: Option<Arc<[u32]>>,
    /// Token sequences that must not come about: where the output ends with all but the last token of one, the last is
    /// banned. None may be empty.
    pub bad_words: Arc<[Vec<u32>]>,
    /// Report the token's log-probability, and this many of the likeliest alternatives: up to 1000.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            typical_p: None,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            min_tokens: 0,
            logit_bias: Vec::new(),
            allowed_token_ids: None,
            bad_words: Arc::default(),
            logprobs: None,
        }
    }
}

/// A parameter outside its range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ParamError {
    /// Name of the parameter, as the field is called.
    pub param: &'static str,
    /// One line: the name, the range, and what was given.
    pub message: String,
}

impl SamplingParams {
    /// Checks every range. The sampler is total without it, but what it does then is not meaningful.
    ///
    /// # Errors
    /// The first parameter that is outside its range.
    pub fn validate(&self) -> Result<(), ParamError> {
        in_range("temperature", self.temperature, (0.0..=100.0).contains(&self.temperature), "from 0 to 100")?;
        in_range("top_p", self.top_p, is_share(self.top_p), "over 0 and at most 1")?;
        in_range("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "from 0 to 1")?;
        if let Some(typical_p) = self.typical_p {
            in_range("typical_p", typical_p, is_share(typical_p), "over 0 and at most 1")?;
        }
        let repetition = self.repetition_penalty;
        in_range("repetition_penalty", repetition, repetition > 0.0 && repetition.is_finite(), "over 0 and finite")?;
        let additive = [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)];
        for (param, value) in additive {
            in_range(param, value, (-2.0..=2.0).contains(&value), "from -2 to 2")?;
        }
        for &(token, bias) in &self.logit_bias {
            let within = (-100.0..=100.0).contains(&bias);
            let range = format_args!("from -100 to 100 for token {token}");
            in_range("logit_bias", bias, within, range)?;
        }
        if self.allowed_token_ids.as_ref().is_some_and(|ids| ids.is_empty()) {
            let message = "allowed_token_ids must hold at least one token id, got none".to_owned();
            return Err(ParamError { param: "allowed_token_ids", message });
        }
        if self.bad_words.iter().any(Vec::is_empty) {
            let message = "bad_words must not hold an empty word".to_owned();
            return Err(ParamError { param: "bad_words", message });
        }
        match self.logprobs {
            Some(count) if count > MAX_LOGPROBS => {
                let message = format!("logprobs must be at most {MAX_LOGPROBS}, got {count}");
                Err(ParamError { param: "logprobs", message })
            }
            _ => Ok(()),
        }
    }
}

/// Whether the likeliest token is taken rather than drawn.
pub(crate) fn is_greedy(params: &SamplingParams) -> bool {
    params.temperature < GREEDY_BELOW
}

/// Whether `p` is a probability that can keep something.
fn is_share(p: f32) -> bool {
    p > 0.0 && p <= 1.0
}

fn in_range(param: &'static str, value: f32, within: bool, range: impl std::fmt::Display) -> Result<(), ParamError> {
    if within {
        return Ok(());
    }
    Err(ParamError { param, message: format!("{param} must be {range}, got {value}") })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Every field that is out of range, and the name that the error must carry.
    #[test]
    fn a_value_out_of_range_is_refused_by_name() {
        let ok = SamplingParams::default;
        let cases: Vec<(&str, SamplingParams)> = vec![
            ("temperature", SamplingParams { temperature: -0.1, ..ok() }),
            ("temperature", SamplingParams { temperature: 100.5, ..ok() }),
            ("temperature", SamplingParams { temperature: f32::NAN, ..ok() }),
            ("top_p", SamplingParams { top_p: 0.0, ..ok() }),
            ("top_p", SamplingParams { top_p: 1.1, ..ok() }),
            ("min_p", SamplingParams { min_p: -0.1, ..ok() }),
            ("min_p", SamplingParams { min_p: f32::INFINITY, ..ok() }),
            ("typical_p", SamplingParams { typical_p: Some(0.0), ..ok() }),
            ("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..ok() }),
            ("repetition_penalty", SamplingParams { repetition_penalty: f32::INFINITY, ..ok() }),
            ("presence_penalty", SamplingParams { presence_penalty: 2.1, ..ok() }),
            ("frequency_penalty", SamplingParams { frequency_penalty: f32::NAN, ..ok() }),
            ("logit_bias", SamplingParams { logit_bias: vec![(3, 1.0), (7, -101.0)], ..ok() }),
            ("allowed_token_ids", SamplingParams { allowed_token_ids: Some(Arc::default()), ..ok() }),
            ("bad_words", SamplingParams { bad_words: [vec![1], vec![]].into(), ..ok() }),
            ("logprobs", SamplingParams { logprobs: Some(1001), ..ok() }),
        ];
        for (param, params) in cases {
            let error = params.validate().unwrap_err();
            assert_eq!(error.param, param);
            let line = error.to_string();
            assert!(line.starts_with(param) && !line.contains('\n'), "{line}");
        }
    }

    #[test]
    fn the_edges_of_the_ranges_are_accepted() {
        let params = SamplingParams {
            temperature: 100.0,
            top_p: 1.0,
            min_p: 1.0,
            typical_p: Some(1.0),
            repetition_penalty: 0.01,
            presence_penalty: -2.0,
            frequency_penalty: 2.0,
            logit_bias: vec![(0, 100.0), (1, -100.0)],
            allowed_token_ids: Some([0].into()),
            bad_words: [vec![1]].into(),
            logprobs: Some(1000),
            ..SamplingParams::default()
        };
        assert_eq!(params.validate(), Ok(()));
        let greedy = SamplingParams { temperature: 0.0, ..params };
        assert_eq!(greedy.validate(), Ok(()));
    }
}

//! The sampling parameters of a request, and their ranges.

use std::sync::Arc;

/// Lower temperatures select the likeliest token.
const GREEDY_BELOW: f32 = 1e-5;

/// Greatest [`SamplingParams::temperature`], as in the OpenAI API.
pub const MAX_TEMPERATURE: f32 = 2.0;

/// How tokens are drawn. The default is plain sampling at temperature 1. Clones share the long lists.
///
/// Token ids at or above the length of the logits row are ignored.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SamplingParams {
    /// Divisor of the logits, 0 to [`MAX_TEMPERATURE`]. Below 1e-5 the likeliest token is taken.
    pub temperature: f32,
    /// Keeps the fewest likeliest tokens whose probabilities sum to at least this: over 0, at most 1 (off).
    pub top_p: f32,
    /// Keeps this many of the likeliest tokens, and all with the same logit as the last of them; 0 is off.
    pub top_k: u32,
    /// Drops tokens less likely than this fraction of the largest probability: 0 (off) to 1.
    pub min_p: f32,
    /// Keeps the tokens whose surprise is nearest to its mean, until their probabilities reach this sum (Meister et
    /// al., "Locally Typical Sampling", 2022): over 0, at most 1; `None` and 1 are off.
    pub typical_p: Option<f32>,
    /// Divides the positive and multiplies the other logits of tokens in prompt or output (Keskar et al., "CTRL",
    /// 2019): over 0; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each token in the output: -2 to 2.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each of its occurrences in the output: -2 to 2.
    pub frequency_penalty: f32,
    /// Seed of the request. The sampler reads only [`Context::seed`](crate::Context::seed), which the caller takes from
    /// here or generates.
    pub seed: Option<u64>,
    /// Number of output tokens before which no stop id can be drawn.
    pub min_tokens: usize,
    /// Values added to the logits of tokens: -100 to 100 each.
    pub logit_bias: Vec<(u32, f32)>,
    /// The only tokens that may be drawn, if given; not empty.
    pub allowed_token_ids: Option<Arc<[u32]>>,
    /// Token sequences that must not be generated: if the output ends with all but the last token of one, the last is
    /// banned. None may be empty.
    pub bad_words: Arc<[Vec<u32>]>,
    /// Reports the token's log-probability and this many of the likeliest alternatives.
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
    /// Name of the parameter's field.
    pub param: &'static str,
    /// One line with the name, the range, and the value found.
    pub message: String,
}

impl SamplingParams {
    /// Whether these are equal parameters that share their long lists, as clones do. Compares no long list.
    pub fn is_clone_of(&self, other: &SamplingParams) -> bool {
        let lists = |params: &SamplingParams| {
            (params.bad_words.as_ptr(), params.allowed_token_ids.as_ref().map(|ids| ids.as_ptr()))
        };
        // Equal pointers make the comparison of the lists itself one of pointers.
        lists(self) == lists(other) && self == other
    }

    /// Checks every range. Without this check the sampler does not panic, but its results are not meaningful.
    ///
    /// # Errors
    /// The first parameter outside its range.
    pub fn validate(&self) -> Result<(), ParamError> {
        let is_temperature = (0.0..=MAX_TEMPERATURE).contains(&self.temperature);
        in_range("temperature", self.temperature, is_temperature, format_args!("from 0 to {MAX_TEMPERATURE}"))?;
        in_range("top_p", self.top_p, is_positive_probability(self.top_p), "over 0 and at most 1")?;
        in_range("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "from 0 to 1")?;
        if let Some(typical_p) = self.typical_p {
            in_range("typical_p", typical_p, is_positive_probability(typical_p), "over 0 and at most 1")?;
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
            let message = "allowed_token_ids must contain at least one token id, got none".to_owned();
            return Err(ParamError { param: "allowed_token_ids", message });
        }
        if self.bad_words.iter().any(Vec::is_empty) {
            let message = "bad_words must not contain an empty word".to_owned();
            return Err(ParamError { param: "bad_words", message });
        }
        Ok(())
    }
}

/// Whether the likeliest token is taken, without a draw.
pub(crate) fn is_greedy(params: &SamplingParams) -> bool {
    params.temperature < GREEDY_BELOW
}

/// Whether `p` is a probability above 0.
fn is_positive_probability(p: f32) -> bool {
    p > 0.0 && p <= 1.0
}

fn in_range(param: &'static str, value: f32, within: bool, range: impl std::fmt::Display) -> Result<(), ParamError> {
    if within {
        return Ok(());
    }
    Err(ParamError { param, message: format!("{param} must be {range}, got {value}") })
}

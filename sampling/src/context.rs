//! The inputs of a draw besides logits and parameters, and its result.

use crate::constraint::TokenSet;
use crate::logprobs::TokenLogprobs;

/// The sequence that a row of logits belongs to.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The prompt's token ids.
    pub prompt: &'a [u32],
    /// The sequence's output tokens so far. Their number is the index of the token to draw.
    pub output: &'a [u32],
    /// End-of-sequence and stop token ids, held back until
    /// [`SamplingParams::min_tokens`](crate::SamplingParams::min_tokens).
    pub stop_ids: &'a [u32],
    /// The tokens that the sequence's constraint allows, if it has one. No other token is drawn, whatever the
    /// parameters.
    pub allowed: Option<&'a TokenSet>,
    /// Key of the noise: the request's seed, or a generated one.
    pub seed: u64,
    /// Index of the sequence within its request. Several sequences may draw from the same row of logits.
    pub sequence: u32,
}

/// A token, and how likely it was.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Sampled {
    /// The token drawn.
    pub token: u32,
    /// Its log-probability, if [`SamplingParams::logprobs`](crate::SamplingParams::logprobs) requests it.
    pub logprob: Option<TokenLogprobs>,
}

/// One of the likeliest tokens of a row; see [`Sampler::likeliest`](crate::Sampler::likeliest).
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Likely {
    /// The token. Its log-probability, if [`SamplingParams::logprobs`](crate::SamplingParams::logprobs) requests it, is
    /// that of the raw row, as for a drawn token.
    pub sampled: Sampled,
    /// Log-probability in the adjusted row, at most 0.
    pub logprob: f32,
}

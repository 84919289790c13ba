//! What a draw is made from, and what comes of it.

use crate::constraint::TokenSet;
use crate::logprobs::TokenLogprobs;

/// Where in which request a row of logits stands.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The prompt's token ids.
    pub prompt: &'a [u32],
    /// Tokens made so far by this sequence; their number is the index of the one to be drawn.
    pub output: &'a [u32],
    /// End-of-sequence and stop token ids, held back until [`SamplingParams::min_tokens`](crate::SamplingParams::min_tokens).
    pub stop_ids: &'a [u32],
    /// The only tokens that may come, where a constraint holds the sequence: never left, whatever the parameters say.
    pub allowed: Option<&'a TokenSet>,
    /// Key of the noise: the request's own seed, or one made up for it.
    pub seed: u64,
    /// Index of the sequence within its request. Several may draw from one row of logits.
    pub sequence: u32,
}

/// A token, and how likely it was.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Sampled {
    /// The token drawn.
    pub token: u32,
    /// Its log-probability, when [`SamplingParams::logprobs`](crate::SamplingParams::logprobs) asks for it.
    pub logprob: Option<TokenLogprobs>,
}

/// One of the likeliest tokens, for a search that weighs them.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Likely {
    /// The token. Its log-probability, where [`SamplingParams::logprobs`](crate::SamplingParams::logprobs) asks for it, is that of the raw row, as for a
    /// token that was drawn.
    pub sampled: Sampled,
    /// Its log-probability in the adjusted row, at most 0.
    pub logprob: f32,
}

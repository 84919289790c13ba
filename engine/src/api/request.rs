//! What a caller asks for.

use std::sync::Arc;

use models::Pooling;
use sampling::SamplingParams;

use crate::grammar::StructuredOutput;

/// How one request wants to be continued. Clones share the long lists, so that requests of one call hold them once.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationParams {
    /// What shapes each draw.
    pub sampling: SamplingParams,
    /// Sequences to make from the one prompt; their prompt blocks are shared.
    pub n: usize,
    /// Samples to make instead of `n`, at least `n`: the `n` of the highest mean log-probability per token (of the raw
    /// logits, the ending token included; equal ones in the order of their seeds) become the answer, best first. Nothing
    /// is heard of any before all have ended.
    pub best_of: Option<usize>,
    /// Search for the likeliest continuations instead of sampling; the `n` best become the answer, best first, at the end.
    pub beam: Option<BeamSearch>,
    /// Greatest number of tokens per sequence; `None` fills the context. `0` only scores the prompt.
    pub max_tokens: Option<usize>,
    /// End-of-sequence tokens do not end a sequence.
    pub ignore_eos: bool,
    /// A sequence ends right before the first of these texts.
    pub stop: Arc<[String]>,
    /// A sequence ends with any of these tokens.
    pub stop_token_ids: Vec<u32>,
    /// Leave the matched stop string in the text.
    pub include_stop_str_in_output: bool,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: bool,
    /// Log-probabilities of the prompt's own tokens, with this many alternatives each.
    pub prompt_logprobs: Option<usize>,
    /// Make an embedding of the prompt instead of a continuation; see [`GenerationParams::embedding`].
    pub pooling: Option<Pooling>,
    /// What each text must match as a whole. It may end only where the match is whole, and ends where nothing can follow,
    /// before `min_tokens` if it must; not together with a beam search.
    pub structured_outputs: Option<Arc<StructuredOutput>>,
}

impl Default for GenerationParams {
    fn default() -> Self {
        GenerationParams {
            sampling: SamplingParams::default(),
            n: 1,
            best_of: None,
            beam: None,
            max_tokens: Some(16),
            ignore_eos: false,
            stop: Arc::default(),
            stop_token_ids: Vec::new(),
            include_stop_str_in_output: false,
            skip_special_tokens: true,
            prompt_logprobs: None,
            pooling: None,
            structured_outputs: None,
        }
    }
}

impl GenerationParams {
    /// The embedding of the prompt and no token: hidden states behind the final norm, pooled, of length 1. A mean needs
    /// the states of all tokens, so it computes also what the prefix cache knows.
    pub fn embedding(pooling: Pooling) -> GenerationParams {
        GenerationParams { pooling: Some(pooling), max_tokens: Some(0), ..GenerationParams::default() }
    }
}

/// A beam search: in each step the `width` likeliest unfinished continuations live on.
///
/// Likely by the logits after allowed ids, bad words, `min_tokens`, bias and penalties. Temperature, the filters of
/// [`SamplingParams`] and its seed do not apply; stop strings are refused, as hypotheses end by tokens. Where fewer than
/// `n` continuations exist (few allowed ids, few tokens), the rest of the answer is empty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamSearch {
    /// Hypotheses that live at once, at least `n`. They share the blocks of what they have in common.
    pub width: usize,
    /// A finished hypothesis is scored by the sum of its log-probabilities over the number of its tokens to this power
    /// (Hugging Face's definition; the ending token counts): above 0 favours long ones, below 0 short ones. Finite.
    pub length_penalty: f32,
    /// End as soon as `width` hypotheses have finished, instead of when no other can become one of the best.
    pub early_stopping: bool,
}

impl BeamSearch {
    /// A search of this width with a length penalty of 1, which ends when the best are certain.
    pub fn new(width: usize) -> BeamSearch {
        BeamSearch { width, length_penalty: 1.0, early_stopping: false }
    }
}

/// One prompt and what to do with it.
#[derive(Clone, Debug, Default)]
pub struct GenerationRequest {
    /// Prompt as token ids, at least one.
    pub prompt: Vec<u32>,
    /// How to continue it.
    pub params: GenerationParams,
    /// Lower runs first (only under the priority policy).
    pub priority: i32,
    /// Requests share cached prompt blocks only under the same salt.
    pub cache_salt: Option<String>,
}

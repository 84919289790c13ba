//! Requests.

use std::sync::Arc;

use models::Pooling;
use sampling::SamplingParams;
use text::{Grammar, ReasoningParser, StreamOptions, ThinkingLimit};

use crate::connector::KvTransfer;

/// Parameters of a request. Clones share the long lists.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationParams {
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Number of sequences to generate from the prompt. They share the prompt's blocks.
    pub n: usize,
    /// Number of candidates to generate, at least `n`. The `n` candidates with the highest mean log-probability per token become
    /// the answer, best first (log-probabilities of the raw logits, the ending token included; equal ones in the order of
    /// their indices). Nothing is returned before all have ended.
    pub best_of: Option<usize>,
    /// Searches for the likeliest continuations instead of sampling. The `n` best are returned at the end, best first.
    pub beam: Option<BeamSearch>,
    /// Greatest number of tokens per sequence; `None` fills the context, and 0 only scores the prompt.
    pub max_tokens: Option<usize>,
    /// End-of-sequence tokens do not end a sequence.
    pub ignore_eos: bool,
    /// Texts before the first of which a sequence ends.
    pub stop: Arc<[String]>,
    /// Tokens that end a sequence.
    pub stop_token_ids: Vec<u32>,
    /// Parser of the reasoning in front of the answer: stop strings count in the answer only. `None`: in the whole text.
    pub reasoning: Option<ReasoningParser>,
    /// Ends the reasoning of each sequence after a number of tokens: the tokens that end it are then the only ones that may follow, where
    /// a grammar allows them. All other tokens are drawn as without a limit. Cannot be combined with a beam search.
    pub thinking: Option<ThinkingLimit>,
    /// Keeps the matched stop string in the text.
    pub include_stop_str_in_output: bool,
    /// Removes special tokens from the text.
    pub skip_special_tokens: bool,
    /// Returns log-probabilities of the prompt tokens, with this many alternatives each.
    pub prompt_logprobs: Option<usize>,
    /// Returns an embedding of the prompt, or the logits of its labels, instead of a continuation; see [`GenerationParams::pooled`].
    pub pooling: Option<Pooling>,
    /// Grammar that each whole text must match. A text may end only where it matches, and ends where nothing can follow, even
    /// before `min_tokens`. Cannot be combined with a beam search.
    pub structured_outputs: Option<Arc<StructuredOutput>>,
    /// Allows drafts for the request, if the engine [speculates](crate::EngineConfig::speculative). They change no token.
    pub speculative: bool,
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
            reasoning: None,
            thinking: None,
            include_stop_str_in_output: false,
            skip_special_tokens: true,
            prompt_logprobs: None,
            pooling: None,
            structured_outputs: None,
            speculative: true,
        }
    }
}

impl GenerationParams {
    /// How the text of a sequence is made from its tokens.
    pub(crate) fn stream(&self) -> StreamOptions<'_> {
        StreamOptions {
            stop: &self.stop,
            include_stop: self.include_stop_str_in_output,
            min_tokens: self.sampling.min_tokens,
            reasoning: self.reasoning.as_ref(),
            skip_special: self.skip_special_tokens,
        }
    }

    /// Parameters for an embedding of the prompt, or for the logits of its labels, and no token: the hidden states after the final
    /// norm, pooled, and what the model's [`Pooler`](crate::Pooler) makes of them. Poolings other than that of the last token need the
    /// states of others too, so they also compute tokens whose keys and values are in the prefix cache.
    pub fn pooled(pooling: Pooling) -> GenerationParams {
        GenerationParams { pooling: Some(pooling), max_tokens: Some(0), ..GenerationParams::default() }
    }
}

/// A grammar that the whole text must match.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StructuredOutput {
    /// The grammar.
    pub grammar: Grammar,
    /// API name of the field that specifies it, for error messages.
    pub param: &'static str,
}

/// A beam search, which keeps the `width` likeliest unfinished continuations in each step.
///
/// Likelihood is measured on the logits after allowed ids, bad words, `min_tokens`, bias and penalties. Temperature, filters and
/// seed of [`SamplingParams`] do not apply. Stop strings are refused, because hypotheses end at tokens. If fewer than `n`
/// continuations exist (few allowed ids, few tokens), the remaining sequences are empty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamSearch {
    /// Number of live hypotheses, at least `n`. They share the blocks of common prefixes.
    pub width: usize,
    /// A finished hypothesis scores the sum of its log-probabilities, divided by the number of its tokens to this power (Hugging
    /// Face's definition; the ending token counts). Above 0 favours long hypotheses, below 0 short ones. Must be finite.
    pub length_penalty: f32,
    /// Ends the search as soon as `width` hypotheses have finished, instead of when no other can become one of the best.
    pub early_stopping: bool,
}

impl BeamSearch {
    /// A search with a length penalty of 1 that ends when the best hypotheses are certain.
    pub fn new(width: usize) -> BeamSearch {
        BeamSearch { width, length_penalty: 1.0, early_stopping: false }
    }
}

/// A prompt and how to continue it.
#[derive(Clone, Debug, Default)]
pub struct GenerationRequest {
    /// Token ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Parameters.
    pub params: GenerationParams,
    /// Requests with a lower value run first, under the priority policy. [`BACKGROUND`](sched::BACKGROUND) is below all others under
    /// every policy.
    pub priority: i32,
    /// Requests share cached prompt blocks only with requests of the same salt.
    pub cache_salt: Option<String>,
    /// Position of the first token of the second text, if the prompt is a pair of texts: models with token types tell them apart.
    pub second: Option<usize>,
    /// Name of the LoRA adapter that computes the request; `None`: the model as it is.
    pub adapter: Option<String>,
    /// What to exchange with other replicas, if the engine has a [connector](crate::EngineConfig::kv_transfer).
    pub kv_transfer: KvTransfer,
}

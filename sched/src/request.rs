//! Requests, and the reasons why the scheduler refuses them.

use std::fmt;

use kvblock::Media;
use serde::{Deserialize, Serialize};

use crate::SchedConfig;
use crate::sizes::{blocks_needed, longest_prompt};

/// Id of a request, chosen by the caller. It can be reused after the request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// The priority of work that yields to everything else, under every policy.
pub const BACKGROUND: i32 = i32::MAX;

/// Id of a sequence of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SeqId {
    /// The request.
    pub request: RequestId,
    /// Index among its `n` sequences.
    pub index: u32,
}

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, sequence {}", self.request, self.index)
    }
}

/// A prompt to continue. Build it from [`Request::new`], so that new fields do not break your code.
///
/// ```
/// # use sched::{Request, RequestId};
/// let pair = Request { n: 2, ..Request::new(RequestId(1), vec![1, 2, 3], 16) };
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Its id, different from those of all live requests.
    pub id: RequestId,
    /// Prompt token ids, at least one.
    pub prompt: Vec<u32>,
    /// Number of sequences to generate from the prompt. They share its blocks.
    pub n: usize,
    /// Whether the `n` sequences are the beams of one search. Beams draw in the same steps, and after each token some
    /// can end and others can continue as forks of one ([`Outcome::parent`](crate::Outcome::parent)).
    pub beam_search: bool,
    /// Greatest number of output tokens per sequence, at least 1. A sequence that reaches it has finished.
    pub max_tokens: usize,
    /// Priority, lower first. Only used under [`Policy::Priority`](crate::Policy::Priority), except for [`BACKGROUND`].
    pub priority: i32,
    /// Cached prefixes are shared only between requests with the same salt.
    pub cache_salt: Option<String>,
    /// Name or id of the adapter (LoRA) that computes the request. Cached prefixes are shared only under the same one.
    pub adapter: Option<String>,
    /// Images and other inputs behind placeholder tokens of the prompt. Cached blocks with such placeholders are shared
    /// only if the inputs are equal.
    pub media: Vec<Media>,
    /// Whether to use cached blocks. `false` computes every prompt token, as prompt log-probabilities need; the blocks
    /// enter the cache nevertheless.
    pub read_prefix_cache: bool,
}

impl Request {
    /// Creates a request for one sequence of at most `max_tokens` output tokens, with defaults for the other fields.
    pub fn new(id: RequestId, prompt: Vec<u32>, max_tokens: usize) -> Request {
        Request {
            id,
            prompt,
            n: 1,
            beam_search: false,
            max_tokens,
            priority: 0,
            cache_salt: None,
            adapter: None,
            media: Vec::new(),
            read_prefix_cache: true,
        }
    }

    /// Checks that the request can run alone under this configuration.
    pub(crate) fn check(&self, config: &SchedConfig) -> Result<(), Refusal> {
        let (prompt, max_tokens, max_model_len) = (self.prompt.len(), self.max_tokens, config.max_model_len);
        if prompt == 0 {
            return Err(Refusal::EmptyPrompt);
        }
        if self.n == 0 {
            return Err(Refusal::NoSequences);
        }
        if max_tokens == 0 {
            return Err(Refusal::NoTokens);
        }
        if self.n > config.max_num_seqs {
            return Err(Refusal::TooManySequences {
                n: self.n,
                beam_search: self.beam_search,
                max_num_seqs: config.max_num_seqs,
            });
        }
        if prompt.saturating_add(max_tokens) > max_model_len {
            return Err(Refusal::TooLong { prompt, max_tokens, max_model_len });
        }
        let needed = blocks_needed(prompt, self.n, max_tokens, config);
        if needed > config.num_blocks {
            let longest_prompt = longest_prompt(self.n, max_tokens, config);
            return Err(Refusal::NeverFits { needed, pool: config.num_blocks, longest_prompt });
        }
        Ok(())
    }
}

/// Why a request was refused. It changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The prompt is empty.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// `n` is 0.
    #[error("n is 0: at least one sequence is needed")]
    NoSequences,
    /// `max_tokens` is 0.
    #[error("max_tokens is 0: at least one token is needed")]
    NoTokens,
    /// More sequences than can run at once.
    #[error("{} is {n}, but at most {max_num_seqs} sequences run at once (--max-num-seqs)",
            if *.beam_search { "the beam width" } else { "n" })]
    TooManySequences {
        /// Number of sequences requested.
        n: usize,
        /// Whether the sequences are the beams of a search.
        beam_search: bool,
        /// `--max-num-seqs`.
        max_num_seqs: usize,
    },
    /// Prompt and output exceed the context length.
    #[error(
        "the prompt has {prompt} tokens and max_tokens is {max_tokens}: together more than the context of \
         {max_model_len} (--max-model-len)"
    )]
    TooLong {
        /// Number of tokens in the prompt.
        prompt: usize,
        /// Number of output tokens requested.
        max_tokens: usize,
        /// `--max-model-len`.
        max_model_len: usize,
    },
    /// The request needs more blocks than the pool has.
    #[error("needs {needed} blocks, the pool holds {pool}; the longest prompt that fits is {longest_prompt} tokens")]
    NeverFits {
        /// Number of blocks for all sequences at full length.
        needed: usize,
        /// Number of blocks in the pool.
        pool: usize,
        /// Length of the longest prompt that fits with the same `n` and `max_tokens`; 0 if none does.
        longest_prompt: usize,
    },
    /// A live request has this id.
    #[error("{0} is live already")]
    DuplicateId(RequestId),
}

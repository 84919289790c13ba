//! Requests, and why the scheduler refuses one.

use std::fmt;

use kvblock::Media;
use serde::{Deserialize, Serialize};

use crate::SchedConfig;
use crate::sizes::{blocks_needed, longest_prompt};

/// A request, as its submitter names it. May be reused once the request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// One of the sequences that a request makes from its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SeqId {
    /// The request.
    pub request: RequestId,
    /// Which of its `n` sequences, from 0.
    pub index: u32,
}

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, sequence {}", self.request, self.index)
    }
}

/// A prompt to be continued. Start from [`Request::new`] and change what differs, so that new fields break nothing.
///
/// ```
/// # use sched::{Request, RequestId};
/// let pair = Request { n: 2, ..Request::new(RequestId(1), vec![1, 2, 3], 16) };
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Its name; not that of another live request.
    pub id: RequestId,
    /// Prompt token ids, at least one.
    pub prompt: Vec<u32>,
    /// Sequences to make from the prompt; they share its blocks.
    pub n: usize,
    /// The `n` sequences are the beams of one search: they draw in the same step, and after each token some may
    /// end and others go on as forks of what was one ([`Outcome::parent`](crate::Outcome::parent)).
    pub beam_search: bool,
    /// Greatest number of output tokens per sequence, at least one. A sequence that reaches it has finished.
    pub max_tokens: usize,
    /// Lower runs first; only under [`Policy::Priority`](crate::Policy::Priority).
    pub priority: i32,
    /// Cached prefixes are shared only under the same salt.
    pub cache_salt: Option<String>,
    /// Name or id of the adapter (LoRA) that computes the request; cached prefixes are shared only under the same one.
    pub adapter: Option<String>,
    /// Images and other inputs that stand for some of the prompt's tokens; cached blocks that hold their placeholders are
    /// shared only where these agree.
    pub media: Vec<Media>,
    /// `false`: every prompt token is computed (prompt log-probabilities want every row); the blocks are
    /// stored all the same.
    pub read_prefix_cache: bool,
}

impl Request {
    /// A request for one sequence of at most `max_tokens` output tokens, with defaults for the rest.
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

    /// Whether the request can run at all under this configuration, alone.
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

/// Why a request was not taken. It has left no trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is nothing to continue.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// No output is asked for.
    #[error("n is 0: at least one sequence is needed")]
    NoSequences,
    /// No token is asked for.
    #[error("max_tokens is 0: at least one token is needed")]
    NoTokens,
    /// Its sequences cannot run at once.
    #[error("{} is {n}, but at most {max_num_seqs} sequences run at once (--max-num-seqs)",
            if *.beam_search { "the beam width" } else { "n" })]
    TooManySequences {
        /// Sequences asked for.
        n: usize,
        /// The sequences are the beams of a search.
        beam_search: bool,
        /// `--max-num-seqs`.
        max_num_seqs: usize,
    },
    /// Prompt and output exceed the context.
    #[error(
        "the prompt has {prompt} tokens and max_tokens is {max_tokens}: together more than the context of \
         {max_model_len} (--max-model-len)"
    )]
    TooLong {
        /// Tokens in the prompt.
        prompt: usize,
        /// Output tokens asked for.
        max_tokens: usize,
        /// `--max-model-len`.
        max_model_len: usize,
    },
    /// The whole pool would not hold it.
    #[error("needs {needed} blocks, the pool holds {pool}; the longest prompt that fits is {longest_prompt} tokens")]
    NeverFits {
        /// Blocks for the whole group at full length.
        needed: usize,
        /// Blocks in the pool.
        pool: usize,
        /// The longest prompt that would fit with the same `n` and `max_tokens`; 0 if none would.
        longest_prompt: usize,
    },
    /// A live request has this id.
    #[error("{0} is live already")]
    DuplicateId(RequestId),
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kvblock::CacheGroup;

    use super::*;

    fn config(block_size: usize, num_blocks: usize, max_model_len: usize) -> SchedConfig {
        SchedConfig { max_num_seqs: 8, max_model_len, ..SchedConfig::new(num_blocks, block_size) }
    }

    fn request(prompt: usize, n: usize, max_tokens: usize) -> Request {
        Request { n, ..Request::new(RequestId(0), vec![0; prompt], max_tokens) }
    }

    #[test]
    fn the_refusal_gives_the_numbers() {
        let refusal = request(1000, 1, 1).check(&config(16, 49, 4096)).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "needs 63 blocks, the pool holds 49; the longest prompt that fits is 784 tokens"
        );
    }

    #[test]
    fn the_longest_prompt_fits_and_no_longer_one_does() {
        let sliding = |window| vec![CacheGroup::Full, CacheGroup::Sliding { window }];
        for (bs, blocks, len, groups) in [
            (1, 7, 100, vec![CacheGroup::Full]),
            (4, 9, 100, vec![CacheGroup::Full]),
            (4, 9, 30, vec![CacheGroup::Full]),
            (16, 5, 70, vec![CacheGroup::Full]),
            (3, 20, 41, vec![CacheGroup::Full]),
            (4, 19, 60, sliding(6)),
            (2, 30, 50, sliding(1)),
        ] {
            for n in 1..5 {
                for max_tokens in 1..20 {
                    let config = SchedConfig { groups: groups.clone(), ..config(bs, blocks, len) };
                    let brute = (1..=len).filter(|&p| request(p, n, max_tokens).check(&config).is_ok()).max();
                    assert_eq!(
                        longest_prompt(n, max_tokens, &config),
                        brute.unwrap_or(0),
                        "{bs} {blocks} {len} {n} {max_tokens}"
                    );
                }
            }
        }
    }
}

//! What is asked of the scheduler, and when the answer is no.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::SchedConfig;

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

/// A prompt to be continued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Its name; not that of another live request.
    pub id: RequestId,
    /// Prompt token ids, at least one.
    pub prompt: Vec<u32>,
    /// Sequences to make from the prompt; they share its blocks.
    pub n: usize,
    /// Greatest number of output tokens per sequence, at least one. A sequence that reaches it has finished.
    pub max_tokens: usize,
    /// Lower runs first; only under [`Policy::Priority`](crate::Policy::Priority).
    pub priority: i32,
    /// Cached prefixes are shared only under the same salt.
    pub cache_salt: Option<String>,
    /// `false`: every prompt token is computed (prompt log-probabilities want every row); the blocks are
    /// stored all the same.
    pub read_prefix_cache: bool,
    /// The sequences are the beams of a beam search, `n` wide: each outcome says which beam it
    /// [continues](crate::Outcome::parent).
    pub beam_search: bool,
}

impl Request {
    /// Blocks that the request may own at once, all of its sequences at full length: `floor(P / bs) + n *
    /// (ceil((P + max_tokens - 1) / bs) - floor(P / bs))`. Full prompt blocks are shared, and the last token
    /// of a sequence is never written.
    pub(crate) fn blocks_needed(&self, block_size: usize) -> usize {
        let shared = self.prompt.len() / block_size;
        let longest = (self.prompt.len() + self.max_tokens - 1).div_ceil(block_size);
        shared.saturating_add(self.n.saturating_mul(longest - shared))
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
            return Err(Refusal::TooManySequences { n: self.n, max_num_seqs: config.max_num_seqs });
        }
        if prompt.saturating_add(max_tokens) > max_model_len {
            return Err(Refusal::TooLong { prompt, max_tokens, max_model_len });
        }
        let needed = self.blocks_needed(config.block_size);
        if needed > config.num_blocks {
            let longest_prompt = longest_prompt(self.n, max_tokens, config);
            return Err(Refusal::NeverFits { needed, pool: config.num_blocks, longest_prompt });
        }
        Ok(())
    }
}

/// The longest prompt that fits pool and context with `n` outputs of `max_tokens`; 0 if none does.
///
/// With `P = q * bs + r` a group needs `q + n * ceil((r + max_tokens - 1) / bs)` blocks, which is not
/// monotone in `P` (a full last prompt block is shared, a partial one is not), so each `r` is solved for `q`.
fn longest_prompt(n: usize, max_tokens: usize, config: &SchedConfig) -> usize {
    let bs = config.block_size;
    let per_remainder = |r: usize| {
        let own = n.checked_mul((r + max_tokens - 1).div_ceil(bs))?;
        let by_pool = config.num_blocks.checked_sub(own)?;
        let by_context = config.max_model_len.checked_sub(max_tokens + r)? / bs;
        Some(by_pool.min(by_context) * bs + r)
    };
    (0..bs).filter_map(per_remainder).max().unwrap_or(0)
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
    /// The group can not run at once.
    #[error("n is {n}, but at most {max_num_seqs} sequences run at once (--max-num-seqs)")]
    TooManySequences {
        /// Sequences asked for.
        n: usize,
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
    use super::*;

    fn config(block_size: usize, num_blocks: usize, max_model_len: usize) -> SchedConfig {
        SchedConfig { max_num_seqs: 8, max_model_len, ..SchedConfig::new(num_blocks, block_size) }
    }

    fn request(prompt: usize, n: usize, max_tokens: usize) -> Request {
        Request {
            id: RequestId(0),
            prompt: vec![0; prompt],
            n,
            max_tokens,
            priority: 0,
            cache_salt: None,
            read_prefix_cache: true,
            beam_search: false,
        }
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
        for (bs, blocks, len) in [(1, 7, 100), (4, 9, 100), (4, 9, 30), (16, 5, 70), (3, 20, 41)] {
            for n in 1..5 {
                for max_tokens in 1..20 {
                    let config = config(bs, blocks, len);
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

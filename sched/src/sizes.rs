//! The number of blocks that a request needs, and the longest request that fits.

use kvblock::CacheGroup;

use crate::SchedConfig;

impl SchedConfig {
    /// Returns the number of blocks that suffice to compute a sequence of this length alone: in a sliding group those
    /// that the window touches and the next one.
    pub fn least_blocks(&self, tokens: usize) -> usize {
        blocks_needed(tokens, 1, 1, self)
    }

    /// Returns the greatest number of blocks that a sequence of this length owns, however large the pool is.
    pub fn most_blocks(&self, tokens: usize) -> usize {
        let all = tokens.div_ceil(self.block_size);
        self.groups.iter().map(|group| self.most_blocks_in_flight(*group).unwrap_or(all).min(all)).sum()
    }

    /// Returns the length of the longest sequence that fits the pool alone.
    pub fn longest_sequence(&self) -> usize {
        longest_prompt(1, 1, &SchedConfig { max_model_len: usize::MAX / 2, ..self.clone() })
    }
}

/// Returns the number of blocks that `n` sequences of a prompt need alone, all at full length.
///
/// In a full group that is `floor(P / bs) + n * (ceil((P + max_tokens - 1) / bs) - floor(P / bs))`: full prompt blocks
/// are shared, and the last token of a sequence is never written. In a sliding group it is at most, for each sequence,
/// the blocks that its window touches and the next one. Without chunked prefill it is at least the whole prompt.
pub(crate) fn blocks_needed(prompt: usize, n: usize, max_tokens: usize, config: &SchedConfig) -> usize {
    let bs = config.block_size;
    let shared = prompt / bs;
    let all = n.saturating_mul((prompt + max_tokens - 1).div_ceil(bs) - shared).saturating_add(shared);
    let in_group = |group: &CacheGroup| match group {
        CacheGroup::Sliding { window } => {
            let prompt_blocks = if config.enable_chunked_prefill { 0 } else { prompt.div_ceil(bs) };
            all.min(n.saturating_mul(window.div_ceil(bs) + 2).max(prompt_blocks))
        }
        _ => all,
    };
    config.groups.iter().map(in_group).fold(0, usize::saturating_add)
}

/// Returns the length of the longest prompt that fits pool and context with `n` outputs of `max_tokens`; 0 if none
/// does.
///
/// The number of blocks is not monotone in the length of the prompt, because a full last prompt block is shared and a
/// partial one is not. But it is monotone among lengths with the same remainder modulo the block size.
pub(crate) fn longest_prompt(n: usize, max_tokens: usize, config: &SchedConfig) -> usize {
    let bs = config.block_size;
    let with_remainder = |remainder: usize| {
        let full = config.max_model_len.checked_sub(max_tokens + remainder)? / bs;
        let fits = |blocks: usize| blocks_needed(blocks * bs + remainder, n, max_tokens, config) <= config.num_blocks;
        let (mut least, mut most) = (0, full + 1);
        while least < most {
            let middle = least + (most - least) / 2;
            (least, most) = if fits(middle) { (middle + 1, most) } else { (least, middle) };
        }
        Some(least.checked_sub(1)? * bs + remainder)
    };
    (0..bs).filter_map(with_remainder).max().unwrap_or(0)
}

//! How many blocks a request needs, and the longest that fits.

use kvblock::CacheGroup;

use crate::SchedConfig;

impl SchedConfig {
    /// Blocks with which a sequence of so many tokens can be computed, if nothing else runs: in a group with a window no more
    /// than the window touches and the next block.
    pub fn least_blocks(&self, tokens: usize) -> usize {
        blocks_needed(tokens, 1, 1, self)
    }

    /// Blocks that a sequence of so many tokens owns at most, however many there are.
    pub fn most_blocks(&self, tokens: usize) -> usize {
        let all = tokens.div_ceil(self.block_size);
        self.groups.iter().map(|group| self.peak(*group).unwrap_or(all).min(all)).sum()
    }

    /// Tokens of the longest sequence that the pool holds, if nothing else runs.
    pub fn longest_sequence(&self) -> usize {
        longest_prompt(1, 1, &SchedConfig { max_model_len: usize::MAX / 2, ..self.clone() })
    }
}

/// Blocks that `n` sequences of a prompt may own at once, all at full length, if nothing else runs. In a full group
/// `floor(P / bs) + n * (ceil((P + max_tokens - 1) / bs) - floor(P / bs))`: full prompt blocks are shared, and the last token of
/// a sequence is never written. In a sliding group, at most, for each sequence the blocks that its window touches and the one
/// that it writes next; and the whole prompt at once, where it is computed in one step.
pub(crate) fn blocks_needed(prompt: usize, n: usize, max_tokens: usize, config: &SchedConfig) -> usize {
    let bs = config.block_size;
    let shared = prompt / bs;
    let all = n.saturating_mul((prompt + max_tokens - 1).div_ceil(bs) - shared).saturating_add(shared);
    let of = |group: &CacheGroup| match group {
        CacheGroup::Sliding { window } => {
            let at_once = if config.enable_chunked_prefill { 0 } else { prompt.div_ceil(bs) };
            all.min(n.saturating_mul(window.div_ceil(bs) + 2).max(at_once))
        }
        _ => all,
    };
    config.groups.iter().map(of).fold(0, usize::saturating_add)
}

/// The longest prompt that fits pool and context with `n` outputs of `max_tokens`; 0 if none does.
///
/// What a request needs is not monotone in its prompt (a full last prompt block is shared, a partial one is not), but it is
/// among prompts that leave the same rest over full blocks.
pub(crate) fn longest_prompt(n: usize, max_tokens: usize, config: &SchedConfig) -> usize {
    let bs = config.block_size;
    let with_rest = |rest: usize| {
        let full = config.max_model_len.checked_sub(max_tokens + rest)? / bs;
        let fits = |blocks: usize| blocks_needed(blocks * bs + rest, n, max_tokens, config) <= config.num_blocks;
        let (mut least, mut most) = (0, full + 1);
        while least < most {
            let middle = least + (most - least) / 2;
            (least, most) = if fits(middle) { (middle + 1, most) } else { (least, middle) };
        }
        Some(least.checked_sub(1)? * bs + rest)
    };
    (0..bs).filter_map(with_rest).max().unwrap_or(0)
}

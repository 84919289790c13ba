//! Whether decode splits contexts over thread blocks: the choice between `cuda.paged_v1` and `cuda.paged_v2`.

use crate::shape::PARTITION;

/// Thresholds for splitting contexts. Both choices compute the same bits; only the time differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedRule {
    /// Contexts that may be longer than this number of tokens are always split.
    pub longest_whole: usize,
    /// With more pairs of a row and a head than this, shorter contexts are not split.
    pub enough_blocks: usize,
}

impl PagedRule {
    /// The rule of vLLM's `PagedAttention.forward_decode` (`vllm/attention/ops/paged_attn.py`):
    /// `use_v1 = max_seq_len <= 8192 and (max_num_partitions == 1 or num_seqs * num_heads > 512)`.
    pub const VLLM: PagedRule = PagedRule { longest_whole: 8192, enough_blocks: 512 };

    /// Whether to split contexts of at most `max_context` tokens.
    ///
    /// ```
    /// use attention_kernels::PagedRule;
    /// assert!(!PagedRule::VLLM.splits(512, 1, 32), "one partition");
    /// assert!(PagedRule::VLLM.splits(4096, 1, 32), "few rows with long contexts");
    /// assert!(!PagedRule::VLLM.splits(4096, 17, 32), "many rows");
    /// assert!(PagedRule::VLLM.splits(8193, 17, 32));
    /// ```
    pub fn splits(&self, max_context: usize, rows: usize, num_heads: usize) -> bool {
        let whole = max_context <= PARTITION || rows * num_heads > self.enough_blocks;
        max_context > self.longest_whole || !whole
    }
}

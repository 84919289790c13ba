//! Shape of a cache.

/// Keys are reduced in partitions of this number of tokens, counted from the start of the sequence.
pub const PARTITION: usize = 512;

/// Shape of the keys (or the values) of one layer. Their order in memory is that of the cache's [`Layout`](crate::Layout).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Number of blocks in the pool.
    pub num_blocks: usize,
    /// Number of KV heads.
    pub num_kv_heads: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl KvShape {
    /// Returns the number of elements of one block.
    pub fn block_elements(&self) -> usize {
        self.num_kv_heads * self.block_size * self.head_dim
    }

    /// Returns the index of the first element of a head of the token in `slot` (= block × block_size + offset) in
    /// [`Layout::Hnd`](crate::Layout::Hnd).
    pub fn offset(&self, slot: usize, head: usize) -> usize {
        let (block, at) = (slot / self.block_size, slot % self.block_size);
        ((block * self.num_kv_heads + head) * self.block_size + at) * self.head_dim
    }
}

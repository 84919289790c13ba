//! The shape of a cache.

/// Keys are reduced in partitions of this many tokens, counted from the start of the sequence.
pub const PARTITION: usize = 512;

/// Shape of one layer's key (or value) cache; the order of the dimensions is its [`Layout`](crate::Layout)'s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl KvShape {
    /// Elements of one block of one layer's keys (or values).
    pub fn block_elements(&self) -> usize {
        self.num_kv_heads * self.block_size * self.head_dim
    }

    /// Offset of head `head` of the token in `slot` (= block × block_size + offset) in the tree's layout.
    pub fn offset(&self, slot: usize, head: usize) -> usize {
        let (block, at) = (slot / self.block_size, slot % self.block_size);
        ((block * self.num_kv_heads + head) * self.block_size + at) * self.head_dim
    }
}

//! What can go wrong, as values: no space, a configuration that can not be, a broken invariant.

use crate::BlockId;

/// An operation needed more blocks than could be had; it changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} blocks wanted, {free} can be had; free a sequence first")]
pub struct NoSpace {
    /// Blocks the operation would have taken off the free list.
    pub wanted: usize,
    /// Blocks on the free list, those that still hold a cached prefix included.
    pub free: usize,
}

/// A table was to be forked while it has tokens that are not committed; nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{committed} of {len} tokens are committed; commit or truncate before forking")]
pub struct Uncommitted {
    /// Committed tokens of the table.
    pub committed: usize,
    /// All of its tokens.
    pub len: usize,
}

/// A [`PoolConfig`](crate::PoolConfig) that no pool can be built from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The number of blocks is zero or does not fit a block id.
    #[error("num_blocks: found {found}, expected 1 to {max}", max = u32::MAX - 1)]
    NumBlocks {
        /// What the configuration says.
        found: usize,
    },
    /// A block holds no token.
    #[error("block_size: found 0, expected at least 1 token")]
    BlockSize,
    /// The hash has no bits, or more than it has.
    #[error("hash_bits: found {found}, expected 1 to 128")]
    HashBits {
        /// What the configuration says.
        found: u32,
    },
}

/// What an audit found: the pool's books do not agree with the live tables.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuditError {
    /// A reference count differs from the block's occurrences in live tables.
    #[error("{block}: {counted} references on the books, {found} in live tables")]
    References {
        /// The block.
        block: BlockId,
        /// What the pool believes.
        counted: u32,
        /// What the tables say.
        found: u32,
    },
    /// A block is both free and referenced, or neither, or twice on the free list.
    #[error("{block}: {count} times on the free list with {references} references")]
    FreeList {
        /// The block.
        block: BlockId,
        /// Occurrences on the free list.
        count: u32,
        /// References on the books.
        references: u32,
    },
    /// A block without a hash lies behind a cached one, so that a cached prefix would be evicted before it.
    #[error("{block}: free without a hash, but behind a cached block on the free list")]
    EvictionOrder {
        /// The block.
        block: BlockId,
    },
    /// The gauges do not sum to the total.
    #[error("gauges: {found} blocks counted, the pool has {total}")]
    Gauges {
        /// Sum of the three gauges.
        found: usize,
        /// Blocks in the pool.
        total: usize,
    },
    /// An entry of the prefix index is not what the block or its table says.
    #[error("{block}: prefix index entry is wrong: {what}")]
    Prefix {
        /// The block.
        block: BlockId,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A table's blocks do not fit its length.
    #[error("a table of {len} tokens has {blocks} blocks of {block_size}")]
    TableLength {
        /// Tokens in the table.
        len: usize,
        /// Blocks in the table.
        blocks: usize,
        /// Tokens per block.
        block_size: usize,
    },
}

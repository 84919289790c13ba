//! The configuration of a pool, and its validation.

use crate::PoolError;
use crate::error::MOST_TOKENS_PER_BLOCK;

/// A group of layers that share one block table per sequence, because they read the same positions. New kinds may be
/// added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum CacheGroup {
    /// A query reads all positions up to its own.
    Full,
    /// A query at position `p` reads positions `p - window + 1` to `p`. Blocks behind the window are freed.
    Sliding {
        /// Number of positions that a query reads, its own included; at least 1.
        window: usize,
    },
}

impl CacheGroup {
    /// Returns the number of leading blocks that no query at position `computed` or later reads.
    ///
    /// ```text
    /// block_size 4, window 6, computed 11     | 0 1 2 3 | 4 5 6 7 | 8 9 10 . |
    /// the query at 11 reads 6..=11              a hole        ^----------^
    /// ```
    pub fn holes(self, computed: usize, block_size: usize) -> usize {
        match self {
            CacheGroup::Full => 0,
            CacheGroup::Sliding { window } => (computed + 1).saturating_sub(window) / block_size,
        }
    }
}

/// Configuration of a [`BlockPool`](crate::BlockPool).
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Number of blocks in the pool.
    pub num_blocks: usize,
    /// Number of tokens per block, a power of two up to 2^20.
    pub block_size: usize,
    /// Whether to keep the blocks of finished sequences and share equal prefixes.
    pub prefix_caching: bool,
    /// Seed of the prefix hash's key; `None` draws a random one. Replicas whose hashes must be equal need equal seeds.
    pub hash_seed: Option<u64>,
    /// Number of hash bits, 1 to 128. Fewer than 128 force collisions, for tests: results stay correct, lookups get
    /// slower.
    pub hash_bits: u32,
    /// Whether to order [`MemOp::Poison`](crate::MemOp::Poison) for slots that must not be read again.
    pub poison: bool,
    /// The cache groups. Each sequence has one table per group, and all groups use blocks of the same size in bytes.
    pub groups: Vec<CacheGroup>,
    /// Number of blocks of host memory; 0 for none. Sequences are swapped out to them.
    pub host_blocks: usize,
    /// Whether host blocks that no swapped sequence needs keep prefixes that the pool evicts.
    pub host_caching: bool,
    /// Whether to record [`BlockEvent`](crate::BlockEvent)s for [`drain_events`](crate::BlockPool::drain_events).
    pub events: bool,
}

impl PoolConfig {
    /// Creates a configuration with prefix caching, a random seed, 128 hash bits, poison in debug builds, one full
    /// group, no host blocks, no caching in them and no events.
    pub fn new(num_blocks: usize, block_size: usize) -> PoolConfig {
        PoolConfig {
            num_blocks,
            block_size,
            prefix_caching: true,
            hash_seed: None,
            hash_bits: 128,
            poison: cfg!(debug_assertions),
            groups: vec![CacheGroup::Full],
            host_blocks: 0,
            host_caching: false,
            events: false,
        }
    }

    /// Validates the configuration and returns the numbers of blocks and host blocks.
    pub(crate) fn check(&self) -> Result<(u32, u32), PoolError> {
        // Two ids are reserved: one marks the end of a list, the other is the sentinel of the free list.
        let count = |found: usize| u32::try_from(found).ok().filter(|n| *n < u32::MAX - 1);
        let num_blocks =
            count(self.num_blocks).filter(|n| *n > 0).ok_or(PoolError::NumBlocks { found: self.num_blocks })?;
        let host_blocks = count(self.host_blocks).ok_or(PoolError::HostBlocks { found: self.host_blocks })?;
        // The index numbers the blocks of both tiers together.
        if self.host_caching && count(self.num_blocks.saturating_add(self.host_blocks)).is_none() {
            return Err(PoolError::HostBlocks { found: self.host_blocks });
        }
        if !self.block_size.is_power_of_two() || self.block_size > MOST_TOKENS_PER_BLOCK {
            return Err(PoolError::BlockSize { found: self.block_size });
        }
        if !(1..=128).contains(&self.hash_bits) {
            return Err(PoolError::HashBits { found: self.hash_bits });
        }
        if self.groups.is_empty() || self.groups.len() > 256 {
            return Err(PoolError::Groups { found: self.groups.len() });
        }
        match self.groups.iter().position(|g| *g == CacheGroup::Sliding { window: 0 }) {
            Some(group) => Err(PoolError::Window { group }),
            None => Ok((num_blocks, host_blocks)),
        }
    }
}

//! How a pool is built, and what no pool can be built from.

use crate::PoolError;

/// Layers that share one block table per sequence, because they look at the same positions. There may be more kinds later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum CacheGroup {
    /// Every position before the query's is read.
    Full,
    /// A query at position `p` reads positions `p - window + 1` to `p`; blocks wholly behind are given back.
    Sliding {
        /// Positions that a query reads, its own included; at least 1.
        window: usize,
    },
}

impl CacheGroup {
    /// Leading blocks that no query at position `computed` or later reads.
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

/// How to build a [`BlockPool`](crate::BlockPool).
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Tokens per block, a power of two.
    pub block_size: usize,
    /// Keep the blocks of finished sequences and share equal prefixes.
    pub prefix_caching: bool,
    /// Key of the prefix hash; `None` draws a random one. Replicas that must give equal prefixes equal names need
    /// equal seeds.
    pub hash_seed: Option<u64>,
    /// Bits of hash, 1 to 128. Less than 128 only forces collisions, for tests: results stay right, lookups
    /// get slower.
    pub hash_bits: u32,
    /// Order [`MemOp::Poison`](crate::MemOp::Poison) for what must not be read again.
    pub poison: bool,
    /// Groups of layers; each sequence has one table per group, and all draw blocks of equal bytes from this pool.
    pub groups: Vec<CacheGroup>,
    /// Blocks of host memory to swap to; 0 for none.
    pub host_blocks: usize,
    /// Keep [`BlockEvent`](crate::BlockEvent)s for [`drain_events`](crate::BlockPool::drain_events).
    pub events: bool,
}

impl PoolConfig {
    /// Prefix caching on, random key, 128 bits, poison in debug builds; one full group, no host blocks, no events.
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
            events: false,
        }
    }

    /// The numbers of blocks and host blocks, if they and the rest can be.
    pub(crate) fn check(&self) -> Result<(u32, u32), PoolError> {
        // One id is left over to mark the end of a list, another for the sentinel of the free list.
        let id = |found: usize| u32::try_from(found).ok().filter(|n| *n < u32::MAX - 1);
        let num_blocks =
            id(self.num_blocks).filter(|n| *n > 0).ok_or(PoolError::NumBlocks { found: self.num_blocks })?;
        let host_blocks = id(self.host_blocks).ok_or(PoolError::HostBlocks { found: self.host_blocks })?;
        if !self.block_size.is_power_of_two() {
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

//! How a pool is built, and what no pool can be built from.

use crate::PoolError;

/// How to build a [`BlockPool`](crate::BlockPool).
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Keep the blocks of finished sequences and share equal prefixes.
    pub prefix_caching: bool,
    /// Key of the prefix hash; `None` takes the process's randomness. Replicas that shall name prefixes alike
    /// need the same.
    pub hash_seed: Option<u64>,
    /// Bits of hash, 1 to 128. Less than 128 only forces collisions, for tests: results stay right, lookups
    /// get slower.
    pub hash_bits: u32,
    /// Order [`MemOp::Poison`](crate::MemOp::Poison) for what must not be read again.
    pub poison: bool,
}

impl PoolConfig {
    /// Prefix caching on, random key, 128 bits, poison in debug builds.
    pub fn new(num_blocks: usize, block_size: usize) -> PoolConfig {
        PoolConfig {
            num_blocks,
            block_size,
            prefix_caching: true,
            hash_seed: None,
            hash_bits: 128,
            poison: cfg!(debug_assertions),
        }
    }

    /// The number of blocks, if it and the rest can be.
    pub(crate) fn check(&self) -> Result<u32, PoolError> {
        let num_blocks = u32::try_from(self.num_blocks).unwrap_or(u32::MAX);
        if num_blocks == 0 || num_blocks == u32::MAX {
            return Err(PoolError::NumBlocks { found: self.num_blocks });
        }
        if self.block_size == 0 {
            return Err(PoolError::BlockSize);
        }
        if !(1..=128).contains(&self.hash_bits) {
            return Err(PoolError::HashBits { found: self.hash_bits });
        }
        Ok(num_blocks)
    }
}

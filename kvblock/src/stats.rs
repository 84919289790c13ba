//! Gauges and counters of a pool.

/// Why a lookup stopped before the last usable block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissReason {
    /// The prompt does not read the cache.
    NotRead,
    /// There is no full block before the last token, which is always computed.
    ShorterThanBlock,
    /// The next block of the prefix was never computed, as far as the pool remembers.
    NoSharedPrefix,
    /// The next block of the prefix, or one of its window, was cached and has been evicted.
    Evicted,
    /// The next block's hash is in the index, but with other tokens.
    Collision,
}

/// Numbers of blocks by state. They always sum to the size of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gauges {
    /// Blocks that live tables reference.
    pub in_use: usize,
    /// Blocks without references that cache a prefix and can be evicted.
    pub cached: usize,
    /// Blocks without contents.
    pub free: usize,
}

/// Numbers of host blocks by state. They always sum to the size of the host pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostGauges {
    /// Blocks of swapped sequences.
    pub in_use: usize,
    /// Other blocks, which cache a prefix and can be evicted.
    pub cached: usize,
    /// Blocks without contents.
    pub free: usize,
}

/// Lookups since the pool was created. Only lookups that led to an open table count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// Number of tables opened with prefix caching on.
    pub lookups: u64,
    /// Number of tokens of these prompts.
    pub query_tokens: u64,
    /// Number of these tokens that were cached, in either tier.
    pub hit_tokens: u64,
    /// Number of these cached tokens that came from host memory.
    pub host_hit_tokens: u64,
    /// Number of lookups that ended with [`MissReason::NotRead`].
    pub not_read: u64,
    /// Number of lookups that ended with [`MissReason::ShorterThanBlock`].
    pub shorter_than_block: u64,
    /// Number of lookups that ended with [`MissReason::NoSharedPrefix`].
    pub no_shared_prefix: u64,
    /// Number of lookups that ended with [`MissReason::Evicted`].
    pub evicted: u64,
    /// Number of lookups that ended with [`MissReason::Collision`].
    pub collisions: u64,
}

impl PrefixStats {
    pub(crate) fn count(&mut self, tokens: usize, (cached, from_host): (usize, usize), miss: Option<MissReason>) {
        self.lookups += 1;
        self.query_tokens += tokens as u64;
        self.hit_tokens += cached as u64;
        self.host_hit_tokens += from_host as u64;
        match miss {
            Some(MissReason::NotRead) => self.not_read += 1,
            Some(MissReason::ShorterThanBlock) => self.shorter_than_block += 1,
            Some(MissReason::NoSharedPrefix) => self.no_shared_prefix += 1,
            Some(MissReason::Evicted) => self.evicted += 1,
            Some(MissReason::Collision) => self.collisions += 1,
            None => {}
        }
    }
}

/// Counts of block operations since the pool was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Blocks allocated.
    pub allocated: u64,
    /// Allocated blocks that evicted a cached prefix.
    pub evicted: u64,
    /// Blocks that returned to the free list.
    pub freed: u64,
    /// Blocks hashed: the work that [`PromptHashes`](crate::PromptHashes) save.
    pub hashed: u64,
    /// Blocks copied on write.
    pub copied: u64,
    /// Blocks released because they fell behind a window.
    pub behind_window: u64,
    /// Blocks of swapped sequences copied to host memory.
    pub swapped_out: u64,
    /// Blocks of swapped sequences copied back from host memory.
    pub swapped_in: u64,
    /// Blocks that a swap-in found in the prefix cache, so that no copy was needed.
    pub swap_in_hits: u64,
    /// Blocks copied to host memory because their prefix was evicted.
    pub offloaded: u64,
    /// Blocks copied back from host memory for a table that was opened on their prefix.
    pub loaded: u64,
    /// Tables dropped instead of released.
    pub leaked_tables: u64,
    /// Greatest number of blocks in use at once.
    pub peak_in_use: usize,
}

//! What the pool counts: where the blocks are now, and what has happened since the start.

/// Why a lookup stopped before the last block it could have used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissReason {
    /// The prompt asked not to read the cache.
    NotRead,
    /// No block is full before the last token, which is always recomputed.
    ShorterThanBlock,
    /// Nobody has computed the next block of the prefix, as far as the pool remembers.
    NoSharedPrefix,
    /// The next block of the prefix, or one of its window, was there and has been reused for something else.
    Evicted,
    /// The next block's hash is there, but with other tokens.
    Collision,
}

/// Where the blocks are; the three always sum to the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gauges {
    /// Blocks that live tables own.
    pub in_use: usize,
    /// Blocks that nobody owns and that hold a cached prefix: reusable, and to be had when needed.
    pub cached: usize,
    /// Blocks that hold nothing.
    pub free: usize,
}

/// Where the host blocks are; the two always sum to the host pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostGauges {
    /// Blocks of swapped sequences.
    pub in_use: usize,
    /// The others.
    pub free: usize,
}

/// Lookups of opened tables since the start; a lookup that led to no table is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// Tables opened with prefix caching on.
    pub lookups: u64,
    /// Their tokens.
    pub query_tokens: u64,
    /// Those of their tokens that were found.
    pub hit_tokens: u64,
    /// Lookups that ended by [`MissReason::NotRead`].
    pub not_read: u64,
    /// Lookups that ended by [`MissReason::ShorterThanBlock`].
    pub shorter_than_block: u64,
    /// Lookups that ended by [`MissReason::NoSharedPrefix`].
    pub no_shared_prefix: u64,
    /// Lookups that ended by [`MissReason::Evicted`].
    pub evicted: u64,
    /// Lookups that ended by [`MissReason::Collision`].
    pub collisions: u64,
}

impl PrefixStats {
    pub(crate) fn count(&mut self, tokens: usize, cached: usize, miss: Option<MissReason>) {
        self.lookups += 1;
        self.query_tokens += tokens as u64;
        self.hit_tokens += cached as u64;
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

/// What has happened to blocks since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Blocks taken off the free list to be written.
    pub taken: u64,
    /// Those of them that held a cached prefix until then.
    pub evicted: u64,
    /// Blocks that went back to the free list.
    pub given_back: u64,
    /// Blocks whose name was computed: the work that [`PromptHashes`](crate::PromptHashes) save.
    pub hashed: u64,
    /// Copies ordered because a writer was not the sole owner.
    pub copied: u64,
    /// Blocks given back because they lay behind a window.
    pub left_window: u64,
    /// Blocks copied to the host.
    pub swapped_out: u64,
    /// Blocks copied back from the host.
    pub swapped_in: u64,
    /// Blocks of swapped sequences that were still in the prefix cache, so that no copy was needed.
    pub swap_in_hits: u64,
    /// Tables that were dropped instead of released.
    pub leaked_tables: u64,
    /// Most blocks ever in use at once.
    pub peak_in_use: usize,
}

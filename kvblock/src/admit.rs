//! From a prompt to a table: the prefix lookup, what it would cost, and the opening.
//!
//! An [`Admission`] borrows the pool, so nothing can change between the lookup and the opening, and dropping
//! it leaves no trace.

use std::sync::Arc;

use crate::prefix::{Content, Found};
use crate::{BlockId, BlockPool, BlockTable, NoSpace};

/// A sequence to be given slots.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// All known tokens.
    pub tokens: &'a [u32],
    /// Blocks are shared only between prompts of the same salt.
    pub salt: Option<&'a str>,
    /// `false` computes every token; the blocks are stored for others nevertheless.
    pub read_cache: bool,
}

/// Why a lookup stopped before the last block it could have used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissReason {
    /// The prompt asked not to read the cache.
    NotRead,
    /// No block is full before the last token, which is always recomputed.
    ShorterThanBlock,
    /// The next block of the prefix is not (or no longer) there.
    NotCached,
    /// The next block's hash is there, but with other tokens.
    Collision,
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
    /// Lookups that ended by [`MissReason::NotCached`].
    pub not_cached: u64,
    /// Lookups that ended by [`MissReason::Collision`].
    pub collisions: u64,
}

/// The answer to "what if this prompt came in?".
pub struct Admission<'a> {
    pool: &'a mut BlockPool,
    prompt: Prompt<'a>,
    hits: Vec<BlockId>,
    miss: Option<MissReason>,
}

impl BlockPool {
    /// Looks up the longest cached prefix of a prompt. Changes nothing until [`Admission::open`].
    ///
    /// The last token is never taken from the cache: its row gives the next token, so it has to be computed.
    pub fn admit<'a>(&'a mut self, prompt: Prompt<'a>) -> Admission<'a> {
        let (hits, miss) = self.longest_prefix(&prompt);
        Admission { pool: self, prompt, hits, miss }
    }

    fn longest_prefix(&self, prompt: &Prompt<'_>) -> (Vec<BlockId>, Option<MissReason>) {
        let mut hits = Vec::new();
        let Some(index) = &self.index else {
            return (hits, None);
        };
        if !prompt.read_cache {
            return (hits, Some(MissReason::NotRead));
        }
        let usable = &prompt.tokens[..prompt.tokens.len().saturating_sub(1)];
        if usable.len() < self.block_size {
            return (hits, Some(MissReason::ShorterThanBlock));
        }
        let salt: Option<Arc<str>> = prompt.salt.map(Arc::from);
        let mut parent = None;
        for tokens in usable.chunks_exact(self.block_size) {
            match index.find(Content { parent, salt: salt.as_ref(), tokens }) {
                Found::Hit(block) => {
                    hits.push(block);
                    parent = index.as_parent(block);
                }
                Found::Absent => return (hits, Some(MissReason::NotCached)),
                Found::Collision => return (hits, Some(MissReason::Collision)),
            }
        }
        (hits, None)
    }
}

impl Admission<'_> {
    /// Leading tokens that would not be computed.
    pub fn cached_tokens(&self) -> usize {
        self.hits.len() * self.pool.block_size
    }

    /// Why not more; `None` if every usable block was found or prefix caching is off.
    pub fn miss(&self) -> Option<MissReason> {
        self.miss
    }

    /// Blocks that would leave the free list: new ones, and cached ones that would be owned again.
    pub fn blocks_needed(&self) -> usize {
        self.pool.blocks_to_open(&self.hits, self.prompt.tokens.len())
    }

    /// Opens the table, with slots for the whole prompt, if `keep_free` more blocks than that can be had.
    pub fn open(self, keep_free: usize) -> Result<BlockTable, NoSpace> {
        let Prompt { tokens, salt, .. } = self.prompt;
        let cached = self.cached_tokens();
        let table = self.pool.open_table(&self.hits, tokens, salt, keep_free)?;
        if self.pool.index.is_some() {
            let stats = &mut self.pool.stats;
            stats.lookups += 1;
            stats.query_tokens += tokens.len() as u64;
            stats.hit_tokens += cached as u64;
            match self.miss {
                Some(MissReason::NotRead) => stats.not_read += 1,
                Some(MissReason::ShorterThanBlock) => stats.shorter_than_block += 1,
                Some(MissReason::NotCached) => stats.not_cached += 1,
                Some(MissReason::Collision) => stats.collisions += 1,
                None => {}
            }
        }
        Ok(table)
    }
}

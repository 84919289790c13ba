//! From a prompt to a block table: prefix lookup, its cost in blocks, and the opening of a table on the cached prefix.
//! Slots for the tokens behind it come with [`append`](BlockPool::append), as much at a time as is computed.
//!
//! An [`Admission`] borrows the pool, so nothing can change between the lookup and the opening, and dropping
//! it leaves no trace.
//!
//! With several cache groups a hit is the longest prefix that serves all of them: a full group needs every block of
//! it, a sliding group those that the next query's window reads.
//!
//! ```text
//! full            b0 b1 b2 b3        found up to 4 blocks
//! sliding, w = 2   .  c1 c2  .       has no block 3, so 4 does not serve; 3 does: (hole) c1 c2
//! hit: 3 blocks
//! ```
//!
//! The identity of a prefix is vouched for by a cached block of it in some group. So a pool without a full group
//! finds a prefix only while some group still caches each of its blocks.

use std::panic::Location;
use std::sync::Arc;

use crate::key::PrefixKey;
use crate::prefix::{Content, Found, Parent};
use crate::{
    BlockId, BlockPool, BlockTable, CacheGroup, GroupTable, MissReason, NoSpace, PrefixHash, Prompt, PromptHashes,
};

/// What a prompt would find and cost now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lookup {
    /// Leading tokens that would not be computed.
    pub cached_tokens: usize,
    /// Cached blocks that would leave the free list, as they would be owned again.
    pub blocks_needed: usize,
    /// Why not more was found; `None` if every usable block was found or prefix caching is off.
    pub miss: Option<MissReason>,
}

/// The answer to "what if this prompt came in?".
pub struct Admission<'a> {
    pool: &'a mut BlockPool,
    prompt: Prompt<'a>,
    key: Option<Arc<PrefixKey>>,
    hit: Hit,
    miss: Option<MissReason>,
}

/// A cached prefix.
#[derive(Default)]
pub(crate) struct Hit {
    /// Leading blocks that need not be computed.
    pub len: usize,
    /// What each group holds of them and beyond, `[blocks, groups]`.
    pub blocks: Vec<Option<BlockId>>,
    /// The prefix up to each.
    pub chain: Vec<Parent>,
}

impl BlockPool {
    /// Looks up the longest cached prefix of a prompt, to open a table on it. Changes nothing until [`Admission::open`].
    ///
    /// The last token is never taken from the cache: its row gives the next token, so it has to be computed.
    ///
    /// ```
    /// # use kvblock::{BlockPool, PoolConfig, Prompt};
    /// # let mut pool = BlockPool::new(PoolConfig::new(8, 4))?;
    /// let french = Prompt { adapter: Some("french"), ..Prompt::new(&[1, 2, 3, 4, 5]) };
    /// let hashes = pool.hash_prompt(french);
    /// let french = Prompt { hashes: Some(&hashes), ..french };
    /// let mut table = pool.admit(french).open(0)?;
    /// pool.append(&mut table, french.tokens)?;
    /// pool.commit(&mut table, 5)?;
    /// assert_eq!(pool.admit(french).cached_tokens(), 4);
    /// assert_eq!(pool.admit(Prompt::new(&[1, 2, 3, 4, 5])).cached_tokens(), 0);
    /// # pool.release(table);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn admit<'a>(&'a mut self, prompt: Prompt<'a>) -> Admission<'a> {
        let key = PrefixKey::new(&prompt);
        let (hit, miss) = self.find_prefix(&prompt, key.as_ref());
        Admission { pool: self, prompt, key, hit, miss }
    }

    /// Says what [`admit`](BlockPool::admit) would find, without borrowing the pool for longer than this call.
    pub fn lookup(&self, prompt: Prompt<'_>) -> Lookup {
        let (hit, miss) = self.find_prefix(&prompt, PrefixKey::new(&prompt).as_ref());
        let blocks_needed = self.blocks_to_open(&hit);
        Lookup { cached_tokens: hit.len * self.block_size, blocks_needed, miss }
    }

    /// The names of all prefixes of a prompt that could be looked up; empty with prefix caching off.
    pub fn hash_prompt(&self, prompt: Prompt<'_>) -> PromptHashes {
        let Some(index) = &self.index else { return PromptHashes::default() };
        PromptHashes(index.names(PrefixKey::new(&prompt).as_deref(), prompt.tokens))
    }

    fn find_prefix(&self, prompt: &Prompt<'_>, key: Option<&Arc<PrefixKey>>) -> (Hit, Option<MissReason>) {
        let usable = &prompt.tokens[..prompt.tokens.len().saturating_sub(1)];
        if self.index.is_none() {
            (Hit::default(), None)
        } else if !prompt.read_cache {
            (Hit::default(), Some(MissReason::NotRead))
        } else if usable.len() < self.block_size {
            (Hit::default(), Some(MissReason::ShorterThanBlock))
        } else {
            self.longest_common(usable, key, prompt.hashes.map_or(&[], |hashes| &hashes.0))
        }
    }

    /// The longest prefix that every group can serve.
    fn longest_common(
        &self,
        tokens: &[u32],
        key: Option<&Arc<PrefixKey>>,
        names: &[PrefixHash],
    ) -> (Hit, Option<MissReason>) {
        let (mut hit, mut miss) = self.walk(tokens, key, names, &[]);
        let lacks = |len: usize| {
            let windows = self.groups.iter().enumerate().filter(|(_, kind)| **kind != CacheGroup::Full);
            windows
                .filter_map(|(g, kind)| self.last_gap(&hit, g, kind.holes(len * self.block_size, self.block_size)..len))
                .min()
        };
        let mut len = hit.len;
        while let Some(gap) = lacks(len) {
            (len, miss) = (gap, Some(MissReason::Evicted));
        }
        hit.len = len;
        (hit, miss)
    }

    fn last_gap(&self, hit: &Hit, group: usize, mut blocks: std::ops::Range<usize>) -> Option<usize> {
        blocks.rfind(|k| hit.blocks[k * self.groups.len() + group].is_none())
    }

    /// Follows a prefix block by block while some group vouches for it and every full group has it. `chain` vouches
    /// for the prefixes that it names.
    pub(crate) fn walk(
        &self,
        tokens: &[u32],
        key: Option<&Arc<PrefixKey>>,
        names: &[PrefixHash],
        chain: &[Parent],
    ) -> (Hit, Option<MissReason>) {
        let mut hit = Hit::default();
        let Some(index) = &self.index else { return (hit, None) };
        let mut parent = None;
        for (k, tokens) in tokens.chunks_exact(self.block_size).enumerate() {
            let content = Content { parent, key, start: k * self.block_size, tokens };
            let name = names.get(k).copied().unwrap_or_else(|| index.name(content));
            let (mut vouched, mut miss) = (chain.get(k).copied(), None);
            for (g, kind) in self.groups.iter().enumerate() {
                let found = index.find(g, name, content);
                let block = if let Found::Hit(block) = found { Some(block) } else { None };
                vouched = vouched.or_else(|| index.as_parent(block?));
                hit.blocks.push(block);
                if block.is_none() && (*kind == CacheGroup::Full || miss.is_none()) {
                    miss = Some((*kind, found));
                }
            }
            let stops = matches!(miss, Some((CacheGroup::Full, _))) || vouched.is_none();
            if let Some((_, found)) = miss.filter(|_| stops) {
                let reason = match found {
                    Found::Evicted => MissReason::Evicted,
                    Found::Collision => MissReason::Collision,
                    Found::Absent | Found::Hit(_) => MissReason::NoSharedPrefix,
                };
                return (hit, Some(reason));
            }
            hit.len += 1;
            hit.chain.extend(vouched);
            parent = vouched;
        }
        (hit, None)
    }

    /// The blocks of the hit that a group's table would begin with.
    fn hit_blocks<'a>(&self, hit: &'a Hit, group: usize) -> (usize, impl Iterator<Item = BlockId> + 'a) {
        let holes = self.groups[group].holes(hit.len * self.block_size, self.block_size);
        let groups = self.groups.len();
        (holes, (holes..hit.len).filter_map(move |k| hit.blocks[k * groups + group]))
    }

    /// Blocks that leave the free list when a table over `hit` is opened.
    fn blocks_to_open(&self, hit: &Hit) -> usize {
        let groups = 0..self.groups.len();
        groups.flat_map(|g| self.hit_blocks(hit, g).1).filter(|b| self.free.contains(*b)).count()
    }
}

impl Admission<'_> {
    /// Leading tokens that would not be computed.
    pub fn cached_tokens(&self) -> usize {
        self.hit.len * self.pool.block_size
    }

    /// Why not more; `None` if every usable block was found or prefix caching is off.
    pub fn miss(&self) -> Option<MissReason> {
        self.miss
    }

    /// Cached blocks that would leave the free list, as they would be owned again.
    pub fn blocks_needed(&self) -> usize {
        self.pool.blocks_to_open(&self.hit)
    }

    /// Opens a table of the cached prefix, if `keep_free` more blocks can be had than it takes off the free list. It is
    /// empty where nothing was found.
    #[track_caller]
    pub fn open(self, keep_free: usize) -> Result<BlockTable, NoSpace> {
        self.pool.reclaim_leaks();
        // Reclaimed blocks that were cached are found by the next lookup; this one only sees more room.
        self.pool.check_space(self.blocks_needed() + keep_free)?;
        let opened = Location::caller();
        let Admission { pool, prompt: Prompt { tokens, .. }, key, mut hit, miss } = self;
        let block_size = pool.block_size;
        let cached = hit.len * block_size;
        let mut groups = Vec::with_capacity(pool.groups.len());
        for g in 0..pool.groups.len() {
            let (holes, found) = pool.hit_blocks(&hit, g);
            groups.push(GroupTable { holes, blocks: found.collect() });
        }
        groups.iter().flat_map(GroupTable::blocks).for_each(|block| pool.share(*block));
        let chained = pool.groups.iter().all(|kind| *kind != CacheGroup::Full);
        hit.chain.truncate(if chained { hit.len } else { 0 });
        if pool.index.is_some() {
            pool.stats.count(tokens.len(), cached, miss);
        }
        let (tokens, chain, home) = (tokens[..cached].to_vec(), hit.chain, pool.home.clone());
        Ok(BlockTable { groups, tokens, committed: cached, valid: usize::MAX, key, chain, block_size, home, opened })
    }
}

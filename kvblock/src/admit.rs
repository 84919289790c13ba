//! Admission: looks up the cached prefix of a prompt, reports the blocks it needs, and opens a table on it. The other
//! tokens get slots by [`append`](BlockPool::append), as they are computed.
//!
//! An [`Admission`] borrows the pool, so nothing can change between lookup and opening. Dropping it changes nothing.
//!
//! With several cache groups a hit is the longest prefix that serves all of them. A full group needs every block of the
//! prefix, a sliding group those that the next query's window reads.
//!
//! ```text
//! full            b0 b1 b2 b3        has 4 blocks
//! sliding, w = 2   .  c1 c2  .       lacks block 3, so it cannot serve 4 blocks, but 3: (hole) c1 c2
//! hit: 3 blocks
//! ```
//!
//! A cached block in any group verifies the identity of a prefix. So a pool without a full group finds a prefix only
//! while some group still caches each of its blocks.
//!
//! A block that is only in host memory is a hit too. Opening a table orders its copy to a new block, which enters the
//! index at once: like every memory operation, the copy is applied before anything reads the block.

use std::panic::Location;
use std::sync::Arc;

use crate::ids::{Place, Tier};
use crate::key::PrefixKey;
use crate::prefix::{Content, Found, Prefix};
use crate::{BlockPool, BlockTable, CacheGroup, GroupTable, MissReason, NoSpace, PrefixHash, Prompt, PromptHashes};

/// The result of looking up a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lookup {
    /// Number of leading tokens that are cached, in either tier.
    pub cached_tokens: usize,
    /// Number of these tokens whose blocks would be copied from the host.
    pub host_tokens: usize,
    /// Number of blocks that opening a table would take off the free list.
    pub blocks_needed: usize,
    /// Why not more tokens are cached; `None` if every usable block was found or prefix caching is off.
    pub miss: Option<MissReason>,
}

/// The cached prefix of a prompt, on which a table can be opened.
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
    /// Number of leading blocks that are cached.
    pub len: usize,
    /// The blocks of each group, for these and possibly more blocks, `[blocks, groups]`.
    pub blocks: Vec<Option<Place>>,
    /// The prefix up to each block.
    pub prefixes: Vec<Prefix>,
}

impl BlockPool {
    /// Looks up the longest cached prefix of a prompt, to open a table on it. Changes nothing until
    /// [`Admission::open`].
    ///
    /// The last token is never taken from the cache. It has to be computed, because its row yields the next token.
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

    /// Returns what [`admit`](BlockPool::admit) would find, without borrowing the pool mutably.
    pub fn lookup(&self, prompt: Prompt<'_>) -> Lookup {
        let (hit, miss) = self.find_prefix(&prompt, PrefixKey::new(&prompt).as_ref());
        let (blocks_needed, host_tokens) = (self.blocks_to_open(&hit), self.host_tokens(&hit));
        Lookup { cached_tokens: hit.len * self.block_size, host_tokens, blocks_needed, miss }
    }

    /// Computes the hashes of all prefixes that a lookup of this prompt needs. Empty if prefix caching is off.
    pub fn hash_prompt(&self, prompt: Prompt<'_>) -> PromptHashes {
        let Some(index) = &self.index else { return PromptHashes::default() };
        PromptHashes(index.hashes(PrefixKey::new(&prompt).as_deref(), prompt.tokens))
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
            self.longest_hit(usable, key, prompt.hashes.map_or(&[], |hashes| &hashes.0))
        }
    }

    /// Finds the longest prefix that serves every group.
    fn longest_hit(
        &self,
        tokens: &[u32],
        key: Option<&Arc<PrefixKey>>,
        hashes: &[PrefixHash],
    ) -> (Hit, Option<MissReason>) {
        let (mut hit, mut miss) = self.walk(tokens, key, hashes, &[], self.host.num_cached > 0);
        let first_gap = |len: usize| {
            let sliding = self.groups.iter().enumerate().filter(|(_, kind)| **kind != CacheGroup::Full);
            let last_gap = |(g, kind): (usize, &CacheGroup)| {
                let mut window = kind.holes(len * self.block_size, self.block_size)..len;
                window.rfind(|k| hit.blocks[k * self.groups.len() + g].is_none())
            };
            sliding.filter_map(last_gap).min()
        };
        let mut len = hit.len;
        while let Some(gap) = first_gap(len) {
            (len, miss) = (gap, Some(MissReason::Evicted));
        }
        hit.len = len;
        (hit, miss)
    }

    /// Follows a prefix block by block, while every full group has the block and some group verifies it. A prefix in
    /// `known` counts as verified. Blocks in host memory count only if `reads_host`: nothing keeps them until the caller
    /// holds them.
    pub(crate) fn walk(
        &self,
        tokens: &[u32],
        key: Option<&Arc<PrefixKey>>,
        hashes: &[PrefixHash],
        known: &[Prefix],
        reads_host: bool,
    ) -> (Hit, Option<MissReason>) {
        let mut hit = Hit::default();
        let Some(index) = &self.index else { return (hit, None) };
        let mut parent = None;
        for (k, tokens) in tokens.chunks_exact(self.block_size).enumerate() {
            let content = Content { parent, key, start: k * self.block_size, tokens };
            let hash = hashes.get(k).copied().unwrap_or_else(|| index.hash(content));
            let (mut verified, mut miss) = (known.get(k).copied(), None);
            for (g, kind) in self.groups.iter().enumerate() {
                let found = index.find(Tier::Device, g, hash, content);
                let place = match found {
                    Found::Hit(place) => Some(place),
                    _ if !reads_host => None,
                    _ => match index.find(Tier::Host, g, hash, content) {
                        Found::Hit(place) => Some(place),
                        _ => None,
                    },
                };
                verified = verified.or_else(|| index.prefix_of(place?));
                hit.blocks.push(place);
                if place.is_none() && (*kind == CacheGroup::Full || miss.is_none()) {
                    miss = Some((*kind, found));
                }
            }
            let stops = matches!(miss, Some((CacheGroup::Full, _))) || verified.is_none();
            if let Some((_, found)) = miss.filter(|_| stops) {
                let reason = match found {
                    Found::Evicted => MissReason::Evicted,
                    Found::Collision => MissReason::Collision,
                    Found::Absent | Found::Hit(_) => MissReason::NoSharedPrefix,
                };
                return (hit, Some(reason));
            }
            hit.len += 1;
            hit.prefixes.extend(verified);
            parent = verified;
        }
        (hit, None)
    }

    /// Returns the holes and blocks with which a group's table begins.
    fn hit_blocks<'a>(&self, hit: &'a Hit, group: usize) -> (usize, impl Iterator<Item = Place> + 'a) {
        let holes = self.groups[group].holes(hit.len * self.block_size, self.block_size);
        let groups = self.groups.len();
        (holes, (holes..hit.len).filter_map(move |k| hit.blocks[k * groups + group]))
    }

    /// Number of blocks that leave the free list when a table is opened on `hit`.
    fn blocks_to_open(&self, hit: &Hit) -> usize {
        let leaves = |place: &Place| match *place {
            Place::Device(block) => self.free.contains(block),
            Place::Host(_) => true,
        };
        (0..self.groups.len()).flat_map(|g| self.hit_blocks(hit, g).1).filter(leaves).count()
    }

    /// Number of tokens of a hit of which some group's block is copied from the host.
    fn host_tokens(&self, hit: &Hit) -> usize {
        let is_on_host = |k: &usize| {
            let of_block = self.groups.iter().zip(&hit.blocks[k * self.groups.len()..]);
            of_block.into_iter().any(|(kind, place)| {
                matches!(place, Some(Place::Host(_))) && kind.holes(hit.len * self.block_size, self.block_size) <= *k
            })
        };
        if self.host.num_cached == 0 { 0 } else { (0..hit.len).filter(is_on_host).count() * self.block_size }
    }
}

impl Admission<'_> {
    /// Number of leading tokens that are cached, in either tier.
    pub fn cached_tokens(&self) -> usize {
        self.hit.len * self.pool.block_size
    }

    /// Number of the cached tokens whose blocks are copied from the host.
    pub fn host_tokens(&self) -> usize {
        self.pool.host_tokens(&self.hit)
    }

    /// Why not more tokens are cached; `None` if every usable block was found or prefix caching is off.
    pub fn miss(&self) -> Option<MissReason> {
        self.miss
    }

    /// Number of blocks that [`open`](Admission::open) would take off the free list.
    pub fn blocks_needed(&self) -> usize {
        self.pool.blocks_to_open(&self.hit)
    }

    /// Opens a table on the cached prefix; the table is empty if nothing was found. Orders copies of the blocks that are
    /// only in host memory. Fails unless `keep_free` blocks
    /// remain free afterwards.
    #[track_caller]
    pub fn open(self, keep_free: usize) -> Result<BlockTable, NoSpace> {
        self.pool.reclaim_leaks();
        // The next lookup finds reclaimed blocks that are cached. For this one they are only free.
        self.pool.check_space(self.blocks_needed().saturating_add(keep_free))?;
        let opened = Location::caller();
        let host_tokens = self.host_tokens();
        let Admission { pool, prompt, key, mut hit, miss } = self;
        let block_size = pool.block_size;
        let committed = hit.len * block_size;
        let mut places = Vec::with_capacity(pool.groups.len());
        for g in 0..pool.groups.len() {
            let (holes, found) = pool.hit_blocks(&hit, g);
            places.push(GroupTable { holes, blocks: found.collect() });
        }
        let groups = pool.load(&places)?;
        let hashes = (host_tokens > 0).then(|| hit.prefixes.iter().map(|prefix| prefix.hash).collect::<Vec<_>>());
        let keeps_prefixes = pool.groups.iter().all(|kind| *kind != CacheGroup::Full);
        hit.prefixes.truncate(if keeps_prefixes { hit.len } else { 0 });
        if pool.index.is_some() {
            pool.stats.count(prompt.tokens.len(), (committed, host_tokens), miss);
        }
        let mut table = BlockTable {
            groups,
            tokens: prompt.tokens[..committed].to_vec(),
            committed,
            num_valid: usize::MAX,
            key,
            prefixes: hit.prefixes,
            block_size,
            pool: pool.pool.clone(),
            opened,
        };
        if let Some(hashes) = hashes {
            pool.index_full(&mut table, 0..hit.len, &hashes);
        }
        Ok(table)
    }
}

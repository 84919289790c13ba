//! The prefix index: which block caches which prefix, in which cache group.
//!
//! A lookup must never return a block of another prefix, whatever the hash does. So each distinct prefix in the index
//! has a unique [`PrefixId`], and an entry stores its parent's id, its key and its tokens. A lookup walks from the
//! front and accepts a candidate only if its parent is *the prefix verified so far* and its tokens are equal. By
//! induction the whole prefix is equal, at the cost of comparing one block. Groups share the ids, so a prefix that is a
//! hole in one group is verified by a block of another.
//!
//! Several blocks may cache the same prefix, if requests computed it at the same time. All are kept, the oldest first,
//! and the prefix remains in the index until the last of them is removed.
//!
//! ```text
//! buckets [hash, group] ──▶ entry of block 7 ⇄ entry of block 2 ⇄ …        links are block ids
//! ```
//!
//! The index is a hash map threaded through one entry of 64 bytes (a cache line) per block, with one or two bucket
//! heads of 4 bytes per block. It never reallocates. All operations are O(1), apart from entries that share a bucket. A
//! lookup reads three cache lines per block: bucket, entry, tokens.
//!
//! When the last block of a prefix is removed, the entries of longer prefixes become unreachable. Such orphans are
//! removed when the same tokens are indexed again under the same hash ([`PrefixIndex::orphan_of`]), so they do not
//! accumulate.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;

use crate::hash::PrefixHasher;
use crate::ids::{BlockId, PrefixHash};
use crate::key::{BlockKey, PrefixKey};

/// Identity of one exact sequence of tokens under one key. Ids are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PrefixId(NonZeroU64);

/// Hash and identity of a prefix that ends with a full block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefix {
    pub hash: PrefixHash,
    id: PrefixId,
}

/// Contents of a full block.
#[derive(Clone, Copy)]
pub(crate) struct Content<'a> {
    /// The prefix before the block; `None` for a first block.
    pub parent: Option<Prefix>,
    /// Key of the whole sequence.
    pub key: Option<&'a Arc<PrefixKey>>,
    /// Position of the first token in the sequence.
    pub start: usize,
    /// Exactly one block of tokens.
    pub tokens: &'a [u32],
}

impl<'a> Content<'a> {
    /// The part of a sequence's key that this block depends on.
    fn part_of<'b>(&self, key: Option<&'b Arc<PrefixKey>>) -> BlockKey<'b> {
        BlockKey::new(key.map(|key| &**key), self.start..self.start + self.tokens.len())
    }
}

/// Result of [`PrefixIndex::find`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Hit(BlockId),
    /// No block has this hash.
    Absent,
    /// No block has this hash, but one had it recently.
    Evicted,
    /// A block has this hash, but caches another prefix.
    Collision,
}

/// Result of [`PrefixIndex::insert`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Inserted {
    /// The block was in the index, or another block of the group caches the same prefix.
    Known,
    /// No other block of the group has the hash.
    NewHash,
    /// Other blocks of the group have the hash, but cache other prefixes.
    SharedHash,
}

/// A cached prefix that a lookup can reach.
pub(crate) struct Reachable<'a> {
    /// Hash of the prefix before the block.
    pub parent: Option<PrefixHash>,
    pub hash: PrefixHash,
    /// Tokens of the block.
    pub tokens: &'a [u32],
    /// Key of the first block in front that has one, or of this block.
    pub key: Option<&'a Arc<PrefixKey>>,
}

pub(crate) struct Removed {
    pub group: usize,
    pub hash: PrefixHash,
    /// Whether no other block of the group has that hash.
    pub is_last: bool,
}

struct Entry {
    hash: PrefixHash,
    id: PrefixId,
    parent: Option<PrefixId>,
    /// Key of the sequence, if the block depends on a part of it.
    key: Option<Arc<PrefixKey>>,
    /// Neighbours in the bucket; [`NONE`] at its ends.
    prev: u32,
    next: u32,
    group: u8,
}

const _: () = assert!(size_of::<Option<Entry>>() == 64, "an entry is one cache line");

impl Entry {
    fn has(&self, group: usize, hash: PrefixHash) -> bool {
        self.hash == hash && usize::from(self.group) == group
    }
}

/// A link to no block.
const NONE: u32 = u32::MAX;

/// Index of all cached prefixes of a pool.
pub(crate) struct PrefixIndex {
    hasher: PrefixHasher,
    block_size: usize,
    groups: usize,
    /// First block of each bucket. Their number is a power of two, at least one per block.
    buckets: Box<[u32]>,
    /// One per block, `Some` while the block is cached.
    entries: Box<[Option<Entry>]>,
    /// Tokens of each cached block, `[num_blocks, block_size]`.
    tokens: Box<[u32]>,
    /// Fingerprints of recently evicted hashes, overwritten by later ones. They only determine the reason of a miss.
    evicted: Box<[u32]>,
    last_id: NonZeroU64,
}

impl PrefixIndex {
    pub fn new(hasher: PrefixHasher, num_blocks: usize, block_size: usize, groups: usize) -> PrefixIndex {
        PrefixIndex {
            hasher,
            block_size,
            groups,
            buckets: vec![NONE; num_blocks.next_power_of_two()].into(),
            entries: (0..num_blocks).map(|_| None).collect(),
            tokens: vec![0; num_blocks * block_size].into(),
            evicted: vec![0; 1 << num_blocks.ilog2()].into(),
            last_id: NonZeroU64::MIN,
        }
    }

    pub fn seed(&self) -> u64 {
        self.hasher.seed()
    }

    /// Number of blocks hashed since the start.
    pub fn num_hashed(&self) -> u64 {
        self.hasher.num_hashed.get()
    }

    /// Size in bytes, which is constant. Keys are shared with the tables and not counted.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.buckets)
            + size_of_val(&*self.entries)
            + size_of_val(&*self.tokens)
            + size_of_val(&*self.evicted)
    }

    pub fn contains(&self, block: BlockId) -> bool {
        self.entry(block.0).is_some()
    }

    /// Returns the prefix that a cached block ends.
    pub fn prefix_of(&self, block: BlockId) -> Option<Prefix> {
        self.entry(block.0).map(|e| Prefix { hash: e.hash, id: e.id })
    }

    /// Returns group and hash of a cached block.
    pub fn hash_of(&self, block: BlockId) -> Option<(usize, PrefixHash)> {
        self.entry(block.0).map(|e| (usize::from(e.group), e.hash))
    }

    pub fn hash(&self, content: Content<'_>) -> PrefixHash {
        self.hasher.hash(content.parent.map(|p| p.hash), content.part_of(content.key), content.tokens)
    }

    /// Returns the hashes of all prefixes of `tokens` that end with a full block before the last token.
    pub fn hashes(&self, key: Option<&PrefixKey>, tokens: &[u32]) -> Vec<PrefixHash> {
        let mut parent = None;
        let blocks = tokens[..tokens.len().saturating_sub(1)].chunks_exact(self.block_size);
        blocks
            .zip((0..).step_by(self.block_size))
            .map(|(tokens, start)| {
                let hash = self.hasher.hash(parent, BlockKey::new(key, start..start + tokens.len()), tokens);
                parent = Some(hash);
                hash
            })
            .collect()
    }

    /// Looks for a block of a group with exactly this content behind exactly this parent.
    pub fn find(&self, group: usize, hash: PrefixHash, content: Content<'_>) -> Found {
        let mut miss = Found::Absent;
        for (block, _) in self.with_hash(group, hash) {
            if self.holds(block, content) {
                return Found::Hit(block);
            }
            // Equal tokens behind another parent of the same hash: the old parent was evicted.
            miss = if self.tokens_of(block) == content.tokens { Found::Evicted } else { Found::Collision };
        }
        let (at, print) = fingerprint(hash);
        if miss == Found::Absent && self.evicted[at & (self.evicted.len() - 1)] == print {
            Found::Evicted
        } else {
            miss
        }
    }

    /// Inserts a block of a group. `known` is the prefix that the block ends, if the table remembers it. Does nothing
    /// if the block is in the index.
    pub fn insert(
        &mut self,
        group: usize,
        block: BlockId,
        hash: PrefixHash,
        content: Content<'_>,
        known: Option<Prefix>,
    ) -> Inserted {
        if self.contains(block) {
            return Inserted::Known;
        }
        let id = self.id_of(hash, content, known);
        self.tokens[block.index() * self.block_size..][..self.block_size].copy_from_slice(content.tokens);
        // After a block with the same prefix, so that the oldest is found first; else after the last with the same
        // hash; else at the front of the bucket.
        let (mut before, mut inserted) = (None, Inserted::NewHash);
        for (other, entry) in self.with_hash(group, hash) {
            (before, inserted) = (Some((other.0, entry.next)), Inserted::SharedHash);
            if self.holds(other, content) {
                inserted = Inserted::Known;
                break;
            }
        }
        let bucket = self.bucket(group, hash);
        let (prev, next) = before.unwrap_or_else(|| (NONE, std::mem::replace(&mut self.buckets[bucket], block.0)));
        if let Some(entry) = self.entry_mut(prev) {
            entry.next = block.0;
        }
        if let Some(entry) = self.entry_mut(next) {
            entry.prev = block.0;
        }
        let key = content.key.filter(|key| !content.part_of(Some(key)).is_empty()).cloned();
        let parent = content.parent.map(|p| p.id);
        self.entries[block.index()] = Some(Entry { hash, id, parent, key, prev, next, group: group as u8 });
        inserted
    }

    /// Returns a block without owners that has the same group, hash and tokens as `block`, but another parent. No
    /// lookup can reach it any more: its parent was evicted and computed again.
    pub fn orphan_of(&self, block: BlockId, refs: &[u32]) -> Option<BlockId> {
        let own = self.entry(block.0)?;
        let is_orphan = |(other, entry): &(BlockId, &Entry)| {
            entry.parent != own.parent && self.tokens_of(*other) == self.tokens_of(block) && refs[other.index()] == 0
        };
        self.with_hash(usize::from(own.group), own.hash).find(is_orphan).map(|(other, _)| other)
    }

    /// Returns the prefix that ends with this content, for a table that has no block of it.
    pub fn prefix(&mut self, hash: PrefixHash, content: Content<'_>) -> Prefix {
        Prefix { hash, id: self.id_of(hash, content, None) }
    }

    /// Returns the prefixes of a group that a lookup can reach from the start of a sequence, parents first, each once.
    /// With `has_holes`, another group's block counts as a parent.
    pub fn reachable(&self, group: usize, has_holes: bool) -> Vec<Reachable<'_>> {
        let mut children: BTreeMap<Option<PrefixId>, Vec<BlockId>> = BTreeMap::new();
        for (block, entry) in (0..).map(BlockId).zip(&self.entries) {
            if let Some(entry) = entry.as_ref().filter(|entry| has_holes || usize::from(entry.group) == group) {
                children.entry(entry.parent).or_default().push(block);
            }
        }
        let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
        let mut parents = VecDeque::from([(None, None, None)]);
        while let Some((id, parent, parent_key)) = parents.pop_front() {
            for block in children.remove(&id).unwrap_or_default() {
                let Some(entry) = self.entry(block.0) else { continue };
                let key = entry.key.as_ref().or(parent_key);
                if usize::from(entry.group) == group && seen.insert(entry.id) {
                    found.push(Reachable { parent, hash: entry.hash, tokens: self.tokens_of(block), key });
                }
                if children.contains_key(&Some(entry.id)) {
                    parents.push_back((Some(entry.id), Some(entry.hash), key));
                }
            }
        }
        found
    }

    /// Removes a block; `None` if it was not in the index.
    pub fn remove(&mut self, block: BlockId) -> Option<Removed> {
        let Entry { hash, prev, next, group, .. } = self.entries[block.index()].take()?;
        let group = usize::from(group);
        if prev == NONE {
            let bucket = self.bucket(group, hash);
            self.buckets[bucket] = next;
        }
        // Blocks with equal hashes are neighbours.
        let mut is_last = true;
        if let Some(entry) = self.entry_mut(prev) {
            entry.next = next;
            is_last &= !entry.has(group, hash);
        }
        if let Some(entry) = self.entry_mut(next) {
            entry.prev = prev;
            is_last &= !entry.has(group, hash);
        }
        Some(Removed { group, hash, is_last })
    }

    /// Remembers that a prefix was evicted, as the reason of a later miss.
    pub fn remember_evicted(&mut self, hash: PrefixHash) {
        let (at, print) = fingerprint(hash);
        self.evicted[at & (self.evicted.len() - 1)] = print;
    }

    pub fn forget_evicted(&mut self) {
        self.evicted.fill(0);
    }

    /// Checks that the block is in the index with this group, hash and content.
    pub fn verify(&self, group: usize, block: BlockId, content: Content<'_>) -> Result<(), &'static str> {
        let (found, hash) = self.hash_of(block).ok_or("a full committed block is not indexed")?;
        if found != group {
            return Err("it is indexed in another group");
        }
        if hash != self.hash(content) {
            return Err("its hash is not that of the table's tokens");
        }
        if !self.holds(block, content) {
            return Err("its tokens or its parent differ from the table's");
        }
        Ok(())
    }

    /// Checks that each entry is linked exactly once, in its own bucket, and that nothing else is linked.
    pub fn audit(&self) -> Result<(), (BlockId, &'static str)> {
        let mut linked = 0;
        for (bucket, &head) in self.buckets.iter().enumerate() {
            let (mut prev, mut at) = (NONE, head);
            while at != NONE {
                let entry = self.entry(at).ok_or((BlockId(at), "it is linked but not indexed"))?;
                if self.bucket(usize::from(entry.group), entry.hash) != bucket {
                    return Err((BlockId(at), "it is linked in another bucket"));
                }
                if entry.prev != prev {
                    return Err((BlockId(at), "its back link is broken"));
                }
                linked += 1;
                (prev, at) = (at, entry.next);
            }
        }
        let indexed = self.entries.iter().flatten().count();
        if linked == indexed { Ok(()) } else { Err((BlockId(0), "the numbers of entries and links differ")) }
    }

    /// Returns the id under which any group caches the content, else that of `known`, else a new one.
    fn id_of(&mut self, hash: PrefixHash, content: Content<'_>, known: Option<Prefix>) -> PrefixId {
        for group in 0..self.groups {
            if let Found::Hit(block) = self.find(group, hash, content)
                && let Some(entry) = self.entry(block.0)
            {
                return entry.id;
            }
        }
        known.map_or_else(
            || {
                self.last_id = self.last_id.saturating_add(1);
                PrefixId(self.last_id)
            },
            |prefix| prefix.id,
        )
    }

    fn holds(&self, block: BlockId, content: Content<'_>) -> bool {
        self.entry(block.0).is_some_and(|entry| {
            entry.parent == content.parent.map(|p| p.id)
                && (entry.key.is_none() && content.key.is_none()
                    || content.part_of(entry.key.as_ref()) == content.part_of(content.key))
                && self.tokens_of(block) == content.tokens
        })
    }

    fn tokens_of(&self, block: BlockId) -> &[u32] {
        &self.tokens[block.index() * self.block_size..][..self.block_size]
    }

    /// The hash is keyed and uniform, so its low bits select a bucket. Each group has another offset.
    fn bucket(&self, group: usize, hash: PrefixHash) -> usize {
        (hash.0 as usize).wrapping_add(group.wrapping_mul(0x9e37_79b9)) & (self.buckets.len() - 1)
    }

    /// Blocks of a group with this hash, in bucket order.
    fn with_hash(&self, group: usize, hash: PrefixHash) -> impl Iterator<Item = (BlockId, &Entry)> {
        let linked = |link: u32| Some((BlockId(link), self.entry(link)?));
        let first = linked(self.buckets[self.bucket(group, hash)]);
        std::iter::successors(first, move |(_, entry)| linked(entry.next)).filter(move |(_, e)| e.has(group, hash))
    }

    fn entry(&self, block: u32) -> Option<&Entry> {
        self.entries.get(block as usize)?.as_ref()
    }

    fn entry_mut(&mut self, block: u32) -> Option<&mut Entry> {
        self.entries.get_mut(block as usize)?.as_mut()
    }
}

/// Returns where to remember an evicted hash, and a fingerprint of it that is never 0.
fn fingerprint(hash: PrefixHash) -> (usize, u32) {
    let mixed = (hash.0 as u64 ^ (hash.0 >> 64) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 32) as usize, mixed as u32 | 1)
}

//! The prefix index: which block holds the keys and values of which prefix, in which cache group.
//!
//! A lookup must never return a block of another prefix, whatever the hash does. So each distinct prefix that
//! is indexed gets a [`PrefixId`] of its own, never given twice, and an entry holds its parent's id, its key
//! and its tokens. Walking from the front, a candidate found by hash is taken only if its parent is *the
//! prefix verified so far* and its tokens are equal: by induction the whole prefix is equal, at the cost of
//! comparing one block. Groups share the ids, so a group with holes is verified by what another still holds.
//!
//! Several blocks may hold the same prefix (requests that computed it at the same time): all are kept, the oldest
//! in front, and the prefix stays findable until the last of them is gone.
//!
//! ```text
//! buckets [hash, group] ──▶ entry of block 7 ⇄ entry of block 2 ⇄ …        links are block ids
//! ```
//!
//! A hash map threaded through the blocks' own entries: one entry of 64 bytes (a cache line) and one or two
//! bucket heads of 4 bytes per block, never more and never reallocated. All operations are O(1) but for entries that
//! share a bucket. A lookup reads three cache lines per block: bucket, entry, tokens.
//!
//! A prefix whose blocks are all gone leaves what stood on it behind, unreachable. Such orphans leave the index when the
//! same tokens are indexed again under the same name ([`PrefixIndex::orphan_of`]), so they never pile up in a bucket.

use std::num::NonZeroU64;
use std::sync::Arc;

use crate::hash::PrefixHasher;
use crate::ids::{BlockId, PrefixHash};
use crate::key::{BlockKey, PrefixKey};

/// Identity of one exact token sequence (and key) that is or was in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefixId(NonZeroU64);

/// What stands before a block: the hash and the identity of the prefix so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parent {
    pub hash: PrefixHash,
    id: PrefixId,
}

/// A full block's contents as the index knows them.
#[derive(Clone, Copy)]
pub(crate) struct Content<'a> {
    /// The prefix before this block; `None` for a first block.
    pub parent: Option<Parent>,
    /// Key of the whole sequence.
    pub key: Option<&'a Arc<PrefixKey>>,
    /// Position of the first token in its sequence.
    pub start: usize,
    /// Exactly one block of tokens.
    pub tokens: &'a [u32],
}

impl<'a> Content<'a> {
    /// The part of `key`, which belongs to a whole sequence, that this block depends on.
    fn part_of<'b>(&self, key: Option<&'b Arc<PrefixKey>>) -> BlockKey<'b> {
        BlockKey::new(key.map(|key| &**key), self.start..self.start + self.tokens.len())
    }
}

/// What a lookup found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Hit(BlockId),
    /// Nothing under this hash.
    Absent,
    /// Nothing under this hash, but not long ago there was.
    Evicted,
    /// Something under this hash, but of another prefix.
    Collision,
}

/// What an insertion met.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Inserted {
    /// The block was indexed already, or another block of the group holds the same.
    Known,
    /// No other block of the group has the name.
    FirstOfName,
    /// Other blocks of the group have the name, and hold something else.
    BesideOthers,
}

/// What a removal did.
pub(crate) struct Removed {
    pub group: usize,
    pub hash: PrefixHash,
    /// No other block of the group has that name.
    pub last: bool,
}

struct Entry {
    hash: PrefixHash,
    id: PrefixId,
    parent: Option<PrefixId>,
    /// Key of the sequence that the block was indexed for, where the block depends on a part of it.
    key: Option<Arc<PrefixKey>>,
    /// Neighbours in the bucket; [`NONE`] at its ends.
    prev: u32,
    next: u32,
    group: u8,
}

impl Entry {
    fn is_named(&self, group: usize, hash: PrefixHash) -> bool {
        self.hash == hash && usize::from(self.group) == group
    }
}

/// No block.
const NONE: u32 = u32::MAX;

/// Index of all cached prefixes of one pool.
pub(crate) struct PrefixIndex {
    hasher: PrefixHasher,
    block_size: usize,
    groups: usize,
    /// First block of each bucket; a power of two of them, at least one per block.
    buckets: Box<[u32]>,
    /// Per block, set while the block is cached.
    entries: Box<[Option<Entry>]>,
    /// Tokens of each cached block, `[num_blocks, block_size]`.
    tokens: Box<[u32]>,
    /// Fingerprints of recently evicted hashes, each overwritten by the next that falls on its place. Only the
    /// reason of a miss depends on them.
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

    /// The seed of the hash's key.
    pub fn seed(&self) -> u64 {
        self.hasher.seed()
    }

    /// Blocks whose name was computed.
    pub fn hashed(&self) -> u64 {
        self.hasher.hashed.get()
    }

    /// Bytes that the index takes, whatever it holds; keys are shared with their tables and not counted.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.buckets)
            + size_of_val(&*self.entries)
            + size_of_val(&*self.tokens)
            + size_of_val(&*self.evicted)
    }

    pub fn contains(&self, block: BlockId) -> bool {
        self.entry(block.0).is_some()
    }

    /// What a block behind this one has before it.
    pub fn as_parent(&self, block: BlockId) -> Option<Parent> {
        self.entry(block.0).map(|e| Parent { hash: e.hash, id: e.id })
    }

    /// Group and hash of a cached block.
    pub fn name_of(&self, block: BlockId) -> Option<(usize, PrefixHash)> {
        self.entry(block.0).map(|e| (usize::from(e.group), e.hash))
    }

    /// The hash of a content.
    pub fn name(&self, content: Content<'_>) -> PrefixHash {
        self.hasher.name(content.parent.map(|p| p.hash), content.part_of(content.key), content.tokens)
    }

    /// The names of every prefix of `tokens` that ends with a full block before the last token.
    pub fn names(&self, key: Option<&PrefixKey>, tokens: &[u32]) -> Vec<PrefixHash> {
        let mut parent = None;
        let blocks = tokens[..tokens.len().saturating_sub(1)].chunks_exact(self.block_size);
        blocks
            .zip((0..).step_by(self.block_size))
            .map(|(tokens, start)| {
                let name = self.hasher.name(parent, BlockKey::new(key, start..start + tokens.len()), tokens);
                parent = Some(name);
                name
            })
            .collect()
    }

    /// Looks in a group for a block that holds exactly this content behind exactly this prefix.
    pub fn find(&self, group: usize, name: PrefixHash, content: Content<'_>) -> Found {
        let mut miss = Found::Absent;
        let mut at = self.buckets[self.bucket(group, name)];
        while let Some(entry) = self.entry(at) {
            if entry.is_named(group, name) {
                if self.holds(BlockId(at), content) {
                    return Found::Hit(BlockId(at));
                }
                // Equal tokens behind another parent of the same name: what vouched for that parent was evicted.
                miss = if self.tokens_of(BlockId(at)) == content.tokens { Found::Evicted } else { Found::Collision };
            }
            at = entry.next;
        }
        let (place, print) = fingerprint(name);
        if miss == Found::Absent && self.evicted[place & (self.evicted.len() - 1)] == print {
            Found::Evicted
        } else {
            miss
        }
    }

    /// Indexes a block of a group under its name; `content` is what it holds, and `known` the prefix with it, where a
    /// table remembers that. A block that is indexed stays as it is.
    pub fn insert(
        &mut self,
        group: usize,
        block: BlockId,
        name: PrefixHash,
        content: Content<'_>,
        known: Option<Parent>,
    ) -> Inserted {
        if self.contains(block) {
            return Inserted::Known;
        }
        let id = self.identity(name, content, known);
        self.tokens[block.index() * self.block_size..][..self.block_size].copy_from_slice(content.tokens);
        // Behind its twin, so that the oldest block keeps being found; else beside its name; else in front of the bucket.
        let bucket = self.bucket(group, name);
        let (beside, inserted) = self.beside(group, name, content);
        let (prev, next) = match beside.and_then(|b| Some((b, self.entry(b)?.next))) {
            Some(behind) => behind,
            None => (NONE, std::mem::replace(&mut self.buckets[bucket], block.0)),
        };
        if let Some(entry) = self.entry_mut(prev) {
            entry.next = block.0;
        }
        if let Some(entry) = self.entry_mut(next) {
            entry.prev = block.0;
        }
        let key = content.key.filter(|key| !content.part_of(Some(key)).is_empty()).cloned();
        let parent = content.parent.map(|p| p.id);
        self.entries[block.index()] = Some(Entry { hash: name, id, parent, key, prev, next, group: group as u8 });
        inserted
    }

    /// A block that stands under the name of `block` in its group with the same tokens but another parent, and that
    /// nobody owns. Its parent was evicted and computed again, so no lookup reaches it any more.
    pub fn orphan_of(&self, block: BlockId, refs: &[u32]) -> Option<BlockId> {
        let own = self.entry(block.0)?;
        let group = usize::from(own.group);
        let mut at = self.buckets[self.bucket(group, own.hash)];
        while let Some(entry) = self.entry(at) {
            let other = BlockId(at);
            let has_name = entry.is_named(group, own.hash) && entry.parent != own.parent;
            if has_name && self.tokens_of(other) == self.tokens_of(block) && refs[other.index()] == 0 {
                return Some(other);
            }
            at = entry.next;
        }
        None
    }

    /// The prefix that ends with this content, for a table that has no block of it.
    pub fn prefix(&mut self, name: PrefixHash, content: Content<'_>) -> Parent {
        Parent { hash: name, id: self.identity(name, content, None) }
    }

    /// Forgets a block; `None` if it was not indexed.
    pub fn remove(&mut self, block: BlockId) -> Option<Removed> {
        let Entry { hash, prev, next, group, .. } = self.entries[block.index()].take()?;
        let group = usize::from(group);
        if prev == NONE {
            let bucket = self.bucket(group, hash);
            self.buckets[bucket] = next;
        }
        // Equal names stand side by side.
        let mut last = true;
        if let Some(entry) = self.entry_mut(prev) {
            entry.next = next;
            last &= !entry.is_named(group, hash);
        }
        if let Some(entry) = self.entry_mut(next) {
            entry.prev = prev;
            last &= !entry.is_named(group, hash);
        }
        Some(Removed { group, hash, last })
    }

    /// Remembers that a prefix was evicted, so that the next lookup can say so.
    pub fn remember_evicted(&mut self, hash: PrefixHash) {
        let (place, print) = fingerprint(hash);
        self.evicted[place & (self.evicted.len() - 1)] = print;
    }

    /// Forgets what was evicted.
    pub fn forget_evicted(&mut self) {
        self.evicted.fill(0);
    }

    /// Whether the block is indexed under the name of this content and verifies as it.
    pub fn verify(&self, group: usize, block: BlockId, content: Content<'_>) -> Result<(), &'static str> {
        let (at, hash) = self.name_of(block).ok_or("a full committed block is not indexed")?;
        if at != group {
            return Err("it is indexed in another group");
        }
        if hash != self.name(content) {
            return Err("its hash is not the name of the table's tokens");
        }
        if !self.holds(block, content) {
            return Err("it holds other tokens or another parent than the table says");
        }
        Ok(())
    }

    /// Checks every link: each entry is reachable in its own bucket, once, and nothing else is.
    pub fn audit(&self) -> Result<(), (BlockId, &'static str)> {
        let mut reached = 0;
        for (bucket, &head) in self.buckets.iter().enumerate() {
            let (mut prev, mut at) = (NONE, head);
            while at != NONE {
                let entry = self.entry(at).ok_or((BlockId(at), "linked but not indexed"))?;
                if self.bucket(usize::from(entry.group), entry.hash) != bucket {
                    return Err((BlockId(at), "linked in another bucket"));
                }
                if entry.prev != prev {
                    return Err((BlockId(at), "its link back is broken"));
                }
                reached += 1;
                (prev, at) = (at, entry.next);
            }
        }
        let indexed = self.entries.iter().flatten().count();
        if reached == indexed { Ok(()) } else { Err((BlockId(0), "entries and links differ in number")) }
    }

    /// The block to stand behind: one that holds the same, else the last of the same name.
    fn beside(&self, group: usize, name: PrefixHash, content: Content<'_>) -> (Option<u32>, Inserted) {
        let (mut beside, mut at) = (None, self.buckets[self.bucket(group, name)]);
        while let Some(entry) = self.entry(at) {
            if entry.is_named(group, name) {
                beside = Some(at);
                if self.holds(BlockId(at), content) {
                    return (beside, Inserted::Known);
                }
            }
            at = entry.next;
        }
        (beside, if beside.is_some() { Inserted::BesideOthers } else { Inserted::FirstOfName })
    }

    /// The id under which any group holds the content, else the known one, else a new one.
    fn identity(&mut self, name: PrefixHash, content: Content<'_>, known: Option<Parent>) -> PrefixId {
        for group in 0..self.groups {
            if let Found::Hit(block) = self.find(group, name, content)
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

    /// The hash is keyed and uniform, so its low bits are a bucket as they are; each group begins elsewhere.
    fn bucket(&self, group: usize, name: PrefixHash) -> usize {
        (name.0 as usize).wrapping_add(group.wrapping_mul(0x9e37_79b9)) & (self.buckets.len() - 1)
    }

    fn entry(&self, block: u32) -> Option<&Entry> {
        self.entries.get(block as usize)?.as_ref()
    }

    fn entry_mut(&mut self, block: u32) -> Option<&mut Entry> {
        self.entries.get_mut(block as usize)?.as_mut()
    }
}

/// A place to remember a hash at, and what to remember there; never 0.
fn fingerprint(hash: PrefixHash) -> (usize, u32) {
    let mixed = (hash.0 as u64 ^ (hash.0 >> 64) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 32) as usize, mixed as u32 | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_per_block_is_one_cache_line() {
        assert_eq!(size_of::<Option<Entry>>(), 64);
    }
}

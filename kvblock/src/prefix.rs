//! The prefix index: which block caches which prefix, in which cache group.
//!
//! A lookup must never return a block of another prefix, whatever the hash does. So each distinct prefix in the index
//! has a unique [`PrefixId`], and an entry stores its parent's id, its key and its tokens. A lookup walks from the
//! front and accepts a candidate only if its parent is *the prefix verified so far* and its tokens are equal. By
//! induction the whole prefix is equal, at the cost of comparing one block. Groups share the ids, so a prefix that is a
//! hole in one group is verified by a block of another.
//!
//! One index serves both tiers: a host block has an entry like a block of the device, in a list of its own, and shares
//! the ids. So a prefix that is only in host memory verifies the blocks behind it, wherever they are.
//!
//! Several blocks may cache the same prefix, if requests computed it at the same time. All are kept, the oldest first,
//! and the prefix remains in the index until the last of them is removed.
//!
//! ```text
//! buckets [hash, list] ──▶ entry of block 7 ⇄ entry of block 2 ⇄ …        a list: a tier and a cache group
//! slots                     blocks of the device, then host blocks          links are slots
//! ```
//!
//! The index is a hash map threaded through one entry of 64 bytes (a cache line) per block, with one or two bucket
//! heads of 4 bytes per block. It never reallocates. All operations are O(1), apart from entries that share a bucket. A
//! lookup reads three cache lines per block: bucket, entry, tokens.
//!
//! When the last block of a prefix is removed, the entries of longer prefixes become unreachable. Such orphans are
//! removed when the same tokens are indexed again under the same hash ([`PrefixIndex::orphan_of`]), so they do not
//! accumulate.

mod reachable;

use std::num::NonZeroU64;
use std::sync::Arc;

use crate::hash::PrefixHasher;
use crate::ids::{BlockId, HostBlockId, Place, PrefixHash, Tier};
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
    Hit(Place),
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
    /// The block was in the index, or another block of the list caches the same prefix.
    Known,
    /// No other block of the list has the hash.
    NewHash,
    /// Other blocks of the list have the hash, but cache other prefixes.
    SharedHash,
}

pub(crate) struct Removed {
    pub group: usize,
    pub hash: PrefixHash,
    /// Whether no other block of the tier and the group has that hash.
    pub is_last: bool,
}

#[derive(Clone)]
struct Entry {
    hash: PrefixHash,
    id: PrefixId,
    parent: Option<PrefixId>,
    /// Key of the sequence, if the block depends on a part of it.
    key: Option<Arc<PrefixKey>>,
    /// Neighbours in the bucket; [`NONE`] at its ends.
    prev: u32,
    next: u32,
    /// The cache group of a block of the device. The lists of host blocks follow, in the same order.
    list: u16,
}

const _: () = assert!(size_of::<Option<Entry>>() == 64, "an entry is one cache line");

impl Entry {
    fn has(&self, list: usize, hash: PrefixHash) -> bool {
        self.hash == hash && usize::from(self.list) == list
    }
}

/// A link to no block.
const NONE: u32 = u32::MAX;

/// Index of all cached prefixes of a pool.
pub(crate) struct PrefixIndex {
    hasher: PrefixHasher,
    block_size: usize,
    groups: usize,
    /// Number of blocks of the device, whose slots come first.
    num_blocks: usize,
    /// First slot of each bucket. Their number is a power of two, at least one per slot.
    buckets: Box<[u32]>,
    /// One per slot, `Some` while the block is cached.
    entries: Box<[Option<Entry>]>,
    /// Tokens of each cached block, `[slots, block_size]`.
    tokens: Box<[u32]>,
    /// Fingerprints of recently evicted hashes, overwritten by later ones. They only determine the reason of a miss.
    evicted: Box<[u32]>,
    last_id: NonZeroU64,
}

impl PrefixIndex {
    /// Creates an index of these numbers of blocks of the device and of the host.
    pub fn new(
        hasher: PrefixHasher,
        (num_blocks, host_blocks): (usize, usize),
        block_size: usize,
        groups: usize,
    ) -> PrefixIndex {
        let slots = num_blocks + host_blocks;
        PrefixIndex {
            hasher,
            block_size,
            groups,
            num_blocks,
            buckets: vec![NONE; slots.next_power_of_two()].into(),
            entries: (0..slots).map(|_| None).collect(),
            tokens: vec![0; slots * block_size].into(),
            evicted: vec![0; 1 << slots.ilog2()].into(),
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

    pub fn contains(&self, place: Place) -> bool {
        self.slot(place).is_some_and(|slot| self.entry(slot).is_some())
    }

    /// Returns the prefix that a cached block ends.
    pub fn prefix_of(&self, place: Place) -> Option<Prefix> {
        self.entry(self.slot(place)?).map(|e| Prefix { hash: e.hash, id: e.id })
    }

    /// Returns group and hash of a cached block.
    pub fn hash_of(&self, place: Place) -> Option<(usize, PrefixHash)> {
        self.entry(self.slot(place)?).map(|e| (usize::from(e.list) % self.groups, e.hash))
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

    /// Looks in a tier for a block of a group with exactly this content behind exactly this parent.
    pub fn find(&self, tier: Tier, group: usize, hash: PrefixHash, content: Content<'_>) -> Found {
        let mut miss = Found::Absent;
        for (slot, _) in self.with_hash(self.list(tier, group), hash) {
            if self.holds(slot, content) {
                return Found::Hit(self.place(slot));
            }
            // Equal tokens behind another parent of the same hash: the old parent was evicted.
            miss = if self.tokens_of(slot) == content.tokens { Found::Evicted } else { Found::Collision };
        }
        let (at, print) = fingerprint(hash);
        if miss == Found::Absent && self.evicted[at & (self.evicted.len() - 1)] == print {
            Found::Evicted
        } else {
            miss
        }
    }

    /// Returns the host block with the prefix of a cached block of the device.
    pub fn host_copy_of(&self, block: BlockId) -> Option<HostBlockId> {
        let own = self.entry(block.0)?;
        let mut copies = self.with_hash(usize::from(own.list) + self.groups, own.hash);
        let (slot, _) = copies.find(|(_, entry)| entry.id == own.id)?;
        match self.place(slot) {
            Place::Host(host) => Some(host),
            Place::Device(_) => None,
        }
    }

    /// Inserts a block of a group. `known` is the prefix that the block ends, if the table remembers it. Does nothing
    /// if the block is in the index.
    pub fn insert(
        &mut self,
        group: usize,
        place: Place,
        hash: PrefixHash,
        content: Content<'_>,
        known: Option<Prefix>,
    ) -> Inserted {
        let Some(slot) = self.slot(place).filter(|slot| self.entry(*slot).is_none()) else { return Inserted::Known };
        let id = self.id_of(hash, content, known);
        self.tokens[slot as usize * self.block_size..][..self.block_size].copy_from_slice(content.tokens);
        let list = self.list(place.tier(), group);
        let key = content.key.filter(|key| !content.part_of(Some(key)).is_empty()).cloned();
        let parent = content.parent.map(|p| p.id);
        let (before, inserted) = self.position(list, hash, |other, _| self.holds(other, content));
        self.link(slot, before, Entry { hash, id, parent, key, prev: NONE, next: NONE, list: list as u16 });
        inserted
    }

    /// Inserts a host block that gets the contents of a cached block of the device. Does nothing if the former is in the
    /// index or the latter is not.
    pub fn insert_copy(&mut self, of: BlockId, host: HostBlockId) -> Inserted {
        let slot = self.slot(Place::Host(host)).filter(|slot| self.entry(*slot).is_none());
        let (Some(slot), Some(mut entry)) = (slot, self.entry(of.0).cloned()) else { return Inserted::Known };
        entry.list += self.groups as u16;
        let start = of.index() * self.block_size;
        self.tokens.copy_within(start..start + self.block_size, slot as usize * self.block_size);
        let id = entry.id;
        let (before, inserted) = self.position(usize::from(entry.list), entry.hash, |_, other| other.id == id);
        self.link(slot, before, entry);
        inserted
    }

    /// Returns the slot behind which a block with this hash is linked, and the slot that follows: behind a block with
    /// the same prefix, so that the oldest is found first; else behind the last with the same hash; else `None`, at the
    /// front of the bucket.
    fn position(
        &self,
        list: usize,
        hash: PrefixHash,
        is_same: impl Fn(u32, &Entry) -> bool,
    ) -> (Option<(u32, u32)>, Inserted) {
        let (mut before, mut inserted) = (None, Inserted::NewHash);
        for (other, entry) in self.with_hash(list, hash) {
            (before, inserted) = (Some((other, entry.next)), Inserted::SharedHash);
            if is_same(other, entry) {
                return (before, Inserted::Known);
            }
        }
        (before, inserted)
    }

    fn link(&mut self, slot: u32, before: Option<(u32, u32)>, mut entry: Entry) {
        let bucket = self.bucket(usize::from(entry.list), entry.hash);
        let (prev, next) = before.unwrap_or_else(|| (NONE, std::mem::replace(&mut self.buckets[bucket], slot)));
        if let Some(entry) = self.entry_mut(prev) {
            entry.next = slot;
        }
        if let Some(entry) = self.entry_mut(next) {
            entry.prev = slot;
        }
        (entry.prev, entry.next) = (prev, next);
        self.entries[slot as usize] = Some(entry);
    }

    /// Returns a block without owners that has the same list, hash and tokens as `place`, but another parent. No lookup
    /// can reach it any more: its parent was evicted and computed again.
    pub fn orphan_of(&self, place: Place, has_no_owner: impl Fn(Place) -> bool) -> Option<Place> {
        let slot = self.slot(place)?;
        let own = self.entry(slot)?;
        let is_orphan = |(other, entry): &(u32, &Entry)| {
            entry.parent != own.parent
                && self.tokens_of(*other) == self.tokens_of(slot)
                && has_no_owner(self.place(*other))
        };
        self.with_hash(usize::from(own.list), own.hash).find(is_orphan).map(|(other, _)| self.place(other))
    }

    /// Returns the prefix that ends with this content, for a table that has no block of it.
    pub fn prefix(&mut self, hash: PrefixHash, content: Content<'_>) -> Prefix {
        Prefix { hash, id: self.id_of(hash, content, None) }
    }

    /// Removes a block; `None` if it was not in the index.
    pub fn remove(&mut self, place: Place) -> Option<Removed> {
        let slot = self.slot(place)?;
        let Entry { hash, prev, next, list, .. } = self.entries[slot as usize].take()?;
        let list = usize::from(list);
        if prev == NONE {
            let bucket = self.bucket(list, hash);
            self.buckets[bucket] = next;
        }
        // Blocks with equal hashes are neighbours.
        let mut is_last = true;
        if let Some(entry) = self.entry_mut(prev) {
            entry.next = next;
            is_last &= !entry.has(list, hash);
        }
        if let Some(entry) = self.entry_mut(next) {
            entry.prev = prev;
            is_last &= !entry.has(list, hash);
        }
        Some(Removed { group: list % self.groups, hash, is_last })
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
        let (found, hash) = self.hash_of(Place::Device(block)).ok_or("a full committed block is not indexed")?;
        if found != group {
            return Err("it is indexed in another group");
        }
        if hash != self.hash(content) {
            return Err("its hash is not that of the table's tokens");
        }
        if !self.holds(block.0, content) {
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
                if self.bucket(usize::from(entry.list), entry.hash) != bucket {
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

    /// Returns the id under which any list caches the content, else that of `known`, else a new one.
    fn id_of(&mut self, hash: PrefixHash, content: Content<'_>, known: Option<Prefix>) -> PrefixId {
        let lists = if self.entries.len() > self.num_blocks { 2 * self.groups } else { self.groups };
        for list in 0..lists {
            if let Some((_, entry)) = self.with_hash(list, hash).find(|(slot, _)| self.holds(*slot, content)) {
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

    fn holds(&self, slot: u32, content: Content<'_>) -> bool {
        self.entry(slot).is_some_and(|entry| {
            entry.parent == content.parent.map(|p| p.id)
                && (entry.key.is_none() && content.key.is_none()
                    || content.part_of(entry.key.as_ref()) == content.part_of(content.key))
                && self.tokens_of(slot) == content.tokens
        })
    }

    fn tokens_of(&self, slot: u32) -> &[u32] {
        &self.tokens[slot as usize * self.block_size..][..self.block_size]
    }

    /// Returns the slot of a block; `None` if there is no such block.
    fn slot(&self, place: Place) -> Option<u32> {
        match place {
            Place::Device(block) => Some(block.0).filter(|slot| (*slot as usize) < self.num_blocks),
            Place::Host(block) => Some(block.0.saturating_add(self.num_blocks as u32))
                .filter(|slot| (*slot as usize) < self.entries.len()),
        }
    }

    fn place(&self, slot: u32) -> Place {
        match slot.checked_sub(self.num_blocks as u32) {
            None => Place::Device(BlockId(slot)),
            Some(host) => Place::Host(HostBlockId(host)),
        }
    }

    fn list(&self, tier: Tier, group: usize) -> usize {
        match tier {
            Tier::Device => group,
            Tier::Host => self.groups + group,
        }
    }

    /// The hash is keyed and uniform, so its low bits select a bucket. Each list has another offset.
    fn bucket(&self, list: usize, hash: PrefixHash) -> usize {
        (hash.0 as usize).wrapping_add(list.wrapping_mul(0x9e37_79b9)) & (self.buckets.len() - 1)
    }

    /// Blocks of a list with this hash, in bucket order.
    fn with_hash(&self, list: usize, hash: PrefixHash) -> impl Iterator<Item = (u32, &Entry)> {
        let linked = |link: u32| Some((link, self.entry(link)?));
        let first = linked(self.buckets[self.bucket(list, hash)]);
        std::iter::successors(first, move |(_, entry)| linked(entry.next)).filter(move |(_, e)| e.has(list, hash))
    }

    fn entry(&self, slot: u32) -> Option<&Entry> {
        self.entries.get(slot as usize)?.as_ref()
    }

    fn entry_mut(&mut self, slot: u32) -> Option<&mut Entry> {
        self.entries.get_mut(slot as usize)?.as_mut()
    }
}

/// Returns where to remember an evicted hash, and a fingerprint of it that is never 0.
fn fingerprint(hash: PrefixHash) -> (usize, u32) {
    let mixed = (hash.0 as u64 ^ (hash.0 >> 64) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 32) as usize, mixed as u32 | 1)
}

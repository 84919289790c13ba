//! The prefix index: which block holds the keys and values of which prefix.
//!
//! A lookup must never return a block of another prefix, whatever the hash does. So each distinct prefix that
//! is indexed gets a [`PrefixId`] of its own, never given twice, and an entry holds its parent's id, its salt
//! and its tokens. Walking from the front, a candidate found by hash is taken only if its parent is *the
//! prefix verified so far* and its tokens are equal: by induction the whole prefix is equal, at the cost of
//! comparing one block.
//!
//! Several blocks may hold the same prefix (requests that computed it at the same time): all are kept under
//! one hash, linked by block id, and the prefix stays findable until the last of them is gone. All operations
//! are O(1) in the number of blocks but for the entries that share one hash, and none allocates except for
//! the map's first growth.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;

use crate::BlockId;
use crate::hash::PrefixHasher;

/// Identity of one exact token sequence (and salt) that is or was in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefixId(NonZeroU64);

/// What stands before a block: the hash and the identity of the prefix so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parent {
    hash: u128,
    id: PrefixId,
}

/// A full block's contents as the index knows them.
#[derive(Clone, Copy)]
pub(crate) struct Content<'a> {
    /// The prefix before this block; `None` for a first block.
    pub parent: Option<Parent>,
    /// Salt of the whole sequence.
    pub salt: Option<&'a Arc<str>>,
    /// Exactly one block of tokens.
    pub tokens: &'a [u32],
}

/// What a lookup found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Hit(BlockId),
    /// Nothing under this hash.
    Absent,
    /// Something under this hash, but of another prefix.
    Collision,
}

struct Entry {
    hash: u128,
    id: PrefixId,
    parent: Option<PrefixId>,
    /// Set in first blocks only.
    salt: Option<Arc<str>>,
    /// Neighbours under the same hash.
    prev: Option<BlockId>,
    next: Option<BlockId>,
}

/// Index of all cached prefixes of one pool.
pub(crate) struct PrefixIndex {
    hasher: PrefixHasher,
    block_size: usize,
    /// First block under each hash.
    first: HashMap<u128, BlockId>,
    /// Per block, set while the block is cached.
    entries: Box<[Option<Entry>]>,
    /// Tokens of each cached block, `[num_blocks, block_size]`.
    tokens: Box<[u32]>,
    last_id: NonZeroU64,
}

impl PrefixIndex {
    pub fn new(hasher: PrefixHasher, num_blocks: usize, block_size: usize) -> PrefixIndex {
        PrefixIndex {
            hasher,
            block_size,
            first: HashMap::with_capacity(num_blocks),
            entries: (0..num_blocks).map(|_| None).collect(),
            tokens: vec![0; num_blocks * block_size].into(),
            last_id: NonZeroU64::MIN,
        }
    }

    /// The seed of the hash's key.
    pub fn seed(&self) -> u64 {
        self.hasher.seed()
    }

    pub fn contains(&self, block: BlockId) -> bool {
        self.entries[block.index()].is_some()
    }

    /// What a block behind this one has before it.
    pub fn as_parent(&self, block: BlockId) -> Option<Parent> {
        self.entries[block.index()].as_ref().map(|e| Parent { hash: e.hash, id: e.id })
    }

    /// Looks for a block that holds exactly this content behind exactly this prefix.
    pub fn find(&self, content: Content<'_>) -> Found {
        self.find_under(self.name(content), content)
    }

    /// Indexes a block; `content` is what it holds. Returns `false` if it is indexed already.
    pub fn insert(&mut self, block: BlockId, content: Content<'_>) -> bool {
        if self.contains(block) {
            return false;
        }
        let hash = self.name(content);
        let id = match self.find_under(hash, content) {
            Found::Hit(twin) => self.entries[twin.index()].as_ref().map(|e| e.id),
            Found::Absent | Found::Collision => None,
        };
        let id = id.unwrap_or_else(|| {
            self.last_id = self.last_id.saturating_add(1);
            PrefixId(self.last_id)
        });
        self.tokens[block.index() * self.block_size..][..self.block_size].copy_from_slice(content.tokens);
        // Behind the first, so that the oldest block keeps being found and insertion stays O(1).
        let prev = *self.first.entry(hash).or_insert(block);
        let (prev, next) = if prev == block {
            (None, None)
        } else {
            (Some(prev), self.entry_mut(Some(prev)).and_then(|e| e.next.replace(block)))
        };
        if let Some(entry) = self.entry_mut(next) {
            entry.prev = Some(block);
        }
        let salt = if content.parent.is_none() { content.salt.cloned() } else { None };
        self.entries[block.index()] = Some(Entry { hash, id, parent: content.parent.map(|p| p.id), salt, prev, next });
        true
    }

    /// Forgets a block; `false` if it was not indexed.
    pub fn remove(&mut self, block: BlockId) -> bool {
        let Some(Entry { hash, prev, next, .. }) = self.entries[block.index()].take() else {
            return false;
        };
        match (prev, next) {
            (None, None) => {
                self.first.remove(&hash);
            }
            (None, Some(next)) => {
                self.first.insert(hash, next);
            }
            (Some(_), _) => {}
        }
        if let Some(entry) = self.entry_mut(prev) {
            entry.next = next;
        }
        if let Some(entry) = self.entry_mut(next) {
            entry.prev = prev;
        }
        true
    }

    /// Whether the block is indexed under the name of this content and verifies as it.
    pub fn verify(&self, block: BlockId, content: Content<'_>) -> Result<(), &'static str> {
        let entry = self.entries[block.index()].as_ref().ok_or("a full committed block is not indexed")?;
        if entry.hash != self.name(content) {
            return Err("its hash is not the name of the table's tokens");
        }
        if !self.holds(block, content) {
            return Err("it holds other tokens or another parent than the table says");
        }
        Ok(())
    }

    /// Checks every link: each entry is reachable under its own hash, once, and nothing else is.
    pub fn audit(&self) -> Result<(), (BlockId, &'static str)> {
        let mut reached = 0;
        for (&hash, &first) in &self.first {
            let (mut prev, mut at) = (None, Some(first));
            while let Some(block) = at {
                let entry = self.entries[block.index()].as_ref().ok_or((block, "linked but not indexed"))?;
                if entry.hash != hash {
                    return Err((block, "linked under another hash"));
                }
                if entry.prev != prev {
                    return Err((block, "its link back is broken"));
                }
                reached += 1;
                (prev, at) = (at, entry.next);
            }
        }
        let indexed = self.entries.iter().filter(|e| e.is_some()).count();
        if reached == indexed { Ok(()) } else { Err((BlockId(0), "entries and links differ in number")) }
    }

    fn name(&self, content: Content<'_>) -> u128 {
        let salt = if content.parent.is_none() { content.salt.map(|s| &**s) } else { None };
        self.hasher.name(content.parent.map(|p| p.hash), salt, content.tokens)
    }

    fn find_under(&self, hash: u128, content: Content<'_>) -> Found {
        let mut at = self.first.get(&hash).copied();
        let absent = at.is_none();
        while let Some(block) = at {
            if self.holds(block, content) {
                return Found::Hit(block);
            }
            at = self.entries[block.index()].as_ref().and_then(|e| e.next);
        }
        if absent { Found::Absent } else { Found::Collision }
    }

    fn holds(&self, block: BlockId, content: Content<'_>) -> bool {
        self.entries[block.index()].as_ref().is_some_and(|entry| {
            entry.parent == content.parent.map(|p| p.id)
                && (entry.parent.is_some() || entry.salt.as_ref() == content.salt)
                && self.tokens[block.index() * self.block_size..][..self.block_size] == *content.tokens
        })
    }

    fn entry_mut(&mut self, block: Option<BlockId>) -> Option<&mut Entry> {
        block.and_then(|b| self.entries[b.index()].as_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_per_block_is_one_cache_line() {
        assert_eq!(size_of::<Option<Entry>>(), 64);
    }
}

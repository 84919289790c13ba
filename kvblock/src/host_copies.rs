//! Exchange of prefixes with other pools through host memory: copies the blocks of a prefix out, and takes blocks in whose
//! contents come from elsewhere.
//!
//! Both only change the host tier. A block that is taken in is found by the next lookup, so its contents must be written
//! before any memory operation that is drained later. They may be written before operations that are ordered already:
//! none of these names the block.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::ids::{Place, Tier};
use crate::key::PrefixKey;
use crate::prefix::{Content, Found, Inserted};
use crate::{BlockPool, HostBlockId, MemOp, Prompt};

/// A host block with the contents of a block of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCopy {
    /// Index of the block in the prompt.
    pub block: usize,
    /// The cache group.
    pub group: usize,
    /// The host block. It has the contents, or gets them from an operation that is ordered, as long as
    /// [`BlockPool::has_copy`] says so.
    pub host: HostBlockId,
    /// How often the host block had been taken.
    taken: u32,
}

impl BlockPool {
    /// Orders copies to the host of the full blocks of a prompt that are cached on the device alone. Returns all of its
    /// cached blocks that are on the host then.
    pub fn copy_to_host(&mut self, prompt: Prompt<'_>) -> Vec<HostCopy> {
        if !self.host.caching {
            return Vec::new();
        }
        let key = PrefixKey::new(&prompt);
        let hashes = prompt.hashes.map_or(&[][..], |hashes| &hashes.0);
        let hit = self.walk(prompt.tokens, key.as_ref(), hashes, &[], true).0;
        let groups = self.groups.len();
        let places = || hit.blocks[..hit.len * groups].iter().enumerate();
        let copy = |pool: &BlockPool, at: usize, host: HostBlockId| {
            let (block, group) = (at / groups, at % groups);
            HostCopy { block, group, host, taken: pool.host.taken[host.index()] }
        };
        let on_host = |(at, place): (usize, &Option<Place>)| match *place {
            Some(Place::Host(host)) => Some(copy(self, at, host)),
            _ => None,
        };
        let mut copies: Vec<HostCopy> = places().filter_map(on_host).collect();
        for (at, place) in places() {
            if let Some(Place::Device(block)) = *place {
                self.offload(block);
                let host = self.index.as_ref().and_then(|index| index.host_copy_of(block));
                copies.extend(host.map(|host| copy(self, at, host)));
            }
        }
        // A copy may have taken the host block of another.
        copies.retain(|copy| self.has_copy(copy));
        copies.sort_by_key(|copy| (copy.block, copy.group));
        copies
    }

    /// Returns whether the host block of a copy still caches what it did when the copy was returned.
    pub fn has_copy(&self, copy: &HostCopy) -> bool {
        self.host.taken.get(copy.host.index()) == Some(&copy.taken) && self.host_prefix_of(copy.host).is_some()
    }

    /// Takes host blocks for blocks of a prompt, each given as index and group, as far as they are not cached and the
    /// prefix before them is. They are cached from now on. Returns them, and the caller writes their contents at once, but
    /// after the operations that it has drained.
    ///
    /// Takes no host block that an operation names which is ordered and not drained: it would read the new contents, or
    /// overwrite them.
    pub fn insert_on_host(&mut self, prompt: Prompt<'_>, blocks: &BTreeSet<(usize, usize)>) -> Vec<HostCopy> {
        if !self.host.caching {
            return Vec::new();
        }
        let places = self.memory_ops.iter().filter_map(MemOp::copy).flat_map(|(from, to)| [from, to]);
        let named: BTreeSet<Place> = places.collect();
        let key = PrefixKey::new(&prompt);
        let (mut parent, mut held, mut inserted) = (None, Vec::new(), Vec::new());
        let mut first_event = self.events.len();
        'blocks: for (block, tokens) in prompt.tokens.chunks_exact(self.block_size).enumerate() {
            let Some(index) = &self.index else { break };
            let content = Content { parent, key: key.as_ref(), start: block * self.block_size, tokens };
            let known = prompt.hashes.and_then(|hashes| hashes.0.get(block).copied());
            let hash = known.unwrap_or_else(|| index.hash(content));
            let mut verified = None;
            for group in 0..self.groups.len() {
                let Some(index) = &self.index else { break 'blocks };
                let found = [Tier::Device, Tier::Host].map(|tier| index.find(tier, group, hash, content));
                let mut place =
                    found.into_iter().find_map(|found| if let Found::Hit(at) = found { Some(at) } else { None });
                if place.is_none() && blocks.contains(&(block, group)) {
                    let num_events = self.events.len();
                    let is_named = |host: &HostBlockId| named.contains(&Place::Host(*host));
                    let Some(host) = self.host.free.iter().find(|host| !is_named(host)) else { break 'blocks };
                    self.take_host(host);
                    if self.events.len() > num_events {
                        // What was evicted may have had the same hash, so its removal comes first.
                        first_event = self.events.len();
                    }
                    let Some(index) = &mut self.index else { break 'blocks };
                    let entered = index.insert(group, Place::Host(host), hash, content, None);
                    self.host.num_cached += 1;
                    held.push((block, host));
                    inserted.push(HostCopy { block, group, host, taken: self.host.taken[host.index()] });
                    let stored = (Tier::Host, group, content.parent.map(|p| p.hash), hash);
                    self.events.stored(first_event, stored, content.tokens, content.key);
                    if entered == Inserted::SharedHash {
                        self.uncache_orphans(Place::Host(host));
                    }
                    place = Some(Place::Host(host));
                } else if let Some(Place::Host(host)) = place
                    && self.host.hold(host)
                {
                    held.push((block, host));
                }
                verified = verified.or_else(|| self.index.as_ref()?.prefix_of(place?));
            }
            if verified.is_none() {
                break;
            }
            parent = verified;
        }
        // The end of a sequence is useless without its beginning, so it is evicted first.
        held.sort_by_key(|(block, _)| Reverse(*block));
        held.into_iter().for_each(|(_, host)| self.host.let_go(host));
        inserted
    }
}

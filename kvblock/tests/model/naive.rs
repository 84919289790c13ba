//! A naive prefix cache without hashes, links or reference counts: a map from blocks to prefixes.

use std::collections::BTreeMap;

use kvblock::{BlockId, CacheGroup, HostBlockId};

use super::keys::agree;

/// Identity of a prefix.
pub type Id = u64;

/// The prefix that a block caches.
#[derive(Clone)]
pub struct Cached {
    pub group: usize,
    pub key: usize,
    /// All tokens up to the block's end.
    pub prefix: Vec<u32>,
    id: Id,
    parent: Option<Id>,
}

impl Cached {
    fn is(&self, key: usize, prefix: &[u32], parent: Option<Id>) -> bool {
        self.parent == parent && self.prefix == prefix && agree(self.key, key, prefix.len())
    }
}

/// All cached blocks of both tiers.
#[derive(Default)]
pub struct NaiveCache {
    pub blocks: BTreeMap<BlockId, Cached>,
    /// The host tier.
    pub host: BTreeMap<HostBlockId, Cached>,
    /// The blocks of the host tier, least recently used first.
    pub host_order: Vec<HostBlockId>,
    last_id: Id,
}

impl NaiveCache {
    /// Number of leading blocks of a prompt that the cache can serve. Full groups need all of them, sliding groups
    /// those of the window, and some group must have each.
    pub fn hit(&self, groups: &[CacheGroup], key: usize, tokens: &[u32], block_size: usize) -> usize {
        let present = self.walk(groups, key, &tokens[..tokens.len().saturating_sub(1)], block_size);
        let serves = |len: &usize| {
            groups
                .iter()
                .enumerate()
                .all(|(g, kind)| (first_read(*kind, len * block_size) / block_size..*len).all(|k| present[k][g]))
        };
        (0..=present.len()).rev().find(serves).unwrap_or(0)
    }

    /// Which groups have each leading block, up to the first that a full group or every group lacks.
    pub fn walk(&self, groups: &[CacheGroup], key: usize, tokens: &[u32], block_size: usize) -> Vec<Vec<bool>> {
        let mut present: Vec<Vec<bool>> = Vec::new();
        let mut parent = None;
        for k in 1..=tokens.len() / block_size {
            let here: Vec<Option<Id>> =
                (0..groups.len()).map(|g| self.id(g, key, &tokens[..k * block_size], parent)).collect();
            let missed = here.iter().zip(groups).any(|(id, kind)| id.is_none() && *kind == CacheGroup::Full);
            let Some(id) = here.iter().flatten().next().filter(|_| !missed) else { break };
            parent = Some(*id);
            present.push(here.iter().map(Option::is_some).collect());
        }
        present
    }

    /// The identity under which a group caches a prefix, in either tier.
    pub fn id(&self, group: usize, key: usize, prefix: &[u32], parent: Option<Id>) -> Option<Id> {
        self.id_on_device(group, key, prefix, parent).or_else(|| {
            let same = |c: &&Cached| c.group == group && c.is(key, prefix, parent);
            self.host.values().find(same).map(|c| c.id)
        })
    }

    /// The same for the device alone.
    pub fn id_on_device(&self, group: usize, key: usize, prefix: &[u32], parent: Option<Id>) -> Option<Id> {
        let same = |c: &&Cached| c.group == group && c.is(key, prefix, parent);
        self.blocks.values().find(same).map(|c| c.id)
    }

    /// The host block with a prefix.
    pub fn on_host(&self, group: usize, key: usize, prefix: &[u32], parent: Option<Id>) -> Option<HostBlockId> {
        self.host.iter().find(|(_, c)| c.group == group && c.is(key, prefix, parent)).map(|(block, _)| *block)
    }

    /// The host block with the same prefix as a block of the device.
    pub fn host_copy_of(&self, block: BlockId) -> Option<HostBlockId> {
        let own = &self.blocks[&block];
        self.on_host(own.group, own.key, &own.prefix, own.parent)
    }

    /// The prefix of a block of the device is copied to the host.
    pub fn offload(&mut self, block: BlockId, host: HostBlockId) {
        self.host.insert(host, self.blocks[&block].clone());
        self.use_host(host);
    }

    /// A block with this prefix comes from elsewhere. Returns the identity of its prefix.
    pub fn store_on_host(
        &mut self,
        host: HostBlockId,
        group: usize,
        key: usize,
        prefix: &[u32],
        parent: Option<Id>,
    ) -> Id {
        let duplicate =
            self.blocks.values().chain(self.host.values()).find(|c| c.is(key, prefix, parent)).map(|c| c.id);
        self.last_id += 1;
        let id = duplicate.unwrap_or(self.last_id);
        self.host.insert(host, Cached { group, key, prefix: prefix.to_vec(), id, parent });
        id
    }

    pub fn use_host(&mut self, host: HostBlockId) {
        self.host_order.retain(|other| *other != host);
        self.host_order.push(host);
    }

    pub fn forget_host(&mut self, host: HostBlockId) {
        self.host.remove(&host);
        self.host_order.retain(|other| *other != host);
    }

    /// Host blocks of the same group with the same last tokens as `host`, but another parent.
    pub fn host_twins(&self, host: HostBlockId, block_size: usize) -> Vec<HostBlockId> {
        let own = &self.host[&host];
        let last = |c: &Cached| c.prefix[c.prefix.len() - block_size..].to_vec();
        let same = |c: &Cached| c.group == own.group && c.parent != own.parent && last(c) == last(own);
        self.host.iter().filter(|(_, c)| same(c)).map(|(other, _)| *other).collect()
    }

    /// Stores a block, unless it is stored already, and returns the identity of its prefix. `known` is the identity
    /// that its sequence remembers.
    pub fn store(
        &mut self,
        block: BlockId,
        group: usize,
        key: usize,
        prefix: &[u32],
        parent: Option<Id>,
        known: Option<Id>,
    ) -> Id {
        if let Some(cached) = self.blocks.get(&block) {
            return cached.id;
        }
        let duplicate =
            self.blocks.values().chain(self.host.values()).find(|c| c.is(key, prefix, parent)).map(|c| c.id);
        self.last_id += 1;
        let id = duplicate.or(known).unwrap_or(self.last_id);
        self.blocks.insert(block, Cached { group, key, prefix: prefix.to_vec(), id, parent });
        id
    }

    /// Blocks of the same group with the same last tokens as `block`, but another parent.
    pub fn others_with_tokens(&self, block: BlockId, block_size: usize) -> impl Iterator<Item = BlockId> + '_ {
        let own = &self.blocks[&block];
        let last = move |c: &Cached| c.prefix[c.prefix.len() - block_size..].to_vec();
        let same = move |c: &Cached| c.group == own.group && c.parent != own.parent && last(c) == last(own);
        self.blocks.iter().filter(move |(other, c)| **other != block && same(c)).map(|(other, _)| *other)
    }

    pub fn forget(&mut self, block: BlockId) {
        self.blocks.remove(&block);
    }

    pub fn contains(&self, block: BlockId) -> bool {
        self.blocks.contains_key(&block)
    }
}

/// The first position that a query at `position` reads.
pub fn first_read(kind: CacheGroup, position: usize) -> usize {
    match kind {
        CacheGroup::Full => 0,
        CacheGroup::Sliding { window } => (position + 1).saturating_sub(window),
        other => panic!("{other:?}: unknown to the model"),
    }
}

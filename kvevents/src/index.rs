//! What subscribers know: a copy of the announced prefixes, which turns changes into events.
//!
//! Invariants: every announced prefix was announced after its parent and is withdrawn before it, so that a subscriber can walk
//! from the root at every moment. A prefix is announced once per medium, however often the caller reports it. Blocks of sliding
//! windows are the exception: their parents leave the cache first, so they are announced as they come.
//!
//! The copy takes about `4 × block_size + 150` bytes per cached block. Its owner is the publisher thread.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::change::{BlockHash, Change, Layout, Medium, SpecKind};

const MEDIA: [Medium; 2] = [Medium::Gpu, Medium::Cpu];

/// An announced prefix.
struct Node {
    parent: Option<BlockHash>,
    children: HashSet<BlockHash>,
    /// Which of [`MEDIA`] hold the block.
    media: [bool; 2],
    token_ids: Box<[u32]>,
    lora_name: Option<Arc<str>>,
    cache_salt: Option<Arc<str>>,
}

/// See the [module](self).
pub struct Index {
    block_size: usize,
    /// Whether a prefix without its parent is useless.
    is_tree: bool,
    nodes: HashMap<BlockHash, Node>,
}

/// A run of consecutive blocks to announce.
struct Run<'a> {
    parent: Option<BlockHash>,
    hashes: &'a [BlockHash],
    token_ids: &'a [u32],
    lora_name: &'a Option<Arc<str>>,
    cache_salt: &'a Option<Arc<str>>,
}

impl Index {
    pub fn new(layout: Layout) -> Index {
        let is_tree = !matches!(layout.group, Some(SpecKind::Sliding { .. }));
        Index { block_size: layout.block_size.max(1), is_tree, nodes: HashMap::new() }
    }

    /// Applies changes in order, and returns what subscribers have to be told.
    pub fn apply(&mut self, changes: &[Change]) -> Vec<Change> {
        let mut events = Vec::new();
        for change in changes {
            match change {
                Change::Stored { medium, parent, hashes, token_ids, lora_name, cache_salt } => {
                    let run = Run { parent: *parent, hashes, token_ids, lora_name, cache_salt };
                    self.store(*medium, &run, &mut events);
                }
                Change::Removed { medium, hash } => self.remove(*medium, *hash, &mut events),
                Change::Cleared => {
                    self.nodes.clear();
                    events.push(Change::Cleared);
                }
            }
        }
        events
    }

    /// Announces the blocks of a run that are not known yet. Consecutive ones share an event.
    fn store(&mut self, medium: Medium, run: &Run<'_>, events: &mut Vec<Change>) {
        if run.token_ids.is_empty() {
            let known = run.hashes.iter().filter_map(|hash| self.copy(medium, *hash));
            return events.extend(known.collect::<Vec<_>>());
        }
        let (mut before, mut extends) = (run.parent, false);
        for (hash, tokens) in run.hashes.iter().zip(run.token_ids.chunks_exact(self.block_size)) {
            let parent = before.replace(*hash);
            if !self.insert(medium, *hash, parent, tokens, run) {
                extends = false;
                continue;
            }
            match events.last_mut() {
                Some(Change::Stored { hashes, token_ids, .. }) if extends => {
                    hashes.push(*hash);
                    token_ids.extend_from_slice(tokens);
                }
                _ => events.push(Change::Stored {
                    medium,
                    parent,
                    hashes: vec![*hash],
                    token_ids: tokens.to_vec(),
                    lora_name: run.lora_name.clone(),
                    cache_salt: run.cache_salt.clone(),
                }),
            }
            extends = true;
        }
    }

    /// Announces a known block on one more medium. A block that is not known has a parent that subscribers do not know.
    fn copy(&mut self, medium: Medium, hash: BlockHash) -> Option<Change> {
        let node = self.nodes.get_mut(&hash).filter(|node| !node.media[medium as usize])?;
        node.media[medium as usize] = true;
        Some(Change::Stored {
            medium,
            parent: node.parent,
            hashes: vec![hash],
            token_ids: node.token_ids.to_vec(),
            lora_name: node.lora_name.clone(),
            cache_salt: node.cache_salt.clone(),
        })
    }

    /// Inserts a block; `false` if it is known on this medium, or if subscribers do not know its parent.
    fn insert(
        &mut self,
        medium: Medium,
        hash: BlockHash,
        parent: Option<BlockHash>,
        tokens: &[u32],
        run: &Run<'_>,
    ) -> bool {
        if let Some(node) = self.nodes.get_mut(&hash) {
            return !std::mem::replace(&mut node.media[medium as usize], true);
        }
        if self.is_tree
            && let Some(parent) = parent
        {
            let Some(node) = self.nodes.get_mut(&parent).filter(|_| parent != hash) else { return false };
            node.children.insert(hash);
        }
        let mut media = [false; 2];
        media[medium as usize] = true;
        let (lora_name, cache_salt) = (run.lora_name.clone(), run.cache_salt.clone());
        let node = Node { parent, children: HashSet::new(), media, token_ids: tokens.into(), lora_name, cache_salt };
        self.nodes.insert(hash, node);
        true
    }

    /// Withdraws a block from a medium. If no medium is left, its descendants are withdrawn before it: no lookup reaches them.
    fn remove(&mut self, medium: Medium, hash: BlockHash, events: &mut Vec<Change>) {
        let Some(node) = self.nodes.get_mut(&hash).filter(|node| node.media[medium as usize]) else { return };
        node.media[medium as usize] = false;
        if node.media.contains(&true) {
            return events.push(Change::Removed { medium, hash });
        }
        // Parents precede children in this list.
        let mut gone: Vec<BlockHash> = node.children.iter().copied().collect();
        let mut next = 0;
        while let Some(hash) = gone.get(next) {
            let children: Vec<BlockHash> =
                self.nodes.get(hash).map_or(Vec::new(), |node| node.children.iter().copied().collect());
            gone.extend(children);
            next += 1;
        }
        for hash in gone.into_iter().rev() {
            let Some(node) = self.nodes.remove(&hash) else { continue };
            let held = MEDIA.into_iter().filter(|medium| node.media[*medium as usize]);
            events.extend(held.map(|medium| Change::Removed { medium, hash }));
        }
        events.push(Change::Removed { medium, hash });
        let parent = self.nodes.remove(&hash).and_then(|node| node.parent);
        if let Some(parent) = parent.and_then(|parent| self.nodes.get_mut(&parent)) {
            parent.children.remove(&hash);
        }
    }

    /// The events that rebuild the index from nothing, parents first.
    pub fn snapshot(&self) -> Vec<Change> {
        let mut children: HashMap<BlockHash, Vec<BlockHash>> = HashMap::new();
        let mut starts = Vec::new();
        for (hash, node) in &self.nodes {
            match node.parent.filter(|parent| self.nodes.contains_key(parent)) {
                Some(parent) => children.entry(parent).or_default().push(*hash),
                None => starts.push(*hash),
            }
        }
        let mut events = vec![Change::Cleared];
        while let Some(start) = starts.pop() {
            let Some(first) = self.nodes.get(&start) else { continue };
            let (mut hashes, mut token_ids, mut at) = (vec![start], first.token_ids.to_vec(), start);
            while let Some(next) = children.get_mut(&at).and_then(Vec::pop) {
                // The others follow this run, which holds their parent.
                starts.extend(children.remove(&at).into_iter().flatten());
                match self.nodes.get(&next).filter(|node| node.media == first.media) {
                    Some(node) => {
                        hashes.push(next);
                        token_ids.extend_from_slice(&node.token_ids);
                        at = next;
                    }
                    None => {
                        starts.push(next);
                        break;
                    }
                }
            }
            events.extend(MEDIA.into_iter().filter(|medium| first.media[*medium as usize]).map(|medium| {
                Change::Stored {
                    medium,
                    parent: first.parent,
                    hashes: hashes.clone(),
                    token_ids: token_ids.clone(),
                    lora_name: first.lora_name.clone(),
                    cache_salt: first.cache_salt.clone(),
                }
            }));
        }
        events
    }
}

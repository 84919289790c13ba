//! Hands the changes of the prefix cache to the publisher of KV events, once per step.
//!
//! Published is one cache group: the first with full attention, because consumers count a prefix as cached if its blocks are, and
//! take blocks of windows for whole prefixes. A model with nothing but windows publishes its first group, marked as such. Prefixes in
//! host memory are announced on the medium `CPU`. Blocks of preempted requests in host memory are not: no other request can read
//! them.
//!
//! The cost per step is proportional to the number of changes. Without a publisher the pool records none.

use std::collections::HashMap;
use std::sync::Arc;

use kvevents::{BlockHash, Change, Layout, Medium, Publisher, Sockets, SpecKind};
use sched::{BlockEvent, CacheGroup, SchedConfig, Scheduler, Tier};

use super::adapters::AdapterNames;
use crate::error::EngineError;

/// The publisher, and what it publishes.
pub(super) struct KvEvents {
    publisher: Publisher,
    /// Index of the cache group.
    group: usize,
}

impl KvEvents {
    pub fn start(sockets: Sockets, sched: &SchedConfig) -> Result<KvEvents, EngineError> {
        let full = sched.groups.iter().position(|group| *group == CacheGroup::Full);
        let group = full.unwrap_or(0);
        let kind = match sched.groups.get(group) {
            Some(CacheGroup::Sliding { window }) => Some(SpecKind::Sliding { group, window: *window }),
            _ => (sched.groups.len() > 1).then_some(SpecKind::Full { group }),
        };
        if !sched.enable_prefix_caching {
            tracing::warn!("--kv-events-config has no effect, because prefix caching is off");
        }
        let layout = Layout { block_size: sched.block_size, group: kind };
        Ok(KvEvents { publisher: Publisher::start_on(sockets, layout)?, group })
    }

    /// Hands over the changes since the last call. Never waits.
    pub fn publish(&mut self, scheduler: &mut Scheduler, adapters: &AdapterNames) {
        let group = self.group;
        let mut texts = Texts::new(adapters);
        let changes = scheduler.drain_block_events().filter_map(|event| texts.change(event, group)).collect();
        self.publisher.publish(changes, || cached(scheduler, adapters, group));
    }

    /// Index of the published cache group.
    pub fn group(&self) -> usize {
        self.group
    }

    /// The publisher, for its numbers and addresses.
    pub fn publisher(&self) -> &Publisher {
        &self.publisher
    }
}

/// The prefixes of a cache group, parents first, one change per block.
pub(super) fn cached(scheduler: &Scheduler, adapters: &AdapterNames, group: usize) -> Vec<Change> {
    let mut texts = Texts::new(adapters);
    scheduler.cached_prefixes(group).into_iter().filter_map(|event| texts.change(event, group)).collect()
}

/// Names of adapters and salts. Each distinct one of a step is copied once.
struct Texts<'a> {
    adapters: &'a AdapterNames,
    /// Shared copies by text.
    shared: HashMap<String, Arc<str>>,
}

impl<'a> Texts<'a> {
    fn new(adapters: &'a AdapterNames) -> Texts<'a> {
        Texts { adapters, shared: HashMap::new() }
    }

    fn share(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.shared.get(text) {
            return known.clone();
        }
        let shared: Arc<str> = text.into();
        self.shared.insert(text.to_string(), shared.clone());
        shared
    }

    /// The change that an event of this group means.
    fn change(&mut self, event: BlockEvent, published: usize) -> Option<Change> {
        match event {
            BlockEvent::Stored { tier, group, parent, hashes, tokens, key } if group == published => {
                let adapter = key.as_ref().and_then(|key| key.adapter.as_deref());
                // An adapter without a name is being replaced; its contents still tell it from others.
                let adapters = self.adapters;
                let name = adapter.map(|digest| adapters.name_of(digest).unwrap_or(digest));
                Some(Change::Stored {
                    medium: medium(tier),
                    parent: parent.map(|hash| BlockHash::new(hash.0)),
                    hashes: hashes.into_iter().map(|hash| BlockHash::new(hash.0)).collect(),
                    token_ids: tokens,
                    lora_name: name.map(|name| self.share(name)),
                    cache_salt: key.as_ref().and_then(|key| key.salt.as_deref()).map(|salt| self.share(salt)),
                })
            }
            BlockEvent::Removed { tier, group, hash } if group == published => {
                Some(Change::Removed { medium: medium(tier), hash: BlockHash::new(hash.0) })
            }
            BlockEvent::Stored { .. } | BlockEvent::Removed { .. } => None,
            BlockEvent::Cleared => Some(Change::Cleared),
        }
    }
}

fn medium(tier: Tier) -> Medium {
    match tier {
        Tier::Device => Medium::Gpu,
        Tier::Host => Medium::Cpu,
    }
}

//! Block events: changes of the set of prefixes that the pool can serve, for a router or a second index.
//!
//! Events identify prefixes by hash, not by block. Of several blocks with one prefix in one group and tier, the first insertion
//! stores the hash; of several with one hash, the last removal removes it. A hash is stored again if another prefix has
//! it, or the same prefix behind a parent that was evicted in between, which no lookup reaches. Replaying the events in
//! order yields the set of indexed `(tier, group, hash)` triples at every moment. Without [`PoolConfig::events`](crate::PoolConfig::events) they cost nothing. With it
//! they are kept until they are drained.

use std::sync::Arc;

use crate::ids::{PrefixHash, Tier};
use crate::key::PrefixKey;

/// A change of the set of cached prefixes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockEvent {
    /// Consecutive blocks of one sequence entered the prefix index.
    Stored {
        /// Where the blocks are.
        tier: Tier,
        /// The cache group.
        group: usize,
        /// Hash of the prefix before the blocks; `None` at the start of a sequence.
        parent: Option<PrefixHash>,
        /// One hash per block, in order.
        hashes: Vec<PrefixHash>,
        /// Their tokens: `block_size` for each hash. Empty if the blocks were copied from the other tier, which still
        /// has them at this moment; then `parent` and `key` are `None`.
        tokens: Vec<u32>,
        /// Salt, adapter and media of the sequence, if it has any.
        key: Option<Arc<PrefixKey>>,
    },
    /// A prefix left the index of a tier.
    Removed {
        /// The tier that no longer has it.
        tier: Tier,
        /// The cache group.
        group: usize,
        /// Hash of the prefix.
        hash: PrefixHash,
    },
    /// All prefixes of all groups and tiers left the index.
    Cleared,
}

/// Events since the last drain; `None` if they are disabled.
pub(crate) struct EventLog(Option<Vec<BlockEvent>>);

impl EventLog {
    pub fn new(is_enabled: bool) -> EventLog {
        EventLog(is_enabled.then(Vec::new))
    }

    pub fn len(&self) -> usize {
        self.0.as_ref().map_or(0, Vec::len)
    }

    /// Adds a stored block to the event since `first` that ends with the block's parent, or adds an event for it.
    pub fn stored(
        &mut self,
        first: usize,
        (tier, group, parent, hash): (Tier, usize, Option<PrefixHash>, PrefixHash),
        tokens: &[u32],
        key: Option<&Arc<PrefixKey>>,
    ) {
        let Some(events) = &mut self.0 else { return };
        for event in events[first..].iter_mut().rev() {
            if let BlockEvent::Stored { tier: stored_tier, group: stored_group, hashes, tokens: stored_tokens, .. } =
                event
                && (*stored_tier, *stored_group, hashes.last().copied()) == (tier, group, parent)
            {
                hashes.push(hash);
                stored_tokens.extend_from_slice(tokens);
                return;
            }
        }
        let (hashes, tokens) = (vec![hash], tokens.to_vec());
        events.push(BlockEvent::Stored { tier, group, parent, hashes, tokens, key: key.cloned() });
    }

    pub fn push(&mut self, event: BlockEvent) {
        if let Some(events) = &mut self.0 {
            events.push(event);
        }
    }

    pub fn drain(&mut self) -> impl Iterator<Item = BlockEvent> + '_ {
        self.0.iter_mut().flat_map(|events| events.drain(..))
    }
}

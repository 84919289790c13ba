//! Block events: what a router or a second index must hear to know which prefixes this pool can serve.
//!
//! An event speaks of prefixes by name, not of blocks: of several blocks of one name in one group, the first stores it
//! and the last removes it. Replaying the events in order gives the set of indexed `(group, hash)` at every moment.
//! Costs nothing unless [`PoolConfig::events`](crate::PoolConfig::events) is set; then drain them, as they are kept
//! until somebody does.

use std::sync::Arc;

use crate::ids::PrefixHash;
use crate::key::PrefixKey;

/// A change of what can be found by prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockEvent {
    /// A run of consecutive blocks of one sequence became findable.
    Stored {
        /// The cache group.
        group: usize,
        /// The prefix before the run; `None` at the start of a sequence.
        parent: Option<PrefixHash>,
        /// One name per block of the run, in order.
        hashes: Vec<PrefixHash>,
        /// Their tokens: `block_size` for each hash.
        tokens: Vec<u32>,
        /// Salt, adapter and media of the sequence, if it has any.
        key: Option<Arc<PrefixKey>>,
    },
    /// A prefix can no longer be found.
    Removed {
        /// The cache group.
        group: usize,
        /// Its name.
        hash: PrefixHash,
    },
    /// No prefix can be found any more, in any group.
    Cleared,
}

/// Events since the last drain, if somebody wants them.
pub(crate) struct EventLog {
    events: Option<Vec<BlockEvent>>,
}

impl EventLog {
    pub fn new(wanted: bool) -> EventLog {
        EventLog { events: wanted.then(Vec::new) }
    }

    /// Where the runs of the operation that begins now may start.
    pub fn mark(&self) -> usize {
        self.events.as_ref().map_or(0, Vec::len)
    }

    /// Extends the run since `mark` that ends with `parent`, or begins one.
    pub fn stored(
        &mut self,
        mark: usize,
        at: usize,
        before: Option<PrefixHash>,
        name: PrefixHash,
        content: &[u32],
        of: Option<&Arc<PrefixKey>>,
    ) {
        let Some(events) = &mut self.events else { return };
        for event in events[mark..].iter_mut().rev() {
            if let BlockEvent::Stored { group, hashes, tokens, .. } = event
                && (*group, hashes.last().copied()) == (at, before)
            {
                hashes.push(name);
                tokens.extend_from_slice(content);
                return;
            }
        }
        let (hashes, tokens) = (vec![name], content.to_vec());
        events.push(BlockEvent::Stored { group: at, parent: before, hashes, tokens, key: of.cloned() });
    }

    pub fn push(&mut self, event: BlockEvent) {
        if let Some(events) = &mut self.events {
            events.push(event);
        }
    }

    pub fn drain(&mut self) -> impl Iterator<Item = BlockEvent> + '_ {
        self.events.iter_mut().flat_map(|events| events.drain(..))
    }
}

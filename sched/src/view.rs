//! A borrowed view of the scheduler's requests; nothing is copied.
//!
//! Reading it costs what it reads; planning knows nothing of it.

use kvblock::{BlockId, BlockPool, BlockTable};

use crate::group::Group;
use crate::{RequestId, Scheduler};

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestState {
    /// It holds blocks.
    Running,
    /// It waits in host memory, or is on its way there.
    Swapped,
    /// It waits for blocks.
    Waiting,
}

/// A live request.
#[derive(Clone, Copy)]
pub struct RequestView<'a> {
    id: RequestId,
    state: RequestState,
    group: &'a Group,
}

impl RequestView<'_> {
    /// Its name.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Where it stands.
    pub fn state(&self) -> RequestState {
        self.state
    }

    /// Sequences that have not ended.
    pub fn num_sequences(&self) -> usize {
        self.group.num_live()
    }

    /// Tokens of its prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.group.request.prompt.len()
    }

    /// Tokens that came from the prefix cache when it was last admitted.
    pub fn cached_tokens(&self) -> usize {
        self.group.cached
    }

    /// Tokens drawn so far, over all of its sequences.
    pub fn generated_tokens(&self) -> usize {
        self.group.seqs.iter().map(|s| s.output.len()).sum()
    }

    /// Tokens whose keys and values lie in its blocks, cached ones included; a prompt that sequences share counts once.
    pub fn computed_tokens(&self) -> usize {
        let prompt = self.group.request.prompt.len();
        let committed = || self.group.tables().map(BlockTable::committed);
        let shared = committed().max().unwrap_or(0).min(prompt);
        shared + committed().map(|tokens| tokens.saturating_sub(prompt)).sum::<usize>()
    }

    /// How often it had to give its blocks back.
    pub fn preemptions(&self) -> u32 {
        self.group.preemptions
    }

    /// Its blocks, those in every table of every sequence: one that sequences share comes several times.
    pub fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.group.tables().flat_map(BlockTable::groups).flat_map(|table| table.blocks().iter().copied())
    }
}

impl Scheduler {
    /// All live requests: the running in order of admission, then the swapped and the waiting in order of their queues.
    pub fn requests(&self) -> impl Iterator<Item = RequestView<'_>> {
        let running = self.running.values().map(|id| (*id, RequestState::Running));
        let swapped = self.swapped.values().map(|id| (*id, RequestState::Swapped));
        let waiting = self.waiting.values().map(|id| (*id, RequestState::Waiting));
        let view = |(id, state)| Some(RequestView { id, state, group: self.groups.get(&id)? });
        running.chain(swapped).chain(waiting).filter_map(view)
    }

    /// The pool, to look at.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }
}

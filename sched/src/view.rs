//! A borrowed view of the scheduler's requests. It copies nothing and costs planning nothing.

use kvblock::{BlockId, BlockPool, BlockTable};

use crate::live_request::LiveRequest;
use crate::{RequestId, Scheduler};

/// State of a live request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestState {
    /// It owns blocks.
    Running,
    /// It is in host memory, or about to be swapped out.
    Swapped,
    /// It waits for admission.
    Waiting,
}

/// Read-only view of one live request.
#[derive(Clone, Copy)]
pub struct RequestView<'a> {
    id: RequestId,
    state: RequestState,
    live: &'a LiveRequest,
}

impl RequestView<'_> {
    /// Its id.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Its state.
    pub fn state(&self) -> RequestState {
        self.state
    }

    /// Number of sequences that have not ended.
    pub fn num_sequences(&self) -> usize {
        self.live.num_live()
    }

    /// Number of tokens in its prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.live.request.prompt.len()
    }

    /// Number of tokens that the last admission took from the prefix cache.
    pub fn cached_tokens(&self) -> usize {
        self.live.num_cached_tokens
    }

    /// Number of tokens drawn so far, over all of its sequences.
    pub fn generated_tokens(&self) -> usize {
        self.live.seqs.iter().map(|s| s.output.len()).sum()
    }

    /// Number of tokens whose keys and values are in its blocks, cached ones included. A shared prompt counts once.
    pub fn computed_tokens(&self) -> usize {
        let prompt = self.live.request.prompt.len();
        let committed = || self.live.tables().map(BlockTable::committed);
        let shared = committed().max().unwrap_or(0).min(prompt);
        shared + committed().map(|tokens| tokens.saturating_sub(prompt)).sum::<usize>()
    }

    /// Number of times it was preempted.
    pub fn preemptions(&self) -> u32 {
        self.live.num_preemptions
    }

    /// The blocks in all tables of all sequences. A block that sequences share occurs several times.
    pub fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.live.tables().flat_map(BlockTable::groups).flat_map(|table| table.blocks().iter().copied())
    }
}

impl Scheduler {
    /// Returns all live requests: the running in order of admission, then the swapped and the waiting in queue order.
    pub fn requests(&self) -> impl Iterator<Item = RequestView<'_>> {
        let running = self.running.values().map(|id| (*id, RequestState::Running));
        let swapped = self.swapped.values().map(|id| (*id, RequestState::Swapped));
        let waiting = self.waiting.values().map(|id| (*id, RequestState::Waiting));
        let view = |(id, state)| Some(RequestView { id, state, live: self.requests.get(&id)? });
        running.chain(swapped).chain(waiting).filter_map(view)
    }

    /// The block pool.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }
}

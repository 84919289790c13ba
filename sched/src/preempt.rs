//! Preemption: which request is preempted, and what happens to its keys and values.
//!
//! The victim has the worst rank: the lowest priority, then the least work to lose. Its outputs are kept, including
//! those that steps in flight will draw. Its keys and values are swapped to host memory if several live sequences share
//! them, or if computing them again would cost more than moving their blocks out and back
//! ([`SchedConfig::swap_cost`](crate::SchedConfig::swap_cost)); else they are discarded and computed again. A prefix
//! that came from the cache is assumed to be cached still, so it costs nothing to compute.
//!
//! A request that steps in flight write to is swapped out after the last of them is committed. Until then it keeps its
//! tables, and its host blocks are reserved.

use kvblock::BlockTable;

use crate::config::PreemptionMode;
use crate::live_request::{LiveRequest, Phase};
use crate::{RequestId, Scheduler, SeqId, StepId};

impl Scheduler {
    /// Takes all blocks of a running request and puts it back into a queue, at its position by arrival.
    pub(crate) fn preempt(&mut self, id: RequestId) {
        let policy = self.config.policy;
        let others = self.running_requests().filter(|live| live.request.id != id);
        let best = others.map(|live| live.priority(policy)).min();
        let is_swapped = self.requests.get(&id).is_some_and(|live| self.should_swap(live));
        let oldest = self.oldest_in_flight();
        let Some(live) = self.requests.get_mut(&id) else { return };
        self.counters.preemptions += 1;
        self.counters.preemptions_by_priority += u64::from(best.is_some_and(|best| best < live.priority(policy)));
        live.num_preemptions += 1;
        if !is_swapped {
            return self.recompute(id);
        }
        self.counters.swap_preemptions += 1;
        let (stage, is_in_flight) = (live.stage(), live.is_in_flight(oldest));
        self.set_phase(id, Phase::SwappingOut { stage });
        if !is_in_flight {
            self.swap_out(id);
        }
    }

    /// Discards a request's keys and values and puts it back into the waiting queue, to be computed again.
    pub(crate) fn recompute(&mut self, id: RequestId) {
        if let Some(live) = self.requests.get(&id) {
            self.counters.tokens_lost += live.work() as u64;
            self.changes += 1;
            self.release_contents(id);
            self.set_phase(id, Phase::Waiting);
        }
    }

    /// Returns whether to swap a request out: whether that is cheaper or required, and host memory is left.
    fn should_swap(&self, live: &LiveRequest) -> bool {
        let mode = self.config.preemption_mode;
        if self.config.host_blocks == 0 || mode == PreemptionMode::Recompute {
            return false;
        }
        let needed = self.host_blocks_for(live);
        let is_cheaper = live.num_live() > 1 || live.work() > self.config.swap_cost.saturating_mul(needed);
        let swapping_out = self.swapped.values().filter_map(|id| self.requests.get(id));
        let swapping_out = swapping_out.filter(|live| matches!(live.phase, Phase::SwappingOut { .. }));
        let host = self.pool.host_gauges();
        let reserved: usize = swapping_out.map(|live| self.host_blocks_for(live)).sum();
        (is_cheaper || mode == PreemptionMode::Swap) && needed + reserved <= host.free + host.cached
    }

    /// Number of host blocks for a request once the steps in flight are committed.
    fn host_blocks_for(&self, live: &LiveRequest) -> usize {
        let tables = live.seqs.iter().filter_map(|s| Some((s.table.as_ref()?, s.num_computed_tokens)));
        self.pool.host_blocks_needed(tables)
    }

    fn swap_out(&mut self, id: RequestId) {
        let Some(live) = self.requests.get_mut(&id) else { return };
        let stage = live.stage();
        let (mut indices, mut tables): (Vec<usize>, Vec<BlockTable>) = (Vec::new(), Vec::new());
        for (index, sequence) in live.seqs.iter_mut().enumerate() {
            let Some(table) = sequence.table.take() else { continue };
            if std::mem::take(&mut sequence.num_sent_entries) > 0 {
                self.released.push(SeqId { request: id, index: index as u32 });
            }
            sequence.num_computed_tokens = table.committed();
            indices.push(index);
            tables.push(table);
        }
        match self.pool.swap_out(&mut tables) {
            Ok(swapped) => self.set_phase(id, Phase::Swapped { stage, indices, swapped }),
            Err(error) => {
                debug_assert!(false, "host blocks were reserved, yet {error}");
                for (index, table) in indices.into_iter().zip(tables) {
                    live.seqs[index].table = Some(table);
                }
                self.recompute(id);
            }
        }
    }

    /// Completes what waited for the end of a step: releases tables that the step wrote to, and swaps out requests.
    pub(crate) fn finish_step(&mut self, step: StepId) {
        for pending in self.pending_releases.extract_if(.., |p| p.until <= step) {
            self.pool.release(pending.table);
        }
        let oldest = self.oldest_in_flight();
        let can_leave = |id: &&RequestId| {
            let live = self.requests.get(id);
            live.is_some_and(|live| matches!(live.phase, Phase::SwappingOut { .. }) && !live.is_in_flight(oldest))
        };
        let leaving: Vec<RequestId> = self.swapped.values().filter(can_leave).copied().collect();
        leaving.into_iter().for_each(|id| self.swap_out(id));
    }

    /// Number of blocks that the commits of the steps in flight will free: those of pending releases, of requests that
    /// will be swapped out, and behind the windows of running requests.
    pub(crate) fn num_blocks_freed_by_commit(&self) -> usize {
        let Some(oldest) = self.oldest_in_flight() else { return 0 };
        let swapping_out = self.swapped.values().filter_map(|id| self.requests.get(id)).flat_map(LiveRequest::tables);
        let tables = self.pending_releases.iter().map(|p| &p.table).chain(swapping_out);
        let whole = tables.flat_map(BlockTable::groups).flat_map(|g| g.blocks());
        let in_flight = self.running_requests().flat_map(|live| &live.seqs).filter(|s| s.is_in_flight(Some(oldest)));
        let behind_windows = in_flight.flat_map(|s| {
            let groups = s.table.iter().flat_map(BlockTable::groups).zip(&self.config.groups);
            groups.flat_map(|(g, kind)| {
                // Drafts may turn out wrong.
                let least = s.num_computed_tokens.saturating_sub(s.num_last_drafts);
                let holes = kind.holes(least, self.config.block_size);
                &g.blocks()[..holes.saturating_sub(g.holes()).min(g.blocks().len())]
            })
        });
        let mut blocks: Vec<_> = whole.chain(behind_windows).copied().collect();
        blocks.sort_unstable();
        blocks.chunk_by(|a, b| a == b).filter(|owners| owners.len() == self.pool.references(owners[0]) as usize).count()
    }
}

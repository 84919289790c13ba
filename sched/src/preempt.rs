//! Preemption: which request gives way, what happens to its keys and values, and how they leave.
//!
//! The victim has the worst standing: the lowest priority, then the least work to lose. Its outputs stay, and so do
//! those that steps in flight will draw. Its keys and values are dropped and computed again, or swapped to host
//! memory, by this rule: swapped where several live sequences share them, or where computing them again would cost
//! more than moving their blocks out and back ([`SchedConfig::swap_cost`](crate::SchedConfig::swap_cost)); a prefix
//! that came from the cache is likely to be found there again, so it costs nothing to compute.
//!
//! A request that steps in flight write to leaves when the last of them is over. Until then it keeps its tables, and its
//! host blocks are reserved.

use kvblock::BlockTable;

use crate::config::PreemptionMode;
use crate::group::{Group, Phase};
use crate::{RequestId, Scheduler, SeqId, StepId};

impl Scheduler {
    /// Takes all blocks of a running request and puts it back into the queue, at the place of its arrival.
    pub(crate) fn preempt(&mut self, id: RequestId) {
        let policy = self.config.policy;
        let others = self.running_groups().filter(|g| g.request.id != id);
        let best = others.map(|g| g.priority(policy)).min();
        let is_swapped = self.groups.get(&id).is_some_and(|g| self.shall_swap(g));
        let oldest = self.oldest_in_flight();
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        self.counters.preemptions += 1;
        self.counters.preemptions_by_priority += u64::from(best.is_some_and(|best| best < group.priority(policy)));
        group.preemptions += 1;
        if !is_swapped {
            return self.begin_again(id);
        }
        self.counters.swap_preemptions += 1;
        let (stage, is_in_flight) = (group.stage(), group.is_in_flight(oldest));
        self.enter(id, Phase::Leaving { stage });
        if !is_in_flight {
            self.swap_out(id);
        }
    }

    /// Sends every request that runs or is swapped out back to the queue, without its keys and values.
    pub(crate) fn send_all_back(&mut self) {
        let all: Vec<RequestId> = self.running.values().chain(self.swapped.values()).copied().collect();
        all.into_iter().for_each(|id| self.begin_again(id));
    }

    /// Sends a request back to the queue without keys and values, so that all of it is computed again.
    pub(crate) fn begin_again(&mut self, id: RequestId) {
        if let Some(group) = self.groups.get(&id) {
            self.counters.tokens_lost += group.work() as u64;
            self.changes += 1;
            self.drop_contents(id);
            self.enter(id, Phase::Waiting);
        }
    }

    /// Whether a request's keys and values are worth keeping, and there is host memory for them.
    fn shall_swap(&self, group: &Group) -> bool {
        let mode = self.config.preemption_mode;
        if self.config.host_blocks == 0 || mode == PreemptionMode::Recompute {
            return false;
        }
        let needed = self.host_blocks_for(group);
        let worth = group.num_live() > 1 || group.work() > self.config.swap_cost.saturating_mul(needed);
        let leaving = self.swapped.values().filter_map(|id| self.groups.get(id));
        let is_leaving = |g: &&Group| matches!(g.phase, Phase::Leaving { .. });
        let spoken_for: usize = leaving.filter(is_leaving).map(|g| self.host_blocks_for(g)).sum();
        (worth || mode == PreemptionMode::Swap) && needed + spoken_for <= self.pool.host_gauges().free
    }

    /// Host blocks for a request once the steps in flight are committed.
    fn host_blocks_for(&self, group: &Group) -> usize {
        let tables = group.seqs.iter().filter_map(|s| Some((s.table.as_ref()?, s.planned)));
        self.pool.host_blocks_needed(tables)
    }

    /// Moves the tables of a request that leaves to host memory.
    fn swap_out(&mut self, id: RequestId) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let stage = group.stage();
        let (mut indices, mut tables): (Vec<usize>, Vec<BlockTable>) = (Vec::new(), Vec::new());
        for (index, sequence) in group.seqs.iter_mut().enumerate() {
            let Some(table) = sequence.table.take() else {
                continue;
            };
            if std::mem::take(&mut sequence.sent) > 0 {
                self.released.push(SeqId { request: id, index: index as u32 });
            }
            sequence.planned = table.committed();
            indices.push(index);
            tables.push(table);
        }
        match self.pool.swap_out(&mut tables) {
            Ok(swapped) => self.enter(id, Phase::Swapped { stage, indices, swapped }),
            Err(error) => {
                debug_assert!(false, "host blocks were spoken for, yet {error}");
                for (index, table) in indices.into_iter().zip(tables) {
                    group.seqs[index].table = Some(table);
                }
                self.begin_again(id);
            }
        }
    }

    /// Completes what waited for a step that is over now: frees parked tables, and swaps out requests that left while it
    /// ran.
    pub(crate) fn step_is_over(&mut self, step: StepId) {
        for parked in self.parked.extract_if(.., |p| p.until <= step) {
            self.pool.release(parked.table);
        }
        let oldest = self.oldest_in_flight();
        let may_go = |id: &&RequestId| {
            let group = self.groups.get(id);
            group.is_some_and(|g| matches!(g.phase, Phase::Leaving { .. }) && !g.is_in_flight(oldest))
        };
        let gone: Vec<RequestId> = self.swapped.values().filter(may_go).copied().collect();
        gone.into_iter().for_each(|id| self.swap_out(id));
    }

    /// Blocks that come free with the commits of the steps in flight: of tables that were given up, of requests that are
    /// swapped out then, and behind the windows of those that run.
    pub(crate) fn num_coming_blocks(&self) -> usize {
        let Some(oldest) = self.oldest_in_flight() else { return 0 };
        let leaving = self.swapped.values().filter_map(|id| self.groups.get(id)).flat_map(Group::tables);
        let tables = self.parked.iter().map(|p| &p.table).chain(leaving);
        let whole = tables.flat_map(BlockTable::groups).flat_map(|g| g.blocks());
        let in_flight = self.running_groups().flat_map(|g| &g.seqs).filter(|s| s.is_in_flight(Some(oldest)));
        let behind_windows = in_flight.flat_map(|s| {
            let groups = s.table.iter().flat_map(BlockTable::groups).zip(&self.config.groups);
            groups.flat_map(|(g, kind)| {
                let holes = kind.holes(s.planned, self.config.block_size);
                &g.blocks()[..holes.saturating_sub(g.holes()).min(g.blocks().len())]
            })
        });
        let mut blocks: Vec<_> = whole.chain(behind_windows).copied().collect();
        blocks.sort_unstable();
        blocks.chunk_by(|a, b| a == b).filter(|owners| owners.len() == self.pool.references(owners[0]) as usize).count()
    }
}

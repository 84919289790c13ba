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
use crate::group::{Away, Group, QueueKey};
use crate::{RequestId, Scheduler, SeqId, StepId};

impl Scheduler {
    /// The running request of worst standing, which is preempted next.
    pub(crate) fn victim(&self) -> Option<RequestId> {
        self.running.values().copied().max_by_key(|id| self.groups.get(id).map(|g| g.standing(self.config.policy)))
    }

    /// Takes all blocks of a running request and puts it back into the queue, at the place of its arrival.
    pub(crate) fn preempt(&mut self, id: RequestId) {
        self.stop_running(id);
        let policy = self.config.policy;
        let best = self.running_groups().map(|g| g.priority(policy)).min();
        let is_swapped = self.groups.get(&id).is_some_and(|g| self.shall_swap(g));
        let oldest = self.oldest_in_flight();
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        self.counters.preemptions += 1;
        self.counters.preemptions_by_priority += u64::from(best.is_some_and(|best| best < group.priority(policy)));
        group.preemptions += 1;
        let key = group.queue_key(policy);
        if is_swapped {
            self.counters.swap_preemptions += 1;
            group.away = Some(Away::Leaving);
            self.swapped.insert(key, id);
            if !group.is_in_flight(oldest) {
                self.swap_out(key, id);
            }
        } else {
            self.send_back(key, id);
        }
    }

    /// Sends every request that runs or is swapped out back to the queue, without its keys and values.
    pub(crate) fn send_all_back(&mut self) {
        let mut all: Vec<RequestId> = std::mem::take(&mut self.running).into_values().collect();
        all.extend(std::mem::take(&mut self.swapped).into_values());
        for id in all {
            let Some(group) = self.groups.get_mut(&id) else {
                continue;
            };
            group.place = None;
            let key = group.queue_key(self.config.policy);
            if let Some(Away::Host { swapped, .. }) = group.away.take() {
                self.pool.discard(swapped);
            }
            self.send_back(key, id);
        }
    }

    /// Drops a request's tables, so that all of it is computed again.
    pub(crate) fn send_back(&mut self, key: QueueKey, id: RequestId) {
        if let Some(group) = self.groups.get_mut(&id) {
            self.counters.tokens_lost += group.work() as u64;
            group.forked = false;
            group.away = None;
            self.waiting.insert(key, id);
            self.release_tables(id, |_, _| true);
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
        let spoken_for: usize =
            leaving.filter(|g| matches!(g.away, Some(Away::Leaving))).map(|g| self.host_blocks_for(g)).sum();
        (worth || mode == PreemptionMode::Swap) && needed + spoken_for <= self.pool.host_gauges().free
    }

    /// Host blocks for a request once the steps in flight are committed.
    fn host_blocks_for(&self, group: &Group) -> usize {
        let tables = group.seqs.iter().filter_map(|s| Some((s.table.as_ref()?, s.planned)));
        self.pool.host_blocks_needed(tables)
    }

    /// Moves the tables of a request that leaves to host memory.
    fn swap_out(&mut self, key: QueueKey, id: RequestId) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
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
            Ok(swapped) => group.away = Some(Away::Host { indices, swapped }),
            Err(error) => {
                debug_assert!(false, "host blocks were spoken for, yet {error}");
                for (index, table) in indices.into_iter().zip(tables) {
                    group.seqs[index].table = Some(table);
                }
                self.swapped.remove(&key);
                self.send_back(key, id);
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
        let may_go = |id: &RequestId| {
            let group = self.groups.get(id);
            group.is_some_and(|g| matches!(g.away, Some(Away::Leaving)) && !g.is_in_flight(oldest))
        };
        let gone: Vec<(QueueKey, RequestId)> =
            self.swapped.iter().filter(|(_, id)| may_go(id)).map(|(key, id)| (*key, *id)).collect();
        for (key, id) in gone {
            self.swap_out(key, id);
        }
    }

    /// Blocks that can be had once the steps in flight are committed, beyond those that can be now.
    pub(crate) fn num_parked_blocks(&self) -> usize {
        let leaving = self.swapped.values().filter_map(|id| self.groups.get(id)).flat_map(Group::tables);
        let tables = self.parked.iter().map(|p| &p.table).chain(leaving);
        let groups = tables.flat_map(BlockTable::groups);
        let mut blocks: Vec<_> = groups.flat_map(|g| g.blocks()).copied().collect();
        blocks.sort_unstable();
        blocks.chunk_by(|a, b| a == b).filter(|owners| owners.len() == self.pool.references(owners[0]) as usize).count()
    }
}

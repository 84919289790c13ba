//! Failed steps. Nothing of a failed step is committed, and nothing that it wrote can enter the prefix cache.
//!
//! A step fails if one of its copies or its forward pass fails. Its memory operations may not have been executed, so
//! every block that they should have written is invalid. Every request that has a span in the step, or that holds such
//! a block, discards its keys and values, waits again at its position by arrival, and is computed again. Draws depend
//! only on a sequence and its tokens, so the outputs do not change.
//!
//! A step that was planned behind a failed one has read what that one should have written. It can only fail too.

use kvblock::MemOp;

use crate::live_request::{LiveRequest, Phase};
use crate::{CommitError, RequestId, Scheduler, StepId};

impl Scheduler {
    /// Discards the oldest step in flight, or a plan without spans, because it failed. Its memory operations,
    /// `operations`, may not have been executed. The device must no longer access the step's blocks.
    ///
    /// The requests of the step wait again and are computed again. [Abort](Scheduler::abort) those that should end
    /// instead, before or after this call. While a step that was planned behind this one, or behind this plan without spans,
    /// is in flight, nothing can be planned, and that step can only fail. An error changes nothing.
    pub fn fail(&mut self, step: StepId, operations: &[MemOp]) -> Result<(), CommitError> {
        let in_flight = self.oldest_in_flight();
        let is_behind = self.in_flight.iter().skip(1).any(|other| other.step == step);
        if is_behind || step > self.last_step {
            return Err(CommitError::NotInFlight { step, in_flight });
        }
        let failed = (in_flight == Some(step)).then(|| self.in_flight.pop_front()).flatten();
        let behind = self.in_flight.iter_mut().filter(|other| other.step > step);
        behind.for_each(|other| other.is_behind_failure = true);
        let Some(failed) = failed else {
            self.invalidate_destinations(operations);
            return Ok(());
        };
        let mut requests: Vec<RequestId> = Vec::with_capacity(failed.spans.len());
        for span in &failed.spans {
            let id = span.seq.request;
            if let Some(live) = self.requests.get_mut(&id).filter(|live| live.arrival == span.arrival) {
                for index in span.sample.clone() {
                    live.seqs[index as usize].num_output_placeholders -= 1;
                }
                requests.push(id);
            }
        }
        requests.dedup();
        for id in requests {
            if self.requests.get(&id).is_some_and(|live| !matches!(live.phase, Phase::Waiting)) {
                self.recompute(id);
            }
        }
        self.invalidate_destinations(operations);
        self.invalidate_destinations(&failed.later_memory_ops);
        self.finish_step(step);
        Ok(())
    }

    /// Keeps the destinations of these operations out of the prefix cache. Requests that hold one are computed again.
    fn invalidate_destinations(&mut self, operations: &[MemOp]) {
        // An error means that the pool has no such block, so no table holds it either.
        for block in operations.iter().filter_map(MemOp::destination) {
            let _ = self.pool.forget_contents(block);
        }
        for block in operations.iter().filter_map(MemOp::host_destination) {
            let _ = self.pool.forget_host_contents(block);
        }
        let is_affected = |live: &LiveRequest| match &live.phase {
            Phase::Swapped { swapped, .. } => self.pool.holds_invalid_on_host(swapped),
            Phase::Waiting | Phase::Running { .. } | Phase::SwappingOut { .. } => {
                live.tables().any(|table| self.pool.holds_invalid(table))
            }
        };
        let affected = self.requests.iter().filter(|(_, live)| is_affected(live)).map(|(id, _)| *id);
        let mut affected: Vec<RequestId> = affected.collect();
        // A hash map has no order, and equal histories must give equal plans.
        affected.sort_unstable();
        for id in affected {
            self.recompute(id);
        }
    }
}

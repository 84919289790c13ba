//! Steps that fail: nothing of them is committed, and nothing that they touched can enter the prefix cache.
//!
//! A step fails when one of its copies or its forward pass does. Whether its memory operations happened is then unknown, so
//! every block that they should have written counts as invalid. Every request that was in the step, or that holds such a
//! block, gives up its keys and values, waits again at the place of its arrival, and is computed anew. Draws depend only on
//! a sequence and its tokens, so it draws what it would have drawn.
//!
//! A step that was planned behind a failed one read what that one should have written. It can only fail as well.

use kvblock::{BlockTable, MemOp};

use crate::group::{Group, Phase};
use crate::{CommitError, RequestId, Scheduler, StepId};

impl Scheduler {
    /// Gives up the oldest step in flight, or a plan without spans: none of its results will come, and its memory
    /// operations, which are `operations`, may not have happened. The device must have let go of its blocks.
    ///
    /// The requests of the step wait again and are computed anew; [abort](Scheduler::abort) those that should end instead,
    /// before or after this call. While a step is in flight that was planned behind this one, nothing can be planned, and
    /// that step cannot be committed: it has to fail too. An error changes nothing.
    pub fn fail(&mut self, step: StepId, operations: &[MemOp]) -> Result<(), CommitError> {
        let in_flight = self.oldest_in_flight();
        let is_behind = self.flights.iter().skip(1).any(|flight| flight.step == step);
        if is_behind || step > self.last_step {
            return Err(CommitError::NotInFlight { step, in_flight });
        }
        let Some(flight) = (in_flight == Some(step)).then(|| self.flights.pop_front()).flatten() else {
            self.revoke(operations);
            return Ok(());
        };
        self.flights.iter_mut().for_each(|behind| behind.is_behind_failure = true);
        let mut failed: Vec<RequestId> = Vec::with_capacity(flight.spans.len());
        for span in &flight.spans {
            let id = span.seq.request;
            if let Some(group) = self.groups.get_mut(&id).filter(|g| g.arrival == span.arrival) {
                for index in span.sample.clone() {
                    group.seqs[index as usize].promised -= 1;
                }
                failed.push(id);
            }
        }
        failed.dedup();
        for id in failed {
            if self.groups.get(&id).is_some_and(|group| !matches!(group.phase, Phase::Waiting)) {
                self.begin_again(id);
            }
        }
        self.revoke(operations);
        self.revoke(&flight.behind);
        self.step_is_over(step);
        Ok(())
    }

    /// Makes sure that nothing enters the prefix cache which these operations should have copied. Requests that hold it
    /// are computed anew.
    fn revoke(&mut self, operations: &[MemOp]) {
        let mut blocks: Vec<_> = operations.iter().filter_map(MemOp::destination).collect();
        let mut host: Vec<_> = operations.iter().filter_map(MemOp::host_destination).collect();
        // An error says that the pool has no such block: then nothing was copied to it either.
        blocks.retain(|block| self.pool.forget_contents(*block).is_ok());
        host.retain(|block| self.pool.forget_host_contents(*block).is_ok());
        let holds = |table: &BlockTable| table.groups().iter().flat_map(|g| g.blocks()).any(|b| blocks.contains(b));
        let concerns = |group: &Group| match &group.phase {
            Phase::Swapped { swapped, .. } => swapped.blocks().iter().any(|b| host.contains(b)),
            Phase::Waiting | Phase::Running { .. } | Phase::Leaving { .. } => group.tables().any(holds),
        };
        let mut concerned: Vec<RequestId> =
            self.groups.iter().filter(|(_, group)| concerns(group)).map(|(id, _)| *id).collect();
        // A hash map has no order of its own, and equal histories must give equal plans.
        concerned.sort_unstable();
        for id in concerned {
            self.begin_again(id);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::{Outcome, Request, RequestId, SchedConfig, Scheduler, SeqId, StepPlan};

    const A: SeqId = SeqId { request: RequestId(0), index: 0 };
    const B: SeqId = SeqId { request: RequestId(1), index: 0 };

    fn submit(s: &mut Scheduler, seq: SeqId, prompt: usize) {
        s.submit(Request::new(seq.request, vec![seq.request.0 as u32; prompt], 8)).unwrap();
    }

    /// Plans and hands over a step.
    fn launch(s: &mut Scheduler) -> StepPlan {
        let plan = s.plan();
        s.submitted(plan.step).unwrap();
        plan
    }

    #[test]
    fn what_a_failed_step_computed_is_computed_again_and_is_in_no_cache() {
        let config = SchedConfig { max_num_seqs: 4, max_num_batched_tokens: 64, ..SchedConfig::new(40, 4) };
        let mut s = Scheduler::new(SchedConfig { max_in_flight: 2, ..config }).unwrap();
        submit(&mut s, A, 9);
        let first = launch(&mut s);
        submit(&mut s, B, 21);
        let second = launch(&mut s);
        assert_eq!(second.spans.iter().map(|span| span.tokens.len()).collect::<Vec<_>>(), [1, 21]);

        // The first fails; the second read the token that it never drew.
        assert!(s.fail(second.step, &second.memory).is_err(), "there is an older one");
        s.abort(A.request);
        s.fail(first.step, &first.memory).unwrap();
        s.fail(second.step, &second.memory).unwrap();
        s.audit().unwrap();
        let stats = s.stats();
        assert_eq!((stats.num_running, stats.num_waiting, stats.blocks_in_use, stats.blocks_cached), (0, 1, 0, 0));

        // B begins again with all of its prompt, and goes on to its end.
        let plan = launch(&mut s);
        assert_eq!((plan.released, plan.spans[0].seq, plan.spans[0].tokens.len()), (vec![A, B], B, 21));
        s.commit(plan.step, &[Outcome::token(B, 5, false)]).unwrap();
        for token in 0..7 {
            let plan = launch(&mut s);
            s.commit(plan.step, &[Outcome::token(B, token, false)]).unwrap();
        }
        assert!(!s.has_work());
        s.audit().unwrap();
    }
}

//! A step that is given up after it was planned: one that was launched behind another which failed, and read what that
//! should have written.
//!
//! Nothing of it is committed. Who was in it waits again, at the place of its arrival, and computes anew what it knows;
//! since draws depend on nothing but a sequence and its tokens, it draws what it would have drawn.

use kvblock::MemOp;

use crate::{CommitError, RequestId, Scheduler, StepId};

impl Scheduler {
    /// Gives up the oldest step in flight: none of its results will come, and `operations`, those of its plan, are
    /// [revoked](Scheduler::revoke). The device must have let go of its blocks.
    pub fn lose(&mut self, step: StepId, operations: &[MemOp]) -> Result<(), CommitError> {
        let in_flight = self.oldest_in_flight();
        if in_flight != Some(step) {
            return Err(CommitError::NotInFlight { step, in_flight });
        }
        let Some(flight) = self.flights.pop_front() else {
            return Ok(());
        };
        let mut lost: Vec<RequestId> = Vec::with_capacity(flight.spans.len());
        for span in &flight.spans {
            let id = span.seq.request;
            if let Some(group) = self.groups.get_mut(&id).filter(|g| g.arrival == span.arrival) {
                for index in span.sample.clone() {
                    group.seqs[index as usize].promised -= 1;
                }
                lost.push(id);
            }
        }
        lost.dedup();
        for id in lost {
            if !self
                .groups
                .get(&id)
                .is_some_and(|group| self.waiting.contains_key(&group.queue_key(self.config.policy)))
            {
                self.begin_again(id);
            }
        }
        self.revoke(operations);
        self.step_is_over(step);
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::{Outcome, Request, RequestId, SchedConfig, Scheduler, SeqId, StepPlan};

    const A: SeqId = SeqId { request: RequestId(0), index: 0 };
    const B: SeqId = SeqId { request: RequestId(1), index: 0 };

    fn submit(s: &mut Scheduler, seq: SeqId, prompt: usize) {
        s.submit(Request {
            id: seq.request,
            prompt: vec![seq.request.0 as u32; prompt],
            n: 1,
            beam_search: false,
            max_tokens: 8,
            priority: 0,
            cache_salt: None,
            read_prefix_cache: true,
        })
        .unwrap();
    }

    /// Plans and hands over a step.
    fn launch(s: &mut Scheduler) -> StepPlan {
        let plan = s.plan();
        s.submitted(plan.step).unwrap();
        plan
    }

    #[test]
    fn what_a_lost_step_computed_is_computed_again_and_is_in_no_cache() {
        let config = SchedConfig { max_num_seqs: 4, max_num_batched_tokens: 64, ..SchedConfig::new(40, 4) };
        let mut s = Scheduler::new(SchedConfig { max_in_flight: 2, ..config }).unwrap();
        submit(&mut s, A, 9);
        let first = launch(&mut s);
        submit(&mut s, B, 21);
        let second = launch(&mut s);
        assert_eq!(second.spans.iter().map(|span| span.tokens.len()).collect::<Vec<_>>(), [1, 21]);

        // The first fails; the second read the token that it never drew.
        assert!(s.lose(second.step, &second.memory).is_err(), "there is an older one");
        s.abort(A.request);
        s.revoke(&first.memory);
        s.commit(first.step, &[]).unwrap();
        s.lose(second.step, &second.memory).unwrap();
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

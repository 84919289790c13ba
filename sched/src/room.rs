//! Spans for the running requests, and blocks for the spans.
//!
//! In numbers only, so that nothing that is planned is ever taken back: every decode gets its token, then
//! prefills share what is left of the budget, best standing first, then drafts are verified with what that
//! leaves. `max_num_batched_tokens > max_num_seqs` leaves at least one token for prefills. Then count the blocks
//! that all chosen spans need together; while they can not be had, give up the drafts, then preempt the request
//! of worst standing and choose again.
//!
//! The blocks of a victim that a step in flight writes to come back with that step's commit. Preempting more
//! does not hurry them. So once what is on its way suffices, the plan defers instead: it keeps the spans that
//! need no block, and the others from the best standing down to the first that does not fit.

use crate::group::{Group, Standing};
use crate::step::Choice;
use crate::{RequestId, Scheduler};

/// What the running requests compute in a step.
pub(crate) struct Room {
    pub choices: Vec<Choice>,
    /// Tokens that they leave of the budget.
    pub budget: usize,
    /// Something was left out for want of blocks.
    pub deferred: bool,
}

impl Scheduler {
    /// Chooses, and preempts until the blocks for the choice can be had or are on their way. Ends, because the
    /// request of best standing fits alone.
    pub(crate) fn make_room(&mut self, preempted: &mut Vec<RequestId>) -> Room {
        let mut verify = true;
        loop {
            let list = std::mem::take(&mut self.spare.choices);
            let (choices, budget) = self.choose(verify, list);
            let needed = self.blocks_for(&choices);
            let available = self.pool.available();
            if needed <= available {
                return Room { choices, budget, deferred: false };
            }
            if choices.iter().any(|c| c.drafts > 0) {
                verify = false;
                continue;
            }
            let parked = self.num_parked_blocks();
            if parked > 0 && needed <= available + parked {
                self.counters.deferrals += 1;
                return Room { choices: self.defer(&choices), budget, deferred: true };
            }
            let Some(victim) = self.victim() else {
                return Room { choices, budget, deferred: false };
            };
            self.preempt(victim);
            preempted.push(victim);
        }
    }

    /// Spans for the running requests, in an empty list, and what they leave of the budget.
    fn choose(&self, verify: bool, mut choices: Vec<Choice>) -> (Vec<Choice>, usize) {
        let mut budget = self.config.max_num_batched_tokens;
        let mut prefills = Vec::new();
        for group in self.running.iter().filter_map(|id| self.groups.get(id)) {
            self.choose_of(group, &mut budget, &mut choices, &mut prefills);
        }
        self.share_out(prefills, &mut budget, &mut choices);
        if verify {
            self.add_drafts(&mut choices, &mut budget);
        }
        (choices, budget)
    }

    /// What one request could compute: single tokens go to `choices` and off the budget, prefills to `prefills`.
    pub(crate) fn choose_of(
        &self,
        group: &Group,
        budget: &mut usize,
        choices: &mut Vec<Choice>,
        prefills: &mut Vec<(Standing, Choice)>,
    ) {
        let request = group.request.id;
        for (index, pending) in group.pending() {
            let choice = Choice { request, index, count: pending, drafts: 0 };
            if pending == 1 {
                choices.push(choice);
                *budget = budget.saturating_sub(1);
            } else {
                prefills.push((group.standing(self.config.policy), choice));
            }
        }
    }

    /// Shares the rest of the budget among prefills, best standing first.
    pub(crate) fn share_out(
        &self,
        mut prefills: Vec<(Standing, Choice)>,
        budget: &mut usize,
        choices: &mut Vec<Choice>,
    ) {
        // Stable, so that the sequences of a request keep their order.
        prefills.sort_by_key(|(standing, _)| *standing);
        for (_, choice) in prefills {
            let count = self.config.chunk(choice.count, *budget);
            if count > 0 {
                choices.push(Choice { count, ..choice });
                *budget -= count;
            }
        }
    }

    /// Lengthens spans of one token by the drafts behind it. Where somebody waits, half of what is left stays for
    /// admissions.
    fn add_drafts(&self, choices: &mut [Choice], budget: &mut usize) {
        let is_queue_empty = self.waiting.is_empty() && self.swapped.is_empty();
        let mut share = if is_queue_empty { *budget } else { *budget / 2 };
        for choice in choices.iter_mut().filter(|c| c.count == 1) {
            let drafts = self.groups.get(&choice.request).map_or(0, |g| g.num_drafts(choice.index)).min(share);
            choice.drafts = drafts;
            choice.count += drafts;
            share -= drafts;
            *budget -= drafts;
        }
    }

    /// The choices that can have their blocks now; the beams of one search all or none. Nobody takes a block past
    /// one of better standing that waits for more, so that one is served as soon as the parked blocks are back.
    fn defer(&self, choices: &[Choice]) -> Vec<Choice> {
        let beams = |a: &Choice, b: &Choice| {
            a.request == b.request && self.groups.get(&a.request).is_some_and(|g| g.request.beam_search)
        };
        let mut units: Vec<(usize, &[Choice])> = choices.chunk_by(beams).enumerate().collect();
        units.sort_by_key(|(_, unit)| self.groups.get(&unit[0].request).map(|g| g.standing(self.config.policy)));
        let mut free = self.pool.available();
        units.retain(|(_, unit)| {
            let needed = self.blocks_for(unit);
            let is_taken = needed <= free;
            free = if is_taken { free - needed } else { 0 };
            is_taken
        });
        units.sort_by_key(|(place, _)| *place);
        units.into_iter().flat_map(|(_, unit)| unit).copied().collect()
    }

    /// Blocks that these spans need together.
    pub(crate) fn blocks_for(&self, choices: &[Choice]) -> usize {
        let append = |choice: &Choice| {
            let sequence = &self.groups.get(&choice.request)?.seqs[choice.index];
            let table = sequence.table.as_ref()?;
            Some((table, (sequence.planned + choice.count).saturating_sub(table.len())))
        };
        self.pool.blocks_needed(choices.iter().filter_map(append))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::{Outcome, Request, RequestId, SchedConfig, Scheduler, SeqId};

    #[test]
    fn nobody_takes_a_block_past_one_of_better_standing_that_waits_for_more() {
        let config = SchedConfig { enable_prefix_caching: false, max_num_seqs: 8, ..SchedConfig::new(3, 4) };
        let mut s = Scheduler::new(config).unwrap();
        // Two beams of a prompt of one block, and another prompt of one block; one block is free.
        for (id, n, beam_search) in [(0, 2, true), (1, 1, false)] {
            let (id, prompt, cache_salt) = (RequestId(id), vec![0; 4], None);
            let request =
                Request { id, prompt, n, beam_search, max_tokens: 5, priority: 0, cache_salt, read_prefix_cache: true };
            s.submit(request).unwrap();
        }
        let plan = s.plan();
        let token = |request, index| Outcome::token(SeqId { request: RequestId(request), index }, 7, false);
        s.commit(plan.step, &[token(0, 0), token(0, 1), token(1, 0)]).unwrap();

        let (choices, _) = s.choose(false, Vec::new());
        assert_eq!((choices.len(), s.blocks_for(&choices), s.pool.available()), (3, 3, 1));
        assert!(s.defer(&choices).is_empty(), "the block is kept for the beams, who came first and need two");
        assert_eq!(s.defer(&choices[2..]).len(), 1);
    }
}

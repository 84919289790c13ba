//! Spans for the running requests, and blocks for the spans.
//!
//! Everything is chosen in numbers first, so that nothing that is planned is ever taken back: every decode gets its token,
//! then prefills share what is left of the budget, best standing first. `max_num_batched_tokens > max_num_seqs` leaves at
//! least one token for prefills. Then count the blocks that all chosen spans need together; while there are too few,
//! preempt the request of worst standing and choose again.
//!
//! Drafts come last, after admissions: they are verified with the tokens and blocks that nobody else needs. While others
//! wait, at most half of the tokens are kept for drafts; and while the head of the queue lacks blocks, drafts take none.
//!
//! The blocks of a victim that a step in flight writes to come back with that step's commit, and so do those behind the
//! windows of what it computes. Preempting more does not hurry them. So once what is on its way suffices, the plan defers
//! instead: it keeps the spans that need no block, and the others from the best standing down to the first that does not fit.

use crate::draft::{Choice, Room};
use crate::group::Group;
use crate::{RequestId, Scheduler};

impl Scheduler {
    /// Chooses, and preempts until the blocks for the choice can be had or are on their way. Ends, because the
    /// request of best standing fits alone.
    pub(crate) fn make_room(&mut self, preempted: &mut Vec<RequestId>) -> Room {
        loop {
            let list = std::mem::take(&mut self.spare.choices);
            let (mut choices, mut budget) = self.choose(list);
            let mut needed = self.blocks_for(&choices);
            let available = self.pool.available();
            let coming = if needed > available { self.num_coming_blocks() } else { 0 };
            if self.running.len() == 1 && needed > available + coming {
                self.shorten(&mut choices, &mut budget);
                needed = self.blocks_for(&choices);
            }
            if needed <= available {
                return Room { choices, budget, deferred: false };
            }
            if coming > 0 && needed <= available + coming {
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
    fn choose(&self, mut choices: Vec<Choice>) -> (Vec<Choice>, usize) {
        let mut budget = self.config.max_num_batched_tokens;
        let mut prefills = Vec::new();
        for group in self.running_groups() {
            self.choose_of(group, &mut budget, &mut choices, &mut prefills);
        }
        self.share_out(prefills, &mut budget, &mut choices);
        (choices, budget)
    }

    /// What one request could compute: single tokens go to `choices` and off the budget, prefills to `prefills`.
    pub(crate) fn choose_of(
        &self,
        group: &Group,
        budget: &mut usize,
        choices: &mut Vec<Choice>,
        prefills: &mut Vec<Choice>,
    ) {
        let request = group.request.id;
        for (index, pending) in group.pending() {
            let choice = Choice { request, index, count: pending, drafts: 0 };
            if pending == 1 {
                choices.push(choice);
                *budget = budget.saturating_sub(1);
            } else {
                prefills.push(choice);
            }
        }
    }

    /// Ends each span where its sequence's next block does. With no longer ones a request fits alone: when it was taken, each
    /// of its sequences was counted with no more of a window's group than what the window touches and the next block.
    pub(crate) fn shorten(&self, choices: &mut [Choice], budget: &mut usize) {
        let block_size = self.config.block_size;
        for choice in choices {
            let planned = self.groups.get(&choice.request).map_or(0, |group| group.seqs[choice.index].planned);
            let count = choice.count.min(block_size - planned % block_size);
            *budget += choice.count - count;
            choice.count = count;
        }
    }

    /// Shares the rest of the budget among prefills, best standing first.
    pub(crate) fn share_out(&self, mut prefills: Vec<Choice>, budget: &mut usize, choices: &mut Vec<Choice>) {
        self.sort_by_standing(&mut prefills, |choice| choice);
        for choice in prefills {
            let count = self.config.chunk(choice.count, *budget);
            if count > 0 {
                choices.push(Choice { count, ..choice });
                *budget -= count;
            }
        }
    }

    /// Tokens of the budget to keep for drafts while others are admitted.
    pub(crate) fn tokens_for_drafts(&self, choices: &[Choice], budget: usize) -> usize {
        let is_queue_empty = self.waiting.is_empty() && self.swapped.is_empty();
        let most = if is_queue_empty { budget } else { budget / 2 };
        choices.iter().map(|choice| self.num_drafts(choice)).sum::<usize>().min(most)
    }

    /// Lengthens spans of one token by the drafts behind it, with the tokens and blocks that are left.
    pub(crate) fn add_drafts(&self, choices: &mut [Choice], mut budget: usize) {
        let (block_size, groups) = (self.config.block_size, self.config.groups.len());
        let mut free = if self.is_head_blocked() {
            0
        } else {
            self.pool.available().saturating_sub(self.blocks_for(choices)) / groups
        };
        for choice in choices {
            let Some(sequence) = self.groups.get(&choice.request).map(|group| &group.seqs[choice.index]) else {
                continue;
            };
            let slots = sequence.table.as_ref().map_or(0, kvblock::BlockTable::len).max(sequence.planned + 1);
            let entries = slots.div_ceil(block_size);
            let room = (entries + free) * block_size - (sequence.planned + 1);
            let drafts = self.num_drafts(choice).min(budget).min(room);
            free -= (sequence.planned + 1 + drafts).div_ceil(block_size).saturating_sub(entries);
            budget -= drafts;
            choice.drafts = drafts;
            choice.count += drafts;
        }
    }

    /// Drafts that could be verified behind a choice.
    fn num_drafts(&self, choice: &Choice) -> usize {
        let group = self.groups.get(&choice.request).filter(|_| choice.count == 1);
        group.map_or(0, |group| group.num_drafts(choice.index))
    }

    /// The choices that can have their blocks now; the beams of one search all or none. Nobody takes a block past
    /// one of better standing that waits for more, so that one is served as soon as the parked blocks are back.
    fn defer(&self, choices: &[Choice]) -> Vec<Choice> {
        let beams = |a: &Choice, b: &Choice| {
            a.request == b.request && self.groups.get(&a.request).is_some_and(|g| g.request.beam_search)
        };
        let mut units: Vec<(usize, &[Choice])> = choices.chunk_by(beams).enumerate().collect();
        self.sort_by_standing(&mut units, |(_, unit)| &unit[0]);
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
            s.submit(Request { n, beam_search, ..Request::new(RequestId(id), vec![0; 4], 5) }).unwrap();
        }
        let plan = s.plan();
        let token = |request, index| Outcome::token(SeqId { request: RequestId(request), index }, 7, false);
        s.commit(plan.step, &[token(0, 0), token(0, 1), token(1, 0)]).unwrap();

        let (choices, _) = s.choose(Vec::new());
        assert_eq!((choices.len(), s.blocks_for(&choices), s.pool.available()), (3, 3, 1));
        assert!(s.defer(&choices).is_empty(), "the block is kept for the beams, who came first and need two");
        assert_eq!(s.defer(&choices[2..]).len(), 1);
    }
}

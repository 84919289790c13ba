//! Spans for the running requests, and blocks for the spans.
//!
//! In numbers only, so that nothing that is planned is ever taken back: every decode gets its token, then
//! prefills share what is left of the budget, best standing first. `max_num_batched_tokens > max_num_seqs`
//! leaves at least one token for them. Then count the blocks that all chosen spans need together; while they
//! can not be had, preempt the request of worst standing and choose again.
//!
//! The blocks of a victim that a step in flight writes to come back with that step's commit. Preempting more
//! does not hurry them. So once what is on its way suffices, the plan defers instead: it keeps the spans that
//! need no block, and the others from the best standing down to the first that does not fit.

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
        loop {
            let (choices, budget) = self.choose();
            let needed = self.pool.blocks_needed(choices.iter().filter_map(|c| self.append_of(c)));
            let available = self.pool.available();
            if needed <= available {
                return Room { choices, budget, deferred: false };
            }
            if !self.parked.is_empty() && needed <= available + self.num_parked_blocks() {
                self.counters.deferrals += 1;
                return Room { choices: self.defer(choices), budget, deferred: true };
            }
            let worst =
                self.running.iter().max_by_key(|id| self.groups.get(id).map(|g| g.standing(self.config.policy)));
            let Some(&victim) = worst else {
                return Room { choices, budget, deferred: false };
            };
            self.preempt(victim);
            preempted.push(victim);
        }
    }

    /// Spans for the running requests, and what they leave of the budget.
    fn choose(&self) -> (Vec<Choice>, usize) {
        let mut budget = self.config.max_num_batched_tokens;
        let mut choices = Vec::with_capacity(self.running.len());
        let mut prefills = Vec::new();
        for &request in &self.running {
            let Some(group) = self.groups.get(&request) else {
                continue;
            };
            for (index, pending) in group.pending() {
                if pending == 1 {
                    choices.push(Choice { request, index, count: 1 });
                    budget = budget.saturating_sub(1);
                } else {
                    let choice = Choice { request, index, count: pending };
                    prefills.push((group.standing(self.config.policy), choice));
                }
            }
        }
        // Stable, so that the sequences of a request keep their order.
        prefills.sort_by_key(|(standing, _)| *standing);
        for (_, choice) in prefills {
            let count = self.config.chunk(choice.count, budget);
            if count > 0 {
                choices.push(Choice { count, ..choice });
                budget -= count;
            }
        }
        (choices, budget)
    }

    /// The choices that can have their blocks now. Nobody takes a block past one of better standing that
    /// waits for more, so that one is served as soon as the parked blocks are back.
    fn defer(&self, choices: Vec<Choice>) -> Vec<Choice> {
        let mut order: Vec<usize> = (0..choices.len()).collect();
        order.sort_by_key(|&at| self.groups.get(&choices[at].request).map(|g| g.standing(self.config.policy)));
        let mut free = self.pool.available();
        let mut is_taken = vec![false; choices.len()];
        for at in order {
            let needed = self.pool.blocks_needed(self.append_of(&choices[at]));
            is_taken[at] = needed <= free;
            free = if is_taken[at] { free - needed } else { 0 };
        }
        choices.into_iter().zip(is_taken).filter_map(|(choice, taken)| taken.then_some(choice)).collect()
    }

    /// The tokens that a choice appends to its table.
    fn append_of(&self, choice: &Choice) -> Option<(&kvblock::BlockTable, usize)> {
        let sequence = &self.groups.get(&choice.request)?.seqs[choice.index];
        let table = sequence.table.as_ref()?;
        Some((table, (sequence.planned + choice.count).saturating_sub(table.len())))
    }

    /// Takes all of a running request's blocks and puts it back in the queue, at the place of its arrival.
    /// Its outputs stay, and so do those that steps in flight will draw.
    fn preempt(&mut self, id: RequestId) {
        self.running.retain(|r| *r != id);
        let policy = self.config.policy;
        let best = self.running.iter().filter_map(|r| self.groups.get(r)).map(|g| g.priority(policy)).min();
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        self.counters.preemptions += 1;
        self.counters.preemptions_by_priority += u64::from(best.is_some_and(|best| best < group.priority(policy)));
        self.counters.tokens_lost += group.work() as u64;
        group.forked = false;
        group.preemptions += 1;
        self.waiting.insert(group.queue_key(policy), id);
        self.release_tables(id, |_| true);
    }
}

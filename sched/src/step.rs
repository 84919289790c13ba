//! One plan: choose, make room, apply, admit.
//!
//! 1. *Choose* spans for the running requests, in numbers only: every decode gets its token, then prefills
//!    share what is left of the budget, best standing first. `max_num_batched_tokens > max_num_seqs` leaves
//!    at least one token for them.
//! 2. *Make room*: count the blocks that all chosen spans need together; while they can not be had, preempt
//!    the request of worst standing and choose again. So nothing that is planned is ever taken back.
//! 3. *Apply* the choice to the tables.
//! 4. *Admit* from the head of the waiting queue, never past it, while budget, sequences and blocks last. A
//!    step that preempted admits nothing.
//!
//! Cost: O(running sequences). A head of the queue that did not fit is not looked up again until something
//! has changed.

use kvblock::Prompt;

use crate::commit::{Flight, InFlight};
use crate::group::Group;
use crate::plan::{Span, TableDelta};
use crate::{RequestId, Scheduler, StepId, StepPlan};

/// The head of the queue that could not be admitted, and when.
pub(crate) struct Blocked {
    head: RequestId,
    changes: u64,
    budget: usize,
}

/// Tokens to compute for one running sequence.
#[derive(Clone, Copy)]
struct Choice {
    request: RequestId,
    index: usize,
    count: usize,
}

impl Scheduler {
    /// Plans the next step. The plan may be empty.
    ///
    /// While a planned step that has spans is not committed, its outcome is unknown and nothing can be
    /// planned: the result is an empty plan under that step's id. An empty plan needs no commit.
    pub fn plan(&mut self) -> StepPlan {
        if let Some(flight) = &self.flight {
            return StepPlan::empty(flight.step);
        }
        self.last_step = StepId(self.last_step.0 + 1);
        let mut plan = StepPlan::empty(self.last_step);
        let (choices, mut budget) = self.make_room(&mut plan.preempted);
        for choice in choices {
            self.push_span(&mut plan, choice, 0);
        }
        if plan.preempted.is_empty() {
            self.admit(&mut plan, &mut budget);
        }
        plan.memory = self.pool.drain_memory_ops().map(Into::into).collect();
        plan.released = std::mem::take(&mut self.released);
        if !plan.spans.is_empty() {
            self.counters.steps += 1;
            self.flight = Some(Flight { step: plan.step, spans: self.in_flight(&plan) });
        }
        plan
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
            let count = choice.count.min(budget);
            if count > 0 {
                choices.push(Choice { count, ..choice });
                budget -= count;
            }
        }
        (choices, budget)
    }

    /// Chooses, and preempts until the blocks for the choice can be had. Ends, because the request of best
    /// standing fits alone.
    fn make_room(&mut self, preempted: &mut Vec<RequestId>) -> (Vec<Choice>, usize) {
        loop {
            let (choices, budget) = self.choose();
            let appends = choices.iter().filter_map(|c| {
                let table = self.groups.get(&c.request)?.seqs[c.index].table.as_ref()?;
                Some((table, (table.committed() + c.count).saturating_sub(table.len())))
            });
            if self.pool.blocks_needed(appends) <= self.pool.available() {
                return (choices, budget);
            }
            let worst =
                self.running.iter().max_by_key(|id| self.groups.get(id).map(|g| g.standing(self.config.policy)));
            let Some(&victim) = worst else {
                return (choices, budget);
            };
            self.preempt(victim);
            preempted.push(victim);
        }
    }

    /// Takes all of a running request's blocks and puts it back in the queue, at the place of its arrival.
    /// Its outputs stay.
    fn preempt(&mut self, id: RequestId) {
        self.running.retain(|r| *r != id);
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        self.counters.preemptions += 1;
        self.counters.tokens_lost += group.work() as u64;
        group.forked = false;
        group.resumed = true;
        self.waiting.insert(group.queue_key(self.config.policy), id);
        self.release_tables(id, |_| true);
    }

    fn admit(&mut self, plan: &mut StepPlan, budget: &mut usize) {
        let mut live: usize = self.running.iter().filter_map(|id| self.groups.get(id)).map(Group::num_live).sum();
        while *budget > 0
            && let Some((&key, &id)) = self.waiting.first_key_value()
            && let Some(group) = self.groups.get_mut(&id)
        {
            live += group.num_live();
            if live > self.config.max_num_seqs {
                return;
            }
            // With nothing running there is room, as each request fits alone; and that is a change since others ran.
            let alone = self.running.is_empty();
            let unchanged = |b: &Blocked| b.head == id && b.changes == self.changes && b.budget >= *budget;
            if self.blocked.as_ref().is_some_and(unchanged) {
                return;
            }
            let tokens = group.prefill_tokens();
            let prompt = Prompt {
                tokens: &tokens,
                salt: group.request.cache_salt.as_deref(),
                read_cache: group.request.read_prefix_cache,
            };
            let admission = self.pool.admit(prompt);
            let cached = admission.cached_tokens();
            let pending = tokens.len() - cached;
            let whole = self.config.enable_chunked_prefill || pending <= *budget;
            let keep_free = if alone { 0 } else { self.config.watermark() };
            let Some(table) = whole.then(|| admission.open(keep_free).ok()).flatten() else {
                self.blocked = Some(Blocked { head: id, changes: self.changes, budget: *budget });
                return;
            };
            let queried = if self.config.enable_prefix_caching { tokens.len() as u64 } else { 0 };
            if group.resumed {
                self.counters.resumed_prefix_queries += queried;
                self.counters.resumed_prefix_hits += cached as u64;
            } else {
                self.counters.prompt_tokens += tokens.len() as u64;
                self.counters.prefix_queries += queried;
                self.counters.prefix_hits += cached as u64;
            }
            group.cached = cached;
            group.seqs[0].table = Some(table);
            self.waiting.remove(&key);
            self.running.push(id);
            let count = pending.min(*budget);
            *budget -= count;
            self.push_span(plan, Choice { request: id, index: 0, count }, cached);
        }
    }

    /// Gives the chosen tokens their slots and writes the span.
    fn push_span(&mut self, plan: &mut StepPlan, choice: Choice, cached: usize) {
        let Choice { request, index, count } = choice;
        let Some(group) = self.groups.get_mut(&request) else {
            return;
        };
        let Some(mut table) = group.seqs[index].table.take() else {
            return;
        };
        let (start, end, len) = (table.committed(), table.committed() + count, table.len());
        let mut keep = group.seqs[index].sent;
        if end > len {
            match self.pool.append(&mut table, &group.tokens(index, len..end)) {
                Ok(first_changed) => keep = keep.min(first_changed),
                Err(no_space) => {
                    debug_assert!(false, "room was made, yet {no_space}");
                    group.seqs[index].table = Some(table);
                    return;
                }
            }
        }
        let append = table.blocks()[keep..].to_vec();
        group.seqs[index].sent = table.blocks().len();
        plan.spans.push(Span {
            seq: group.seq_id(index),
            start,
            tokens: table.tokens()[start..end].to_vec(),
            table: TableDelta { keep, append },
            slots: table.slots(start..end).collect(),
            cached,
            sample: group.sample(index, end),
        });
        let prompt = group.request.prompt.len();
        self.counters.prompt_tokens_computed += (end.min(prompt) - start.min(prompt)) as u64;
        group.seqs[index].table = Some(table);
    }

    /// What the commit has to know of the plan.
    fn in_flight(&self, plan: &StepPlan) -> Vec<InFlight> {
        let arrival = |id| self.groups.get(&id).map_or(u64::MAX, |g| g.arrival);
        plan.spans
            .iter()
            .map(|s| InFlight {
                seq: s.seq,
                arrival: arrival(s.seq.request),
                end: s.start + s.tokens.len(),
                sample: s.sample.clone(),
            })
            .collect()
    }
}

//! Admission: from the head of the waiting queue, never past it, while budget, sequences and blocks last.

use kvblock::Prompt;

use crate::group::Group;
use crate::step::{Choice, Draft};
use crate::{RequestId, Scheduler};

/// The head of the queue that could not be admitted, and when.
pub(crate) struct Blocked {
    head: RequestId,
    changes: u64,
    budget: usize,
}

impl Scheduler {
    /// Admits what it can, and plans the first span of each.
    pub(crate) fn admit(&mut self, draft: &mut Draft, budget: &mut usize) {
        let running = || self.running.iter().filter_map(|id| self.groups.get(id));
        let mut live: usize = running().map(Group::num_live).sum();
        let mut partial = running().filter(|g| g.is_partial()).count();
        let oldest = self.oldest_in_flight();
        while *budget > 0
            && let Some((&key, &id)) = self.waiting.first_key_value()
            && let Some(group) = self.groups.get_mut(&id)
        {
            live += group.num_live();
            // Preempted from a step in flight, whose tokens it has to know before it computes them again.
            let is_late = group.seqs.iter().any(|s| s.is_in_flight(oldest));
            if live > self.config.max_num_seqs || is_late {
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
            let count = self.config.chunk(pending, *budget);
            let may_split = self.config.enable_chunked_prefill && partial < self.config.max_num_partial_prefills;
            let keep_free = if alone { 0 } else { self.config.watermark() };
            let opened = (count == pending || may_split).then(|| admission.open(keep_free).ok());
            let Some(table) = opened.flatten() else {
                self.blocked = Some(Blocked { head: id, changes: self.changes, budget: *budget });
                return;
            };
            let queried = if self.config.enable_prefix_caching { tokens.len() as u64 } else { 0 };
            if group.preemptions > 0 {
                self.counters.resumed_prefix_queries += queried;
                self.counters.resumed_prefix_hits += cached as u64;
            } else {
                self.counters.prompt_tokens += tokens.len() as u64;
                self.counters.prefix_queries += queried;
                self.counters.prefix_hits += cached as u64;
            }
            group.cached = cached;
            group.seqs[0].planned = cached;
            group.seqs[0].table = Some(table);
            self.waiting.remove(&key);
            self.running.push(id);
            *budget -= count;
            self.push_span(draft, Choice { request: id, index: 0, count }, cached);
            partial += usize::from(self.groups.get(&id).is_some_and(Group::is_partial));
        }
    }
}

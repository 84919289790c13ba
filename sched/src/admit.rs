//! Admission: from the head of the queue, never past it, while tokens, sequences and blocks are left. Within a priority,
//! requests that come back from host memory go before those that wait.
//!
//! A request takes blocks for its first span alone. The blocks that the rest of its prompt will take are counted, not
//! taken: nobody else is admitted into them. In a group with a window that is no more than the window and the chunks in
//! flight, however long the prompt.

use kvblock::{BlockTable, CacheGroup, Prompt, PromptHashes};

use crate::draft::{Choice, Draft};
use crate::group::{Group, Phase, Stage};
use crate::scheduler::Blocked;
use crate::{RequestId, SchedConfig, Scheduler};

/// What an admission may take.
struct Limits {
    /// Tokens of the step.
    budget: usize,
    /// Blocks that must stay free: for spans of running requests that are not made yet, for the prompts that are computed
    /// in part, and a reserve.
    keep_free: usize,
    /// Of these, those for the spans.
    for_spans: usize,
    /// Whether one more prompt may be computed in part.
    may_split: bool,
}

impl Scheduler {
    /// Admits what it can, and plans the first spans of each. `for_spans` blocks are for spans of running requests that are
    /// not made yet.
    pub(crate) fn admit(&mut self, draft: &mut Draft, budget: &mut usize, for_spans: usize) {
        let mut seqs: usize = self.running_groups().map(Group::num_running_seqs).sum();
        let mut for_prompts: usize = self.running_groups().map(|g| self.blocks_ahead(g)).sum();
        let mut partial = self.running_groups().filter(|g| g.is_partial()).count();
        let oldest = self.oldest_in_flight();
        while *budget > 0
            && let Some((_, id)) = self.head_of_queue()
            && let Some(group) = self.groups.get(&id)
        {
            seqs += group.num_running_seqs();
            // Preempted from a step in flight, whose tokens it has to know before it computes them again.
            if seqs > self.config.max_num_seqs || group.is_in_flight(oldest) {
                return;
            }
            // With nothing running there is room, as each request fits alone; and that is a change since others ran.
            let alone = self.running.is_empty();
            let unchanged = |b: &Blocked| b.head == id && b.wakeups == self.wakeups() && b.budget >= *budget;
            if self.blocked.as_ref().is_some_and(unchanged) {
                return;
            }
            let limits = Limits {
                budget: *budget,
                keep_free: for_spans + if alone { 0 } else { for_prompts + self.config.watermark() },
                for_spans,
                may_split: self.config.enable_chunked_prefill && partial < self.config.max_num_partial_prefills,
            };
            let is_away = !matches!(group.phase, Phase::Waiting);
            let admitted = if is_away { self.bring_back(id, &limits, alone) } else { self.open(id, &limits, alone) };
            let Some(choices) = admitted else {
                self.blocked = Some(Blocked { head: id, wakeups: self.wakeups(), budget: *budget });
                return;
            };
            let cached = self.groups.get(&id).map_or(0, |g| if is_away { 0 } else { g.cached });
            for choice in choices {
                *budget -= choice.count;
                self.push_span(draft, choice, cached);
            }
            let group = self.groups.get(&id);
            partial += usize::from(group.is_some_and(Group::is_partial));
            for_prompts += group.map_or(0, |g| self.blocks_ahead(g));
        }
    }

    /// Whether the request that is next to be admitted could not be, when it was tried last.
    pub(crate) fn is_head_blocked(&self) -> bool {
        let head = self.head_of_queue();
        self.blocked.as_ref().is_some_and(|blocked| head.is_some_and(|(_, id)| id == blocked.head))
    }

    /// Opens the table of a request that waits, on the prefix of it that is cached, and says what it computes first; `None` if
    /// there is no room. Alone there is room, though it might not be for all that the step could compute.
    fn open(&mut self, id: RequestId, limits: &Limits, alone: bool) -> Option<Vec<Choice>> {
        let group = self.groups.get_mut(&id)?;
        let hashes = group.hashes.take();
        let tokens = group.prefill_tokens();
        let prompt = Prompt {
            salt: group.request.cache_salt.as_deref(),
            adapter: group.request.adapter.as_deref(),
            media: &group.request.media,
            read_cache: group.request.read_prefix_cache,
            ..Prompt::new(&tokens)
        };
        // A request that waits is hashed once, however often it is looked up.
        let hash = || if prompt.read_cache { self.pool.hash_prompt(prompt) } else { PromptHashes::default() };
        let hashes = hashes.unwrap_or_else(hash);
        let available = self.pool.available();
        let admission = self.pool.admit(Prompt { hashes: Some(&hashes), ..prompt });
        let (len, cached, config) = (tokens.len(), admission.cached_tokens(), &self.config);
        let mut count = config.chunk(len - cached, limits.budget);
        let mut may_start = cached + count == len || limits.may_split;
        let fits = |count, ahead| {
            admission.blocks_needed() + config.blocks_between(cached, cached + count) + ahead + limits.keep_free
                <= available
        };
        let mut ahead = config.blocks_ahead(cached, cached + count, len);
        if alone && !fits(count, ahead) {
            // What is cached ends with a block.
            let least = if config.enable_chunked_prefill { 0 } else { group.request.prompt.len() };
            let end = least.max(cached + 1).next_multiple_of(config.block_size).min(len);
            count = if fits(count, 0) { count } else { count.min(end - cached) };
            (ahead, may_start) = (0, true);
        }
        let keep_free = config.blocks_between(cached, cached + count) + ahead + limits.keep_free;
        let opened = if may_start { admission.open(keep_free).ok() } else { None };
        let Some(table) = opened else {
            drop(tokens);
            group.hashes = Some(hashes);
            return None;
        };
        let len = len as u64;
        let queried = if config.enable_prefix_caching { len } else { 0 };
        if group.has_run {
            self.counters.resumed_prefix_queries += queried;
            self.counters.resumed_prefix_hits += cached as u64;
        } else {
            self.counters.prompt_tokens += len;
            self.counters.prefix_queries += queried;
            self.counters.prefix_hits += cached as u64;
        }
        drop(tokens);
        group.has_run = true;
        group.cached = cached;
        group.seqs[0].planned = cached;
        group.seqs[0].table = Some(table);
        self.start_running(id, Stage::Prompt);
        Some(vec![Choice { request: id, index: 0, count, drafts: 0 }])
    }

    /// Brings a request back from host memory, if it then has room to go on, and says what it computes first.
    fn bring_back(&mut self, id: RequestId, limits: &Limits, alone: bool) -> Option<Vec<Choice>> {
        let group = self.groups.get_mut(&id)?;
        if group.is_partial() && !limits.may_split {
            return None;
        }
        // Alone there is room, though it might not be for the most that the next spans could need.
        let growth = if alone { 0 } else { self.config.growth(group) };
        let stage = group.stage();
        let Phase::Swapped { indices, swapped, .. } = &mut group.phase else {
            return None;
        };
        let tables: Vec<BlockTable> = self.pool.swap_in(swapped, limits.keep_free + growth).ok()?;
        for (index, table) in std::mem::take(indices).into_iter().zip(tables) {
            group.seqs[index].table = Some(table);
        }
        self.start_running(id, stage);
        // Sequences may have ended meanwhile.
        self.settle(id);
        let group = self.groups.get(&id)?;
        let (mut choices, mut prefills, mut budget) = (Vec::new(), Vec::new(), limits.budget);
        self.choose_of(group, &mut budget, &mut choices, &mut prefills);
        self.share_out(prefills, &mut budget, &mut choices);
        if alone && self.blocks_for(&choices) > self.pool.available() {
            self.shorten(&mut choices, &mut budget);
        }
        let tokens: usize = choices.iter().map(|c| c.count).sum();
        let fits = tokens <= limits.budget && self.blocks_for(&choices) + limits.for_spans <= self.pool.available();
        Some(if fits { choices } else { Vec::new() })
    }
}

impl Scheduler {
    /// Blocks that the rest of a running request's prompt will take.
    fn blocks_ahead(&self, group: &Group) -> usize {
        let first = &group.seqs[0];
        if !group.is_partial() {
            return 0;
        }
        let len = first.table.as_ref().map_or(0, BlockTable::len);
        self.config.blocks_ahead(group.cached, len, group.target(0))
    }
}

impl SchedConfig {
    /// Blocks that the positions behind `from` tokens take up to `to` tokens, in all groups.
    fn blocks_between(&self, from: usize, to: usize) -> usize {
        self.groups.len() * (to.div_ceil(self.block_size) - from.div_ceil(self.block_size))
    }

    /// Blocks that a prompt of `len` tokens will take, of which those before `from` were cached and those before `to` have
    /// blocks: more than it owns then, at most.
    fn blocks_ahead(&self, from: usize, to: usize, len: usize) -> usize {
        let rest = len.div_ceil(self.block_size) - to.div_ceil(self.block_size);
        let ahead = |group: &CacheGroup| match self.peak(*group) {
            None => rest,
            Some(peak) => {
                let owned = to.div_ceil(self.block_size) - group.holes(from, self.block_size);
                rest.min(peak.saturating_sub(owned))
            }
        };
        self.groups.iter().map(ahead).sum()
    }

    /// The most blocks that the next spans of a swapped request take: those for what is known, and a copy of each sequence's
    /// last.
    fn growth(&self, group: &Group) -> usize {
        let Phase::Swapped { indices, .. } = &group.phase else {
            return 0;
        };
        let of = |index: usize| {
            let known = group.target(index).div_ceil(self.block_size);
            let rest = known - group.seqs[index].planned.div_ceil(self.block_size).min(known);
            self.groups.iter().map(|g| rest.min(self.peak(*g).unwrap_or(rest)) + 1).sum::<usize>()
        };
        indices.iter().filter(|&&index| !group.is_forked() || group.seqs[index].live).map(|&index| of(index)).sum()
    }
}

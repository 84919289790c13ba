//! Admission: from the head of the queue, in order, while tokens, sequences, blocks and adapters are left.
//!
//! Up to half of a step's prompt tokens go to admissions, although running prefills have more to compute: the tokens that
//! these spare (`running`). So a prompt starts within as many plans as there are requests before it, however long those are.
//!
//! A request gets blocks only for its first span. The blocks for the rest of its prompt are reserved as a number, which
//! counts against later admissions. In a sliding group that number is at most the window and the chunks in flight,
//! however long the prompt is.

use kvblock::{BlockTable, CacheGroup, Prompt, PromptHashes};

use crate::live_request::{LiveRequest, Phase, Stage};
use crate::scheduler::BlockedHead;
use crate::step_state::{PlanBuilder, ScheduledSpan};
use crate::{RequestId, SchedConfig, Scheduler};

/// The resources of an admission.
struct Limits {
    /// Tokens left in the step, and those that running requests spare.
    tokens: usize,
    /// Blocks that must stay free: for spans of running requests without slots, for partly computed prompts, and the
    /// watermark.
    keep_free: usize,
    /// The part of `keep_free` for the spans.
    for_spans: usize,
}

impl Scheduler {
    /// Admits requests and plans their first spans, with the tokens of `budget` and then those that the spans of running
    /// requests spare. `for_spans` blocks are kept for these, which have no slots yet. Returns the number of tokens to take
    /// from them.
    pub(crate) fn admit(
        &mut self,
        builder: &mut PlanBuilder,
        budget: &mut usize,
        (running, for_spans): (&[ScheduledSpan], usize),
    ) -> usize {
        let (spare_tokens, mut taken) = (self.spare_tokens(running), 0);
        let mut seqs: usize = self.running_requests().map(LiveRequest::num_running_seqs).sum();
        let mut for_prompts: usize = self.running_requests().map(|live| self.blocks_for_rest_of_prompt(live, 0)).sum();
        for span in running {
            if let Some(live) = self.requests.get(&span.request).filter(|live| live.is_partial()) {
                for_prompts += self.blocks_for_rest_of_prompt(live, span.num_tokens);
                for_prompts -= self.blocks_for_rest_of_prompt(live, 0);
            }
        }
        let oldest = self.oldest_in_flight();
        let mut adapters = self.running_adapters();
        while let Some(id) = self.next_to_admit(&adapters)
            && let Some(live) = self.requests.get(&id)
        {
            // Nothing is taken from a better priority.
            let may_take = |(of_span, _): &&(i32, usize)| *of_span >= live.priority(self.config.policy);
            let spare: usize = spare_tokens.iter().filter(may_take).map(|(_, tokens)| tokens).sum();
            let tokens = *budget + spare.saturating_sub(taken);
            seqs += live.num_running_seqs();
            // A request that was preempted from a step in flight needs the tokens of that step first.
            if tokens == 0 || seqs > self.config.max_num_seqs || live.is_in_flight(oldest) {
                break;
            }
            // If nothing runs, the request fits, because each fits alone. Then the last failure no longer holds either.
            let is_alone = self.running.is_empty();
            let unchanged = |b: &BlockedHead| b.id == id && b.wakeups == self.wakeups() && b.tokens >= tokens;
            if self.blocked_head.as_ref().is_some_and(unchanged) {
                break;
            }
            let limits = Limits {
                tokens,
                keep_free: for_spans + if is_alone { 0 } else { for_prompts + self.config.watermark() },
                for_spans,
            };
            let is_swapped = !matches!(live.phase, Phase::Waiting);
            let passed = self.passed_by(id, &adapters);
            let admitted = if is_swapped {
                self.admit_swapped(id, &limits, is_alone)
            } else {
                self.admit_waiting(id, &limits, is_alone)
            };
            let Some(spans) = admitted else {
                self.blocked_head = Some(BlockedHead { id, wakeups: self.wakeups(), tokens });
                break;
            };
            self.count_passed(passed);
            let cached = self.requests.get(&id).map_or(0, |live| if is_swapped { 0 } else { live.num_cached_tokens });
            for span in spans {
                let of_budget = span.num_tokens.min(*budget);
                *budget -= of_budget;
                taken += span.num_tokens - of_budget;
                self.push_span(builder, span, cached);
            }
            let live = self.requests.get(&id);
            adapters.add(live.and_then(|live| live.request.adapter.as_deref()));
            for_prompts += live.map_or(0, |live| self.blocks_for_rest_of_prompt(live, 0));
        }
        taken
    }

    /// Returns whether the last attempt to admit the head of the queue failed.
    pub(crate) fn is_head_blocked(&self) -> bool {
        let head = self.next_to_admit(&self.running_adapters());
        self.blocked_head.as_ref().is_some_and(|blocked| head.is_some_and(|id| id == blocked.id))
    }

    /// Opens the table of a waiting request on its cached prefix, blocks from the host included, and returns its first span; `None` if it does not
    /// fit. Alone it always fits, if necessary with a shorter span.
    fn admit_waiting(&mut self, id: RequestId, limits: &Limits, is_alone: bool) -> Option<Vec<ScheduledSpan>> {
        let live = self.requests.get_mut(&id)?;
        let hashes = live.hashes.take();
        let tokens = live.prefill_tokens();
        let prompt = Prompt {
            salt: live.request.cache_salt.as_deref(),
            adapter: live.request.adapter.as_deref(),
            media: &live.request.media,
            read_cache: live.request.read_prefix_cache,
            ..Prompt::new(&tokens)
        };
        // A waiting request is hashed once, however often it is looked up.
        let hash = || if prompt.read_cache { self.pool.hash_prompt(prompt) } else { PromptHashes::default() };
        let hashes = hashes.unwrap_or_else(hash);
        let available = self.pool.available();
        let admission = self.pool.admit(Prompt { hashes: Some(&hashes), ..prompt });
        let (len, cached, config) = (tokens.len(), admission.cached_tokens(), &self.config);
        let from_host = admission.host_tokens();
        let mut num_tokens = (len - cached).min(limits.tokens);
        let mut may_start = cached + num_tokens == len || config.enable_chunked_prefill;
        let fits = |num_tokens, for_rest| {
            admission.blocks_needed() + config.blocks_between(cached, cached + num_tokens) + for_rest + limits.keep_free
                <= available
        };
        let mut for_rest = config.blocks_for_rest(cached, cached + num_tokens, len);
        if is_alone && !fits(num_tokens, for_rest) {
            // The cached prefix ends at the end of a block.
            let least = if config.enable_chunked_prefill { 0 } else { live.request.prompt.len() };
            let end = least.max(cached + 1).next_multiple_of(config.block_size).min(len);
            num_tokens = if fits(num_tokens, 0) { num_tokens } else { num_tokens.min(end - cached) };
            (for_rest, may_start) = (0, true);
        }
        let keep_free = config.blocks_between(cached, cached + num_tokens) + for_rest + limits.keep_free;
        let opened = if may_start { admission.open(keep_free).ok() } else { None };
        drop(tokens);
        let Some(table) = opened else {
            live.hashes = Some(hashes);
            return None;
        };
        let queried = if config.enable_prefix_caching { len as u64 } else { 0 };
        if live.has_run {
            self.counters.resumed_prefix_queries += queried;
            self.counters.resumed_prefix_hits += cached as u64;
        } else {
            self.counters.prompt_tokens += len as u64;
            self.counters.prefix_queries += queried;
            self.counters.prefix_hits += cached as u64;
            self.counters.host_prefix_hits += from_host as u64;
        }
        live.has_run = true;
        live.num_cached_tokens = cached;
        live.seqs[0].num_computed_tokens = cached;
        live.seqs[0].table = Some(table);
        self.start_running(id, Stage::Prompt);
        Some(vec![ScheduledSpan { request: id, index: 0, num_tokens, num_drafts: 0, num_spare: 0 }])
    }

    /// Swaps a request in, if its next spans fit too, and returns these; `None` if it does not fit.
    fn admit_swapped(&mut self, id: RequestId, limits: &Limits, is_alone: bool) -> Option<Vec<ScheduledSpan>> {
        let live = self.requests.get_mut(&id)?;
        // Alone it always fits, if necessary with shorter spans.
        let for_spans = if is_alone { 0 } else { self.config.most_blocks_for_next_spans(live) };
        let stage = live.stage();
        let Phase::Swapped { indices, swapped, .. } = &mut live.phase else { return None };
        let tables: Vec<BlockTable> = self.pool.swap_in(swapped, limits.keep_free + for_spans).ok()?;
        for (index, table) in std::mem::take(indices).into_iter().zip(tables) {
            live.seqs[index].table = Some(table);
        }
        self.start_running(id, stage);
        // Sequences may have ended while the request was swapped out.
        self.update_stage(id);
        let live = self.requests.get(&id)?;
        let (mut spans, mut prefills, mut budget) = (Vec::new(), Vec::new(), limits.tokens);
        Self::choose_decodes(live, &mut budget, &mut spans, &mut prefills);
        Self::limit_decodes(&mut spans, &mut budget);
        self.choose_prefills(prefills, &mut budget, &mut spans);
        if is_alone && self.blocks_for(&spans) > self.pool.available() {
            self.end_at_block(&mut spans, &mut budget);
        }
        let tokens: usize = spans.iter().map(|span| span.num_tokens).sum();
        let fits = tokens <= limits.tokens && self.blocks_for(&spans) + limits.for_spans <= self.pool.available();
        Some(if fits { spans } else { Vec::new() })
    }

    /// Number of blocks that the rest of a running request's prompt needs, behind a span of `num_tokens` that has no slots yet.
    fn blocks_for_rest_of_prompt(&self, live: &LiveRequest, num_tokens: usize) -> usize {
        if !live.is_partial() {
            return 0;
        }
        let len = live.seqs[0].table.as_ref().map_or(0, BlockTable::len) + num_tokens;
        self.config.blocks_for_rest(live.num_cached_tokens, len, live.target(0))
    }
}

impl SchedConfig {
    /// Number of blocks, in all groups, for the positions between `from` and `to` tokens.
    fn blocks_between(&self, from: usize, to: usize) -> usize {
        self.groups.len() * (to.div_ceil(self.block_size) - from.div_ceil(self.block_size))
    }

    /// Number of blocks that a prompt of `len` tokens will own at most in addition, if the tokens before `cached` were
    /// cached and those before `to` have blocks.
    fn blocks_for_rest(&self, cached: usize, to: usize, len: usize) -> usize {
        let rest = len.div_ceil(self.block_size) - to.div_ceil(self.block_size);
        let in_group = |group: &CacheGroup| match self.most_blocks_in_flight(*group) {
            None => rest,
            Some(most) => {
                let owned = to.div_ceil(self.block_size) - group.holes(cached, self.block_size);
                rest.min(most.saturating_sub(owned))
            }
        };
        self.groups.iter().map(in_group).sum()
    }

    /// Upper bound of the blocks for the next spans of a swapped request: blocks for all known tokens, and a copy of
    /// each sequence's last block.
    fn most_blocks_for_next_spans(&self, live: &LiveRequest) -> usize {
        let Phase::Swapped { indices, .. } = &live.phase else { return 0 };
        let of_sequence = |index: usize| {
            let known = live.target(index).div_ceil(self.block_size);
            let rest = known - live.seqs[index].num_computed_tokens.div_ceil(self.block_size).min(known);
            self.groups.iter().map(|g| rest.min(self.most_blocks_in_flight(*g).unwrap_or(rest)) + 1).sum::<usize>()
        };
        let continues = |index: &&usize| !live.is_forked() || live.seqs[**index].live;
        indices.iter().filter(continues).map(|&index| of_sequence(index)).sum()
    }
}

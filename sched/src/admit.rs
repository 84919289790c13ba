//! Admission: from the head of the queue, never past it, while tokens, sequences and blocks are left. Within a priority,
//! requests that come back from host memory go before those that wait.

use kvblock::{BlockTable, Prompt, PromptHashes};

use crate::group::{Away, Group, QueueKey};
use crate::step::{Choice, Draft};
use crate::{RequestId, Scheduler};

/// The head of the queue that could not be admitted, and what was known then.
pub(crate) struct Blocked {
    head: RequestId,
    /// [`Scheduler::wakeups`] at that time.
    wakeups: u64,
    budget: usize,
}

/// What an admission may take.
struct Limits {
    /// Tokens of the step.
    budget: usize,
    /// Blocks that must stay free, those for the spans of running requests included.
    keep_free: usize,
    /// Blocks for the spans of requests that run already.
    reserved: usize,
    /// Whether one more prompt may be computed in part.
    may_split: bool,
}

impl Scheduler {
    /// Admits what it can, and plans the first spans of each. `reserved` blocks are for spans of running requests that are
    /// not made yet.
    pub(crate) fn admit(&mut self, draft: &mut Draft, budget: &mut usize, reserved: usize) {
        let mut seats: usize = self.running_groups().map(Group::seats).sum();
        let mut partial = self.running_groups().filter(|g| g.is_partial()).count();
        let oldest = self.oldest_in_flight();
        while *budget > 0
            && let Some((key, id)) = self.head_of_queue()
            && let Some(group) = self.groups.get(&id)
        {
            seats += group.seats();
            // Preempted from a step in flight, whose tokens it has to know before it computes them again.
            if seats > self.config.max_num_seqs || group.is_in_flight(oldest) {
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
                keep_free: reserved + if alone { 0 } else { self.config.watermark() },
                reserved,
                may_split: self.config.enable_chunked_prefill && partial < self.config.max_num_partial_prefills,
            };
            let is_away = group.away.is_some();
            let admitted = if is_away { self.bring_back(id, &limits, alone) } else { self.open(id, &limits, alone) };
            let Some(choices) = admitted else {
                self.blocked = Some(Blocked { head: id, wakeups: self.wakeups(), budget: *budget });
                return;
            };
            (if is_away { &mut self.swapped } else { &mut self.waiting }).remove(&key);
            self.start_running(id);
            let cached = self.groups.get(&id).map_or(0, |g| if is_away { 0 } else { g.cached });
            for choice in choices {
                *budget -= choice.count;
                self.push_span(draft, choice, cached);
            }
            partial += usize::from(self.groups.get(&id).is_some_and(Group::is_partial));
        }
    }

    /// Whether the request that is next to be admitted could not be, when it was tried last.
    pub(crate) fn is_head_blocked(&self) -> bool {
        let head = self.head_of_queue();
        self.blocked.as_ref().is_some_and(|blocked| head.is_some_and(|(_, id)| id == blocked.head))
    }

    /// The request that is next to be admitted.
    fn head_of_queue(&self) -> Option<(QueueKey, RequestId)> {
        let first = |queue: &std::collections::BTreeMap<QueueKey, RequestId>| {
            queue.first_key_value().map(|(key, id)| (*key, *id))
        };
        match (first(&self.swapped), first(&self.waiting)) {
            (Some(swapped), Some(waiting)) if waiting.0.0 < swapped.0.0 => Some(waiting),
            (swapped, waiting) => swapped.or(waiting),
        }
    }

    /// Opens the table of a request that waits, with slots for all that it has to compute before it draws, and says
    /// what it computes first; `None` if there is no room. Alone there is room for the prompt, though a window's group may lack
    /// it for what was drawn behind it; that gets its slots with its spans.
    fn open(&mut self, id: RequestId, limits: &Limits, alone: bool) -> Option<Vec<Choice>> {
        let group = self.groups.get(&id)?;
        let (all, prompt) = (group.target(0), group.request.prompt.len());
        let opened = self.open_for(id, limits, all);
        if opened.is_none() && alone && prompt < all { self.open_for(id, limits, prompt) } else { opened }
    }

    /// Opens the table with slots for the first `len` tokens.
    fn open_for(&mut self, id: RequestId, limits: &Limits, len: usize) -> Option<Vec<Choice>> {
        let group = self.groups.get_mut(&id)?;
        let hashes = group.hashes.take();
        let tokens = &group.prefill_tokens()[..len];
        let prompt = Prompt {
            salt: group.request.cache_salt.as_deref(),
            adapter: group.request.adapter.as_deref(),
            media: &group.request.media,
            read_cache: group.request.read_prefix_cache,
            ..Prompt::new(tokens)
        };
        // A request that waits is hashed once, however often it is looked up.
        let hash = || if prompt.read_cache { self.pool.hash_prompt(prompt) } else { PromptHashes::default() };
        let hashes = hashes.unwrap_or_else(hash);
        let admission = self.pool.admit(Prompt { hashes: Some(&hashes), ..prompt });
        let cached = admission.cached_tokens();
        let pending = tokens.len() - cached;
        let count = self.config.chunk(pending, limits.budget);
        let may_start = count == pending || limits.may_split;
        let opened = if may_start { admission.open(limits.keep_free).ok() } else { None };
        let Some(table) = opened else {
            group.hashes = Some(hashes);
            return None;
        };
        let queried = if self.config.enable_prefix_caching { len as u64 } else { 0 };
        if group.has_run {
            self.counters.resumed_prefix_queries += queried;
            self.counters.resumed_prefix_hits += cached as u64;
        } else {
            self.counters.prompt_tokens += len as u64;
            self.counters.prefix_queries += queried;
            self.counters.prefix_hits += cached as u64;
        }
        group.has_run = true;
        group.cached = cached;
        group.seqs[0].planned = cached;
        group.seqs[0].table = Some(table);
        Some(vec![Choice { request: id, index: 0, count, drafts: 0 }])
    }

    /// Brings a request back from host memory, if it then has room to go on, and says what it computes first.
    fn bring_back(&mut self, id: RequestId, limits: &Limits, alone: bool) -> Option<Vec<Choice>> {
        let group = self.groups.get_mut(&id)?;
        if group.is_partial() && !limits.may_split {
            return None;
        }
        // Alone there is room, though it might not be for the most that the next spans could need.
        let growth = if alone { 0 } else { growth(group, self.config.block_size) * self.config.groups.len() };
        let Some(Away::Host { indices, swapped }) = &mut group.away else {
            return None;
        };
        let tables: Vec<BlockTable> = self.pool.swap_in(swapped, limits.keep_free + growth).ok()?;
        for (&index, table) in indices.iter().zip(tables) {
            group.seqs[index].table = Some(table);
        }
        group.away = None;
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
        let fits = tokens <= limits.budget && self.blocks_for(&choices) + limits.reserved <= self.pool.available();
        Some(if fits { choices } else { Vec::new() })
    }
}

/// The most blocks of a group of layers that the next spans of a swapped request take: those for what is known, and
/// a copy of each sequence's last.
fn growth(group: &Group, block_size: usize) -> usize {
    let of = |index: usize| {
        let known = group.target(index).div_ceil(block_size);
        known - group.seqs[index].planned.div_ceil(block_size).min(known) + 1
    };
    let Some(Away::Host { indices, .. }) = &group.away else {
        return 0;
    };
    indices.iter().filter(|&&index| !group.forked || group.seqs[index].live).map(|&index| of(index)).sum()
}

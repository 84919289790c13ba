//! The scheduler's state, and the public calls besides planning and committing.
//!
//! A live request is in `requests` and, by its [`Phase`], in exactly one of `waiting`, `swapped` and `running`.
//! [`Scheduler::set_phase`] maintains that. If a request ends or is preempted while steps in flight write to its
//! blocks, its tables are released only after the last of these steps is committed, so that no other request gets a
//! block that is still written.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvblock::{AuditError, BlockEvent, BlockPool, BlockTable, HostBlockId, HostCopy, PoolConfig, PrefixStats, Prompt};

use crate::ids::IdMap;
use crate::live_request::{LiveRequest, Phase, QueueKey, Sequence, Stage};
use crate::step_state::{Recycled, StepInFlight};
use crate::{
    ConfigError, Refusal, Request, RequestId, SchedConfig, SchedulerStats, SeqId, SpecStats, StepId, StepPlan,
};

/// A table to release after the commit of the step `until`, which still writes to it.
pub(crate) struct PendingRelease {
    pub seq: SeqId,
    pub arrival: u64,
    pub until: StepId,
    pub table: BlockTable,
}

/// The state in which the head of the queue could not be admitted.
pub(crate) struct BlockedHead {
    pub id: RequestId,
    /// See [`Scheduler::wakeups`].
    pub wakeups: u64,
    /// Number of tokens that were left for it.
    pub tokens: usize,
}

/// Continuous batching over a paged KV cache. See the [crate documentation](crate).
pub struct Scheduler {
    pub(crate) config: SchedConfig,
    pub(crate) pool: BlockPool,
    pub(crate) requests: IdMap<RequestId, LiveRequest>,
    pub(crate) waiting: BTreeMap<QueueKey, RequestId>,
    /// Requests in host memory, and those that will be swapped out.
    pub(crate) swapped: BTreeMap<QueueKey, RequestId>,
    /// In order of admission.
    pub(crate) running: BTreeMap<u64, RequestId>,
    /// Steps that are planned and not committed, oldest first.
    pub(crate) in_flight: VecDeque<StepInFlight>,
    pub(crate) pending_releases: Vec<PendingRelease>,
    /// Sequences for [`StepPlan::released`](crate::StepPlan::released) of the next plan.
    pub(crate) released: Vec<SeqId>,
    pub(crate) blocked_head: Option<BlockedHead>,
    /// Number of events, other than freed blocks, after which a blocked head may fit; see [`Scheduler::wakeups`].
    pub(crate) changes: u64,
    pub(crate) last_step: StepId,
    pub(crate) counters: SchedulerStats,
    pub(crate) spec: SpecStats,
    /// Tokens to append to a table; kept so that a span does not allocate.
    pub(crate) appended: Vec<u32>,
    pub(crate) recycled: Recycled,
    /// See [`Scheduler::set_prompt_budget`].
    pub(crate) prompt_budget: usize,
    /// See [`Scheduler::set_ready_adapters`].
    pub(crate) ready_adapters: Option<Vec<String>>,
    num_arrivals: u64,
    num_admissions: u64,
}

impl Scheduler {
    /// Creates an idle scheduler with an empty pool.
    pub fn new(config: SchedConfig) -> Result<Scheduler, ConfigError> {
        config.validate()?;
        let prompt_budget = config.max_num_batched_tokens;
        let pool = BlockPool::new(PoolConfig {
            prefix_caching: config.enable_prefix_caching,
            hash_seed: config.hash_seed,
            groups: config.groups.clone(),
            host_blocks: config.host_blocks,
            host_caching: config.host_caching,
            events: config.block_events,
            ..PoolConfig::new(config.num_blocks, config.block_size)
        })?;
        Ok(Scheduler {
            config,
            pool,
            requests: IdMap::default(),
            waiting: BTreeMap::new(),
            swapped: BTreeMap::new(),
            running: BTreeMap::new(),
            in_flight: VecDeque::new(),
            pending_releases: Vec::new(),
            released: Vec::new(),
            blocked_head: None,
            changes: 0,
            last_step: StepId(0),
            counters: SchedulerStats::default(),
            spec: SpecStats::default(),
            appended: Vec::new(),
            recycled: Recycled::default(),
            prompt_budget,
            ready_adapters: None,
            num_arrivals: 0,
            num_admissions: 0,
        })
    }

    /// Adds a request to the waiting queue. Refuses a request that can never run; a refused request changes nothing.
    pub fn submit(&mut self, request: Request) -> Result<(), Refusal> {
        request.check(&self.config)?;
        let id = request.id;
        if self.requests.contains_key(&id) {
            return Err(Refusal::DuplicateId(id));
        }
        self.requests.insert(id, LiveRequest::new(request, self.num_arrivals, self.config.pipeline));
        self.num_arrivals += 1;
        self.set_phase(id, Phase::Waiting);
        Ok(())
    }

    /// Ends a request immediately; `false` if it is not live. Outcomes of steps in flight are ignored for it, and its
    /// blocks are not reused before these steps are committed. The id can be reused at once.
    pub fn abort(&mut self, id: RequestId) -> bool {
        self.release_contents(id);
        self.changes += u64::from(self.requests.contains_key(&id));
        self.leave_queue(id);
        self.requests.remove(&id).is_some()
    }

    /// Ends one sequence of a request, for example when its text contains a stop string. The request ends with its last
    /// sequence. Returns `false` if the sequence is not live, or is a beam: beams end by outcomes.
    pub fn finish_sequence(&mut self, seq: SeqId) -> bool {
        let sequence = self.sequence_mut(seq).filter(|s| s.live);
        let Some(sequence) = sequence else { return false };
        sequence.live = false;
        self.update_stage(seq.request);
        true
    }

    /// Proposes draft tokens to follow the last known token of a sequence, replacing earlier proposals. If the
    /// sequence's next span computes that one token, or accepted drafts again and that token
    /// ([`SchedConfig::recompute_drafts`]), the span also computes as many drafts as the budget, the blocks and
    /// `max_tokens` allow, and its outcome reports how many were right. Returns `false` if the sequence is not
    /// live, has a token in flight, or is a beam.
    pub fn propose(&mut self, seq: SeqId, drafts: Vec<u32>) -> bool {
        let sequence = self.sequence_mut(seq).filter(|s| s.live && s.num_output_placeholders == 0);
        sequence.map(|s| s.drafts = drafts).is_some()
    }

    /// Leaves the last known token of a running sequence out of the next plans, so that nothing is drawn for it, or ends this. For a
    /// caller that does not know yet what the sequence may draw. While a prompt is computed, its sequence 0 stands for all. A request
    /// that waits, also after a preemption, is admitted nevertheless. Returns `false` if the sequence is not live, or is a beam.
    pub fn hold(&mut self, seq: SeqId, is_held: bool) -> bool {
        let sequence = self.sequence_mut(seq).filter(|s| s.live);
        sequence.map(|s| s.is_held = is_held).is_some()
    }

    /// Replaces the drafts of the newest plan, in the order of its spans, before it is submitted: whoever proposed them gave only
    /// their number. `tokens` may be shorter; the rest stays as it was proposed.
    pub fn replace_drafts(&mut self, plan: &mut StepPlan, tokens: &[u32]) {
        let Scheduler { in_flight, requests, pool, .. } = self;
        let Some(step) = in_flight.back_mut().filter(|step| step.step == plan.step) else { return };
        let mut tokens = tokens.iter().copied();
        for (span, in_flight) in plan.spans.iter_mut().zip(&mut step.spans) {
            let table = requests.get_mut(&span.seq.request).and_then(|live| {
                live.seqs.get_mut(span.seq.index as usize).and_then(|sequence| sequence.table.as_mut())
            });
            let (Some(table), first) = (table, span.tokens.len() - span.drafts) else { continue };
            for ((at, draft), token) in (first..).zip(&mut in_flight.drafts).zip(&mut tokens) {
                (span.tokens[at], *draft) = (token, token);
                pool.replace(table, span.start + at, token);
            }
        }
    }

    /// Sets the greatest number of prompt tokens of each later plan while sequences decode, tokens to recompute after
    /// a preemption included. The least is 1, the default `max_num_batched_tokens`. Without chunked prefill this has no
    /// effect, because a prompt has to fit one step.
    pub fn set_prompt_budget(&mut self, tokens: usize) {
        self.prompt_budget = tokens.clamp(1, self.config.max_num_batched_tokens);
    }

    /// Returns the greatest number of prompt tokens of a plan while sequences decode.
    pub fn prompt_budget(&self) -> usize {
        self.prompt_budget
    }

    /// Number of rows that the next plan computes for sequences that decode, with their proposed drafts.
    pub fn num_decode_rows(&self) -> usize {
        let decoding = || self.decoding_requests().flat_map(|live| &live.seqs).filter(|s| s.live);
        let (sequences, drafts) = (decoding().count(), decoding().map(|s| s.drafts.len()).sum::<usize>());
        if self.config.pipeline && sequences > 0 {
            self.share() + drafts / self.config.max_in_flight
        } else {
            sequences + drafts
        }
    }

    /// Number of sequences that run, and of those that wait only for their share of a step: all that would decode if every
    /// prompt were computed.
    pub fn num_sequences_in_reach(&self) -> usize {
        let sequences = |id: &RequestId| self.requests.get(id).map_or(0, LiveRequest::num_running_seqs);
        let most = self.config.max_num_seqs;
        let mut sum: usize = self.running.values().map(sequences).sum();
        if !self.is_head_blocked() {
            let mut queue = self.swapped.values().chain(self.waiting.values());
            while sum < most
                && let Some(id) = queue.next()
            {
                sum += sequences(id);
            }
        }
        sum.min(most)
    }

    /// Returns whether any request is live.
    pub fn has_work(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Empties the prefix cache, that of host memory included, for example after the weights have changed. Returns `false` and
    /// does nothing while a request owns blocks, on the host too. With `reset_running`, requests that run or are swapped out discard their keys and values and
    /// wait again, unless steps are in flight.
    pub fn reset_prefix_cache(&mut self, reset_running: bool) -> bool {
        if reset_running && self.in_flight.is_empty() {
            let all: Vec<RequestId> = self.running.values().chain(self.swapped.values()).copied().collect();
            all.into_iter().for_each(|id| self.recompute(id));
        }
        self.pool.reset_prefix_cache()
    }

    /// Returns whether evicted prefixes stay in host memory.
    pub fn caches_on_host(&self) -> bool {
        self.config.enable_prefix_caching && self.config.host_caching && self.config.host_blocks > 0
    }

    /// See [`BlockPool::copy_to_host`]. The copies are part of the next plan.
    pub fn copy_to_host(&mut self, prompt: Prompt<'_>) -> Vec<HostCopy> {
        self.pool.copy_to_host(prompt)
    }

    /// See [`BlockPool::has_copy`].
    pub fn has_copy(&self, copy: &HostCopy) -> bool {
        self.pool.has_copy(copy)
    }

    /// See [`BlockPool::insert_on_host`]. The contents must be written after every earlier plan has executed and before the next one does.
    pub fn insert_on_host(&mut self, prompt: Prompt<'_>, blocks: &BTreeSet<(usize, usize)>) -> Vec<HostCopy> {
        self.pool.insert_on_host(prompt, blocks)
    }

    /// Removes a host block whose contents could not be written from the prefix cache.
    pub fn forget_host_block(&mut self, block: HostBlockId) {
        let done = self.pool.forget_host_contents(block);
        debug_assert!(done.is_ok(), "{done:?}");
    }

    /// Drains the changes of the prefix cache since the last call. Empty unless [`SchedConfig::block_events`] is set.
    pub fn drain_block_events(&mut self) -> impl Iterator<Item = BlockEvent> + '_ {
        self.pool.drain_events()
    }

    /// Returns the events that announce all prefixes of a cache group that a lookup can reach, parents first. Takes a
    /// pass over the pool.
    pub fn cached_prefixes(&self, group: usize) -> Vec<BlockEvent> {
        self.pool.cached_prefixes(group)
    }

    /// Returns the current statistics.
    pub fn stats(&self) -> SchedulerStats {
        let (gauges, host, counters) = (self.pool.gauges(), self.pool.host_gauges(), self.pool.counters());
        SchedulerStats {
            num_running: self.running.len(),
            num_waiting: self.waiting.len(),
            num_swapped: self.swapped.len(),
            num_in_flight: self.in_flight.len(),
            blocks_in_use: gauges.in_use,
            blocks_cached: gauges.cached,
            blocks_free: gauges.free,
            blocks_total: self.pool.num_blocks(),
            host_blocks_in_use: host.in_use,
            host_blocks_cached: host.cached,
            host_blocks_total: self.config.host_blocks,
            blocks_peak: counters.peak_in_use,
            blocks_copied: counters.copied,
            blocks_swapped_out: counters.swapped_out,
            blocks_swapped_in: counters.swapped_in,
            blocks_offloaded: counters.offloaded,
            blocks_loaded: counters.loaded,
            ..self.counters
        }
    }

    /// Lookups in the prefix cache, and the reasons of misses.
    pub fn prefix_stats(&self) -> &PrefixStats {
        self.pool.stats()
    }

    /// Statistics of draft verification.
    pub fn spec_stats(&self) -> &SpecStats {
        &self.spec
    }

    /// Checks the pool's metadata against all live tables. Takes a pass over all tokens; intended for tests and
    /// diagnosis.
    pub fn audit(&self) -> Result<(), AuditError> {
        let owned = self.requests.values().flat_map(LiveRequest::tables);
        let swapped = self.requests.values().filter_map(|live| match &live.phase {
            Phase::Swapped { swapped, .. } => Some(swapped),
            Phase::Waiting | Phase::Running { .. } | Phase::SwappingOut { .. } => None,
        });
        self.pool.audit_host(swapped)?;
        self.pool.audit(owned.chain(self.pending_releases.iter().map(|p| &p.table)))
    }

    pub(crate) fn oldest_in_flight(&self) -> Option<StepId> {
        self.in_flight.front().map(|f| f.step)
    }

    /// The running requests, in order of admission.
    pub(crate) fn running_requests(&self) -> impl Iterator<Item = &LiveRequest> {
        self.running.values().filter_map(|id| self.requests.get(id))
    }

    /// The running requests whose prompts are computed.
    pub(crate) fn decoding_requests(&self) -> impl Iterator<Item = &LiveRequest> {
        self.running_requests().filter(|live| !live.is_partial())
    }

    /// Number of events after which a request that could not be admitted may fit, or needs less work. The pool counts
    /// freed blocks.
    pub(crate) fn wakeups(&self) -> u64 {
        self.changes + self.pool.counters().freed
    }

    /// Moves a request to another phase and its queue.
    pub(crate) fn set_phase(&mut self, id: RequestId, phase: Phase) {
        self.leave_queue(id);
        let Some(live) = self.requests.get_mut(&id) else { return };
        let key = live.queue_key(self.config.policy);
        live.phase = phase;
        match live.phase {
            Phase::Waiting => drop(self.waiting.insert(key, id)),
            Phase::Running { position, .. } => drop(self.running.insert(position, id)),
            Phase::SwappingOut { .. } | Phase::Swapped { .. } => drop(self.swapped.insert(key, id)),
        }
    }

    pub(crate) fn start_running(&mut self, id: RequestId, stage: Stage) {
        let position = self.num_admissions;
        self.num_admissions += 1;
        self.set_phase(id, Phase::Running { position, stage });
    }

    /// Releases a request's tables and host blocks.
    pub(crate) fn release_contents(&mut self, id: RequestId) {
        self.release_tables(id, |_, _| true);
        if let Some(live) = self.requests.get_mut(&id)
            && let Phase::Swapped { stage, .. } = live.phase
            && let Phase::Swapped { swapped, .. } = std::mem::replace(&mut live.phase, Phase::SwappingOut { stage })
        {
            self.pool.discard(swapped);
        }
    }

    /// Updates a request after its computed tokens or its live sequences have changed: forks at the end of the prompt,
    /// releases the tables of ended sequences, and ends the request with its last sequence.
    pub(crate) fn update_stage(&mut self, id: RequestId) {
        let Some(live) = self.requests.get_mut(&id) else { return };
        if live.num_live() == 0 {
            self.abort(id);
            return;
        }
        let is_forked = live.is_forked();
        let LiveRequest { seqs, request, .. } = live;
        if let [first, others @ ..] = &mut seqs[..]
            && let Some(prompt) = first.table.as_ref().filter(|t| !is_forked && t.committed() >= request.prompt.len())
        {
            // If other sequences are live, the first table ends with the prompt that they share, and all of it is
            // committed.
            for other in others.iter_mut().filter(|s| s.live) {
                other.table = self.pool.fork(prompt).ok();
                other.num_computed_tokens = prompt.committed();
            }
            live.set_stage(Stage::Forked);
            self.changes += 1;
        }
        if live.is_forked() {
            self.release_tables(id, |_, sequence| !sequence.live);
        }
    }

    /// Releases the tables of the sequences of a request that satisfy `which`.
    pub(crate) fn release_tables(&mut self, id: RequestId, which: impl Fn(usize, &Sequence) -> bool) {
        let oldest = self.oldest_in_flight();
        let Some(live) = self.requests.get_mut(&id) else { return };
        let arrival = live.arrival;
        for (index, sequence) in live.seqs.iter_mut().enumerate().filter(|(i, s)| which(*i, s)) {
            let seq = SeqId { request: id, index: index as u32 };
            sequence.num_computed_tokens = 0;
            if std::mem::take(&mut sequence.num_sent_entries) > 0 {
                self.released.push(seq);
            }
            let Some(table) = sequence.table.take() else { continue };
            self.changes += 1;
            if sequence.is_in_flight(oldest) {
                self.pending_releases.push(PendingRelease { seq, arrival, until: sequence.last_step, table });
            } else {
                self.pool.release(table);
            }
        }
    }

    /// Returns a sequence of a request that is not a beam search.
    fn sequence_mut(&mut self, seq: SeqId) -> Option<&mut Sequence> {
        let live = self.requests.get_mut(&seq.request).filter(|live| !live.request.beam_search)?;
        live.seqs.get_mut(seq.index as usize)
    }

    fn leave_queue(&mut self, id: RequestId) {
        let Some(live) = self.requests.get(&id) else { return };
        let key = live.queue_key(self.config.policy);
        match live.phase {
            Phase::Waiting => self.waiting.remove(&key),
            Phase::Running { position, .. } => self.running.remove(&position),
            Phase::SwappingOut { .. } | Phase::Swapped { .. } => self.swapped.remove(&key),
        };
    }
}

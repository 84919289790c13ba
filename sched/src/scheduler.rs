//! The scheduler's state, and the calls that change it from outside: submit, abort, finish.
//!
//! A request is in `groups` while it lives, and by its [`Phase`] in exactly one of `waiting`, `swapped` and `running`:
//! [`Scheduler::enter`] keeps them so. A request may end or be preempted while steps are in flight that write to its
//! blocks: its tables are parked until the last of these is committed, so that nobody gets a block that is still written.

use std::collections::{BTreeMap, VecDeque};

use kvblock::{AuditError, BlockPool, BlockTable, PoolConfig, PrefixStats};

use crate::flight::Flight;
use crate::group::{Group, Phase, QueueKey, Sequence, Stage};
use crate::ids::IdMap;
use crate::spare::Spare;
use crate::{ConfigError, Refusal, Request, RequestId, SchedConfig, SchedulerStats, SeqId, SpecStats, StepId};

/// A table that its sequence has given up and a step in flight still writes to.
pub(crate) struct Parked {
    pub seq: SeqId,
    pub arrival: u64,
    pub until: StepId,
    pub table: BlockTable,
}

/// The head of the queue that could not be admitted, and what was known then.
pub(crate) struct Blocked {
    pub head: RequestId,
    /// [`Scheduler::wakeups`] at that time.
    pub wakeups: u64,
    pub budget: usize,
}

/// Continuous batching over a paged cache. See the crate's documentation.
pub struct Scheduler {
    pub(crate) config: SchedConfig,
    pub(crate) pool: BlockPool,
    pub(crate) groups: IdMap<RequestId, Group>,
    pub(crate) waiting: BTreeMap<QueueKey, RequestId>,
    /// In host memory, or on their way there.
    pub(crate) swapped: BTreeMap<QueueKey, RequestId>,
    /// In order of admission.
    pub(crate) running: BTreeMap<u64, RequestId>,
    /// Planned and not committed, oldest first.
    pub(crate) flights: VecDeque<Flight>,
    pub(crate) parked: Vec<Parked>,
    /// Tables that the executor has to forget.
    pub(crate) released: Vec<SeqId>,
    pub(crate) blocked: Option<Blocked>,
    /// Counts what, besides free blocks, may make room for a request that could not be admitted; see
    /// [`Scheduler::wakeups`].
    pub(crate) changes: u64,
    pub(crate) last_step: StepId,
    pub(crate) counters: SchedulerStats,
    pub(crate) spec: SpecStats,
    /// Tokens on their way into a table; kept, so that a step does not allocate for each.
    pub(crate) scratch: Vec<u32>,
    pub(crate) spare: Spare,
    arrivals: u64,
    admissions: u64,
}

impl Scheduler {
    /// An idle scheduler over a free pool.
    pub fn new(config: SchedConfig) -> Result<Scheduler, ConfigError> {
        config.validate()?;
        let pool = BlockPool::new(PoolConfig {
            prefix_caching: config.enable_prefix_caching,
            hash_seed: config.hash_seed,
            groups: config.groups.clone(),
            host_blocks: config.host_blocks,
            ..PoolConfig::new(config.num_blocks, config.block_size)
        })?;
        Ok(Scheduler {
            config,
            pool,
            groups: IdMap::default(),
            waiting: BTreeMap::new(),
            swapped: BTreeMap::new(),
            running: BTreeMap::new(),
            flights: VecDeque::new(),
            parked: Vec::new(),
            released: Vec::new(),
            blocked: None,
            changes: 0,
            last_step: StepId(0),
            counters: SchedulerStats::default(),
            spec: SpecStats::default(),
            scratch: Vec::new(),
            spare: Spare::default(),
            arrivals: 0,
            admissions: 0,
        })
    }

    /// Takes a request into the waiting queue, or says why it can never run. What is refused leaves no trace.
    pub fn submit(&mut self, request: Request) -> Result<(), Refusal> {
        request.check(&self.config)?;
        let id = request.id;
        if self.groups.contains_key(&id) {
            return Err(Refusal::DuplicateId(id));
        }
        let group = Group::new(request, self.arrivals);
        self.arrivals += 1;
        self.groups.insert(id, group);
        self.enter(id, Phase::Waiting);
        Ok(())
    }

    /// Ends a request now, wherever it is; `false` if it is not live. The outcomes of steps in flight are
    /// ignored for it, and its blocks are given to nobody else before those are committed. The id may be used
    /// again at once.
    pub fn abort(&mut self, id: RequestId) -> bool {
        self.drop_contents(id);
        self.changes += u64::from(self.groups.contains_key(&id));
        self.leave_queue(id);
        self.groups.remove(&id).is_some()
    }

    /// Ends one sequence of a request, as when a front end has found a stop string. The request ends with its last
    /// sequence. `false` if the sequence is not live, or is a beam: beams end by outcomes.
    pub fn finish_sequence(&mut self, seq: SeqId) -> bool {
        let Some(group) = self.groups.get_mut(&seq.request).filter(|g| !g.request.beam_search) else {
            return false;
        };
        let Some(sequence) = group.seqs.get_mut(seq.index as usize).filter(|s| s.live) else {
            return false;
        };
        sequence.live = false;
        self.settle(seq.request);
        true
    }

    /// Proposes tokens to follow the last known one of a sequence, in place of what was proposed before. If the next
    /// span of the sequence computes that one token, it computes as many of these as the budget, the blocks and
    /// `max_tokens` allow, and its outcome says how many were right. `false` if the sequence is not live, has a
    /// token in flight, or is a beam: what follows it is not known then.
    pub fn propose(&mut self, seq: SeqId, drafts: Vec<u32>) -> bool {
        let Some(group) = self.groups.get_mut(&seq.request).filter(|g| !g.request.beam_search) else {
            return false;
        };
        let sequence = group.seqs.get_mut(seq.index as usize).filter(|s| s.live && s.promised == 0);
        sequence.map(|s| s.drafts = drafts).is_some()
    }

    /// Whether anything waits or runs.
    pub fn has_work(&self) -> bool {
        !self.groups.is_empty()
    }

    /// Forgets every cached prefix, as when the weights have changed; `false`, and nothing happens, while a block is
    /// in use. With `reset_running` only steps in flight prevent it: what runs, or is swapped out, gives up its
    /// keys and values and waits again, at the place of its arrival.
    pub fn reset_prefix_cache(&mut self, reset_running: bool) -> bool {
        if reset_running && self.flights.is_empty() {
            self.send_all_back();
        }
        self.pool.reset_prefix_cache()
    }

    /// The numbers now.
    pub fn stats(&self) -> SchedulerStats {
        let (gauges, counters) = (self.pool.gauges(), self.pool.counters());
        SchedulerStats {
            num_running: self.running.len(),
            num_waiting: self.waiting.len(),
            num_swapped: self.swapped.len(),
            num_in_flight: self.flights.len(),
            blocks_in_use: gauges.in_use,
            blocks_cached: gauges.cached,
            blocks_free: gauges.free,
            blocks_total: self.pool.num_blocks(),
            host_blocks_in_use: self.pool.host_gauges().in_use,
            host_blocks_total: self.config.host_blocks,
            blocks_peak: counters.peak_in_use,
            blocks_copied: counters.copied,
            blocks_swapped_out: counters.swapped_out,
            blocks_swapped_in: counters.swapped_in,
            ..self.counters
        }
    }

    /// Lookups in the prefix cache, and why those that missed did.
    pub fn prefix_stats(&self) -> &PrefixStats {
        self.pool.stats()
    }

    /// What became of proposed drafts.
    pub fn spec_stats(&self) -> &SpecStats {
        &self.spec
    }

    /// Blocks that each running request owns, in order of admission; those that its sequences share count once.
    pub fn blocks_per_request(&self) -> impl Iterator<Item = (RequestId, usize)> + '_ {
        let blocks = |id: &RequestId| {
            let groups = self.groups.get(id)?.tables().flat_map(BlockTable::groups);
            let mut blocks: Vec<_> = groups.flat_map(|g| g.blocks()).copied().collect();
            blocks.sort_unstable();
            blocks.dedup();
            Some((*id, blocks.len()))
        };
        self.running.values().filter_map(blocks)
    }

    /// Rebuilds the pool's books from all live tables and compares. Costs a pass over all tokens: for tests
    /// and for a server that suspects itself.
    pub fn audit(&self) -> Result<(), AuditError> {
        let owned = self.groups.values().flat_map(Group::tables);
        let swapped = self.groups.values().filter_map(|g| match &g.phase {
            Phase::Swapped { swapped, .. } => Some(swapped),
            Phase::Waiting | Phase::Running { .. } | Phase::Leaving { .. } => None,
        });
        self.pool.audit_host(swapped)?;
        self.pool.audit(owned.chain(self.parked.iter().map(|p| &p.table)))
    }

    pub(crate) fn oldest_in_flight(&self) -> Option<StepId> {
        self.flights.front().map(|f| f.step)
    }

    /// Moves a request to another phase, and to the queue of those in it.
    pub(crate) fn enter(&mut self, id: RequestId, phase: Phase) {
        self.leave_queue(id);
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let key = group.queue_key(self.config.policy);
        group.phase = phase;
        match group.phase {
            Phase::Waiting => drop(self.waiting.insert(key, id)),
            Phase::Running { place, .. } => drop(self.running.insert(place, id)),
            Phase::Leaving { .. } | Phase::Swapped { .. } => drop(self.swapped.insert(key, id)),
        }
    }

    fn leave_queue(&mut self, id: RequestId) {
        let Some(group) = self.groups.get(&id) else {
            return;
        };
        let key = group.queue_key(self.config.policy);
        match group.phase {
            Phase::Waiting => self.waiting.remove(&key),
            Phase::Running { place, .. } => self.running.remove(&place),
            Phase::Leaving { .. } | Phase::Swapped { .. } => self.swapped.remove(&key),
        };
    }

    /// Puts a request behind those that run.
    pub(crate) fn start_running(&mut self, id: RequestId, stage: Stage) {
        let place = self.admissions;
        self.admissions += 1;
        self.enter(id, Phase::Running { place, stage });
    }

    /// Gives up a request's tables and host blocks.
    pub(crate) fn drop_contents(&mut self, id: RequestId) {
        self.release_tables(id, |_, _| true);
        if let Some(group) = self.groups.get_mut(&id)
            && let Phase::Swapped { stage, .. } = group.phase
            && let Phase::Swapped { swapped, .. } = std::mem::replace(&mut group.phase, Phase::Leaving { stage })
        {
            self.pool.discard(swapped);
        }
    }

    /// The running requests, in order of admission.
    pub(crate) fn running_groups(&self) -> impl Iterator<Item = &Group> {
        self.running.values().filter_map(|id| self.groups.get(id))
    }

    /// Counts everything that may make room for, or save work to, a request that could not be admitted. Blocks that come
    /// free, whatever frees them, are counted by the pool.
    pub(crate) fn wakeups(&self) -> u64 {
        self.changes + self.pool.counters().given_back
    }

    /// Brings a request to where its computed tokens and live sequences say it is: forks at the end of the
    /// prompt, gives back the tables of sequences that have ended, ends with the last of them.
    pub(crate) fn settle(&mut self, id: RequestId) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        if group.num_live() == 0 {
            self.abort(id);
            return;
        }
        let is_forked = group.is_forked();
        let Group { seqs, request, .. } = group;
        if let [first, others @ ..] = &mut seqs[..]
            && let Some(prompt) = first.table.as_ref().filter(|t| !is_forked && t.committed() >= request.prompt.len())
        {
            // Where others live, the first sequence's table ends with what they share, so all of it is committed.
            for other in others.iter_mut().filter(|s| s.live) {
                other.table = self.pool.fork(prompt).ok();
                other.planned = prompt.committed();
            }
            group.set_stage(Stage::Sequences);
            self.changes += 1;
        }
        if group.is_forked() {
            self.release_tables(id, |_, sequence| !sequence.live);
        }
    }

    /// Takes back the tables of those sequences of a request for which `which` holds.
    pub(crate) fn release_tables(&mut self, id: RequestId, which: impl Fn(usize, &Sequence) -> bool) {
        let oldest = self.oldest_in_flight();
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        for (index, sequence) in group.seqs.iter_mut().enumerate().filter(|(i, s)| which(*i, s)) {
            let seq = SeqId { request: id, index: index as u32 };
            sequence.planned = 0;
            if std::mem::take(&mut sequence.sent) > 0 {
                self.released.push(seq);
            }
            let Some(table) = sequence.table.take() else {
                continue;
            };
            self.changes += 1;
            if sequence.is_in_flight(oldest) {
                self.parked.push(Parked { seq, arrival: group.arrival, until: sequence.last_step, table });
            } else {
                self.pool.release(table);
            }
        }
    }
}

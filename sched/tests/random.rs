//! Random histories of arrivals, aborts, stop strings, failed steps and blocks from elsewhere, in small pools with small
//! budgets, checked by an executor with simulated memory.
//!
//! The executor computes a step some events after its plan, at the latest before its commit. A plan that fails before is never
//! computed. Some steps are submitted only after events and another call of `plan`.
//!
//! After every step: the audit passes; the budgets hold; each block that is written has one owner and is not reused
//! before the commit; each sequence reads exactly its own tokens; two schedulers with the same history return equal
//! plans; the oldest aged request is never preempted; and a plan can be serialised and restored. At the end: every
//! sequence that was not ended from outside has the output that it has alone, within four plans per token to compute.
use std::collections::{BTreeSet, HashMap, VecDeque};

use crate::common::{self, Executor, answer, sampled};
use kvblock::{HostCopy, Prompt};
use proptest::prelude::*;
use sched::{
    CacheGroup, CommitError, Media, Outcome, Policy, PreemptionMode, Request, RequestId, RequestState, SchedConfig,
    Scheduler, SeqId, StepId, StepPlan,
};

/// An external event, before a plan or between plan and commit. Numbers select an item modulo the number of items.
#[derive(Clone, Debug)]
enum Event {
    Submit(Request),
    Abort(usize),
    Finish(usize, u32),
    /// Drafts for a sequence: their number, and how many of them are right.
    Propose(usize, u32, usize, usize),
    Reset {
        running: bool,
    },
    /// The oldest steps in flight fail, in order. Plans without spans count too. Those behind them can only fail, later.
    Fail(usize),
    /// Blocks of a prompt are copied to the host.
    CopyOut(Vec<u32>),
    /// Blocks of a prompt come from elsewhere.
    TakeIn(Vec<u32>),
    /// Prompt tokens of the following steps.
    Budget(usize),
    /// The adapters in memory, one bit each.
    Adapters(usize),
    /// The device does some of its work.
    Run(usize),
    /// A sequence is held, or no longer.
    Hold(usize, u32),
}

fn event() -> impl Strategy<Value = Event> {
    // Mostly zeros, so that prompts share prefixes.
    let prompt = prop::collection::vec(prop_oneof![5 => Just(0u32), 1 => Just(1u32)], 1..40);
    let n = prop_oneof![3 => Just(1usize), 1 => 2..5usize];
    prop_oneof![
        6 => (prompt, n, prop::bool::weighted(0.3), 1..20usize, 0..3i32, prop::bool::weighted(0.1), prop::bool::weighted(0.9))
            .prop_map(|(prompt, n, beam_search, max_tokens, priority, salted, read_prefix_cache)| {
                let cache_salt = salted.then(|| "salt".into());
                // Some prompts have one of two images at their fifth token, with several lengths.
                let image = |len: usize| Media { digest: vec![len as u8 % 2], start: 4, len };
                let media = if max_tokens % 4 == 0 { vec![image(max_tokens)] } else { Vec::new() };
                let request = Request::new(RequestId(0), prompt, max_tokens);
                // One of four adapters, or none.
                let adapter = (priority != 1).then(|| format!("adapter {}", max_tokens % 4));
                Event::Submit(Request { n, beam_search, priority, cache_salt, media, adapter, read_prefix_cache, ..request })
            }),
        1 => (0..8usize).prop_map(Event::Abort),
        1 => (0..8usize, 0..4u32).prop_map(|(at, index)| Event::Finish(at, index)),
        3 => (0..8usize, 0..4u32, 0..5usize, 0..5usize).prop_map(|(at, i, len, right)| Event::Propose(at, i, len, right)),
        1 => prop::bool::weighted(0.3).prop_map(|running| Event::Reset { running }),
        1 => (1..4usize).prop_map(Event::Fail),
        1 => prop::collection::vec(0..2u32, 1..20).prop_map(Event::TakeIn),
        1 => prop::collection::vec(0..2u32, 1..20).prop_map(Event::CopyOut),
        2 => prop_oneof![0..12usize, Just(usize::MAX)].prop_map(Event::Budget),
        1 => (0..16usize).prop_map(Event::Adapters),
        2 => (1..4usize).prop_map(Event::Run),
        2 => (0..8usize, 0..2u32).prop_map(|(at, index)| Event::Hold(at, index)),
    ]
}

fn config() -> impl Strategy<Value = SchedConfig> {
    let block_size = prop::sample::select(vec![1usize, 2, 4, 8]);
    let sizes = (block_size, 1..40usize, 1..8usize, 1..40usize, 20..60usize);
    // Steps in flight, and whether they are the stages of a pipeline.
    let depth = prop_oneof![(1..3usize, Just(false)), (1..5usize, Just(true))];
    let limits = (prop_oneof![Just(usize::MAX), 1..4usize], depth);
    let mode = prop::sample::select(vec![PreemptionMode::Auto, PreemptionMode::Recompute, PreemptionMode::Swap]);
    let swap = (prop_oneof![2 => Just(0), 3 => 0..40usize], mode, 0..12usize, prop::bool::ANY);
    let sliding = || (2..20usize).prop_map(|window| CacheGroup::Sliding { window });
    let groups = prop_oneof![
        4 => Just(vec![CacheGroup::Full]),
        3 => sliding().prop_map(|sliding| vec![CacheGroup::Full, sliding]),
        1 => sliding().prop_map(|sliding| vec![sliding]),
        1 => (sliding(), sliding()).prop_map(|(one, other)| vec![one, CacheGroup::Full, other]),
    ];
    let is_set = (prop::bool::weighted(0.8), prop::bool::weighted(0.7), prop::bool::ANY, prop::bool::ANY);
    (sizes, limits, swap, groups, is_set).prop_map(
        |(sizes, limits, (host_blocks, preemption_mode, swap_cost, host_caching), groups, is_set)| {
            let (caching, chunked, fcfs, recompute_drafts) = is_set;
            let (max_loras, (max_in_flight, pipeline)) = limits;
            let (block_size, num_blocks, max_num_seqs, extra, max_model_len) = sizes;
            let least = if chunked { 0 } else { max_model_len };
            SchedConfig {
                block_size,
                num_blocks,
                max_num_seqs,
                max_num_batched_tokens: (max_num_seqs + extra).max(least),
                max_model_len,
                enable_prefix_caching: caching,
                enable_chunked_prefill: chunked,
                policy: if fcfs { Policy::Fcfs } else { Policy::Priority },
                hash_seed: Some(3),
                max_in_flight,
                pipeline,
                max_loras,
                groups,
                host_blocks,
                host_caching,
                preemption_mode,
                recompute_drafts,
                swap_cost,
                block_events: true,
            }
        },
    )
}

/// Events before each plan and between it and its commit, for some steps.
fn history() -> impl Strategy<Value = Vec<(Vec<Event>, Vec<Event>)>> {
    let some = || prop::collection::vec(event(), 0..4);
    prop::collection::vec((some(), some()), 1..25)
}

struct World {
    config: SchedConfig,
    scheduler: Scheduler,
    /// Has the same history and must return the same plans.
    replica: Scheduler,
    executor: Executor,
    /// Plans that are not committed, and plans without spans among them, each with the step with spans in front of it.
    in_flight: VecDeque<(StepPlan, Option<StepId>)>,
    /// Number of these that can only fail.
    num_behind_failure: usize,
    /// The last step with spans that has failed.
    last_failed: Option<StepId>,
    /// Copies to the host, with their prompts and the plan that makes them.
    copies: Vec<(Request, Vec<HostCopy>, Option<StepId>)>,
    /// Adapters in memory.
    ready: Vec<String>,
    /// Sequences that draw nothing, unless a request is just admitted.
    held: Vec<SeqId>,
    next_id: u64,
    /// Live requests, in order of arrival.
    live: Vec<RequestId>,
    /// Requests of which some sequences were ended from outside.
    cut: Vec<SeqId>,
    finished: Vec<SeqId>,
    preemptions: HashMap<RequestId, usize>,
    prompt_budget: usize,
}

impl World {
    fn new(config: SchedConfig) -> World {
        World {
            scheduler: Scheduler::new(config.clone()).unwrap(),
            replica: Scheduler::new(config.clone()).unwrap(),
            executor: Executor::new(&config),
            config,
            in_flight: VecDeque::new(),
            num_behind_failure: 0,
            last_failed: None,
            copies: Vec::new(),
            ready: (0..4).map(|k| format!("adapter {k}")).collect(),
            held: Vec::new(),
            next_id: 0,
            live: Vec::new(),
            cut: Vec::new(),
            finished: Vec::new(),
            preemptions: HashMap::new(),
            prompt_budget: usize::MAX,
        }
    }

    fn apply(&mut self, event: &Event) {
        match event {
            Event::Submit(request) => {
                let request = Request { id: RequestId(self.next_id), ..request.clone() };
                let taken = self.scheduler.submit(request.clone());
                assert_eq!(taken, self.replica.submit(request.clone()));
                let (bs, p, n, max_tokens) =
                    (self.config.block_size, request.prompt.len(), request.n, request.max_tokens);
                let all = p / bs + n * ((p + max_tokens - 1).div_ceil(bs) - p / bs);
                let owned = |kind: &CacheGroup| match kind {
                    CacheGroup::Full => all,
                    CacheGroup::Sliding { window } => {
                        let windows = n * (window.div_ceil(bs) + 2);
                        all.min(if self.config.enable_chunked_prefill { windows } else { windows.max(p.div_ceil(bs)) })
                    }
                    other => panic!("{other:?}: no such group is made here"),
                };
                let needed: usize = self.config.groups.iter().map(owned).sum();
                let fits = n <= self.config.max_num_seqs
                    && p + max_tokens <= self.config.max_model_len
                    && needed <= self.config.num_blocks;
                assert_eq!(taken.is_ok(), fits, "{taken:?}");
                if fits {
                    self.next_id += 1;
                    self.live.push(request.id);
                    self.executor.add(request);
                }
            }
            Event::Abort(at) if !self.live.is_empty() => {
                let id = self.live.remove(at % self.live.len());
                assert!(self.scheduler.abort(id) && self.replica.abort(id));
                let truth = self.executor.requests.get_mut(&id).unwrap();
                let cut = (0..truth.request.n as u32).filter(|i| truth.live[*i as usize]);
                self.cut.extend(cut.map(|index| SeqId { request: id, index }));
                truth.live.fill(false);
            }
            Event::Finish(at, index) if !self.live.is_empty() => {
                let seq = SeqId { request: self.live[at % self.live.len()], index: *index };
                let truth = self.executor.requests.get_mut(&seq.request).unwrap();
                let was_live = !truth.request.beam_search && truth.live.get(*index as usize) == Some(&true);
                assert_eq!(self.scheduler.finish_sequence(seq), was_live);
                assert_eq!(self.replica.finish_sequence(seq), was_live);
                if was_live {
                    truth.live[*index as usize] = false;
                    self.cut.push(seq);
                }
            }
            Event::Propose(at, index, len, right) if !self.live.is_empty() => {
                let seq = SeqId { request: self.live[at % self.live.len()], index: *index };
                let truth = self.executor.requests.get_mut(&seq.request).unwrap();
                if truth.live.get(*index as usize) == Some(&true) {
                    let drafts = truth.guess(*index, *right, *len);
                    let taken = self.scheduler.propose(seq, drafts.clone());
                    // The replica learns them after its plan.
                    assert_eq!(self.replica.propose(seq, vec![9; drafts.len()]), taken);
                    if taken {
                        truth.drafts[*index as usize] = drafts;
                    }
                }
            }
            Event::Reset { running } => {
                let stats = self.scheduler.stats();
                let idle = stats.blocks_in_use + stats.host_blocks_in_use == 0;
                let done = self.scheduler.reset_prefix_cache(*running);
                assert_eq!(self.replica.reset_prefix_cache(*running), done);
                assert_eq!(done, idle || *running && stats.num_in_flight == 0);
                assert!(!done || self.scheduler.stats().blocks_free == self.config.num_blocks);
            }
            Event::Fail(steps) => (0..*steps).for_each(|_| self.fail()),
            Event::CopyOut(tokens) => {
                let copies = self.scheduler.copy_to_host(Prompt::new(tokens));
                assert_eq!(self.replica.copy_to_host(Prompt::new(tokens)), copies);
                self.copies.push((Request::new(RequestId(0), tokens.clone(), 1), copies, None));
            }
            Event::TakeIn(tokens) => {
                let blocks = tokens.len() / self.config.block_size;
                let all = (0..blocks).flat_map(|block| (0..self.config.groups.len()).map(move |group| (block, group)));
                let all: BTreeSet<(usize, usize)> = all.collect();
                let taken = self.scheduler.insert_on_host(Prompt::new(tokens), &all);
                assert_eq!(self.replica.insert_on_host(Prompt::new(tokens), &all), taken);
                let request = Request::new(RequestId(0), tokens.clone(), 1);
                for (k, copy) in taken.iter().enumerate() {
                    if k % 5 == 4 {
                        // It could not be written.
                        self.scheduler.forget_host_block(copy.host);
                        self.replica.forget_host_block(copy.host);
                    } else {
                        self.executor.write_host(&request, copy);
                    }
                }
            }
            Event::Budget(tokens) => {
                self.prompt_budget = *tokens;
                self.scheduler.set_prompt_budget(*tokens);
                self.replica.set_prompt_budget(*tokens);
            }
            Event::Adapters(bits) => self.set_ready_adapters(*bits),
            Event::Hold(at, index) if !self.live.is_empty() => {
                self.hold(SeqId { request: self.live[at % self.live.len()], index: *index });
            }
            // What is behind a failed step reads what was never written.
            Event::Run(steps) if self.num_behind_failure == 0 => (0..*steps).for_each(|_| self.executor.run()),
            _ => {}
        }
        self.forget_ended();
    }

    /// Holds a sequence, or ends this.
    fn hold(&mut self, seq: SeqId) {
        let before = self.held.len();
        self.held.retain(|held| *held != seq);
        let is_held = before == self.held.len();
        let is_live = [&mut self.scheduler, &mut self.replica].map(|scheduler| scheduler.hold(seq, is_held));
        assert_eq!(is_live[0], is_live[1]);
        if is_live[0] && is_held {
            self.held.push(seq);
        }
    }

    fn set_ready_adapters(&mut self, bits: usize) {
        let ready: Vec<String> = (0..4).filter(|k| bits >> k & 1 == 1).map(|k| format!("adapter {k}")).collect();
        self.scheduler.set_ready_adapters(ready.clone());
        self.replica.set_ready_adapters(ready.clone());
        self.ready = ready;
    }

    /// The oldest step fails. All behind it can only fail then. A plan without spans needs no call if the step in front of it has
    /// failed.
    fn fail(&mut self) {
        let Some((plan, front)) = self.in_flight.pop_front() else { return };
        let has_spans = !plan.spans.is_empty();
        self.executor.failed(&plan);
        let is_told = !has_spans && front.is_some() && front == self.last_failed && plan.step.0.is_multiple_of(2);
        for scheduler in [&mut self.scheduler, &mut self.replica].into_iter().filter(|_| !is_told) {
            if self.num_behind_failure > 0 && has_spans {
                let refused = scheduler.commit(plan.step, &[]);
                assert_eq!(refused, Err(CommitError::BehindFailure { step: plan.step }));
            }
            scheduler.fail(plan.step, &plan.memory).unwrap();
            scheduler.audit().unwrap();
        }
        if has_spans {
            self.last_failed = Some(plan.step);
        }
        // What was planned after a failure of which the scheduler knew is not behind it.
        self.num_behind_failure = if is_told { self.num_behind_failure - 1 } else { self.in_flight.len() };
    }

    /// Number of steps in flight with spans.
    fn num_in_flight(&self) -> usize {
        self.in_flight.iter().filter(|(plan, _)| !plan.spans.is_empty()).count()
    }

    fn forget_ended(&mut self) {
        self.live.retain(|id| self.executor.requests[id].live.iter().any(|l| *l));
    }

    /// Runs a step, with events between its plan and the following commits. A patient step commits only if the next
    /// plan requires it. Some are submitted only after the events, and after another plan.
    fn step(&mut self, between: &[Event], is_patient: bool) {
        let (step, idle) = self.plan();
        let (is_hasty, is_late) = (step.0.is_multiple_of(7), step.0.is_multiple_of(3));
        if !is_late {
            self.submitted(step);
        }
        for event in between {
            self.apply(event);
        }
        // It may have failed.
        if is_late && self.in_flight.iter().any(|(plan, _)| plan.step == step && !plan.spans.is_empty()) {
            let (_, is_empty) = self.plan();
            assert!(is_empty || self.config.max_in_flight == 1, "a step is planned behind one that is not submitted");
            self.submitted(step);
        }
        let keep = if idle && !is_patient || is_hasty { 0 } else { self.config.max_in_flight - 1 };
        while self.num_in_flight() > keep || keep == 0 && !self.in_flight.is_empty() {
            self.commit();
        }
    }

    fn submitted(&mut self, step: StepId) {
        for scheduler in [&mut self.scheduler, &mut self.replica] {
            scheduler.submitted(step).unwrap();
        }
    }

    /// Plans a step and gives it to the executor. Returns whether it has no spans.
    fn plan(&mut self) -> (StepId, bool) {
        let decodes = self.scheduler.num_decode_rows() > 0;
        let running = self.scheduler.requests().filter(|request| request.state() == RequestState::Running);
        let running: Vec<RequestId> = running.map(|request| request.id()).collect();
        let plan = self.scheduler.plan();
        let draws = |seq: &SeqId| plan.spans.iter().any(|span| span.seq == *seq && !span.sample.is_empty());
        let is_live = |seq: &SeqId| self.executor.requests[&seq.request].live[seq.index as usize];
        let held = self.held.iter().filter(|seq| running.contains(&seq.request) && is_live(seq));
        assert_eq!(held.copied().find(draws), None, "a held sequence draws");
        self.check_prompt_budget(&plan, decodes);
        let mut same = self.replica.plan();
        let drafts = |span: &sched::Span| span.tokens[span.tokens.len() - span.drafts..].to_vec();
        self.replica.replace_drafts(&mut same, &plan.spans.iter().flat_map(drafts).collect::<Vec<_>>());
        assert_eq!(plan, same, "the plan is not a function of the history");
        // Execute the deserialised plan, so that a plan is complete.
        let json = serde_json::to_string(&plan).unwrap();
        let replayed: StepPlan = serde_json::from_str(&json).unwrap();
        assert_eq!(plan, replayed);
        let may_be_empty =
            self.live.is_empty() || self.num_in_flight() > 0 || self.waits_for_adapter() || !self.held.is_empty();
        assert!(!plan.spans.is_empty() || may_be_empty, "an empty plan although requests are live");
        assert!(plan.spans.is_empty() || !self.live.is_empty(), "a plan with spans although no request is live");
        let mut behind_failure = self.in_flight.iter().take(self.num_behind_failure);
        assert!(plan.spans.is_empty() || behind_failure.all(|(plan, _)| plan.spans.is_empty()), "behind a failed step");
        self.scheduler.audit().unwrap();
        self.check_preempted(&plan);
        self.executor.submit(replayed);
        if self.scheduler.pool().memory_ops().next().is_none() {
            self.copies.iter_mut().for_each(|(_, _, step)| *step = step.or(Some(plan.step)));
        }
        let (step, is_empty) = (plan.step, plan.spans.is_empty());
        if !is_empty || !plan.memory.is_empty() {
            let front = self.in_flight.iter().rfind(|(plan, _)| !plan.spans.is_empty()).map(|(plan, _)| plan.step);
            self.in_flight.push_back((plan, front));
        }
        (step, is_empty)
    }

    /// Whether all live requests may wait for adapters that are not in memory.
    fn waits_for_adapter(&self) -> bool {
        self.scheduler.adapter_to_read().is_some_and(|adapter| !self.ready.iter().any(|ready| ready == adapter))
    }

    fn commit(&mut self) {
        if self.num_behind_failure > 0 {
            return self.fail();
        }
        let (plan, _) = self.in_flight.pop_front().unwrap();
        if plan.spans.is_empty() {
            return;
        }
        let outcomes = self.executor.finish(plan.step);
        let late: Vec<SeqId> =
            sampled(&plan).filter(|q| !self.executor.requests[&q.request].live[q.index as usize]).collect();
        self.finished.extend(outcomes.iter().filter(|o| o.finished && !late.contains(&o.seq)).map(|o| o.seq));
        // Outcomes of ended sequences are optional.
        let given: Vec<Outcome> =
            outcomes.iter().filter(|o| plan.step.0.is_multiple_of(2) || !late.contains(&o.seq)).cloned().collect();
        for scheduler in [&mut self.scheduler, &mut self.replica] {
            scheduler.commit(plan.step, &given).unwrap();
        }
        self.executor.committed(&outcomes);
        // The lists of one are used again, and those of the other are not.
        self.scheduler.recycle(plan);
        self.forget_ended();
        self.check_copies();
        self.check();
    }

    /// Checks the copies on the host that are made and still valid.
    fn check_copies(&mut self) {
        for (request, copies, _) in
            self.copies.iter_mut().filter(|(_, _, s)| s.is_some_and(|s| self.executor.is_over(s)))
        {
            copies.retain(|copy| self.scheduler.has_copy(copy));
            copies.iter().for_each(|copy| self.executor.check_host(request, copy));
        }
        self.copies.retain(|(_, copies, _)| !copies.is_empty());
    }

    /// Beside decodes, a plan computes at most the prompt budget. The last token of a prompt counts as a decode.
    fn check_prompt_budget(&self, plan: &StepPlan, decodes: bool) {
        let of_prompt = |span: &sched::Span| {
            let prompt = self.executor.requests[&span.seq.request].request.prompt.len();
            let tokens = prompt.min(span.start + span.tokens.len()).saturating_sub(span.start);
            if tokens > 1 { tokens } else { 0 }
        };
        let tokens: usize = plan.spans.iter().map(of_prompt).sum();
        // If the plan preempts what decoded, nothing waits for its prompts.
        let decodes = decodes && (plan.preempted.is_empty() || plan.spans.iter().any(|span| of_prompt(span) == 0));
        let is_limited = decodes && self.config.enable_chunked_prefill;
        assert!(!is_limited || tokens <= self.prompt_budget.max(1), "{tokens} of {}: {plan}", self.prompt_budget);
        assert!(plan.num_tokens() <= self.config.max_num_batched_tokens);
    }

    /// An aged request is preempted only for an earlier aged request or a higher priority.
    fn check_preempted(&mut self, plan: &StepPlan) {
        let aged: Vec<RequestId> =
            self.live.iter().copied().filter(|id| self.preemptions.get(id) >= Some(&3)).collect();
        let priority = |id: &RequestId| match self.config.policy {
            Policy::Fcfs => 0,
            Policy::Priority => self.executor.requests[id].request.priority,
        };
        for id in &plan.preempted {
            let before = self.live.iter().any(|other| {
                let (theirs, ours) = (priority(other), priority(id));
                theirs < ours || theirs == ours && aged.contains(other) && other < id
            });
            assert!(before || !aged.contains(id), "{id} is the oldest of the aged");
        }
        for id in &plan.preempted {
            *self.preemptions.entry(*id).or_default() += 1;
        }
    }

    fn check(&self) {
        self.scheduler.audit().unwrap();
        let stats = self.scheduler.stats();
        assert_eq!(stats, self.replica.stats());
        assert_eq!(stats.blocks_in_use + stats.blocks_cached + stats.blocks_free, self.config.num_blocks);
        assert_eq!(stats.num_running + stats.num_waiting + stats.num_swapped, self.live.len());
        assert!(stats.num_swapped > 0 || stats.host_blocks_in_use == 0);
        assert_eq!(self.scheduler.has_work(), !self.live.is_empty());
        assert!(stats.host_blocks_in_use + stats.host_blocks_cached <= self.config.host_blocks);
        assert!(stats.host_prefix_hits <= stats.prefix_hits);
        assert!(stats.prefix_hits <= stats.prefix_queries && stats.resumed_prefix_hits <= stats.resumed_prefix_queries);
    }

    /// Four plans per token that the live requests compute at most. The progress theorem allows more, but a plan that computes
    /// nothing, or only what is lost again, is rare.
    fn bound(&self) -> usize {
        let live = self.live.iter().map(|id| &self.executor.requests[id].request);
        4 * live.map(|r| r.prompt.len() + r.n * (r.max_tokens - 1)).sum::<usize>()
    }

    fn drain(&mut self) {
        self.set_ready_adapters(15);
        self.held.clone().into_iter().for_each(|seq| self.hold(seq));
        let bound = self.bound();
        for _ in 0..bound {
            if self.live.is_empty() {
                break;
            }
            self.step(&[], false);
        }
        while !self.in_flight.is_empty() {
            self.commit();
        }
        assert!(self.live.is_empty(), "{} requests live after {bound} plans", self.live.len());
        assert_eq!(self.scheduler.stats().blocks_in_use, 0);

        // A search has ended once it is not live.
        let is_search = |seq: &SeqId| self.executor.requests[&seq.request].request.beam_search;
        let mut ended: Vec<SeqId> =
            self.finished.iter().chain(&self.cut).copied().filter(|seq| !is_search(seq)).collect();
        ended.sort_unstable();
        let all = |truth: &common::Truth| {
            let id = truth.request.id;
            (0..truth.request.n as u32).map(move |index| SeqId { request: id, index })
        };
        let mut expected: Vec<SeqId> =
            self.executor.requests.values().flat_map(all).filter(|seq| !is_search(seq)).collect();
        expected.sort_unstable();
        assert_eq!(ended, expected, "each sequence ends once");
        for seq in self.finished.iter().filter(|seq| !is_search(seq)) {
            let truth = &self.executor.requests[&seq.request];
            assert_eq!(truth.outputs[seq.index as usize], answer(&truth.request, seq.index));
        }
    }
}

proptest! {
    // `PROPTEST_CASES` sets the number of cases.
    #![proptest_config(ProptestConfig {
        cases: ProptestConfig::default().cases.max(1500),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_request_has_the_output_that_it_has_alone(config in config(), history in history()) {
        let mut world = World::new(config);
        for (before, between) in &history {
            for event in before {
                world.apply(event);
            }
            world.step(between, true);
        }
        world.drain();
    }
}

#[test]
fn every_output_is_right_in_a_pool_too_small_for_the_load() {
    (1..=2).for_each(|steps| outputs_are_right_after_many_preemptions((steps, false), 0));
    (1..=4).for_each(|stages| outputs_are_right_after_many_preemptions((stages, true), 0));
}

#[test]
fn every_output_is_right_in_a_pool_too_small_for_the_load_with_prefixes_in_host_memory() {
    (1..=2).for_each(|steps| outputs_are_right_after_many_preemptions((steps, false), 24));
}

fn outputs_are_right_after_many_preemptions((max_in_flight, pipeline): (usize, bool), host_blocks: usize) {
    // Preempted requests come back through the prefix cache.
    let preemption_mode = PreemptionMode::Recompute;
    let sizes =
        SchedConfig { host_blocks, host_caching: true, preemption_mode, max_num_seqs: 12, ..common::config(16, 4) };
    let config = SchedConfig { enable_prefix_caching: true, max_in_flight, pipeline, ..sizes };
    let mut world = World::new(config);
    for k in 0..30usize {
        let prompt = (0..3 + 5 * k as u32 % 23).map(|i| i / 7).collect();
        let request = common::request(0, 1, 12);
        world.apply(&Event::Submit(Request { prompt, n: 1 + k % 3, beam_search: k % 5 == 4, ..request }));
    }
    assert_eq!(world.live.len(), 30);
    world.drain();
    let stats = world.scheduler.stats();
    assert!(stats.preemptions > 10, "{stats:?}");
    assert!(stats.prefix_hits > 100, "{stats:?}");
    let has_host = host_blocks > 0;
    assert_eq!((stats.blocks_offloaded > 20, stats.blocks_loaded > 10), (has_host, has_host), "{stats:?}");
    assert_eq!(stats.deferrals > 0, max_in_flight > 1, "{stats:?}");
}

//! An executor with simulated memory, which executes plans exactly and checks them.
//!
//! A plan is submitted, and its tables change at once. The device executes it later, in order with what the host writes: at the
//! latest when it is committed, and never if it fails before.
//!
//! It has an array per block. The "key" that a forward pass writes for a token is a hash of everything that the real
//! one depends on. The token drawn is a hash of that, so each request has one right answer, whatever else runs. The
//! executor checks that every span reads exactly its own sequence through the executor's own block tables, which only
//! `TableDelta`, `released` and `MemOp` change.
//!
//! A block of a group with recurrent states has a page: the state after the last token computed in it. A token updates the
//! page of its block, or begins it with the page of the block before. So a token that is computed twice on one page, or not
//! at all, gives another state.

use std::collections::hash_map::DefaultHasher;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{Hash, Hasher};

use kvblock::HostCopy;
use sched::{
    BlockId, CacheGroup, HostBlockId, MemOp, Outcome, Request, RequestId, RequestState, SchedConfig, Scheduler, SeqId,
    Span, StepId, StepPlan,
};

pub fn config(num_blocks: usize, block_size: usize) -> SchedConfig {
    SchedConfig {
        max_num_seqs: 16,
        max_num_batched_tokens: 1024,
        max_model_len: 2048,
        enable_prefix_caching: false,
        hash_seed: Some(1),
        ..SchedConfig::new(num_blocks, block_size)
    }
}

/// A request whose prompt shares no prefix with those of other ids.
pub fn request(id: u64, prompt: usize, max_tokens: usize) -> Request {
    Request::new(RequestId(id), (0..prompt as u32).map(|i| 1000 * (id as u32 + 1) + i).collect(), max_tokens)
}

pub fn seq(request: u64, index: u32) -> SeqId {
    SeqId { request: RequestId(request), index }
}

/// `(request, tokens)` of each span.
pub fn spans(plan: &StepPlan) -> Vec<(u64, usize)> {
    plan.spans.iter().map(|s| (s.seq.request.0, s.tokens.len())).collect()
}

/// Commits a step in which every sampled sequence draws this token.
pub fn commit_all(scheduler: &mut Scheduler, plan: &StepPlan, token: u32) {
    scheduler.submitted(plan.step).unwrap();
    scheduler.commit(plan.step, &outcomes(plan, token)).unwrap();
    scheduler.audit().unwrap();
}

/// Outcomes in which every sampled sequence draws this token.
pub fn outcomes(plan: &StepPlan, token: u32) -> Vec<Outcome> {
    sampled(plan).map(|seq| Outcome::token(seq, token, false)).collect()
}

/// The sequences that a plan samples.
pub fn sampled(plan: &StepPlan) -> impl Iterator<Item = SeqId> + '_ {
    plan.spans.iter().flat_map(|s| s.sample.clone().map(|index| SeqId { index, ..s.seq }))
}

/// The running requests with the number of their blocks. Shared blocks count once.
pub fn blocks_per_request(scheduler: &Scheduler) -> Vec<(RequestId, usize)> {
    let running = scheduler.requests().filter(|request| request.state() == RequestState::Running);
    running.map(|request| (request.id(), request.blocks().collect::<HashSet<_>>().len())).collect()
}

/// The block on the device that an operation writes, or reads for the last time.
fn changed(op: &MemOp) -> BlockId {
    match *op {
        MemOp::Poison { block: changed, .. }
        | MemOp::Copy { dst: changed, .. }
        | MemOp::SwapOut { src: changed, .. }
        | MemOp::SwapIn { dst: changed, .. } => changed,
        other => panic!("{other}: the executor does not know it"),
    }
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The key of the last of these tokens in one cache group: a hash of everything that it depends on.
fn content(group: usize, request: &Request, tokens: &[u32]) -> u64 {
    let inputs = request.media.iter().filter(|media| media.start < tokens.len());
    let inputs: Vec<_> = inputs.map(|m| (&m.digest, m.start, (m.start + m.len).min(tokens.len()))).collect();
    hash((group, &request.cache_salt, &request.adapter, inputs, tokens))
}

/// The state before the first token in one cache group.
fn initial_state(group: usize, request: &Request) -> u64 {
    hash((group, &request.cache_salt, &request.adapter, "state"))
}

/// The state that the token at a position leaves behind.
fn next_state(state: u64, request: &Request, position: usize, token: u32) -> u64 {
    let inputs = request.media.iter().filter(|media| (media.start..media.start + media.len).contains(&position));
    let inputs: Vec<_> = inputs.map(|media| (&media.digest, media.start)).collect();
    hash((state, inputs, token))
}

/// The state after these tokens.
fn state(group: usize, request: &Request, tokens: &[u32]) -> u64 {
    let tokens = tokens.iter().enumerate();
    tokens.fold(initial_state(group, request), |state, (position, token)| next_state(state, request, position, *token))
}

/// The token that sequence `index` draws after `tokens`. There are only two, so that outputs share prefixes.
fn draw(request: &Request, tokens: &[u32], index: u32) -> u32 {
    (hash((&request.cache_salt, &request.adapter, &request.media, tokens, index, "token")) % 2) as u32
}

/// Whether the sequence ends with that token.
fn ends(request: &Request, tokens: &[u32], index: u32) -> bool {
    let outputs = tokens.len() + 1 - request.prompt.len();
    outputs == request.max_tokens
        || hash((&request.cache_salt, &request.adapter, &request.media, tokens, index, "end")).is_multiple_of(16)
}

/// The output of a sequence that runs alone.
pub fn answer(request: &Request, index: u32) -> Vec<u32> {
    let mut tokens = request.prompt.clone();
    loop {
        let is_last = ends(request, &tokens, index);
        tokens.push(draw(request, &tokens, index));
        if is_last {
            return tokens.split_off(request.prompt.len());
        }
    }
}

/// The next outcomes of a search with these outputs, `None` for an ended beam. A beam continues any live beam, or ends;
/// an ended one can become a fork. Some searches end completely.
fn search(request: &Request, beams: &[Option<Vec<u32>>]) -> Vec<Outcome> {
    let live: Vec<u32> = (0..).zip(beams).filter(|(_, beam)| beam.is_some()).map(|(index, _)| index).collect();
    let is_first = beams.iter().all(|beam| beam.as_ref().is_none_or(Vec::is_empty));
    let one = |index: u32| {
        let seq = SeqId { request: request.id, index };
        let random = hash((&request.prompt, beams, index));
        let parent = if is_first { index } else { live[random as usize % live.len()] };
        let has_ended = random.is_multiple_of(7) || is_first && !live.contains(&index);
        let tokens = if has_ended { vec![] } else { vec![(random >> 32) as u32 % 2] };
        Outcome { seq, parent: if has_ended { index } else { parent }, tokens, finished: has_ended }
    };
    (0..beams.len() as u32).map(one).collect()
}

/// The executor's state of a request.
pub struct Truth {
    pub request: Request,
    /// Committed tokens of each sequence.
    pub outputs: Vec<Vec<u32>>,
    pub live: Vec<bool>,
    /// The drafts proposed for each sequence's next span. A plan can use fewer.
    pub drafts: Vec<Vec<u32>>,
    /// Number of drafts that the last verification of each sequence accepted.
    accepted: Vec<usize>,
}

impl Truth {
    /// All committed tokens of a sequence.
    fn known(&self, index: u32) -> Vec<u32> {
        self.request.prompt.iter().chain(&self.outputs[index as usize]).copied().collect()
    }

    /// Returns `len` drafts for a sequence, of which the first `right` are right.
    pub fn guess(&self, index: u32, right: usize, len: usize) -> Vec<u32> {
        let mut tokens = self.known(index);
        let known = tokens.len();
        for k in 0..len {
            let token = draw(&self.request, &tokens, index);
            tokens.push(if k < right { token } else { 1 - token });
        }
        tokens.split_off(known)
    }
}

/// The entries of a sequence's table in each cache group. `None` is a hole.
type Tables = Vec<Vec<Option<BlockId>>>;

/// A step that is not committed.
struct Flight {
    step: StepId,
    /// Which sequence writes to which block.
    written: HashMap<BlockId, SeqId>,
    /// The computed tokens of each sequence after it.
    computed: Vec<(SeqId, usize)>,
    sampled: Vec<SeqId>,
}

/// What a span depends on besides memory, when it is planned.
struct Inputs {
    tables: Tables,
    known: Vec<u32>,
    /// Outputs of the live beams of its request.
    beams: Vec<Option<Vec<u32>>>,
}

/// Work of the device.
enum Work {
    Plan(StepPlan, Vec<Inputs>),
    WriteHost(HostBlockId, Block),
}

/// Contents written by a failed step. No valid contents are equal to it.
const GARBAGE: u64 = u64::MAX;

/// The contents of a block: keys and values by slot, and the page. `None` is NaN.
#[derive(Clone)]
struct Block {
    slots: Vec<Option<u64>>,
    page: Option<u64>,
}

impl Block {
    fn fill(&mut self, value: Option<u64>) {
        self.slots.fill(value);
        self.page = value;
    }
}

pub struct Executor {
    config: SchedConfig,
    memory: Vec<Block>,
    host: Vec<Block>,
    tables: HashMap<SeqId, Tables>,
    /// Number of committed tokens of each sequence.
    computed: HashMap<SeqId, usize>,
    /// Steps that are not committed.
    in_flight: VecDeque<Flight>,
    /// What the device has not done yet.
    queue: VecDeque<Work>,
    /// What each executed step has drawn.
    drawn: HashMap<StepId, Vec<Outcome>>,
    pub requests: HashMap<RequestId, Truth>,
}

impl Executor {
    pub fn new(config: &SchedConfig) -> Executor {
        let block = Block { slots: vec![None; config.block_size], page: None };
        Executor {
            config: config.clone(),
            memory: vec![block.clone(); config.num_blocks],
            host: vec![block; config.host_blocks],
            tables: HashMap::new(),
            computed: HashMap::new(),
            in_flight: VecDeque::new(),
            queue: VecDeque::new(),
            drawn: HashMap::new(),
            requests: HashMap::new(),
        }
    }

    pub fn add(&mut self, request: Request) {
        let n = request.n;
        let truth = Truth {
            request,
            outputs: vec![Vec::new(); n],
            live: vec![true; n],
            drafts: vec![Vec::new(); n],
            accepted: vec![0; n],
        };
        self.requests.insert(truth.request.id, truth);
    }

    fn slot(&self, table: &[Option<BlockId>], position: usize) -> (usize, usize) {
        let block = table[position / self.config.block_size];
        (block.unwrap_or_else(|| panic!("position {position} is in a hole")).index(), position % self.config.block_size)
    }

    /// Takes a plan: checks it, and applies its tables.
    pub fn submit(&mut self, plan: StepPlan) {
        for seq in &plan.released {
            assert!(self.tables.remove(seq).is_some(), "{seq} is released, but has no table");
            self.computed.remove(seq);
            self.in_flight.iter_mut().for_each(|step| step.computed.retain(|(other, _)| other != seq));
        }
        for op in &plan.memory {
            let changed = changed(op);
            let is_written = self.in_flight.iter().any(|step| step.written.contains_key(&changed));
            assert!(!is_written, "{changed} is still written to");
        }
        assert!(plan.num_tokens() <= self.config.max_num_batched_tokens, "budget exceeded");
        assert!(plan.spans.len() <= self.config.max_num_seqs, "too many sequences");
        let adapters = plan.spans.iter().filter_map(|span| self.requests[&span.seq.request].request.adapter.as_ref());
        assert!(adapters.collect::<HashSet<_>>().len() <= self.config.max_loras, "too many adapters");
        let distinct: HashSet<SeqId> = plan.spans.iter().map(|s| s.seq).collect();
        assert_eq!(distinct.len(), plan.spans.len(), "two spans for one sequence");
        for span in &plan.spans {
            let tables = self.tables.entry(span.seq).or_insert_with(|| vec![vec![]; self.config.groups.len()]);
            assert_eq!(span.groups.len(), tables.len());
            for (table, group) in tables.iter_mut().zip(&span.groups) {
                assert!(group.table.keep <= table.len());
                group.table.apply(table, None, Some);
                for block in &group.table.append {
                    let writers: Vec<_> = self.in_flight.iter().filter_map(|step| step.written.get(block)).collect();
                    assert!(writers.iter().all(|w| **w == span.seq), "{block} is reissued while {writers:?} write");
                }
            }
        }
        let mut written = HashMap::new();
        plan.spans.iter().for_each(|span| self.check(span, &mut written));
        let sampled: Vec<SeqId> = sampled(&plan).collect();
        let inputs = |span: &Span| {
            let truth = &self.requests[&span.seq.request];
            let beams = truth.live.iter().zip(&truth.outputs).map(|(live, output)| live.then(|| output.clone()));
            Inputs {
                tables: self.tables[&span.seq].clone(),
                known: truth.known(span.seq.index),
                beams: if truth.request.beam_search { self.check_search(span, &plan, beams.collect()) } else { vec![] },
            }
        };
        let inputs: Vec<Inputs> = plan.spans.iter().map(inputs).collect();
        for seq in &sampled {
            self.requests.get_mut(&seq.request).unwrap().drafts[seq.index as usize].clear();
        }
        if !plan.spans.is_empty() {
            let computed = plan.spans.iter().map(|s| (s.seq, s.start + s.tokens.len() - s.drafts)).collect();
            self.in_flight.push_back(Flight { step: plan.step, written, computed, sampled });
        }
        self.queue.push_back(Work::Plan(plan, inputs));
    }

    /// Has the device do the next of its work.
    pub fn run(&mut self) {
        match self.queue.pop_front() {
            Some(Work::Plan(plan, inputs)) => self.execute(&plan, inputs),
            Some(Work::WriteHost(block, contents)) => self.host[block.index()] = contents,
            None => {}
        }
    }

    /// Whether the device has executed a step, or will never.
    pub fn is_over(&self, step: StepId) -> bool {
        !self.queue.iter().any(|work| matches!(work, Work::Plan(plan, _) if plan.step <= step))
    }

    /// Waits for a step. Returns its outcomes.
    pub fn finish(&mut self, step: StepId) -> Vec<Outcome> {
        while !self.is_over(step) {
            self.run();
        }
        self.drawn[&step].clone()
    }

    /// Applies memory operations, computes the spans, reads every sequence back, and draws tokens.
    fn execute(&mut self, plan: &StepPlan, mut inputs: Vec<Inputs>) {
        plan.memory.iter().for_each(|op| self.apply(op));
        for (span, inputs) in plan.spans.iter().zip(&mut inputs) {
            if let Some(step) = span.awaits {
                let drawn = self.drawn[&step].iter().find(|outcome| outcome.seq == span.seq).unwrap();
                assert_eq!(drawn.tokens.len(), 1);
                inputs.known.push(drawn.tokens[0]);
            }
            inputs.known.extend(&span.tokens[span.tokens.len() - span.drafts..]);
            self.write(span, inputs);
        }
        let outcomes = plan.spans.iter().zip(&inputs).flat_map(|(span, inputs)| self.sample(span, inputs, plan));
        self.drawn.insert(plan.step, outcomes.collect());
    }

    fn apply(&mut self, op: &MemOp) {
        match *op {
            MemOp::Copy { src, dst } => self.memory[dst.index()] = self.memory[src.index()].clone(),
            // A page has no slots.
            MemOp::Poison { block, from_slot: 0 } => self.memory[block.index()].fill(None),
            MemOp::Poison { block, from_slot } => self.memory[block.index()].slots[from_slot..].fill(None),
            MemOp::SwapOut { src, dst } => self.host[dst.index()] = self.memory[src.index()].clone(),
            MemOp::SwapIn { src, dst } => self.memory[dst.index()] = self.host[src.index()].clone(),
            other => panic!("{other}: the executor does not know it"),
        }
    }

    /// Checks the tokens of a span, as far as they are known, and who owns the blocks that it writes.
    fn check(&self, span: &Span, written: &mut HashMap<BlockId, SeqId>) {
        let (truth, index) = (&self.requests[&span.seq.request], span.seq.index as usize);
        let positions = span.start..span.start + span.tokens.len();
        let committed = truth.request.prompt.len() + truth.outputs[index].len();
        if let Some(step) = span.awaits {
            assert!(!self.config.pipeline, "{} awaits {step}", span.seq);
            let draws = |other: &&Flight| other.step == step && other.sampled.contains(&span.seq);
            assert!(self.in_flight.iter().any(|other| draws(&other)), "{} awaits {step}", span.seq);
            assert_eq!((span.tokens.last(), positions.end, span.drafts), (Some(&0), committed + 1, 0));
        } else {
            assert!(positions.end <= committed + span.drafts, "an unknown token without the step that draws it");
        }
        let num_known = span.tokens.len() - span.drafts;
        if span.drafts > 0 {
            let most = if self.config.recompute_drafts { 1 + truth.accepted[index] } else { 1 };
            assert!((1..=most).contains(&num_known), "drafts follow {num_known} known tokens, expected at most {most}");
            assert_eq!(positions.start + num_known, committed, "drafts follow the last known token");
            assert_eq!(span.tokens[num_known..], truth.drafts[index][..span.drafts]);
        }
        assert!(truth.live[index] || positions.end <= truth.request.prompt.len());
        for (table, group) in self.tables[&span.seq].iter().zip(&span.groups) {
            assert_eq!(group.slots.len(), span.tokens.len());
            for (position, slot) in positions.clone().zip(&group.slots) {
                let (block, offset) = self.slot(table, position);
                assert_eq!(*slot, (block * self.config.block_size + offset) as i64, "slot of position {position}");
                let id = BlockId(block as u32);
                let other = written.insert(id, span.seq);
                assert!(other.is_none_or(|o| o == span.seq), "{id} is written by {} and {other:?}", span.seq);
                let owners: Vec<_> =
                    self.tables.keys().filter(|seq| **seq == span.seq || self.reads(**seq, id)).collect();
                assert_eq!(owners, [&span.seq], "{id} is written");
            }
        }
    }

    /// Checks a span of a search, which is never planned ahead. Returns its beams.
    fn check_search(&self, span: &Span, plan: &StepPlan, beams: Vec<Option<Vec<u32>>>) -> Vec<Option<Vec<u32>>> {
        if !span.sample.is_empty() {
            let is_of_search = |seq: &SeqId| seq.request == span.seq.request;
            let sampled: Vec<u32> = sampled(plan).filter(is_of_search).map(|seq| seq.index).collect();
            let mut live = (0u32..).zip(&beams).filter(|(_, beam)| beam.is_some());
            assert!(live.all(|(index, _)| sampled.contains(&index)), "a live beam is not sampled: {sampled:?}");
            let mut in_flight = self.in_flight.iter().flat_map(|step| &step.sampled);
            assert!(!in_flight.any(is_of_search), "a search was planned ahead");
        }
        beams
    }

    /// Checks the tokens of a span, and writes its keys.
    fn write(&mut self, span: &Span, Inputs { tables, known, .. }: &Inputs) {
        let request = &self.requests[&span.seq.request].request;
        let positions = span.start..span.start + span.tokens.len();
        let mut tokens = span.tokens.clone();
        if let (Some(_), Some(placeholder)) = (span.awaits, tokens.last_mut()) {
            *placeholder = known[positions.end - 1];
        }
        assert_eq!(tokens, known[positions.clone()], "tokens of {}", span.seq);
        for (g, table) in tables.iter().enumerate() {
            for position in positions.clone() {
                let (block, offset) = self.slot(table, position);
                if !self.holds_states(g) {
                    self.memory[block].slots[offset] = Some(content(g, request, &known[..=position]));
                } else if position < positions.end - span.drafts {
                    let before = match position.checked_sub(1) {
                        None => Some(initial_state(g, request)),
                        Some(_) if offset > 0 => self.memory[block].page,
                        Some(last) => self.memory[self.slot(table, last).0].page,
                    };
                    self.memory[block].page = before.map(|state| next_state(state, request, position, known[position]));
                }
            }
        }
    }

    /// Whether a group holds recurrent states. The rows of drafts read a copy of the state and write nothing there.
    fn holds_states(&self, group: usize) -> bool {
        self.config.recompute_drafts && matches!(self.config.groups[group], CacheGroup::Sliding { .. })
    }

    /// Whether a sequence's table contains the block within the window and before the end. Blocks that fell behind a
    /// window or were cut off with rejected drafts leave the table with the next span, and nothing reads them until
    /// then.
    fn reads(&self, seq: SeqId, block: BlockId) -> bool {
        let computed = self.computed.get(&seq).copied().unwrap_or(0);
        let in_flight = self.in_flight.iter().flat_map(|step| &step.computed).filter(|(other, _)| *other == seq);
        let end = in_flight.map(|(_, end)| *end).max().unwrap_or(0).max(computed);
        let in_group = |(kind, table): (&CacheGroup, &Vec<Option<BlockId>>)| {
            let first = match kind {
                CacheGroup::Full => 0,
                CacheGroup::Sliding { window } => (computed + 1).saturating_sub(*window) / self.config.block_size,
                other => panic!("{other:?}: the executor does not know it"),
            };
            table.iter().take(end.div_ceil(self.config.block_size)).skip(first).any(|entry| *entry == Some(block))
        };
        self.config.groups.iter().zip(&self.tables[&seq]).any(in_group)
    }

    /// Reads what the span's rows read of its sequence, and draws tokens.
    fn sample(&self, span: &Span, inputs: &Inputs, plan: &StepPlan) -> Vec<Outcome> {
        let truth = &self.requests[&span.seq.request];
        let end = span.start + span.tokens.len();
        let known = &inputs.known[..end];
        for (g, kind) in self.config.groups.iter().enumerate() {
            let first = match kind {
                CacheGroup::Full => 0,
                CacheGroup::Sliding { window } => (span.start + 1).saturating_sub(*window),
                other => panic!("{other:?}: the executor does not know it"),
            };
            if self.holds_states(g) {
                let (block, _) = self.slot(&inputs.tables[g], end - span.drafts - 1);
                let expected = state(g, &truth.request, &known[..end - span.drafts]);
                assert_eq!(self.memory[block].page, Some(expected), "the state of {}", span.seq);
                continue;
            }
            for position in first..end {
                let (block, offset) = self.slot(&inputs.tables[g], position);
                let expected = content(g, &truth.request, &known[..=position]);
                assert_eq!(self.memory[block].slots[offset], Some(expected), "{} reads position {position}", span.seq);
            }
        }
        if truth.request.beam_search {
            // All beams draw in one step, at the first of its spans.
            let mut of_search = plan.spans.iter().filter(|s| s.seq.request == span.seq.request && !s.sample.is_empty());
            let is_first = of_search.next().is_some_and(|first| first.seq == span.seq);
            return if is_first { search(&truth.request, &inputs.beams) } else { vec![] };
        }
        let outcome = |index: u32| {
            let (mut tokens, mut at) = (Vec::new(), end - span.drafts);
            loop {
                let row = &known[..at];
                assert!(
                    row.len() < truth.request.prompt.len() + truth.request.max_tokens,
                    "a token after the last is computed"
                );
                let finished = ends(&truth.request, row, index);
                tokens.push(draw(&truth.request, row, index));
                if finished || at == end || tokens.last() != Some(&known[at]) {
                    return Outcome { seq: SeqId { index, ..span.seq }, parent: index, tokens, finished };
                }
                at += 1;
            }
        };
        span.sample.clone().map(outcome).collect()
    }

    /// The contents of a block of a prompt, as blocks from elsewhere have them.
    fn contents(&self, request: &Request, block: usize, group: usize) -> Block {
        let (start, end) = (block * self.config.block_size, (block + 1) * self.config.block_size);
        if self.holds_states(group) {
            let page = Some(state(group, request, &request.prompt[..end]));
            return Block { slots: vec![None; self.config.block_size], page };
        }
        let slots = (start..end).map(|position| Some(content(group, request, &request.prompt[..=position])));
        Block { slots: slots.collect(), page: None }
    }

    /// Writes a block of a prompt to host memory, after the plans that were submitted before.
    pub fn write_host(&mut self, request: &Request, copy: &HostCopy) {
        self.queue.push_back(Work::WriteHost(copy.host, self.contents(request, copy.block, copy.group)));
    }

    /// Checks the contents of a copy of a block of a prompt.
    pub fn check_host(&self, request: &Request, copy: &HostCopy) {
        let (found, expected) = (&self.host[copy.host.index()], self.contents(request, copy.block, copy.group));
        let is_equal =
            if self.holds_states(copy.group) { found.page == expected.page } else { found.slots == expected.slots };
        assert!(is_equal, "{copy:?} has other contents");
    }

    /// Fails the oldest step: what it should have written becomes garbage. The device does not execute it any more.
    pub fn failed(&mut self, plan: &StepPlan) {
        if !plan.spans.is_empty() {
            self.in_flight.pop_front();
        }
        while let Some(work) = self.queue.front() {
            match work {
                Work::Plan(next, _) if next.step > plan.step => break,
                Work::Plan(next, _) if next.step == plan.step => drop(self.queue.pop_front()),
                _ => self.run(),
            }
        }
        for op in &plan.memory {
            if let Some(block) = op.destination() {
                self.memory[block.index()].fill(Some(GARBAGE));
            }
            if let Some(block) = op.host_destination() {
                self.host[block.index()].fill(Some(GARBAGE));
            }
        }
        for slot in plan.spans.iter().flat_map(|span| &span.groups).flat_map(|group| &group.slots) {
            let slot = *slot as usize;
            self.memory[slot / self.config.block_size].slots[slot % self.config.block_size] = Some(GARBAGE);
            self.memory[slot / self.config.block_size].page = Some(GARBAGE);
        }
    }

    /// Commits the oldest step. Ignores sequences that have ended since the plan.
    pub fn committed(&mut self, outcomes: &[Outcome]) {
        for (seq, computed) in self.in_flight.pop_front().into_iter().flat_map(|step| step.computed) {
            // Keys of accepted drafts are computed too, except where drafts are computed again.
            let outcome = outcomes.iter().find(|outcome| outcome.seq == seq && !self.config.recompute_drafts);
            let accepted = outcome.map_or(0, |outcome| outcome.tokens.len().saturating_sub(1));
            self.computed.insert(seq, computed + accepted);
        }
        let before: HashMap<RequestId, (Vec<Vec<u32>>, Vec<bool>)> =
            self.requests.iter().map(|(id, t)| (*id, (t.outputs.clone(), t.live.clone()))).collect();
        for outcome in outcomes {
            let Some(truth) = self.requests.get_mut(&outcome.seq.request) else {
                continue;
            };
            let index = outcome.seq.index as usize;
            let (outputs, live) = &before[&outcome.seq.request];
            let (parent, max_tokens) = (outcome.parent as usize, truth.request.max_tokens);
            if truth.request.beam_search {
                let goes_on = !outcome.finished && live[parent];
                if goes_on {
                    truth.outputs[index] = outputs[parent].iter().chain(&outcome.tokens).copied().collect();
                }
                truth.live[index] = goes_on && truth.outputs[index].len() < max_tokens;
            } else if truth.live[index] {
                truth.outputs[index].extend(&outcome.tokens);
                truth.accepted[index] = outcome.tokens.len().saturating_sub(1);
                truth.live[index] = !outcome.finished;
                if outcome.finished {
                    assert_eq!(truth.outputs[index], answer(&truth.request, index as u32), "answer of {}", outcome.seq);
                }
            }
        }
    }
}

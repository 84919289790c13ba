//! An executor with real contents: it does what plans say and nothing else, and checks what it sees.
//!
//! It owns an array per physical block. The "key" that a forward pass writes for a token is a hash of all
//! that the real one would depend on; the token it draws is a hash of that, so each request has one right
//! answer, whatever else runs. Every span is checked to read exactly its own sequence through the executor's
//! own block tables, which only `TableDelta`, `released` and `MemOp` have ever changed.
#![allow(clippy::unwrap_used, dead_code)]

use std::collections::hash_map::DefaultHasher;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{Hash, Hasher};

use sched::{BlockId, MemOp, Outcome, Request, RequestId, SchedConfig, Scheduler, SeqId, StepId, StepPlan};

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

/// A request whose prompt shares no prefix with that of another id.
pub fn request(id: u64, prompt: usize, max_tokens: usize) -> Request {
    Request {
        id: RequestId(id),
        prompt: (0..prompt as u32).map(|i| 1000 * (id as u32 + 1) + i).collect(),
        n: 1,
        max_tokens,
        priority: 0,
        cache_salt: None,
        read_prefix_cache: true,
        beam_search: false,
    }
}

pub fn seq(request: u64, index: u32) -> SeqId {
    SeqId { request: RequestId(request), index }
}

/// `(request, tokens)` of each span.
pub fn spans(plan: &StepPlan) -> Vec<(u64, usize)> {
    plan.spans.iter().map(|s| (s.seq.request.0, s.tokens.len())).collect()
}

/// Gives every sampled sequence this token.
pub fn commit_all(scheduler: &mut Scheduler, plan: &StepPlan, token: u32) {
    scheduler.submitted(plan.step).unwrap();
    let outcomes: Vec<Outcome> =
        sampled(plan).map(|seq| Outcome { seq, parent: seq.index, tokens: vec![token], finished: false }).collect();
    scheduler.commit(plan.step, &outcomes).unwrap();
    scheduler.audit().unwrap();
}

/// The sequences that want a token.
pub fn sampled(plan: &StepPlan) -> impl Iterator<Item = SeqId> + '_ {
    plan.spans.iter().flat_map(|s| s.sample.clone().map(|index| SeqId { index, ..s.seq }))
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

fn content(salt: &Option<String>, tokens: &[u32]) -> u64 {
    hash((salt, tokens))
}

/// The token that sequence `index` draws after `tokens`: few different ones, so that outputs meet in the
/// prefix cache.
fn draw(content: u64, index: u32) -> u32 {
    (hash((content, index, "token")) % 2) as u32
}

/// Whether the sequence ends with that token.
fn ends(content: u64, index: u32) -> bool {
    hash((content, index, "end")).is_multiple_of(16)
}

/// What a sequence of the request says when it is alone in the world.
pub fn answer(request: &Request, index: u32) -> Vec<u32> {
    let mut tokens = request.prompt.clone();
    loop {
        let content = content(&request.cache_salt, &tokens);
        tokens.push(draw(content, index));
        if ends(content, index) || tokens.len() == request.prompt.len() + request.max_tokens {
            return tokens.split_off(request.prompt.len());
        }
    }
}

/// What the executor remembers of a request.
pub struct Truth {
    pub request: Request,
    /// Committed tokens of each sequence.
    pub outputs: Vec<Vec<u32>>,
    /// Drawn and not committed, with the step that drew them.
    drawn: Vec<VecDeque<(StepId, u32)>>,
    pub live: Vec<bool>,
}

impl Truth {
    /// All tokens of a sequence, drawn ones included.
    fn known(&self, index: u32) -> Vec<u32> {
        let drawn = self.drawn[index as usize].iter().map(|(_, token)| *token);
        self.request.prompt.iter().chain(&self.outputs[index as usize]).copied().chain(drawn).collect()
    }
}

pub struct Executor {
    config: SchedConfig,
    /// `None` is NaN.
    memory: Vec<Vec<Option<u64>>>,
    tables: HashMap<SeqId, Vec<BlockId>>,
    /// For each step that is not committed, who writes to which block.
    in_flight: VecDeque<HashMap<BlockId, SeqId>>,
    pub requests: HashMap<RequestId, Truth>,
}

impl Executor {
    pub fn new(config: &SchedConfig) -> Executor {
        Executor {
            config: config.clone(),
            memory: vec![vec![None; config.block_size]; config.num_blocks],
            tables: HashMap::new(),
            in_flight: VecDeque::new(),
            requests: HashMap::new(),
        }
    }

    pub fn add(&mut self, request: Request) {
        let n = request.n;
        let truth =
            Truth { request, outputs: vec![Vec::new(); n], drawn: vec![VecDeque::new(); n], live: vec![true; n] };
        self.requests.insert(truth.request.id, truth);
    }

    fn slot(&self, table: &[BlockId], position: usize) -> (usize, usize) {
        (table[position / self.config.block_size].index(), position % self.config.block_size)
    }

    /// Applies tables and memory operations, computes the spans, reads every sequence back, and draws.
    pub fn execute(&mut self, plan: &StepPlan) -> Vec<Outcome> {
        for seq in &plan.released {
            assert!(self.tables.remove(seq).is_some(), "{seq} is released, but has no table");
        }
        for op in &plan.memory {
            let (MemOp::Poison { block: changed, .. } | MemOp::Copy { dst: changed, .. }) = op;
            assert!(!self.in_flight.iter().any(|w| w.contains_key(changed)), "{changed} is still written to");
            match *op {
                MemOp::Copy { src, dst } => self.memory[dst.index()] = self.memory[src.index()].clone(),
                MemOp::Poison { block, from_slot } => self.memory[block.index()][from_slot..].fill(None),
            }
        }
        assert!(plan.num_tokens() <= self.config.max_num_batched_tokens, "budget exceeded");
        assert!(plan.spans.len() <= self.config.max_num_seqs, "too many sequences");
        let distinct: HashSet<SeqId> = plan.spans.iter().map(|s| s.seq).collect();
        assert_eq!(distinct.len(), plan.spans.len(), "two spans for one sequence");
        for span in &plan.spans {
            let table = self.tables.entry(span.seq).or_default();
            assert!(span.table.keep <= table.len());
            table.truncate(span.table.keep);
            table.extend(&span.table.append);
            for block in &span.table.append {
                let writers: Vec<_> = self.in_flight.iter().filter_map(|w| w.get(block)).collect();
                assert!(writers.iter().all(|w| **w == span.seq), "{block} is reissued while {writers:?} write to it");
            }
        }
        let mut written = HashMap::new();
        for span in &plan.spans {
            let truth = &self.requests[&span.seq.request];
            let known = truth.known(span.seq.index);
            let positions = span.start..span.start + span.tokens.len();
            let committed = truth.request.prompt.len() + truth.outputs[span.seq.index as usize].len();
            let mut tokens = span.tokens.clone();
            if let Some(step) = span.awaits {
                let drawn = truth.drawn[span.seq.index as usize].iter().find(|(s, _)| *s == step);
                let placeholder = tokens.last_mut().unwrap();
                assert_eq!((*placeholder, positions.end), (0, committed + 1));
                *placeholder = drawn.unwrap().1;
            } else {
                assert!(positions.end <= committed, "an unknown token without its step");
            }
            assert_eq!(tokens, known[positions.clone()], "tokens of {}", span.seq);
            assert_eq!(span.slots.len(), span.tokens.len());
            assert!(truth.live[span.seq.index as usize] || positions.end <= truth.request.prompt.len());
            for (position, slot) in positions.zip(&span.slots) {
                let (block, offset) = self.slot(&self.tables[&span.seq], position);
                assert_eq!(*slot, (block * self.config.block_size + offset) as i64, "slot of {position}");
                let id = BlockId(block as u32);
                let other = written.insert(id, span.seq);
                assert!(other.is_none_or(|o| o == span.seq), "{id} is written by {} and {other:?}", span.seq);
                let owners = self.tables.values().filter(|t| t.contains(&id)).count();
                assert_eq!(owners, 1, "{id} is written with {owners} owners");
                self.memory[block][offset] = Some(content(&truth.request.cache_salt, &known[..=position]));
            }
        }
        let outcomes: Vec<Outcome> = plan.spans.iter().flat_map(|span| self.sample(span)).collect();
        for outcome in &outcomes {
            let truth = self.requests.get_mut(&outcome.seq.request).unwrap();
            truth.drawn[outcome.seq.index as usize].push_back((plan.step, outcome.tokens[0]));
        }
        if !plan.spans.is_empty() {
            self.in_flight.push_back(written);
        }
        outcomes
    }

    /// Reads a span's sequence from its first token on, and draws from its last row.
    fn sample(&self, span: &sched::Span) -> Vec<Outcome> {
        let truth = &self.requests[&span.seq.request];
        let known = truth.known(span.seq.index);
        let end = span.start + span.tokens.len();
        for position in 0..end {
            let (block, offset) = self.slot(&self.tables[&span.seq], position);
            let expected = content(&truth.request.cache_salt, &known[..=position]);
            assert_eq!(self.memory[block][offset], Some(expected), "{} reads position {position}", span.seq);
        }
        let row = content(&truth.request.cache_salt, &known[..end]);
        let outcome = |index: u32| {
            let outputs = truth.known(index).len() + 1 - truth.request.prompt.len();
            assert!(outputs <= truth.request.max_tokens, "{} is computed for nothing", span.seq);
            let done = outputs == truth.request.max_tokens;
            let seq = SeqId { index, ..span.seq };
            Outcome { seq, parent: seq.index, tokens: vec![draw(row, index)], finished: done || ends(row, index) }
        };
        span.sample.clone().map(outcome).collect()
    }

    /// Notes what was committed of the oldest step; sequences that have ended since the plan take nothing.
    pub fn committed(&mut self, outcomes: &[Outcome]) {
        self.in_flight.pop_front();
        for outcome in outcomes {
            let Some(truth) = self.requests.get_mut(&outcome.seq.request) else {
                continue;
            };
            let index = outcome.seq.index as usize;
            truth.drawn[index].pop_front();
            if truth.live[index] {
                truth.outputs[index].extend(&outcome.tokens);
                truth.live[index] = !outcome.finished;
                if outcome.finished {
                    assert_eq!(truth.outputs[index], answer(&truth.request, index as u32), "answer of {}", outcome.seq);
                }
            }
        }
    }
}

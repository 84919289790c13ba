//! The plan of a step: a complete, plain value that can be printed, replayed and sent to several ranks.
//!
//! The executor makes no decisions. It has a block table per sequence and cache group. For each plan, in this order, it
//! drops the tables in `released`, executes `memory`, applies each span's [`TableDelta`]s, and runs one forward pass
//! over all spans.

use std::fmt;
use std::ops::Range;

use kvblock::{BlockId, MemOp};
use serde::{Deserialize, Serialize};

use crate::{RequestId, SeqId};

/// Number of a step, starting at 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StepId(pub u64);

impl fmt::Display for StepId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}", self.0)
    }
}

/// The plan of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepPlan {
    /// Number of the step.
    pub step: StepId,
    /// The tokens to compute, at most one span per sequence: decodes first, then continued prefills, then admissions.
    pub spans: Vec<Span>,
    /// Memory operations to execute before the forward pass, in all layers and in this order.
    pub memory: Vec<MemOp>,
    /// Sequences whose tables the executor drops first: finished, aborted or preempted since the last plan.
    pub released: Vec<SeqId>,
    /// Requests that this step preempted.
    pub preempted: Vec<RequestId>,
}

/// Consecutive tokens of a sequence to compute in a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// The sequence. Prompts are computed as sequence 0 of their request.
    pub seq: SeqId,
    /// Absolute position of `tokens[0]`. All tokens before it are in the cache.
    pub start: usize,
    /// The tokens, at least one.
    pub tokens: Vec<u32>,
    /// Number of drafts at the end of `tokens`. The executor draws from the row before each draft and from the last
    /// row. Its outcome is the drafts that were right and the token after them.
    pub drafts: usize,
    /// `Some(step)` if the last of `tokens` is a placeholder (0) for the token that `step`, which is in flight, draws
    /// for this sequence. The executor replaces it before the forward pass.
    pub awaits: Option<StepId>,
    /// Block table changes and slots, for each cache group.
    pub groups: Vec<GroupSpan>,
    /// Number of prompt tokens from the prefix cache, in the first span after an admission; else 0.
    pub cached: usize,
    /// Indices of the request's sequences that draw from the *last* row: none for a partial prefill, `0..n` at the end
    /// of the prompt of a request with `n` sequences, `index..index + 1` in decode.
    pub sample: Range<u32>,
}

/// The part of a span for the layers of one cache group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupSpan {
    /// The change of the executor's table. A block is added by the span that writes to it first.
    pub table: TableDelta,
    /// The slot of each token's keys and values: `block * block_size + offset`.
    pub slots: Vec<i64>,
}

/// The change of a block table. The table of a new sequence is empty. See [`TableDelta::apply`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableDelta {
    /// Number of leading entries behind the group's window: holes, which no query reads any more.
    pub holes: usize,
    /// Number of leading entries that do not change, except for the holes.
    pub keep: usize,
    /// Blocks of the entries from `max(keep, holes)` on.
    pub append: Vec<BlockId>,
}

impl TableDelta {
    /// Applies the change to a table. `hole` is the value of entries behind the window.
    pub fn apply<T: Clone>(&self, table: &mut Vec<T>, hole: T, block: impl Fn(BlockId) -> T) {
        table.truncate(self.keep);
        let holes = self.holes.min(table.len());
        table[..holes].fill(hole.clone());
        table.resize(table.len().max(self.holes), hole);
        table.extend(self.append.iter().map(|b| block(*b)));
    }
}

/// The result of a step for one sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The sequence.
    pub seq: SeqId,
    /// Index of the sequence whose state before the step `seq` continues: its own. In a beam search
    /// ([`Request::beam_search`](crate::Request::beam_search)) it can be another sequence that the step sampled. Then
    /// `seq` becomes a fork of it, and its own former state is discarded.
    pub parent: u32,
    /// The drafts that were right, and the token drawn after them. Empty if the sequence ends without a token.
    pub tokens: Vec<u32>,
    /// Whether the sequence has ended. In a beam search it can later become a fork of another.
    pub finished: bool,
}

impl Outcome {
    /// Creates the outcome of one token for a sequence that continues itself.
    pub fn token(seq: SeqId, token: u32, finished: bool) -> Outcome {
        Outcome { seq, parent: seq.index, tokens: vec![token], finished }
    }
}

/// Formats one line for the step, then one for each preemption, dropped table, memory operation and span.
impl fmt::Display for StepPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} spans, {} tokens", self.step, self.spans.len(), self.num_tokens())?;
        self.preempted.iter().try_for_each(|id| write!(f, "\n  preempt {id}"))?;
        self.released.iter().try_for_each(|seq| write!(f, "\n  drop the table of {seq}"))?;
        self.memory.iter().try_for_each(|op| write!(f, "\n  {op}"))?;
        self.spans.iter().try_for_each(|span| write!(f, "\n  {span}"))
    }
}

/// Formats sequence, positions, table changes by group, and the sequences that are sampled.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: positions {}..{}", self.seq, self.start, self.start + self.tokens.len())?;
        match (self.cached, self.drafts) {
            (0, 0) => {}
            (cached, 0) => write!(f, ", {cached} cached tokens before")?,
            (_, drafts) => write!(f, ", the last {drafts} are drafts")?,
        }
        for TableDelta { holes, keep, append } in self.groups.iter().map(|g| &g.table) {
            let append: Vec<u32> = append.iter().map(|block| block.0).collect();
            write!(f, "; table: keep {keep}, {holes} holes, append {append:?}")?;
        }
        if let Some(step) = self.awaits {
            write!(f, "; awaits {step}")?;
        }
        if self.sample.is_empty() { Ok(()) } else { write!(f, "; samples {:?}", self.sample) }
    }
}

impl StepPlan {
    /// Returns whether the executor has nothing to do.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty() && self.memory.is_empty() && self.released.is_empty()
    }

    /// Number of tokens, which are the rows of the forward pass.
    pub fn num_tokens(&self) -> usize {
        self.spans.iter().map(|s| s.tokens.len()).sum()
    }
}

//! What one step is: a complete, plain value that can be printed, replayed and sent to several ranks.
//!
//! The executor decides nothing. It keeps a block table per sequence and cache group and, in this order, forgets
//! the tables in `released`, applies `memory`, applies each span's [`TableDelta`]s, and runs one forward pass
//! over all spans.

use std::fmt;
use std::ops::Range;

use kvblock::{BlockId, MemOp};
use serde::{Deserialize, Serialize};

use crate::{RequestId, SeqId};

/// Number of a step, counted from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StepId(pub u64);

impl fmt::Display for StepId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}", self.0)
    }
}

/// Everything that happens in one step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepPlan {
    /// Which step.
    pub step: StepId,
    /// What is computed, at most one span per sequence: decodes first, then continued prefills, then admissions.
    pub spans: Vec<Span>,
    /// What the memory undergoes before the forward pass, in all layers and in this order.
    pub memory: Vec<MemOp>,
    /// Sequences whose table the executor forgets, before anything else: finished, aborted or preempted since
    /// the last plan.
    pub released: Vec<SeqId>,
    /// Requests that gave all their blocks back in this step and wait again.
    pub preempted: Vec<RequestId>,
}

/// Consecutive tokens of one sequence, to be computed in this step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// The sequence. A prompt is computed as sequence 0 of its request.
    pub seq: SeqId,
    /// Absolute position of `tokens[0]`; everything before it is in the cache.
    pub start: usize,
    /// The tokens, at least one.
    pub tokens: Vec<u32>,
    /// Number of `tokens`, counted from the end, that are drafts to be verified: the executor draws from the row before each of
    /// them and from the last row, and its outcome is the drafts that were right and the token after them.
    pub drafts: usize,
    /// `Some(step)`: the last of `tokens` is a placeholder (0). It stands for the token that `step`, which is
    /// in flight, draws for this sequence; the executor puts that in its place before the forward pass.
    pub awaits: Option<StepId>,
    /// Where its keys and values are, for each cache group.
    pub groups: Vec<GroupSpan>,
    /// Prompt tokens that came from the prefix cache; set on the first span of an admission, else 0.
    pub cached: usize,
    /// Indices of the request's sequences that want a token from the *last* row: none for a partial prefill,
    /// `0..n` when a prompt of a group of `n` is complete, `index..index + 1` in decode.
    pub sample: Range<u32>,
}

/// A span in the layers of one cache group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupSpan {
    /// How the executor's table changes. Blocks come with the span that writes to them first.
    pub table: TableDelta,
    /// Where each token's keys and values go: `block * block_size + offset`.
    pub slots: Vec<i64>,
}

/// How a block table changes; that of a sequence not seen before is empty. See [`TableDelta::apply`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableDelta {
    /// Leading entries that lie behind the group's window: holes, which nothing reads any more.
    pub holes: usize,
    /// Leading entries that stay as they are, but for the holes.
    pub keep: usize,
    /// Blocks of the entries from `max(keep, holes)` on.
    pub append: Vec<BlockId>,
}

impl TableDelta {
    /// Brings a table up to date. `hole` stands for the entries behind the window.
    pub fn apply<T: Clone>(&self, table: &mut Vec<T>, hole: T, block: impl Fn(BlockId) -> T) {
        table.truncate(self.keep);
        let holes = self.holes.min(table.len());
        table[..holes].fill(hole.clone());
        table.resize(table.len().max(self.holes), hole);
        table.extend(self.append.iter().map(|b| block(*b)));
    }
}

/// What a step gave one sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The sequence.
    pub seq: SeqId,
    /// Index of the sequence that it continues, as that was before this step: its own. In a beam search
    /// ([`Request::beam_search`](crate::Request::beam_search)) it may be another that the step sampled: then `seq`
    /// becomes a fork of it, and what `seq` was before is forgotten.
    pub parent: u32,
    /// The tokens drawn for it: one, with the drafts that were right before it; or none if it ends without.
    pub tokens: Vec<u32>,
    /// The sequence has ended. One of a beam search may come back as a fork of another.
    pub finished: bool,
}

impl Outcome {
    /// One token for a sequence that continues itself.
    pub fn token(seq: SeqId, token: u32, finished: bool) -> Outcome {
        Outcome { seq, parent: seq.index, tokens: vec![token], finished }
    }
}

/// One line for the step, then one for each table forgotten, memory operation, span and preemption.
impl fmt::Display for StepPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} spans, {} tokens", self.step, self.spans.len(), self.num_tokens())?;
        self.preempted.iter().try_for_each(|id| write!(f, "\n  preempt {id}"))?;
        self.released.iter().try_for_each(|seq| write!(f, "\n  forget {seq}"))?;
        self.memory.iter().try_for_each(|op| write!(f, "\n  {op}"))?;
        self.spans.iter().try_for_each(|span| write!(f, "\n  {span}"))
    }
}

/// Sequence, positions, blocks by group, and who draws.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: positions {}..{}", self.seq, self.start, self.start + self.tokens.len())?;
        match (self.cached, self.drafts) {
            (0, 0) => {}
            (cached, 0) => write!(f, ", {cached} before them cached")?,
            (_, drafts) => write!(f, ", {drafts} of them drafts")?,
        }
        for TableDelta { holes, keep, append } in self.groups.iter().map(|g| &g.table) {
            let append: Vec<u32> = append.iter().map(|block| block.0).collect();
            write!(f, "; table keeps {keep}, {holes} of them holes, and takes {append:?}")?;
        }
        if let Some(step) = self.awaits {
            write!(f, "; waits for {step}")?;
        }
        if self.sample.is_empty() { Ok(()) } else { write!(f, "; draws {:?}", self.sample) }
    }
}

impl StepPlan {
    pub(crate) fn empty(step: StepId) -> StepPlan {
        StepPlan { step, ..StepPlan::default() }
    }

    /// Whether the executor has nothing to do.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty() && self.memory.is_empty() && self.released.is_empty()
    }

    /// Rows of the forward pass.
    pub fn num_tokens(&self) -> usize {
        self.spans.iter().map(|s| s.tokens.len()).sum()
    }
}

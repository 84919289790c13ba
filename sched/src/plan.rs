//! What one step is: a complete, plain value that can be printed, replayed and sent to several ranks.
//!
//! The executor decides nothing. It keeps one block table per sequence and, in this order, forgets the tables
//! in `released`, applies `memory`, applies each span's [`TableDelta`], and runs one forward pass over all
//! spans.

use std::ops::Range;

use kvblock::BlockId;
use serde::{Deserialize, Serialize};

use crate::{RequestId, SeqId};

/// Number of a step, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StepId(pub u64);

impl std::fmt::Display for StepId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "step {}", self.0)
    }
}

/// Everything that happens in one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepPlan {
    /// Which step.
    pub step: StepId,
    /// What is computed, at most one span per sequence: decodes first, then continued prefills, then admissions.
    pub spans: Vec<Span>,
    /// What the memory undergoes before the forward pass, in order.
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
    /// `Some(step)`: the last of `tokens` is a placeholder (0). It stands for the token that `step`, which is
    /// in flight, draws for this sequence; the executor puts that in its place before the forward pass.
    pub awaits: Option<StepId>,
    /// How the executor's table of this sequence changes. Blocks for a whole prompt come with its first span.
    pub table: TableDelta,
    /// Where each token's keys and values go: `block * block_size + offset`.
    pub slots: Vec<i64>,
    /// Prompt tokens that came from the prefix cache; set on the first span of an admission, else 0.
    pub cached: usize,
    /// Indices of the request's sequences that want a token from the *last* row: none for a partial prefill,
    /// `0..n` when a prompt of a group of `n` is complete, `index..index + 1` in decode.
    pub sample: Range<u32>,
}

/// How a block table changes: `table.truncate(keep); table.extend(append)`. A sequence not seen before starts
/// with an empty table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableDelta {
    /// Leading blocks that stay.
    pub keep: usize,
    /// Blocks that follow them.
    #[serde(with = "block_ids")]
    pub append: Vec<BlockId>,
}

/// Something the cache memory undergoes, in all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemOp {
    /// Copy all slots of one block to another.
    Copy {
        /// Read.
        #[serde(with = "block_id")]
        src: BlockId,
        /// Written.
        #[serde(with = "block_id")]
        dst: BlockId,
    },
    /// Fill the slots from `from_slot` to the block's end with NaN; ordered in debug builds only.
    Poison {
        /// The block.
        #[serde(with = "block_id")]
        block: BlockId,
        /// First slot to fill.
        from_slot: usize,
    },
}

impl MemOp {
    /// What the pool orders, as part of a plan.
    pub(crate) fn of_pool(op: kvblock::MemOp) -> Option<MemOp> {
        match op {
            kvblock::MemOp::Copy { src, dst } => Some(MemOp::Copy { src, dst }),
            kvblock::MemOp::Poison { block, from_slot } => Some(MemOp::Poison { block, from_slot }),
            kvblock::MemOp::SwapOut { .. } | kvblock::MemOp::SwapIn { .. } => {
                debug_assert!(false, "{op:?} in a pool without host blocks");
                None
            }
        }
    }
}

/// What a step gave one sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The sequence.
    pub seq: SeqId,
    /// Index of the sequence, as it was before this commit, whose tokens and blocks it continues. Its own but in a
    /// [beam search](crate::Request::beam_search).
    pub parent: u32,
    /// The tokens drawn for it: one, or none if it ends without.
    pub tokens: Vec<u32>,
    /// The sequence has ended.
    pub finished: bool,
}

impl StepPlan {
    pub(crate) fn empty(step: StepId) -> StepPlan {
        StepPlan { step, spans: Vec::new(), memory: Vec::new(), released: Vec::new(), preempted: Vec::new() }
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

/// `kvblock` knows nothing of serde: a block id is written as its number.
mod block_id {
    use kvblock::BlockId;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(id: &BlockId, serializer: S) -> Result<S::Ok, S::Error> {
        id.0.serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BlockId, D::Error> {
        u32::deserialize(deserializer).map(BlockId)
    }
}

/// Likewise for a list of them.
mod block_ids {
    use kvblock::BlockId;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(ids: &[BlockId], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(ids.iter().map(|id| id.0))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<BlockId>, D::Error> {
        Ok(Vec::<u32>::deserialize(deserializer)?.into_iter().map(BlockId).collect())
    }
}

//! A step between its plan and its commit, as the scheduler remembers it.

use std::ops::Range;

use kvblock::MemOp;

use crate::{SeqId, StepId};

/// A step that has been planned and not committed.
pub(crate) struct Flight {
    pub step: StepId,
    pub spans: Vec<InFlight>,
    /// The executor has taken it, so that the next may be planned behind it.
    pub submitted: bool,
    /// A step before it has failed, so that this one read what was never written.
    pub is_behind_failure: bool,
    /// Memory operations of plans without spans that were made behind it: they are executed behind it, and committed by
    /// nobody.
    pub behind: Vec<MemOp>,
}

/// A span of it.
pub(crate) struct InFlight {
    pub seq: SeqId,
    /// Tells the request from a later one of the same id.
    pub arrival: u64,
    pub start: usize,
    /// Tokens of the sequence that are computed when the step is; those behind a wrong draft do not count.
    pub end: usize,
    /// The last of them that are drafts.
    pub drafts: Vec<u32>,
    pub sample: Range<u32>,
    /// Sequences of the search that it belongs to, 0 for none.
    pub beams: u32,
}

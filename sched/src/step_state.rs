//! A step while it is planned, and between its plan and its commit.

use std::ops::Range;

use kvblock::MemOp;

use crate::plan::Span;
use crate::{RequestId, SeqId, StepId, StepPlan};

/// Tokens of a sequence to compute in the step being planned.
#[derive(Clone, Copy)]
pub(crate) struct ScheduledSpan {
    pub request: RequestId,
    pub index: usize,
    pub num_tokens: usize,
    /// Number of these tokens that are drafts.
    pub num_drafts: usize,
    /// Number of these tokens that admissions may take instead: those of the second half of the prompt tokens.
    pub num_spare: usize,
}

/// The spans of the running requests.
pub(crate) struct RunningSpans {
    /// Decodes, then prefills, the shortest first.
    pub spans: Vec<ScheduledSpan>,
    /// Number of blocks that they need.
    pub blocks: usize,
    /// Tokens left of the step's budget for prompts.
    pub budget: usize,
    /// Tokens left beyond that, which only drafts may take.
    pub for_drafts: usize,
    /// Whether a span was left out for lack of blocks.
    pub is_deferred: bool,
}

/// A step being planned.
pub(crate) struct PlanBuilder {
    pub plan: StepPlan,
    pub in_flight: Vec<SpanInFlight>,
}

/// A step that is planned and not committed.
pub(crate) struct StepInFlight {
    pub step: StepId,
    pub spans: Vec<SpanInFlight>,
    /// Whether the executor has it, so that the next step can be planned.
    pub is_submitted: bool,
    /// Whether a step before it has failed, so that it read invalid contents.
    pub is_behind_failure: bool,
    /// Memory operations of plans without spans that followed it. Such plans are executed, but not committed.
    pub later_memory_ops: Vec<MemOp>,
}

/// A span of a step in flight.
pub(crate) struct SpanInFlight {
    pub seq: SeqId,
    /// Distinguishes the request from a later one with the same id.
    pub arrival: u64,
    pub start: usize,
    /// End of the span. Tokens after a rejected draft are cut off when the outcomes are known.
    pub end: usize,
    /// The last tokens of the span that are drafts.
    pub drafts: Vec<u32>,
    pub sample: Range<u32>,
    /// Number of sequences of the request if it is a beam search, else 0.
    pub num_beams: u32,
}

/// Lists of completed steps, kept so that planning a step of similar size allocates almost nothing.
#[derive(Default)]
pub(crate) struct Recycled {
    pub scheduled: Vec<ScheduledSpan>,
    pub in_flight: Vec<SpanInFlight>,
    /// An empty list for the spans of a plan.
    pub span_list: Vec<Span>,
    /// Spans with stale contents, whose lists are reused.
    pub spans: Vec<Span>,
}

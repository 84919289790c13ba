//! A plan as it grows: what is chosen, and what the commit will have to know.

use crate::flight::InFlight;
use crate::{RequestId, StepPlan};

/// Tokens to compute for one running sequence.
#[derive(Clone, Copy)]
pub(crate) struct Choice {
    pub request: RequestId,
    pub index: usize,
    pub count: usize,
    /// Number of them that are drafts.
    pub drafts: usize,
}

/// A plan as it grows, and what the commit will have to know of it.
pub(crate) struct Draft {
    pub plan: StepPlan,
    pub spans: Vec<InFlight>,
}

/// What the running requests compute in a step.
pub(crate) struct Room {
    pub choices: Vec<Choice>,
    /// Tokens that they leave of the budget.
    pub budget: usize,
    /// Something was left out because blocks are missing.
    pub deferred: bool,
}

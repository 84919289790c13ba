//! A step between its submission and its commit.

use std::sync::Arc;

use sched::StepPlan;

use crate::api::FinishReason;
use crate::worker::StepInput;

/// A step that was submitted and not committed.
pub(super) struct StepInFlight {
    pub input: Arc<StepInput>,
    /// Spans whose sequences end without a token, and why: the request wants none, or its grammar leads nowhere.
    pub ends: Vec<(usize, FinishReason)>,
    /// The next step must not be planned before this one is committed.
    pub holds_up: bool,
}

impl StepInFlight {
    pub fn plan(&self) -> &StepPlan {
        &self.input.plan
    }

    pub fn computes(&self) -> bool {
        !self.plan().spans.is_empty()
    }
}

//! A step between its submission and its commit, and where other threads can see it.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use sched::StepPlan;

use crate::api::FinishReason;
use crate::worker::StepInput;

/// A step that was submitted and not committed.
pub(super) struct StepInFlight {
    pub input: Arc<StepInput>,
    /// Indices of spans whose sequences end without a token, and why: the request asks for no token, or its grammar allows
    /// none.
    pub ends: Vec<(usize, FinishReason)>,
    /// When it was submitted.
    pub submitted: Instant,
    /// The next step must not be planned before this one is committed.
    pub blocks_planning: bool,
}

impl StepInFlight {
    pub fn plan(&self) -> &StepPlan {
        &self.input.plan
    }

    /// Whether any token is computed.
    pub fn has_work(&self) -> bool {
        !self.plan().spans.is_empty()
    }
}

/// The oldest step in flight, if there is one, for other threads to read.
pub(crate) type CurrentStep = Arc<Mutex<Option<Arc<StepInput>>>>;

//! What peers' suites test of a scheduler, restated (ids S1 to S14).
//!
//! | id | where |
//! |---|---|
//! | S1, S7, S13, S14 | `endings` |
//! | S2, S3, S4, S10 | `order`; S3 by the step's budget, as there is no limit per request |
//! | S8 | `sharing` |
//! | S11 | `refusals` |
//! | S5, S6 | not here: a step is planned after the one before it is committed |
//! | S9, S12 | not here: drafts and deferred requests do not exist yet |
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod endings;
mod order;
mod refusals;
mod sharing;

use common::commit_all;
use sched::{SchedConfig, Scheduler};

fn scheduler(config: SchedConfig) -> Scheduler {
    Scheduler::new(config).unwrap()
}

/// Steps until nothing is left; every sequence goes on to its `max_tokens`.
fn drain(scheduler: &mut Scheduler) -> usize {
    let mut steps = 0;
    while scheduler.has_work() {
        let plan = scheduler.plan();
        commit_all(scheduler, &plan, 7);
        steps += 1;
        assert!(steps < 10_000, "no end in sight");
    }
    steps
}

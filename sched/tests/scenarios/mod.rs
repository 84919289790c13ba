//! What peers' suites test of a scheduler, restated (ids S1 to S14), and of block managers what a scheduler sees.
//!
//! | id | where |
//! |---|---|
//! | S1, S7, S13, S14 | `endings` |
//! | S2, S3, S4, S10 | `order` |
//! | S5, S6 | `ahead`; in S6 the preempted one's blocks are not reissued in flight, so that the other waits for one plan |
//! | S8 | `sharing` |
//! | S9, C14 | `drafts` |
//! | S11 | `refusals`, `beams` |
//! | S12, S14, C11 | `swap` |
//! | ours: steps that fail, groups with a window | `failures`, `windows` |
mod ahead;
mod beams;
mod drafts;
mod endings;
mod failures;
mod order;
mod refusals;
mod sharing;
mod swap;
mod windows;

use crate::common::commit_all;
use sched::{SchedConfig, Scheduler, StepPlan};

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

/// Plans and commits a step, with a token for each sequence that wants one.
fn step(scheduler: &mut Scheduler) -> StepPlan {
    let plan = scheduler.plan();
    commit_all(scheduler, &plan, 7);
    plan
}

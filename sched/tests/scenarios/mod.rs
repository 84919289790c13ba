//! The scenarios of other engines' test suites for a scheduler, rewritten (ids S1 to S14; C11 and C14 are of block
//! managers).
//!
//! | id | where |
//! |---|---|
//! | S1, S7, S13, S14 | `endings` |
//! | S2, S3, S4, S10 | `order` |
//! | S5, S6 | `ahead`; in S6 the blocks of the preempted request are not reused in flight, so the other one waits for one plan |
//! | S8 | `sharing` |
//! | S9, C14 | `drafts` |
//! | S11 | `refusals`, `beams` |
//! | S12, S14, C11 | `swap` |
//! | our own: failed steps, sliding groups, adapters | `failures`, `windows`, `adapters` |

mod adapters;
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

/// Runs until no request is left; every sequence ends with `max_tokens`. Returns the number of steps.
fn drain(scheduler: &mut Scheduler) -> usize {
    let mut steps = 0;
    while scheduler.has_work() {
        let plan = scheduler.plan();
        commit_all(scheduler, &plan, 7);
        steps += 1;
        assert!(steps < 10_000, "no progress");
    }
    steps
}

/// Plans and commits a step in which every sampled sequence draws a token.
fn step(scheduler: &mut Scheduler) -> StepPlan {
    let plan = scheduler.plan();
    commit_all(scheduler, &plan, 7);
    plan
}

/// Plans and submits the next step.
fn submit_next(scheduler: &mut Scheduler) -> StepPlan {
    let plan = scheduler.plan();
    scheduler.submitted(plan.step).unwrap();
    plan
}

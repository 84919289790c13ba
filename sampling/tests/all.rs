//! The integration tests of sampling, in one program.
#![allow(clippy::unwrap_used)]

mod adjustments;
mod allocations;
#[path = "common/cases.rs"]
mod cases;
#[path = "../../device/tests/support/allocations.rs"]
mod counter;
mod device;
#[path = "common/distribution.rs"]
mod distribution;
mod draws;
mod logprobs;
mod params;
mod properties;
mod reference;
#[path = "common/rows.rs"]
mod rows;
#[path = "../../device/tests/support/mod.rs"]
mod support;

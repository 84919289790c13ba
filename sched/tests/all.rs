//! The tests of sched, in one program.
#![allow(clippy::unwrap_used)]

mod common;
mod fleet;
mod pipeline;
mod random;
mod scenarios;
mod simulator;
mod starvation;

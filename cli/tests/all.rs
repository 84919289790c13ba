//! The integration tests of the binary, in one program: what it prints, serves and refuses, and what becomes of its process.
#![allow(clippy::unwrap_used)]

mod amplifiers;
mod bench;
mod bench_serve;
mod chat;
mod cli;
#[path = "../../server/tests/common/mod.rs"]
mod common;
mod configuration;
mod crashes;
mod deploy;
#[allow(dead_code, reason = "the tests of hub use the rest")]
#[path = "../../hub/tests/common/mod.rs"]
mod fake_hub;
mod faults;
mod flags;
mod hub;
mod old_cpu;
mod pains;
mod process;
mod ranks;
mod routers;
mod seccomp;
mod state;
mod terminal;

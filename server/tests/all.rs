//! The integration tests of the server, in one program. The soak test is a program of its own: it measures memory.
#![allow(clippy::unwrap_used)]

mod amplifiers;
mod answers;
mod bench;
mod bench_serve;
mod boundary;
mod cli;
mod common;
mod conformance;
mod deploy;
mod embeddings;
mod errors;
mod faults;
mod fuzzed;
mod harsh_http;
mod lifecycle;
mod limits;
mod old_cpu;
mod openapi;
mod origin;
mod page;
mod pains;
mod process;
mod reasoning;
mod responses;
mod searches;
mod seccomp;
mod structured;
mod tools;

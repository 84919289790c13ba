//! The integration tests of downloads, in one program, against servers on this machine that speak the hub's protocol.
#![allow(clippy::unwrap_used)]

mod common;
mod downloads;
mod ids;
mod offline;
mod outline;
mod refusals;
mod selection;
mod shared;
mod tls;
mod trust;

//! Tests of the load generator and the monitor on given data, without a server. Those with servers are in `cli/tests`.
#![allow(clippy::unwrap_used)]

mod client;
mod dataset;
mod figures;
mod frame;

use bench::serve::ServeBenchArgs;
use clap::Parser;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: ServeBenchArgs,
}

/// The flags of `quire bench serve`.
fn args(flags: &[&str]) -> ServeBenchArgs {
    Cli::parse_from([&["serve"], flags].concat()).args
}

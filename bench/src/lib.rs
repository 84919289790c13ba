//! Clients of OpenAI servers: a load generator for any server, and a monitor of a running Quire.
//!
//! | module | purpose |
//! |---|---|
//! | [`serve`] | `quire bench serve`: sends requests to any OpenAI server and reports latencies and throughput |
//! | [`top`] | `quire top`: shows a running server in the terminal |
//! | [`client`] | HTTP/1.1 client, with TLS |
//! | [`statistics`] | means, percentiles and spreads: the one definition for all figures of Quire |
//! | [`random`] | random numbers with the same sequence on every machine |
//! | [`results`] | the file that figures are written to |
//! | [`values`] | parsers of flag values |
//!
//! It does not depend on the engine.
//!
//! ```no_run
//! let server = bench::client::Server::new("http://127.0.0.1:8000", None)?;
//! let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
//! let models = runtime.block_on(async { server.send("/v1/models", None).await?.text().await })?;
//! println!("{models}");
//! # Ok::<(), String>(())
//! ```

use std::io;

pub mod client;
pub mod random;
pub mod results;
pub mod serve;
pub mod statistics;
mod tls;
pub mod top;
pub mod values;

/// Reason why a command failed, as one line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A flag has an invalid value.
    #[error("{0}")]
    Usage(String),
    /// The server or a file has a problem.
    #[error("{0}")]
    Failed(String),
    /// Standard output or another stream failed.
    #[error("input or output failed: {0}")]
    Io(#[from] io::Error),
}

//! Clients of OpenAI servers, ours and others: a load generator, and a view of a running Quire.
//!
//! | module | what it is |
//! |---|---|
//! | [`serve`] | `quire bench serve`: requests to any OpenAI server, and how long its answers took |
//! | [`top`] | `quire top`: a running server in the terminal |
//! | [`client`] | HTTP/1.1 as a client |
//! | [`statistics`] | percentiles and spreads, as all figures of Quire are summed up |
//! | [`results`] | the file that figures are written to |
//! | [`values`] | how values of flags are written |
//!
//! It knows nothing of the engine.
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
pub mod results;
pub mod serve;
pub mod statistics;
pub mod top;
pub mod values;

/// What ends a command early, as one line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A flag that can not be used.
    #[error("{0}")]
    Usage(String),
    /// The server, or a file, is not as it should be.
    #[error("{0}")]
    Failed(String),
    /// Standard output or another stream failed.
    #[error("input or output failed: {0}")]
    Io(#[from] io::Error),
}

//! Quire to the outside: the OpenAI API over HTTP, and the command line of the binary `quire`.
//!
//! It is thin. It reads requests, asks an [`engine::AsyncEngine`], and writes what comes back. It is *not* where anything
//! is decided about tokens: scheduling, sampling, detokenisation and stop strings belong to the engine, so a program that
//! wants text without HTTP uses that crate alone.
//!
//! ```text
//! cli ── flags, environment, quire.toml ──▶ engine::EngineConfig
//!  │
//!  └─ serve ──▶ http ── checked request ──▶ engine::AsyncEngine
//!                ▲                               │
//!                └──── JSON or SSE ◀── events ───┘
//! ```
//!
//! A server in a program of one's own, on a free port:
//!
//! ```no_run
//! use std::{sync::Arc, time::Duration};
//! use engine::{AsyncEngine, EngineConfig};
//! use server::http::{App, ServerOptions, serve};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = AsyncEngine::start(EngineConfig::default(), &|_, _| {})?;
//! let app = Arc::new(App::new(engine, ServerOptions::default()));
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
//! println!("http://{}", listener.local_addr()?);
//! let ten_minutes = tokio::time::sleep(Duration::from_secs(600));
//! serve(listener, app, ten_minutes, Duration::from_secs(30)).await?;
//! # Ok(())
//! # }
//! ```

pub mod cli;
pub mod http;

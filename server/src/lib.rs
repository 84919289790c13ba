//! OpenAI's API over HTTP with vLLM's extensions, the APIs of other servers, and a web page that shows the engine.
//!
//! The crate reads requests, submits them to an [`engine::AsyncEngine`] and writes responses. It decides nothing about
//! tokens: scheduling, sampling, detokenization and stop strings belong to the engine, so that a program without HTTP
//! needs only that crate.
//!
//! ```text
//! client ── HTTP ──▶ checked request ──▶ engine::AsyncEngine
//!    ▲                                        │
//!    └──── JSON, or server-sent events ◀── events
//! ```
//!
//! A server on a free port:
//!
//! ```no_run
//! use std::{sync::Arc, time::Duration};
//! use engine::{AsyncEngine, EngineConfig};
//! use server::{App, ServerOptions, serve};
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
//!
//! Imports between folders go down in this table, which a test checks:
//!
//! | folder | what it owns |
//! |---|---|
//! | `serve` | accepting connections and shutting down |
//! | `router` | the routes of all folders, and who may use them |
//! | `local` | requests of a program that embeds the server, in the JSON of the routes and without HTTP |
//! | `anthropic`, `llama_server`, `ollama` | APIs of other servers: each makes its bodies those of `openai`, and writes the events of the engine |
//! | `vllm` | vLLM's further routes: tokens, vectors, adapters, sleep, and what the server is |
//! | `openai` | routes of OpenAI's API: each reads its bodies into the typed request and writes the events of the engine |
//! | `monitor` | health, metrics, the state of the engine, the web page |
//! | `openapi` | routes and their description |
//! | `reply` | the engine requests of a call, and what responses have in common |
//! | `request` | the typed request: fields, limits, cost |
//! | `app` | state shared by all handlers |
//! | `stored` | what is kept of responses, files and batches, whose it is, and the work that runs |
//! | `http` | connections, who may use the server, errors, JSON, server-sent events, memory of requests in flight |
//! | `metrics`, `settings` | records of requests; settings, which are flags, and parsers of their values |
//!
//! Handlers keep no state between calls, except in `stored`. If a client disconnects, its handler is dropped, which drops the `Run`,
//! cancels its requests and frees their blocks. Background responses and batches are tasks of their own: they take their requests
//! from their records, at first as after a restart.

mod anthropic;
mod app;
mod http;
mod llama_server;
pub mod local;
mod metrics;
mod monitor;
mod ollama;
mod openai;
mod openapi;
mod reply;
mod request;
mod router;
mod serve;
mod settings;
mod stored;
mod vllm;

pub use app::App;
pub use http::{ApiError, ClientCertificates, Listener, Tls};
pub use router::router;
pub use serve::{refuse_while_loading, serve};
pub use settings::{ACCESS_AND_LIMITS, Cors, Limits, ServerOptions, StateOptions, values};
pub use store::{Store, StoreError};

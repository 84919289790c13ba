//! The OpenAI API over HTTP, with vLLM's extensions, and the page that shows the engine.
//!
//! It is thin. It reads requests, asks an [`engine::AsyncEngine`], and writes what comes back. It is *not* where anything
//! is decided about tokens: scheduling, sampling, detokenisation and stop strings belong to the engine, so a program that
//! wants text without HTTP uses that crate alone.
//!
//! ```text
//! client ── HTTP ──▶ checked request ──▶ engine::AsyncEngine
//!    ▲                                        │
//!    └──── JSON, or server-sent events ◀── events
//! ```
//!
//! A server in a program of one's own, on a free port:
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
//! | file | what it owns |
//! |---|---|
//! | `app`, `settings` | state that all handlers share; how a server is set up |
//! | `auth`, `origin`, `cors`, `limits` | who may use the server: keys, sites, origins, sizes and times |
//! | `call`, `observe` | the id of a call and its place among the streams; what log and metrics tell of a request |
//! | `body`, `fields`, `work`, `lanes`, `cost` | JSON in, checked and described field by field, off the threads that serve; what it may cost |
//! | `error`, `json` | errors and JSON out |
//! | `options`, `structured`, `tools`, `messages`, `prompts` | what a request asks for: sampling and limits; a grammar; tools; a conversation as token ids; plain prompts |
//! | `assistant` | a text becomes an assistant's message: thoughts, content, tool calls |
//! | `run` | the engine requests of one call, merged into one stream of events |
//! | `reply`, `logprobs`, `stream` | answers: the frame, log-probabilities, server-sent events |
//! | `completions`, `chat`, `responses`, `embeddings`, `tokenize`, `status`, `metrics` | the routes |
//! | `openapi` | the description of all of these |
//! | `connection`, `refusal` | a client's bytes, and whether it is still there; a last word to what is no request |
//! | `serve`, `watchdog` | listening, and ending in order or because the engine has died; a dump when it is stuck |
//! | `page`, `state` | the web page; the engine as it shows it |
//!
//! No handler keeps state between calls. A handler that is dropped because its client went away drops its `Run`,
//! which cancels the requests and frees their blocks.

mod app;
mod assistant;
mod auth;
mod body;
mod call;
mod chat;
mod completions;
mod connection;
mod cors;
mod cost;
mod embeddings;
mod error;
mod fields;
mod json;
mod lanes;
mod limits;
mod logprobs;
mod messages;
mod metrics;
mod observe;
mod openapi;
mod options;
mod origin;
mod page;
mod prompts;
mod refusal;
mod reply;
mod responses;
mod run;
mod serve;
mod settings;
mod state;
mod status;
mod stream;
mod structured;
mod tokenize;
mod tools;
mod watchdog;
mod work;

use std::sync::Arc;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};

pub use app::App;
pub use origin::Host;
pub use serve::serve;
pub use settings::{Cors, Limits, Reasoning, ServerOptions};

/// All routes over a running engine, for a server that others reach too.
pub fn router(app: Arc<App>) -> Router {
    routes(app, false)
}

/// All routes; `loopback` says whether the server listens on a loopback address.
fn routes(app: Arc<App>, loopback: bool) -> Router {
    Router::new()
        .route("/health", get(status::health))
        .route("/version", get(status::version))
        .route("/metrics", get(status::metrics))
        .route("/v1/models", get(status::models))
        // The rest of the path: a model's name may have slashes.
        .route("/v1/models/{*name}", get(status::model))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/responses/{id}", get(responses::stored).delete(responses::stored))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/openapi.json", get(openapi::openapi))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/quire/state", get(state::state))
        .route("/quire/events", get(state::events))
        .fallback(error::not_found)
        .method_not_allowed_fallback(error::method_not_allowed)
        .layer(from_fn_with_state(app.clone(), auth::check))
        // Needs no key: the page asks for it.
        .merge(page::routes())
        .layer(from_fn_with_state((app.clone(), loopback), origin::check))
        .layer(from_fn_with_state(app.clone(), limits::check_head))
        .layer(from_fn_with_state(app.clone(), cors::apply))
        // The outermost: every answer names its call.
        .layer(from_fn_with_state(app.clone(), call::name))
        .with_state(app)
}

//! OpenAI's API over HTTP with vLLM's extensions, and a web page that shows the engine.
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
//! | file | what it owns |
//! |---|---|
//! | `app`, `settings`, [`values`] | shared state; settings, which are flags; parsers of their values |
//! | `auth`, `origin`, `cors`, `limits` | who may use the server: keys, sites, origins, sizes and times |
//! | `call`, `observe` | the id and resources of a call; log record and metrics of a request |
//! | `body`, `fields`, `work`, `lanes`, `cost`, `budget` | JSON bodies, checked and described field by field off the serving threads; their cost, and the memory that all share |
//! | `error`, `json` | errors and JSON responses |
//! | `options`, `structured`, `tools`, `messages`, `prompts`, `foreign` | request fields: sampling and limits; grammars; tools; conversations; prompts; those that are refused |
//! | `assistant` | parses text into an assistant message: reasoning, content, tool calls |
//! | `run` | the engine requests of a call, merged into one stream of events |
//! | `reply`, `logprobs`, `stream` | responses: envelope and choices, log probabilities, server-sent events |
//! | `completions`, `chat`, `responses`, `embeddings`, `tokenize`, `adapters`, `prefix_cache`, `status`, `metrics` | the routes |
//! | `openapi` | the description of all routes |
//! | `connection`, `refusal` | TCP connections that drop clients which do not read; errors for bytes that are not a request |
//! | `serve`, `watchdog` | accepting connections and shutting down; checks of the engine and of memory |
//! | `page`, `state` | the web page, and the engine's state for it |
//!
//! Handlers keep no state between calls. If a client disconnects, its handler is dropped, which drops the `Run`,
//! cancels its requests and frees their blocks.

mod adapters;
mod app;
mod assistant;
mod auth;
mod body;
mod budget;
mod call;
mod chat;
mod completions;
mod connection;
mod cors;
mod cost;
mod embeddings;
mod error;
mod fields;
mod foreign;
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
mod prefix_cache;
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
pub mod values;
mod watchdog;
mod work;

use std::sync::Arc;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};

pub use app::App;
pub use serve::{refuse_while_loading, serve};
pub use settings::{ACCESS_AND_LIMITS, Cors, Limits, ServerOptions};

/// All routes, for a server that other machines can reach.
pub fn router(app: Arc<App>) -> Router {
    routes(app, false)
}

/// All routes. `loopback` says whether the server listens on a loopback address.
fn routes(app: Arc<App>, loopback: bool) -> Router {
    let may_change_adapters = app.options.allow_runtime_lora_updating.unwrap_or(loopback);
    let [load, unload] = match may_change_adapters {
        true => [post(adapters::load), post(adapters::unload)],
        false => [post(adapters::forbidden), post(adapters::forbidden)],
    };
    let reset = match app.options.server_dev_mode.unwrap_or(loopback) {
        true => post(prefix_cache::reset),
        false => post(prefix_cache::forbidden),
    };
    Router::new()
        .route("/health", get(status::health))
        .route("/ping", get(status::health))
        .route("/version", get(status::version))
        .route("/metrics", get(status::metrics))
        .route("/v1/models", get(status::models))
        // As in llama-server, without the version too.
        .route("/models", get(status::models))
        .route("/chat/completions", post(chat::chat_completions))
        .route("/responses", post(responses::responses))
        .route("/embeddings", post(embeddings::embeddings))
        // The rest of the path, because model names may have slashes.
        .route("/v1/models/{*name}", get(status::model))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/completions/render", post(completions::render))
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/chat/completions/render", post(chat::render))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/v1/load_lora_adapter", load)
        .route("/v1/unload_lora_adapter", unload)
        .route("/reset_prefix_cache", reset)
        .route("/is_sleeping", get(status::is_sleeping))
        .route("/sleep", post(status::sleep))
        .route("/wake_up", post(status::wake_up))
        .route("/openapi.json", get(openapi::openapi))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/quire/state", get(state::state))
        .route("/quire/events", get(state::events))
        .fallback(error::not_found)
        .method_not_allowed_fallback(error::method_not_allowed)
        .layer(from_fn_with_state(app.clone(), auth::check))
        // The page needs no key: it asks the user for one.
        .merge(page::routes())
        .layer(from_fn_with_state((app.clone(), loopback), origin::check))
        .layer(from_fn_with_state(app.clone(), limits::check_head))
        .layer(from_fn_with_state(app.clone(), cors::apply))
        // The outermost layer: every response has the id of its call.
        .layer(from_fn_with_state(app.clone(), call::name))
        .with_state(app)
}

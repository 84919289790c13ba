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
//! Imports between folders go down in this table:
//!
//! | folder | what it owns |
//! |---|---|
//! | `lib`, `serve` | the router; accepting connections and shutting down |
//! | `openai`, `vllm` | routes of an API: each reads its bodies into the typed request and writes the events of the engine |
//! | `monitor` | health, metrics, the state of the engine, the web page |
//! | `openapi` | routes and their description |
//! | `reply` | the engine requests of a call, and what responses have in common |
//! | `request` | the typed request: fields, limits, cost |
//! | `app` | state shared by all handlers |
//! | `http` | connections, who may use the server, errors, JSON, server-sent events, memory of requests in flight |
//! | `metrics`, `settings` | records of requests; settings, which are flags, and parsers of their values |
//!
//! Handlers keep no state between calls. If a client disconnects, its handler is dropped, which drops the `Run`,
//! cancels its requests and frees their blocks.

mod app;
mod http;
mod metrics;
mod monitor;
mod openai;
mod openapi;
mod reply;
mod request;
mod serve;
mod settings;
mod vllm;

use std::sync::Arc;

use axum::extract::State;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};

use openapi::{Operation, Routes};
use request::Work;

pub use app::App;
pub use serve::{refuse_while_loading, serve};
pub use settings::{ACCESS_AND_LIMITS, Cors, Limits, ServerOptions, values};

/// All routes, for a server that other machines can reach.
pub fn router(app: Arc<App>) -> Router {
    routes(app, false)
}

/// All routes. `loopback` says whether the server listens on a loopback address.
fn routes(app: Arc<App>, loopback: bool) -> Router {
    let (mut routes, mut page) = (Routes::default(), Routes::default());
    add_apis(&mut routes, &app, loopback);
    monitor::page::add(&mut page);
    let options = &app.options;
    routes
        .router
        .fallback(http::not_found)
        .method_not_allowed_fallback(http::method_not_allowed)
        .layer(from_fn_with_state(options.clone(), http::keys::check))
        // The page needs no key: it asks the user for one.
        .merge(page.router)
        .layer(from_fn_with_state((options.clone(), app.metrics.clone(), loopback), http::origin::check))
        .layer(from_fn_with_state(options.clone(), http::head::check))
        .layer(from_fn_with_state(options.clone(), http::cors::apply))
        // The outermost layer: every response has the id of its call.
        .layer(from_fn(http::call::name))
        .with_state(app)
}

/// Adds the routes of each API.
fn add_apis(routes: &mut Routes, app: &App, loopback: bool) {
    let may_change_adapters = app.options.allow_runtime_lora_updating.unwrap_or(loopback);
    openai::add(routes);
    vllm::add(routes, may_change_adapters, app.options.server_dev_mode.unwrap_or(loopback));
    monitor::add(routes);
    routes.add(&["/openapi.json"], get(describe), Operation::get("This document").returns_object());
}

/// `GET /openapi.json`.
async fn describe(State(app): State<Arc<App>>) -> Response {
    let document = app.openapi.get_or_init(|| {
        let (work, _waiting) = Work::new(app.clone());
        let mut routes = Routes::describing(work);
        add_apis(&mut routes, &app, false);
        monitor::page::add(&mut routes);
        routes.document()
    });
    Json(document).into_response()
}

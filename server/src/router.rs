//! The routes of all folders, and the layers around them that say who may use them.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::Value;

use crate::app::App;
use crate::http::{ErrorForm, call, cors, head, keys, method_not_allowed, not_found, origin, reshape};
use crate::openapi::{Operation, Routes, page};
use crate::request::Work;
use crate::{anthropic, llama_server, monitor, ollama, openai, vllm};

/// The forms of errors of other APIs than OpenAI's.
const ERRORS: &[ErrorForm] = &[anthropic::ERRORS, llama_server::ERRORS, ollama::ERRORS];

/// All routes, for a server that other machines can reach.
pub fn router(app: Arc<App>) -> Router {
    routes(app, false)
}

/// All routes. `loopback` says whether the server listens on a loopback address.
pub fn routes(app: Arc<App>, loopback: bool) -> Router {
    let (mut routes, mut page) = (Routes::default(), Routes::default());
    add_apis(&mut routes, &app, loopback);
    monitor::page::add(&mut page);
    let options = &app.options;
    let all = routes
        .router
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(options.clone(), keys::check))
        // The page needs no key: it asks the user for one.
        .merge(page.router)
        .layer(from_fn_with_state((options.clone(), app.metrics.clone(), loopback), origin::check))
        .layer(from_fn_with_state(options.clone(), head::check))
        .layer(from_fn_with_state(options.clone(), cors::apply))
        .layer(from_fn_with_state(ERRORS, reshape))
        // The outermost layer: every response has the id of its call.
        .layer(from_fn(call::name))
        .with_state(app.clone());
    match options.root_path.as_ref().filter(|prefix| !prefix.is_empty()) {
        None => all,
        // A proxy may remove the prefix, or leave it.
        Some(prefix) => {
            let add_slash = from_fn_with_state(prefix.clone(), monitor::page::add_slash);
            all.clone().nest_service(prefix, all).layer(add_slash)
        }
    }
}

/// Adds the routes of each API.
fn add_apis(routes: &mut Routes, app: &App, loopback: bool) {
    let may_change_adapters = app.options.allow_runtime_lora_updating.unwrap_or(loopback);
    openai::add(routes);
    anthropic::add(routes);
    ollama::add(routes);
    llama_server::add(routes);
    vllm::add(routes, may_change_adapters, app.options.server_dev_mode.unwrap_or(loopback));
    monitor::add(routes);
    let operation = Operation::get("This document as a page").returns_text("text/html");
    routes.add(&["/docs"], get(show), operation);
    routes.add(&["/openapi.json"], get(describe), Operation::get("This document").returns_object());
}

/// `GET /openapi.json`.
async fn describe(State(app): State<Arc<App>>) -> Response {
    Json(document(&app)).into_response()
}

/// `GET /docs`: the same, to read.
async fn show(State(app): State<Arc<App>>) -> Response {
    let headers = [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CONTENT_SECURITY_POLICY, page::POLICY)];
    (headers, page::html(document(&app))).into_response()
}

/// The OpenAPI document.
fn document(app: &Arc<App>) -> &Value {
    app.openapi.get_or_init(|| {
        let (work, _waiting) = Work::new(app.clone());
        let mut routes = Routes::describing(work);
        add_apis(&mut routes, app, false);
        monitor::page::add(&mut routes);
        routes.document(app.options.root_path.as_deref())
    })
}

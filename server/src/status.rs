//! Routes about the server: `/health`, `/ping`, `/version`, `/metrics`, `/v1/models`, `/is_sleeping`, `/sleep`, `/wake_up`.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::AdapterInfo;
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use super::serve::STOPPING;

/// `GET /health` and `GET /ping`: 200 while the engine runs, takes requests and, if it has work, completes steps; else 503 with
/// the reason.
pub async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let limit = app.options.limits.engine_iteration_timeout;
    if app.engine.is_draining() {
        return Err(ApiError::unavailable(STOPPING));
    }
    if app.engine.is_healthy(limit) {
        return Ok(Json(json!({"status": "ok"})));
    }
    Err(ApiError::unavailable(match app.engine.step_age() {
        Some(age) if app.engine.is_alive() => {
            let (age, limit) = (age.as_secs_f64(), limit.as_secs_f64());
            let expected = format!("expected one within {limit} s (--engine-iteration-timeout)");
            let requests = app.engine.num_unfinished();
            format!("the engine has completed no step for {age:.0} s, {expected}; unfinished requests: {requests}")
        }
        _ => "the engine thread has stopped; restart the server".to_string(),
    }))
}

/// `GET /version`.
pub async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `GET /metrics`.
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let page = app.metrics.render(&app.engine.stats(), app.engine.info(), app.engine.step_age());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}

/// `GET /v1/models`.
pub async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let adapters = app.engine.adapters().into_iter().filter(|adapter| !adapter.is_unloading);
    let names = std::iter::once(&app.model).chain(&app.aliases);
    let data: Vec<Value> =
        names.map(|name| describe(&app, name)).chain(adapters.map(|it| describe_adapter(&app, &it))).collect();
    Json(json!({"object": "list", "data": data}))
}

/// `GET /v1/models/{name}`.
pub async fn model(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(name) = name.map_err(|error| ApiError::invalid("model", error.body_text()))?;
    if app.is_model(&name) {
        return Ok(Json(describe(&app, &name)));
    }
    let adapter = app.adapter(&name).ok_or_else(|| ApiError::unknown_model(&name, &app.model))?;
    Ok(Json(describe_adapter(&app, &adapter)))
}

fn describe(app: &App, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": app.created,
        "owned_by": app.options.owned_by.as_deref().unwrap_or("quire"),
        "root": app.options.root,
        "parent": null,
        "max_model_len": app.context(),
    })
}

/// A LoRA adapter: a model whose parent is the served one.
fn describe_adapter(app: &App, adapter: &AdapterInfo) -> Value {
    let mut model = describe(app, &adapter.name);
    model["root"] = adapter.path.display().to_string().into();
    model["parent"] = app.model.as_str().into();
    model
}

/// `GET /is_sleeping`: an engine never sleeps.
pub async fn is_sleeping() -> Json<Value> {
    Json(json!({"is_sleeping": false}))
}

/// `POST /wake_up`: the engine is awake.
pub async fn wake_up() -> StatusCode {
    StatusCode::OK
}

/// `POST /sleep`: not supported.
pub async fn sleep() -> ApiError {
    let message = "this server cannot give up its memory and go on later; stop it instead";
    ApiError::new(StatusCode::NOT_IMPLEMENTED, message)
}

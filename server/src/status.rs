//! Routes about the server: `/health`, `/version`, `/metrics`, `/v1/models`.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use engine::AdapterInfo;
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;

/// `GET /health`: 200 while the engine runs and, if it has work, completes steps; else 503 with the reason.
pub async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let limit = app.options.limits.engine_iteration_timeout;
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
    let data: Vec<Value> =
        std::iter::once(describe(&app)).chain(adapters.map(|it| describe_adapter(&app, &it))).collect();
    Json(json!({"object": "list", "data": data}))
}

/// `GET /v1/models/{name}`.
pub async fn model(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(name) = name.map_err(|error| ApiError::invalid("model", error.body_text()))?;
    if name == app.model {
        return Ok(Json(describe(&app)));
    }
    let adapter = app.adapter(&name).ok_or_else(|| ApiError::unknown_model(&name, &app.model))?;
    Ok(Json(describe_adapter(&app, &adapter)))
}

fn describe(app: &App) -> Value {
    json!({
        "id": app.model,
        "object": "model",
        "created": app.created,
        "owned_by": "quire",
        "root": app.options.root,
        "parent": null,
        "max_model_len": app.context(),
    })
}

/// A LoRA adapter: a model whose parent is the served one.
fn describe_adapter(app: &App, adapter: &AdapterInfo) -> Value {
    let mut model = describe(app);
    model["id"] = adapter.name.as_str().into();
    model["root"] = adapter.path.display().to_string().into();
    model["parent"] = app.model.as_str().into();
    model
}

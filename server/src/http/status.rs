//! The routes that tell about the server: `/health`, `/version`, `/metrics`, `/v1/models`.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;

/// An engine with work that has finished no step for this long counts as stuck. A step is one pass over a bounded batch;
/// minutes mean that something is wrong even for a large model on a slow machine.
const STUCK: Duration = Duration::from_secs(120);

/// 200 while the engine lives and makes progress, else 503.
pub async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    if app.engine.is_healthy(STUCK) {
        Ok(Json(json!({"status": "ok"})))
    } else {
        Err(ApiError::unavailable("the engine has ended or makes no progress"))
    }
}

/// The version of this binary.
pub async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// Prometheus text.
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let page = app.metrics.render(&app.engine.stats());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}

/// The one model that is served, as a list.
pub async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [describe(&app)]}))
}

/// The one model, asked for by its name.
pub async fn model(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(name) = name.map_err(|error| ApiError::invalid("model", error.body_text()))?;
    if name == app.model { Ok(Json(describe(&app))) } else { Err(ApiError::unknown_model(&name, &app.model)) }
}

fn describe(app: &App) -> Value {
    json!({
        "id": app.model,
        "object": "model",
        "created": app.created,
        "owned_by": "quire",
        "root": app.root,
        "max_model_len": app.context(),
    })
}

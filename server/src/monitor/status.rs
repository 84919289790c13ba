//! Routes about the server: `/health`, `/ping`, `/version`, `/metrics`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::STOPPING;
use crate::app::App;
use crate::http::ApiError;

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
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics_page()).into_response()
}

//! `GET /is_sleeping`, `POST /sleep` and `POST /wake_up`: the engine never sleeps.

use axum::Json;
use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::http::ApiError;

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

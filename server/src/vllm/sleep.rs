//! `GET /is_sleeping`, `POST /sleep` and `POST /wake_up`, as in vLLM: an idle server gives memory back, for example to a training that
//! shares the machine, and takes it again.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use engine::{SleepError, SleepLevel};
use serde_json::{Value, json};
use tokio::time::sleep as pause;

use crate::app::App;
use crate::http::ApiError;

/// Parameters of the query, with their values and meaning.
pub const PARAMETERS: [(&str, &[&str], &str); 2] = [
    ("level", &["0", "1", "2"], "0: only takes no requests; 1, the default: gives the cache back; 2: the weights too."),
    (
        "mode",
        &["abort", "wait", "keep"],
        "What becomes of unfinished requests: abort, the default, ends them, wait waits for them, keep refuses to sleep.",
    ),
];

/// `GET /is_sleeping`.
pub async fn is_sleeping(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"is_sleeping": app.engine.sleeping().is_some()}))
}

/// `POST /wake_up`. As in vLLM, a part of the memory can be named (`tags`), but all of it is taken.
pub async fn wake_up(State(app): State<Arc<App>>) -> Result<StatusCode, ApiError> {
    wake(&app).await.map(|()| StatusCode::OK)
}

/// `POST /sleep`.
pub async fn sleep(State(app): State<Arc<App>>, uri: Uri) -> Result<StatusCode, ApiError> {
    fall_asleep(&app, uri.query().unwrap_or_default()).await.map(|()| StatusCode::OK)
}

/// Takes the memory again.
pub async fn wake(app: &App) -> Result<(), ApiError> {
    app.engine.wake().await.map_err(failed)?;
    tracing::info!("the engine is awake");
    Ok(())
}

/// Gives memory back, as the parameters of a query say.
pub async fn fall_asleep(app: &App, query: &str) -> Result<(), ApiError> {
    let [level, mode] = read(query)?;
    let (number, level) = match level {
        Some("0") => (0, SleepLevel::Pause),
        Some("2") => (2, SleepLevel::CacheAndWeights),
        _ => (1, SleepLevel::Cache),
    };
    while mode == Some("wait") && app.engine.num_unfinished() > 0 {
        pause(std::time::Duration::from_millis(20)).await;
    }
    app.engine.sleep(level, mode.is_none_or(|mode| mode == "abort")).await.map_err(failed)?;
    tracing::info!("the engine sleeps at level {number}");
    Ok(())
}

/// The routes where clients may not use them.
pub async fn forbidden() -> ApiError {
    ApiError::forbidden("clients may not put this server to sleep; start it with --server-dev-mode")
}

fn failed(error: SleepError) -> ApiError {
    let message = error.to_string();
    match error {
        SleepError::Busy(_) => ApiError::new(StatusCode::CONFLICT, message),
        SleepError::Unsupported(_) => ApiError::new(StatusCode::NOT_IMPLEMENTED, message),
        SleepError::Failed(_) | SleepError::Closed => ApiError::unavailable(message),
    }
}

/// Reads the values of [`PARAMETERS`]. As in vLLM, other parameters are ignored.
fn read(query: &str) -> Result<[Option<&'static str>; 2], ApiError> {
    let mut values = [None; 2];
    for (name, text) in query.split('&').filter_map(|pair| pair.split_once('=')) {
        let Some(at) = PARAMETERS.iter().position(|(known, ..)| *known == name) else { continue };
        let allowed = PARAMETERS[at].1;
        let found = allowed.iter().copied().find(|value| *value == text);
        let expected = format!("one of {}", allowed.join(", "));
        values[at] = Some(found.ok_or_else(|| ApiError::wrong(name, &text.into(), expected))?);
    }
    Ok(values)
}

//! `POST /abort_requests`, as in vLLM: ends requests of other connections, by their ids.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::app::App;
use crate::http::ApiError;
use crate::request::{Cost, Fields, Work, body};

/// Reads the ids.
pub fn ids(work: &Work, fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    const PARAM: &str = "request_ids";
    let most = work.options.limits.max_prompts;
    let item = json!({"type": "string"});
    let description = "Ids of requests: of the header X-Request-Id, or of a response that has this id.";
    let list = fields.list(PARAM, most, "--max-prompts", &item, description)?;
    let list = fields.required(PARAM, list.map(Vec::as_slice), "a list of ids")?;
    let id = |value: &Value| value.as_str().map(str::to_string);
    let ids: Option<Vec<String>> = list.iter().map(id).collect();
    ids.ok_or_else(|| ApiError::found(PARAM, "items that are no strings", "a list of ids"))
}

/// `POST /abort_requests`. Ids of requests that have ended are ignored.
pub async fn abort(State(app): State<Arc<App>>, request: Request) -> Result<StatusCode, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let (ids, _) = body.read(&app, |work, fields| Ok((ids(work, fields)?, Cost::default()))).await?;
    app.running.abort(&ids);
    Ok(StatusCode::OK)
}

/// The routes where clients may not use them.
pub async fn forbidden() -> ApiError {
    ApiError::forbidden("clients may not end requests of others on this server; start it with --server-dev-mode")
}

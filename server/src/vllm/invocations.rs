//! `POST /invocations`, as in vLLM for SageMaker: a body of any route, which its fields tell.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use engine::Task;

use super::pooling::{score, vectors};
use crate::app::App;
use crate::http::ApiError;
use crate::openai::{chat, completions, embeddings};
use crate::request::body;

/// `POST /invocations`.
pub async fn invocations(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let has = body.has(&app, ["messages", "prompt", "input", "query", "documents"]).await?;
    let (state, request) = (State(app.clone()), body.into_request());
    match has {
        [true, ..] => chat::chat_completions(state, request).await,
        [_, true, ..] => completions::completions(state, request).await,
        [_, _, true, ..] => match &app.pooler().task {
            Task::Embed { .. } => embeddings::embeddings(state, request).await,
            Task::Classify { .. } => vectors::classify(state, request).await,
        },
        [_, _, _, true, true] => score::rerank(state, request).await,
        _ => score::score(state, request).await,
    }
}

//! What the server is, and the routes of this API that generate nothing.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::response::Response;
use engine::SamplingParams;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::output::sampling;
use crate::app::App;
use crate::http::ApiError;
use crate::http::json::{off_reactor, response};
use crate::openai::chat::ChatRequest;
use crate::openai::embeddings::{self, EmbeddingsRequest};
use crate::reply::Run;
use crate::request::{Cost, Fields, Translation, Work, body};

/// Time limit for a snapshot of the engine.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(10);

/// `GET /props`.
pub async fn props(State(app): State<Arc<App>>) -> Response {
    let (defaults, neutral) = (app.engine.generation_defaults(), SamplingParams::default());
    let params = SamplingParams {
        temperature: defaults.temperature.unwrap_or(neutral.temperature),
        top_p: defaults.top_p.unwrap_or(neutral.top_p),
        top_k: defaults.top_k.unwrap_or(neutral.top_k),
        min_p: defaults.min_p.unwrap_or(neutral.min_p),
        repetition_penalty: defaults.repetition_penalty.unwrap_or(neutral.repetition_penalty),
        ..neutral
    };
    let template = app.engine.chat_template().and_then(|template| template.source().map(str::to_string));
    response(&json!({
        "default_generation_settings": {"params": sampling(&params), "n_ctx": app.context()},
        "total_slots": app.options.limits.max_connections,
        "model_alias": app.model,
        "model_path": app.options.root,
        "modalities": {"vision": false, "audio": false},
        "chat_template": template.unwrap_or_default(),
        "build_info": concat!("quire ", env!("CARGO_PKG_VERSION")),
    }))
}

#[derive(Serialize)]
struct Slot {
    id: u64,
    id_task: u64,
    n_ctx: usize,
    is_processing: bool,
    n_prompt_tokens: usize,
    n_prompt_tokens_cache: usize,
    next_token: Value,
}

/// `GET /slots`: the requests that are computed or wait, of which a snapshot lists some.
pub async fn slots(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let permit = app.watchers.clone().try_acquire_owned();
    let _permit = permit.map_err(|_| ApiError::unavailable("too many clients watch the engine; try again later"))?;
    let mut watcher = app.engine.watch();
    let next = timeout(SNAPSHOT_TIMEOUT, watcher.next()).await;
    let snapshot = next.ok().flatten();
    let snapshot =
        snapshot.ok_or_else(|| ApiError::unavailable("the engine has stopped or makes no progress; see /health"))?;
    let slot = |request: &engine::watch::RequestInfo| Slot {
        id: request.id,
        id_task: request.id,
        n_ctx: app.context(),
        is_processing: request.state == "running",
        n_prompt_tokens: request.prompt_tokens,
        n_prompt_tokens_cache: request.cached_tokens,
        next_token: json!({"n_decoded": request.generated_tokens, "has_next_token": true}),
    };
    Ok(response(&snapshot.requests.iter().map(slot).collect::<Vec<Slot>>()))
}

/// Reads the fields of `/apply-template`.
pub fn read_template(work: &Work, fields: &Fields<'_>) -> Result<ChatRequest, ApiError> {
    let mut body = Translation::new(work, fields, ChatRequest::read);
    body.copy_all(&[
        "messages",
        "tools",
        "tool_choice",
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
        "add_generation_prompt",
        "continue_final_message",
    ]);
    body.read(work)
}

/// `POST /apply-template`.
pub async fn apply_template(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive_any_type(&app, request).await?;
    let read = |work: &Work, fields: &Fields<'_>| {
        let prompt = read_template(work, fields)?.conversation.render(work)?;
        let cost = Cost { repeated_bytes: 2 * prompt.len(), ..Cost::default() };
        Ok((response(&json!({"prompt": prompt})), cost))
    };
    Ok(body.read(&app, read).await?.0)
}

/// Reads the fields of `/embedding`.
pub fn read_embedding(work: &Work, fields: &Fields<'_>) -> Result<EmbeddingsRequest, ApiError> {
    let mut body = Translation::new(work, fields, EmbeddingsRequest::read);
    body.copy_all(&["model", "input", "dimensions"]);
    // The older name of the field.
    body.copy("content", "input");
    let description = "2, the default: length 1; -1: the vector as the model gives it.";
    match fields.integer("embd_normalize", (-1, 2), description)? {
        None | Some(2) => body.set("use_activation", &true),
        Some(-1) => {}
        Some(other) => return Err(ApiError::wrong("embd_normalize", &Value::from(other), "2 or -1")),
    }
    body.read(work).map_err(|error| named(fields, error))
}

/// An error of the field `input`, which may have the other name.
fn named(fields: &Fields<'_>, error: ApiError) -> ApiError {
    if fields.raw("content").is_some() { error.renamed(&[("input", "content")]) } else { error }
}

#[derive(Serialize)]
struct Embedding {
    index: usize,
    embedding: [Vec<f32>; 1],
}

/// `POST /embedding`.
pub async fn embedding(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive_any_type(&app, request).await?;
    let read = |work: &Work, fields: &Fields<'_>| {
        let prepared = embeddings::prepare_request(work, read_embedding(work, fields)?);
        prepared.map_err(|error| named(fields, error))
    };
    let ((requests, form), _) = body.read(&app, read).await?;
    let (vectors, _) = Run::submit(&app, requests).await?.collect_vectors().await?;
    off_reactor(true, move || {
        let one = |(index, vector)| Embedding { index, embedding: [form.finish(&app, vector)] };
        response(&vectors.into_iter().enumerate().map(one).collect::<Vec<Embedding>>())
    })
    .await
}

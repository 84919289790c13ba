//! Embeddings.

use std::sync::Arc;
use std::time::Instant;

use super::output::nanoseconds;
use super::request::served;
use crate::app::App;
use crate::http::{ApiError, json};
use crate::openai::embeddings::{self, EmbeddingsRequest, Form};
use crate::reply::Run;
use crate::request::{Cost, Fields, MAX_SHORT, Translation, Work, accept, body};
use axum::extract::{Request, State};
use axum::response::Response;
use engine::GenerationRequest;

/// Fields that change nothing.
const ACCEPTED: [(&str, &str); 2] = [
    ("keep_alive", "Accepted without effect: the model stays loaded."),
    ("options", "Accepted without effect: no token is drawn."),
];

/// Requests, the form of their vectors, and the name of the model in the request.
type Prepared = ((Vec<GenerationRequest>, Form), String);

/// Reads the fields of `/api/embed`.
pub fn read(work: &Work, fields: &Fields<'_>) -> Result<(EmbeddingsRequest, String), ApiError> {
    let mut body = Translation::new(work, fields, EmbeddingsRequest::read);
    let model = common(work, fields, &mut body)?;
    let description = "Cut the end of a text that is longer than the model takes, instead of refusing it.";
    if fields.flag("truncate", true, description)? {
        body.set("truncate_prompt_tokens", &-1);
    }
    body.copy_all(&["dimensions", "input"]);
    body.set("use_activation", &true);
    Ok((body.read(work)?, model))
}

/// Reads the fields of `/api/embeddings`, whose vectors are those of the model.
pub fn read_one(work: &Work, fields: &Fields<'_>) -> Result<(EmbeddingsRequest, String), ApiError> {
    let mut body = Translation::new(work, fields, EmbeddingsRequest::read);
    let model = common(work, fields, &mut body)?;
    let prompt = fields.str("prompt", work.options.limits.max_text_bytes, "The text.")?;
    let prompt = fields.required("prompt", prompt, "a text")?;
    body.set("input", prompt);
    body.set("truncate_prompt_tokens", &-1);
    Ok((body.read(work).map_err(of_prompt)?, model))
}

fn of_prompt(error: ApiError) -> ApiError {
    error.renamed(&[("input", "prompt")])
}

fn common(
    work: &Work,
    fields: &Fields<'_>,
    body: &mut Translation<'_, '_, EmbeddingsRequest>,
) -> Result<String, ApiError> {
    accept(fields, &ACCEPTED);
    let description = "Name of the model; :latest behind it has no effect.";
    let model = fields.str("model", MAX_SHORT, description)?.unwrap_or(&work.model).to_string();
    body.set("model", served(work, &model));
    Ok(model)
}

/// `POST /api/embed`.
pub async fn embed(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let began = Instant::now();
    let mut body = body::receive_any_type(&app, request).await?;
    let read = |work: &Work, fields: &Fields<'_>| prepare(work, read(work, fields)?);
    let (((requests, form), model), _) = body.read(&app, read).await?;
    let tokens: usize = requests.iter().map(|request| request.prompt.len()).sum();
    let (vectors, _) = Run::submit(&app, requests).await?.collect_vectors().await?;
    json::off_reactor(true, move || {
        let embeddings: Vec<Vec<f32>> = vectors.into_iter().map(|vector| form.finish(&app, vector)).collect();
        json::response(&Embed {
            model,
            embeddings,
            total_duration: nanoseconds(began.elapsed()),
            load_duration: 0,
            prompt_eval_count: tokens,
        })
    })
    .await
}

#[derive(serde::Serialize)]
struct Embed {
    model: String,
    embeddings: Vec<Vec<f32>>,
    total_duration: serde_json::Value,
    load_duration: u64,
    prompt_eval_count: usize,
}

/// `POST /api/embeddings`.
pub async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive_any_type(&app, request).await?;
    let read = |work: &Work, fields: &Fields<'_>| prepare(work, read_one(work, fields)?).map_err(of_prompt);
    let (((requests, form), _), _) = body.read(&app, read).await?;
    let (vectors, _) = Run::submit(&app, requests).await?.collect_vectors().await?;
    let embedding = vectors.into_iter().next().map(|vector| form.finish(&app, vector));
    Ok(json::response(&Embedding { embedding }))
}

#[derive(serde::Serialize)]
struct Embedding {
    embedding: Option<Vec<f32>>,
}

fn prepare(work: &Work, (request, model): (EmbeddingsRequest, String)) -> Result<(Prepared, Cost), ApiError> {
    let (prepared, cost) = embeddings::prepare_request(work, request)?;
    Ok(((prepared, model), cost))
}

//! `POST /v1/embeddings`: embeddings from the hidden states of the served model.
//!
//! The prompts run through the engine like those of completions, in the same steps and with the same prefix cache. They
//! end where completions sample their first token.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use base64::prelude::{BASE64_STANDARD, Engine};
use engine::GenerationRequest;
use serde::Serialize;
use serde_json::{Value, json};

use super::choices::Envelope;
use crate::app::App;
use crate::http::{ApiError, json};
use crate::reply::Run;
use crate::request::pooled::{Pooled, check_activation, finish};
use crate::request::{Cost, Fields, Input, Work, body, prompts, unsupported};

/// `POST /v1/embeddings`.
pub async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((requests, form), _) = body.read(&app, prepare).await?;
    let prompt_tokens: usize = requests.iter().map(|request| request.prompt.len()).sum();
    let envelope = Envelope::new(&app, form.adapter.as_deref(), "embd", "list");
    let vectors = Run::submit(&app, requests).await?.collect_vectors().await?;
    json::off_reactor(true, move || {
        let one = |(index, vector): (usize, Vec<f32>)| {
            let vector = finish(app.pooler(), vector, form.dimensions, form.use_activation);
            Embedding { object: "embedding", index, embedding: Vector::new(vector, form.is_base64) }
        };
        let usage = json!({"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens});
        let mut text = Vec::new();
        envelope.write(&mut text, ("data", vectors.into_iter().enumerate().map(one)), &[], Some(usage));
        json::respond(text)
    })
    .await
}

#[derive(Serialize)]
struct Embedding {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

/// A vector in a response.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Vector {
    /// Written as the shortest decimals of float32: 0.1 and not 0.10000000149011612.
    Numbers(Vec<f32>),
    /// Its little-endian bytes.
    Base64(String),
}

impl Vector {
    /// A vector in one of the two forms.
    pub fn new(vector: Vec<f32>, is_base64: bool) -> Vector {
        let bytes = || vector.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        if is_base64 { Vector::Base64(BASE64_STANDARD.encode(bytes())) } else { Vector::Numbers(vector) }
    }
}

/// What the response depends on.
pub struct Form {
    is_base64: bool,
    dimensions: Option<usize>,
    use_activation: Option<bool>,
    adapter: Option<String>,
}

/// The fields of an embeddings request.
pub struct EmbeddingsRequest {
    is_base64: bool,
    dimensions: Option<usize>,
    pooled: Pooled,
    prompts: Vec<Input>,
}

impl EmbeddingsRequest {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>) -> Result<EmbeddingsRequest, ApiError> {
        let mut pooled = Pooled::read(work, fields)?;
        unsupported::refuse(fields, &unsupported::EMBEDDINGS)?;
        pooled.read_prompt_name(work, fields)?;
        let dimensions = dimensions(work, fields)?;
        let prompts = prompts::read(work, fields, "input", "Texts to embed.")?;
        Ok(EmbeddingsRequest { is_base64: is_base64(fields)?, dimensions, pooled, prompts })
    }
}

/// Reads `encoding_format`.
pub fn is_base64(fields: &Fields<'_>) -> Result<bool, ApiError> {
    let description = "Format of the embeddings: float (default) or base64 of little-endian float32.";
    Ok(fields.word("encoding_format", &["float", "base64"], description)? == Some("base64"))
}

fn dimensions(work: &Work, fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let (pooler, range) = (work.pooler(), (1, usize::MAX));
    let description = "Number of dimensions: the model's own, or fewer if its config.json has matryoshka_dimensions or is_matryoshka.";
    let asked = fields.count("dimensions", range, description)?;
    let refused = |asked: usize| {
        let expected = format!("{}, or a length that the model's config.json allows; remove it", pooler.width);
        ApiError::wrong("dimensions", &Value::from(asked), expected)
    };
    asked.map_or(Ok(None), |asked| if pooler.takes(asked) { Ok(Some(asked)) } else { Err(refused(asked)) })
}

/// Reads the fields and tokenizes the prompts. Also returns the form of the answer.
pub fn prepare(work: &Work, fields: &Fields<'_>) -> Result<((Vec<GenerationRequest>, Form), Cost), ApiError> {
    work.must_embed()?;
    let EmbeddingsRequest { is_base64, dimensions, pooled, prompts } = EmbeddingsRequest::read(work, fields)?;
    check_activation(work, pooled.use_activation)?;
    let least = prompts.iter().map(|input| input.least_tokens(work)).sum();
    pooled.cost(work, prompts.len(), least).check(&work.options.limits)?;
    let prompts = pooled.prompts(work, prompts, "input")?;
    let (requests, cost) = pooled.requests(work, prompts)?;
    let Pooled { adapter, use_activation, .. } = pooled;
    Ok(((requests, Form { is_base64, dimensions, use_activation, adapter }), cost))
}

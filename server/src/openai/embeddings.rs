//! `POST /v1/embeddings`: embeddings from the hidden states of the served model.
//!
//! The prompts run through the engine like those of completions, in the same steps and with the same prefix cache. They
//! end where completions sample their first token.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use engine::GenerationRequest;
use serde_json::Value;

use crate::app::App;
use crate::http::{ApiError, json};
use crate::reply::{Envelope, Run, respond_vectors};
use crate::request::encoding::Encoding;
use crate::request::pooled::{Pooled, check_activation, finish};
use crate::request::{Cost, Fields, Input, Work, body, unsupported};

/// `POST /v1/embeddings`.
pub async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((requests, form), _) = body.read(&app, prepare).await?;
    let prompt_tokens: usize = requests.iter().map(|request| request.prompt.len()).sum();
    let envelope = Envelope::new(&app, form.adapter.as_deref(), "embd", "list");
    let (vectors, cached) = Run::submit(&app, requests).await?.collect_vectors().await?;
    json::off_reactor(true, move || {
        let vectors = vectors.into_iter().map(|vector| form.finish(&app, vector));
        respond_vectors(&envelope, vectors, form.encoding, ("embedding", "embedding"), (prompt_tokens, cached))
    })
    .await?
}

/// What the response depends on.
pub struct Form {
    encoding: Encoding,
    dimensions: Option<usize>,
    use_activation: Option<bool>,
    adapter: Option<String>,
}

impl Form {
    /// What the response has of a vector that the engine gave.
    pub fn finish(&self, app: &App, vector: Vec<f32>) -> Vec<f32> {
        finish(app.pooler(), vector, self.dimensions, self.use_activation)
    }
}

/// The fields of an embeddings request.
pub struct EmbeddingsRequest {
    encoding: Encoding,
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
        let prompts = pooled.inputs(work, fields, "Texts to embed.")?;
        Ok(EmbeddingsRequest { encoding: Encoding::read(fields)?, dimensions, pooled, prompts })
    }
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
    prepare_request(work, EmbeddingsRequest::read(work, fields)?)
}

/// Tokenizes the prompts of a request.
pub fn prepare_request(
    work: &Work,
    request: EmbeddingsRequest,
) -> Result<((Vec<GenerationRequest>, Form), Cost), ApiError> {
    work.must_embed()?;
    let EmbeddingsRequest { encoding, dimensions, pooled, prompts } = request;
    encoding.check(prompts.len())?;
    check_activation(work, pooled.use_activation)?;
    let least = prompts.iter().map(|input| input.least_tokens(work)).sum();
    pooled.cost(work, prompts.len(), least).check(&work.options.limits)?;
    let prompts = pooled.prompts(work, prompts, "input")?;
    let (requests, cost) = pooled.requests(work, prompts)?;
    let Pooled { adapter, use_activation, .. } = pooled;
    Ok(((requests, Form { encoding, dimensions, use_activation, adapter }), cost))
}

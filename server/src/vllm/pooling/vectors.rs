//! `POST /pooling` and `POST /classify`: one vector for each input.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use engine::{GenerationRequest, Task};
use serde::Serialize;

use crate::app::App;
use crate::http::{ApiError, json};
use crate::reply::{Envelope, Run, respond_vectors};
use crate::request::encoding::Encoding;
use crate::request::pooled::{Pooled, check_activation, finish};
use crate::request::{Cost, Fields, Input, Work, body, unsupported};

/// `POST /pooling`: an embedding, or the scores of labels, whichever the model gives.
pub async fn pooling(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((requests, pooled, encoding), _) = body.read(&app, prepare_pooling).await?;
    let prompt_tokens: usize = requests.iter().map(|request| request.prompt.len()).sum();
    let envelope = Envelope::new(&app, pooled.adapter.as_deref(), "pool", "list");
    let (vectors, cached) = Run::submit(&app, requests).await?.collect_vectors().await?;
    json::off_reactor(true, move || {
        let vectors = vectors.into_iter().map(|vector| finish(app.pooler(), vector, None, pooled.use_activation));
        respond_vectors(&envelope, vectors, encoding, ("pooling", "data"), (prompt_tokens, cached))
    })
    .await?
}

/// The fields of a request for pooling.
pub struct PoolingRequest {
    pooled: Pooled,
    encoding: Encoding,
    prompts: Vec<Input>,
}

impl PoolingRequest {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>) -> Result<PoolingRequest, ApiError> {
        let mut pooled = Pooled::read(work, fields)?;
        unsupported::refuse(fields, &unsupported::EMBEDDINGS)?;
        unsupported::refuse(fields, &unsupported::POOLING)?;
        pooled.read_prompt_name(work, fields)?;
        let is_embedding = matches!(work.pooler().task, Task::Embed { .. });
        let task = if is_embedding { "embed" } else { "classify" };
        fields.word("task", &[task], "What to return: what the model gives.")?;
        let encoding = Encoding::read(fields)?;
        let prompts = pooled.inputs(work, fields, "Texts to pool.")?;
        Ok(PoolingRequest { pooled, encoding, prompts })
    }
}

/// Requests, their fields, and the form of the vectors.
type Prepared = (Vec<GenerationRequest>, Pooled, Encoding);

fn prepare_pooling(work: &Work, fields: &Fields<'_>) -> Result<(Prepared, Cost), ApiError> {
    let PoolingRequest { pooled, encoding, prompts } = PoolingRequest::read(work, fields)?;
    encoding.check(prompts.len())?;
    check_activation(work, pooled.use_activation)?;
    let (requests, cost) = requests(work, &pooled, prompts)?;
    Ok(((requests, pooled, encoding), cost))
}

fn requests(work: &Work, pooled: &Pooled, prompts: Vec<Input>) -> Result<(Vec<GenerationRequest>, Cost), ApiError> {
    let least = prompts.iter().map(|input| input.least_tokens(work)).sum();
    pooled.cost(work, prompts.len(), least).check(&work.options.limits)?;
    let prompts = pooled.prompts(work, prompts, "input")?;
    pooled.requests(work, prompts)
}

/// `POST /classify`.
pub async fn classify(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((requests, pooled), _) = body.read(&app, prepare_classes).await?;
    let prompt_tokens: usize = requests.iter().map(|request| request.prompt.len()).sum();
    let envelope = Envelope::new(&app, pooled.adapter.as_deref(), "classify", "list");
    let (vectors, cached) = Run::submit(&app, requests).await?.collect_vectors().await?;
    json::off_reactor(true, move || {
        let labels = match &app.pooler().task {
            Task::Classify { labels, .. } => &labels[..],
            Task::Embed { .. } => &[],
        };
        let one = |(index, vector): (usize, Vec<f32>)| {
            let probs = finish(app.pooler(), vector, None, pooled.use_activation);
            let best = probs.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
            let label = best.and_then(|(label, _)| labels.get(label));
            Classes { index, label: label.map(String::as_str), num_classes: probs.len(), probs }
        };
        envelope.respond(vectors.into_iter().enumerate().map(one), (prompt_tokens, cached))
    })
    .await
}

#[derive(Serialize)]
struct Classes<'a> {
    index: usize,
    label: Option<&'a str>,
    probs: Vec<f32>,
    num_classes: usize,
}

/// The fields of a request for labels.
pub struct ClassifyRequest {
    pooled: Pooled,
    prompts: Vec<Input>,
}

impl ClassifyRequest {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>) -> Result<ClassifyRequest, ApiError> {
        let pooled = Pooled::read(work, fields)?;
        unsupported::refuse(fields, &unsupported::EMBEDDINGS)?;
        unsupported::refuse(fields, &unsupported::CLASSES)?;
        let prompts = pooled.inputs(work, fields, "Texts to classify.")?;
        Ok(ClassifyRequest { pooled, prompts })
    }
}

/// Reads the fields and tokenizes the prompts.
pub fn prepare_classes(work: &Work, fields: &Fields<'_>) -> Result<((Vec<GenerationRequest>, Pooled), Cost), ApiError> {
    let ClassifyRequest { pooled, prompts } = ClassifyRequest::read(work, fields)?;
    if matches!(work.pooler().task, Task::Embed { .. }) {
        return Err(ApiError::unsupported("model", format!("it has no labels; it serves {}", work.serves())));
    }
    let (requests, cost) = requests(work, &pooled, prompts)?;
    Ok(((requests, pooled), cost))
}

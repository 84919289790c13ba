//! `POST /v1/embeddings`: embeddings from the hidden states of the served model.
//!
//! The prompts run through the engine like those of completions, in the same steps and with the same prefix cache. They
//! end where completions sample their first token.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use base64::prelude::{BASE64_STANDARD, Engine};
use engine::{GenerationParams, GenerationRequest};
use serde::Serialize;
use serde_json::{Value, json};

use super::choices::Envelope;
use crate::app::App;
use crate::http::{ApiError, json};
use crate::reply::Run;
use crate::request::{
    Cost, Fields, Input, Work, add_special_tokens, body, cache_salt, priority, prompts, truncation, unsupported, user,
};

/// `POST /v1/embeddings`.
pub async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((requests, is_base64), _) = body.read(&app, prepare).await?;
    let prompt_tokens: usize = requests.iter().map(|request| request.prompt.len()).sum();
    let adapter = requests.first().and_then(|request| request.adapter.as_deref());
    let envelope = Envelope::new(&app, adapter, "embd", "list");
    let answers = Run::submit(&app, requests).await?.collect(false).await?;
    let vectors: Option<Vec<Vec<f32>>> = answers.into_iter().map(|answer| answer.embedding).collect();
    let vectors = vectors.ok_or_else(|| ApiError::internal("the engine returned no embedding; try again"))?;
    json::off_reactor(true, move || {
        let one = |(index, vector): (usize, Vec<f32>)| {
            let bytes = || vector.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
            let embedding =
                if is_base64 { Vector::Base64(BASE64_STANDARD.encode(bytes())) } else { Vector::Numbers(vector) };
            Embedding { object: "embedding", index, embedding }
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

#[derive(Serialize)]
#[serde(untagged)]
enum Vector {
    /// Written as the shortest decimals of float32: 0.1 and not 0.10000000149011612.
    Numbers(Vec<f32>),
    Base64(String),
}

/// The fields of an embeddings request.
pub struct EmbeddingsRequest {
    is_base64: bool,
    keep: Option<usize>,
    add_special: bool,
    priority: i32,
    cache_salt: Option<String>,
    adapter: Option<String>,
    prompts: Vec<Input>,
}

impl EmbeddingsRequest {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>) -> Result<EmbeddingsRequest, ApiError> {
        let adapter = work.choose_model(fields)?;
        unsupported::refuse(fields, &unsupported::EMBEDDINGS)?;
        user(fields)?;
        let description = "LogprobFormat of the embeddings: float (default) or base64 of little-endian float32.";
        let is_base64 = fields.word("encoding_format", &["float", "base64"], description)? == Some("base64");
        let width = work.engine.info().hidden_size;
        if let Some(asked) =
            fields.count("dimensions", (1, usize::MAX), "Number of dimensions; only the model's own.")?
            && asked != width
        {
            let expected = format!("{width}: this model does not support other dimensions; remove it");
            return Err(ApiError::wrong("dimensions", &Value::from(asked), expected));
        }
        let keep = match truncation(fields)? {
            Some(-1) => Some(work.context().saturating_sub(1)),
            other => other.and_then(|n| usize::try_from(n).ok()),
        };
        Ok(EmbeddingsRequest {
            is_base64,
            keep,
            add_special: add_special_tokens(fields)?,
            priority: priority(fields)?,
            cache_salt: cache_salt(fields)?,
            adapter,
            prompts: prompts::read(work, fields, "input", "Texts to embed.")?,
        })
    }
}

/// Reads the fields and tokenizes the prompts. Also returns whether the embeddings are to be sent as base64.
pub fn prepare(work: &Work, fields: &Fields<'_>) -> Result<((Vec<GenerationRequest>, bool), Cost), ApiError> {
    let pooling = work.pooling.ok_or_else(|| {
        let advice = "its 1_Pooling/config.json has neither last-token nor mean pooling; set --pooling-type";
        ApiError::unsupported("model", advice)
    })?;
    let EmbeddingsRequest { is_base64, keep, add_special, priority, cache_salt, adapter, prompts } =
        EmbeddingsRequest::read(work, fields)?;
    let width = work.engine.info().hidden_size;
    let least = prompts.iter().map(|input| input.least_tokens(work)).sum();
    let count = prompts.len();
    let cost = |tokens| Cost {
        prompts: count,
        sequences: 1,
        n: 1,
        prompt_tokens: tokens,
        // The vector and its text.
        list_bytes: width * 20,
        ..Cost::default()
    };
    cost(least).check(&work.options.limits)?;
    let prompts = prompts::tokenize(work, prompts, "input", add_special, keep)?;
    let tokens = prompts.iter().map(|(ids, _)| ids.len()).sum();
    let request = |(prompt, _)| {
        let (params, cache_salt, adapter) = (GenerationParams::embedding(pooling), cache_salt.clone(), adapter.clone());
        GenerationRequest { prompt, params, priority, cache_salt, adapter, ..Default::default() }
    };
    let requests = prompts.into_iter().map(request).collect();
    Ok(((requests, is_base64), cost(tokens)))
}

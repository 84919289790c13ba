//! `POST /tokenize` and `POST /detokenize`, as vLLM has them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::app::App;
use super::body;
use super::error::ApiError;
use super::fields::Fields;
use super::messages::Conversation;

/// Token ids of a `prompt`, or of `messages` through the chat template. A text longer than the context is counted like
/// any other: that is what one comes here for.
pub async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    body.read(&app, |app, fields| {
        app.check_model(fields)?;
        let strings = fields.bool("return_token_strs")?.unwrap_or(false);
        let tokens = match fields.get("messages") {
            Some(_) => Conversation::read(fields)?.tokenize(app)?,
            None => encode(app, fields)?,
        };
        let mut reply = json!({"count": tokens.len(), "max_model_len": app.context()});
        if strings {
            let text = |&id| app.tokenizer().id_to_token(id).unwrap_or_default();
            reply["token_strs"] = tokens.iter().map(text).collect();
        }
        reply["tokens"] = tokens.into();
        // Written out here, where a long list holds nobody up.
        Ok(Json(reply).into_response())
    })
    .await
}

fn encode(app: &App, fields: &Fields) -> Result<Vec<u32>, ApiError> {
    let text = fields.str("prompt")?;
    let text = text.ok_or_else(|| ApiError::invalid("prompt", "missing; expected prompt or messages"))?;
    let add_special = fields.bool("add_special_tokens")?.unwrap_or(true);
    app.tokenizer().encode(text, add_special).map_err(|error| ApiError::invalid("prompt", error))
}

/// The text of token ids, special tokens included.
pub async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    body.read(&app, |app, fields| {
        app.check_model(fields)?;
        let tokens = fields.token_ids("tokens", app.vocab())?;
        let tokens = tokens.ok_or_else(|| ApiError::invalid("tokens", "missing; expected a list of token ids"))?;
        let text = app.tokenizer().decode(&tokens, false).map_err(|error| ApiError::invalid("tokens", error))?;
        Ok(Json(json!({"prompt": text})).into_response())
    })
    .await
}

//! `POST /tokenize` and `POST /detokenize`, as vLLM has them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use serde_json::{Value, json};

use super::app::{App, off_thread};
use super::body;
use super::error::ApiError;
use super::messages::Conversation;

/// Token ids of a `prompt`, or of `messages` through the chat template. A text longer than the context is counted like
/// any other: that is what one comes here for.
pub async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let fields = body::read(request).await?;
    app.check_model(&fields)?;
    let strings = fields.bool("return_token_strs")?.unwrap_or(false);
    let tokens = if fields.get("messages").is_some() {
        Conversation::read(&fields)?.tokenize(&app).await?
    } else {
        let text = fields.str("prompt")?.map(str::to_string);
        let text = text.ok_or_else(|| ApiError::invalid("prompt", "missing; expected prompt or messages"))?;
        let add_special = fields.bool("add_special_tokens")?.unwrap_or(true);
        let app = app.clone();
        off_thread(text.len(), move || {
            app.tokenizer().encode(&text, add_special).map_err(|error| ApiError::invalid("prompt", error))
        })
        .await?
    };
    let mut reply = json!({"count": tokens.len(), "max_model_len": app.context()});
    if strings {
        reply["token_strs"] = tokens.iter().map(|&id| app.tokenizer().id_to_token(id).unwrap_or_default()).collect();
    }
    reply["tokens"] = tokens.into();
    Ok(Json(reply))
}

/// The text of token ids, special tokens included.
pub async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let fields = body::read(request).await?;
    app.check_model(&fields)?;
    let tokens = fields.token_ids("tokens", app.vocab())?;
    let tokens = tokens.ok_or_else(|| ApiError::invalid("tokens", "missing; expected a list of token ids"))?;
    let text = app.tokenizer().decode(&tokens, false).map_err(|error| ApiError::invalid("tokens", error))?;
    Ok(Json(json!({"prompt": text})))
}

//! `POST /tokenize` and `POST /detokenize`, as vLLM has them.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::app::App;
use super::body;
use super::cost::Cost;
use super::error::ApiError;
use super::fields::Fields;
use super::json::Json;
use super::messages::Conversation;
use super::tools::Tools;
use super::work::Work;

/// Token ids of a `prompt`, or of `messages` through the chat template. A text longer than the context is counted like
/// any other: that is the purpose of this route.
pub async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let answer = body.read(&app, |work, fields| {
        let Tokenize { text, strings } = Tokenize::read(work, fields)?;
        let tokens = match text {
            Text::Plain(text, add_special) => work.encode(&text, add_special, "prompt", false)?,
            Text::Chat(conversation) => conversation.encode(work, &conversation.render(work)?, false)?,
        };
        let mut reply = Json::from(json!({"count": tokens.len(), "max_model_len": work.context()}));
        if strings {
            let text = |&id| Value::from(work.tokenizer().id_to_token(id).unwrap_or_default()).to_string();
            reply.set("token_strs", listed(tokens.iter().map(text)));
        }
        reply.set("tokens", listed(tokens.iter()));
        // Written here, where a long list delays nobody.
        let answer = reply.into_response();
        Ok((answer, Cost { repeated_bytes: tokens.len() * if strings { 32 } else { 8 }, ..Cost::default() }))
    });
    Ok(answer.await?.0)
}

/// A list as JSON text.
fn listed(items: impl Iterator<Item = impl std::fmt::Display>) -> Json {
    use std::fmt::Write;
    let mut text = String::from("[");
    for item in items {
        let comma = if text.len() > 1 { "," } else { "" };
        // Writing to a `String` cannot fail.
        let _ = write!(text, "{comma}{item}");
    }
    Json::text(text + "]")
}

/// A text or a conversation that becomes tokens.
pub struct Tokenize {
    text: Text,
    strings: bool,
}

enum Text {
    /// With whether special tokens are added.
    Plain(String, bool),
    Chat(Box<Conversation>),
}

impl Tokenize {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>) -> Result<Tokenize, ApiError> {
        work.check_model(fields)?;
        let strings = fields.flag("return_token_strs", false, "Give the tokens as texts too.")?;
        let tools = Tools::read(fields, &work.limits)?;
        let conversation = Conversation::read(fields, &work.limits, tools.definitions)?;
        let prompt = fields.str("prompt", usize::MAX, "The text; required unless there are messages.")?;
        let text = match (conversation, prompt) {
            (Some(conversation), _) => Text::Chat(Box::new(conversation)),
            (None, Some(text)) => {
                let add_special = fields.get("add_special_tokens")? != Some(&Value::Bool(false));
                Text::Plain(text.to_string(), add_special)
            }
            (None, None) => return Err(ApiError::invalid("prompt", "missing; expected prompt or messages")),
        };
        Ok(Tokenize { text, strings })
    }
}

/// The text of token ids, special tokens included.
pub async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let answer = body.read(&app, |work, fields| {
        let tokens = detokenized(work, fields)?;
        let most = work.limits.max_body_bytes;
        let mut found = 0_usize;
        for &id in &tokens {
            found += work.tokenizer().token_bytes(id).len();
            if found > most {
                let advice = "send fewer ids (--max-body-bytes)";
                return Err(ApiError::over("tokens", found, most, "bytes of text or more", advice));
            }
        }
        let text = work.tokenizer().decode(&tokens, false).map_err(|error| ApiError::invalid("tokens", error))?;
        let cost = Cost { repeated_bytes: 2 * text.len(), ..Cost::default() };
        Ok((Json::from(json!({"prompt": text})).into_response(), cost))
    });
    Ok(answer.await?.0)
}

/// The ids that become a text.
pub fn detokenized(work: &Work, fields: &Fields<'_>) -> Result<Vec<u32>, ApiError> {
    work.check_model(fields)?;
    let (name, most) = ("tokens", work.limits.max_request_tokens);
    let found = fields.token_ids(name, (0, most), "--max-request-tokens", work.vocab(), "The ids.")?;
    fields.required(name, found, "a list of token ids")
}

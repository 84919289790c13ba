//! `POST /tokenize` and `POST /detokenize`, as in vLLM and as in llama-server, whose text has the field `content`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::http::ApiError;
use crate::http::json::{Items, response};
use crate::request::{Conversation, Cost, Fields, Reasoning, Tools, Work, body};

/// `POST /tokenize`: token ids of `prompt`, or of `messages` rendered by the chat template. The text may exceed the
/// context length.
pub async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let answer = body.read(&app, |work, fields| {
        let TokenizeRequest { text, strings } = TokenizeRequest::read(work, fields)?;
        let tokens = match text {
            Text::Plain(text, add_special) => work.encode(&text, add_special, "prompt", false)?,
            Text::Chat(conversation) => conversation.encode(work, &conversation.render(work)?, false)?,
            Text::Content { text, add_special, with_pieces } => {
                let tokens = work.encode(&text, add_special, "content", false)?;
                let response = match with_pieces {
                    true => response(&json!({"tokens": tokens.iter().map(|id| piece(work, *id)).collect::<Vec<_>>()})),
                    false => response(&json!({"tokens": tokens})),
                };
                let cost = tokens.len() * if with_pieces { 96 } else { 8 };
                return Ok((response, Cost { repeated_bytes: cost, ..Cost::default() }));
            }
        };
        let text = |&id: &u32| work.tokenizer().id_to_token(id).unwrap_or_default();
        // Written here, off the threads that serve connections.
        let response = response(&Tokenized {
            count: tokens.len(),
            max_model_len: work.context(),
            token_strs: strings.then(|| Items::new(tokens.iter().map(text))),
            tokens: &tokens,
        });
        Ok((response, Cost { repeated_bytes: tokens.len() * if strings { 32 } else { 8 }, ..Cost::default() }))
    });
    Ok(answer.await?.0)
}

/// A token as llama-server writes it: its text, or its bytes if these are a part of a character.
fn piece(work: &Work, id: u32) -> Value {
    match String::from_utf8(work.tokenizer().token_bytes(id)) {
        Ok(text) => json!({"id": id, "piece": text}),
        Err(error) => json!({"id": id, "piece": error.as_bytes()}),
    }
}

#[derive(Serialize)]
struct Tokenized<'a, T> {
    count: usize,
    max_model_len: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_strs: Option<T>,
    tokens: &'a [u32],
}

/// The fields of a tokenize request.
pub struct TokenizeRequest {
    text: Text,
    strings: bool,
}

enum Text {
    /// The text, and whether to add special tokens.
    Plain(String, bool),
    Chat(Box<Conversation>),
    /// A text of llama-server's request, whose answer has another form.
    Content {
        text: String,
        add_special: bool,
        with_pieces: bool,
    },
}

impl TokenizeRequest {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>) -> Result<TokenizeRequest, ApiError> {
        work.choose_model(fields)?;
        let strings = fields.flag("return_token_strs", false, "Also return the tokens as strings.")?;
        let tools = Tools::read(fields, &work.options.limits, false)?;
        let reasoning = Reasoning::read(fields)?;
        let conversation = Conversation::read(fields, &work.options.limits, tools.definitions, &reasoning, true)?;
        let prompt = fields.str("prompt", usize::MAX, "Text to tokenize; required without messages and content.")?;
        let content = Content::read(fields)?;
        let text = match (conversation, prompt.or(content.text)) {
            (None, Some(text)) if prompt.is_none() => {
                let Content { add_special, with_pieces, .. } = content;
                Text::Content { text: text.to_string(), add_special, with_pieces }
            }
            (Some(conversation), _) => Text::Chat(Box::new(conversation)),
            (None, Some(text)) => {
                let add_special = fields.get("add_special_tokens")? != Some(&Value::Bool(false));
                Text::Plain(text.to_string(), add_special)
            }
            (None, None) => {
                return Err(ApiError::found("prompt", "neither prompt nor messages nor content", "one of them"));
            }
        };
        Ok(TokenizeRequest { text, strings })
    }
}

/// The fields of llama-server's request.
struct Content<'f> {
    text: Option<&'f str>,
    add_special: bool,
    with_pieces: bool,
}

impl<'f> Content<'f> {
    fn read(fields: &'f Fields<'_>) -> Result<Content<'f>, ApiError> {
        let description = "Text to tokenize, as in llama-server: the answer has tokens alone.";
        let text = fields.str("content", usize::MAX, description)?;
        let description = "With content: add special tokens, such as BOS.";
        let add_special = fields.flag("add_special", false, description)?;
        let description = "With content: return an object with id and piece for each token.";
        let with_pieces = fields.flag("with_pieces", false, description)?;
        if text.is_some() {
            fields.refuse("parse_special", "[true]", "remove it: special tokens within a text count as such")?;
        }
        Ok(Content { text, add_special, with_pieces })
    }
}

/// `POST /detokenize`: text of token ids, including special tokens.
pub async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let answer = body.read(&app, |work, fields| {
        let tokens = token_ids(work, fields)?;
        let most = work.options.limits.max_body_bytes;
        let mut found = 0_usize;
        for &id in &tokens {
            found += work.tokenizer().token_bytes(id).len();
            if found > most {
                let advice = "send fewer token ids or raise --max-body-bytes";
                return Err(ApiError::over("tokens", found, most, "bytes of text or more", advice));
            }
        }
        let text = work.tokenizer().decode(&tokens, false).map_err(|error| ApiError::invalid("tokens", error))?;
        let cost = Cost { repeated_bytes: 4 * text.len(), ..Cost::default() };
        Ok((response(&json!({"prompt": text, "content": text})), cost))
    });
    Ok(answer.await?.0)
}

/// Reads the fields of a detokenize request.
pub fn token_ids(work: &Work, fields: &Fields<'_>) -> Result<Vec<u32>, ApiError> {
    work.choose_model(fields)?;
    let (name, most) = ("tokens", work.options.limits.max_request_tokens);
    let found =
        fields.token_ids(name, (0, most), "--max-request-tokens", work.vocab(), "Token ids to convert to text.")?;
    fields.required(name, found, "a list of token ids")
}

//! `POST /v1/responses`: OpenAI's Responses API, on top of a chat.
//!
//! | file | what it owns |
//! |---|---|
//! | `input` | input items, converted to messages |
//! | `request` | the fields of a request, and those that the response repeats |
//! | `output`, `json` | output items, and the events of a stream; JSON that they share |
//! | `kept` | what is kept of a response, and the items that a request continues |
//! | `background`, `replay` | responses that outlive their connection, and the server |
//! | `read_back` | kept responses: read, streamed, cancelled, deleted |
//!
//! A response is what the last event of its stream would carry: one [`ResponseWriter`] makes both. It is kept before its last event is
//! sent, unless the request says `store: false`.

mod background;
mod input;
mod json;
mod kept;
mod output;
mod read_back;
mod replay;
mod request;

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use engine::{Delta, FinishReason};
use serde_json::json;
use store::{Change, Kind, NewRecord};

use super::chat::Prepared;
use super::conversations;
use super::logprobs;
use crate::app::App;
use crate::http::json::{off_reactor, put, response};
use crate::http::{ApiError, Client, sse};
use crate::reply::stream::Settling;
use crate::reply::{Assistant, Run, Translator, Usage, stream};
use crate::request::{Fields, Work, body};
use crate::stored::{Owner, Stored};
pub use background::resume;
use json::Json;
pub use kept::{ComputedBy, identified, take_up};
use kept::{Earlier, Keep, Kept};
use output::{ResponseWriter, Status};
pub use read_back::{cancel, delete, get, input_items, page};
use request::prepare;
pub use request::{metadata, read};

/// List of a response's events among the parts of its record.
const EVENTS: u8 = 0;

/// `POST /v1/responses`.
pub async fn responses(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Result<Response, ApiError> {
    let stored = app.stored()?.clone();
    let owner = stored.owner(&client);
    let mut body = body::receive(&app, request).await?;
    let read = move |work: &Work, fields: &Fields<'_>| prepare(work, fields, Earlier::Of(&owner));
    let ((chat, form), cost) = body.read(&app, read).await?;
    if form.keep.background {
        return background::accept(&app, owner, chat, form).await;
    }
    let run = Run::submit(&app, vec![chat.request(&app)?]).await?.counting(vec![chat.reasoning.clone()]);
    let id = (stored.fresh_id("resp")?, stored.store().now());
    let keeping = Keeping::of(&app, stored, owner, &id.0, form.keep);
    let writer = ResponseWriter::new(&app, id, &chat.options, form.echoed, chat.ids.len());
    let mut translated = Translated { keeping, ..Translated::new(&app, &chat, writer) };
    if chat.options.stream {
        translated.writer.open(false);
        return Ok(stream::respond(run, translated));
    }
    stream::finish(run, &mut translated).await?;
    off_reactor(cost.is_large(), move || response(&translated.writer.response())).await
}

/// `POST /v1/responses/input_tokens`: number of prompt tokens of a request.
pub async fn input_tokens(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Result<Response, ApiError> {
    let owner = app.stored()?.owner(&client);
    let mut body = body::receive(&app, request).await?;
    let read = move |work: &Work, fields: &Fields<'_>| prepare(work, fields, Earlier::Of(&owner));
    let ((chat, _), _) = body.read(&app, read).await?;
    Ok(response(&json!({"object": "response.input_tokens", "input_tokens": chat.ids.len()})))
}

/// A response that is to be kept.
struct Keeping {
    stored: Arc<Stored>,
    owner: Owner,
    id: String,
    store: bool,
    kept: Kept,
}

impl Keeping {
    /// What a request asks to keep, if anything.
    fn of(app: &App, stored: Arc<Stored>, owner: Owner, id: &str, keep: Keep) -> Option<Keeping> {
        if !keep.store && keep.conversation.is_none() {
            return None;
        }
        let kept = Kept {
            input: serde_json::Value::from(identified(keep.input, id)).to_string(),
            previous: keep.previous,
            conversation: keep.conversation.map(|id| (id, 0)),
            computed_by: ComputedBy::of(app),
            ..Kept::default()
        };
        Some(Keeping { stored, owner, id: id.to_string(), store: keep.store, kept })
    }

    /// Keeps a response that has ended.
    async fn keep(self, response: String) -> Result<(), ApiError> {
        let Keeping { stored, owner, id, store, mut kept } = self;
        kept.response = response;
        let mut changes = Vec::new();
        if let Some((conversation, at)) = &mut kept.conversation {
            let items = conversations::turn(&kept.input, &kept.response);
            let (more, last) = conversations::append(&stored, conversation, items).await?;
            *at = last;
            changes.extend(more);
        }
        if store {
            let (kind, body) = (Kind::Response, kept.encode());
            let record = NewRecord { kind, owner, is_open: false, reserved: 0, ttl: None, body };
            changes.push(Change::Insert { id, record });
        }
        stored.apply(changes).await
    }
}

/// State of a running request.
struct Translated {
    app: Arc<App>,
    assistant: Assistant,
    /// Number of alternatives per token; `None` without log probabilities.
    logprobs: Option<usize>,
    writer: ResponseWriter,
    /// The last event waits until this is done.
    keeping: Option<Keeping>,
}

impl Translated {
    fn new(app: &Arc<App>, chat: &Prepared, mut writer: ResponseWriter) -> Translated {
        writer.namespaces = chat.tools.namespaces.clone();
        let logprobs = chat.options.params.sampling.logprobs;
        Translated { app: app.clone(), assistant: chat.assistant(app), logprobs, writer, keeping: None }
    }
}

impl Translator for Translated {
    fn usage(&mut self) -> &mut Usage {
        &mut self.writer.usage
    }

    fn delta(&mut self, _: usize, delta: &Delta) {
        let mut parts = Vec::new();
        self.assistant.read(&delta.text, delta.finish.is_some(), |part| parts.push(part));
        let texts = |k| logprobs::token_texts(self.app.tokenizer(), &delta.tokens, k);
        let scores = self.logprobs.map(texts).into_iter().flatten().map(Json::text);
        self.writer.write(parts, scores);
        if let Some(reason) = &delta.finish {
            let is_cut = *reason == FinishReason::Length;
            self.writer.close(if is_cut { Status::Incomplete } else { Status::Completed });
        }
    }

    fn end(&mut self, failure: Option<ApiError>) {
        failure.iter().for_each(|error| self.writer.fail(error));
    }

    fn settle(&mut self) -> Option<Settling> {
        let keeping = self.keeping.take().filter(|_| self.writer.has_ended())?;
        let text = serde_json::to_string(&self.writer.response()).unwrap_or_default();
        Some(Box::pin(keeping.keep(text)))
    }

    /// A response that could not be kept says so.
    fn settled(&mut self, result: Result<(), ApiError>) {
        if let Err(error) = result {
            tracing::warn!("a response is not kept: {error}");
            self.writer.set("store", false.into());
            self.writer.repeat_last();
        }
    }

    /// One event at a time: each of the last ones repeats the whole output. The last one waits until the response is kept.
    fn write(&mut self, lines: &mut Vec<u8>) -> bool {
        if self.keeping.is_some() && self.writer.has_ended() && self.writer.events.len() < 2 {
            return false;
        }
        let next = self.writer.events.pop_front();
        next.iter().for_each(|(name, event)| sse::event(lines, Some(name), |text| put(text, event)));
        next.is_some()
    }
}

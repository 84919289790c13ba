//! `POST /v1/responses`: OpenAI's Responses API, on top of a chat.
//!
//! | file | what it owns |
//! |---|---|
//! | `input` | input items, converted to messages |
//! | `request` | the fields of a request, and those that the response repeats |
//! | `output`, `json` | output items, and the events of a stream; JSON that they share |
//!
//! A response is what the last event of its stream would carry: one [`ResponseWriter`] makes both. Responses are not stored:
//! they have `"store": false`, and references to earlier responses are rejected.

mod input;
mod json;
mod output;
mod request;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use engine::{Delta, FinishReason};
use serde_json::json;

use super::logprobs;
use crate::app::App;
use crate::http::json::{off_reactor, put, response};
use crate::http::{ApiError, sse};
use crate::reply::{Assistant, Run, Translator, Usage, stream};
use crate::request::body;
use json::Json;
use output::{ResponseWriter, Status};
use request::prepare;
pub use request::read;

/// `POST /v1/responses`.
pub async fn responses(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((chat, echoed), cost) = body.read(&app, prepare).await?;
    let run = Run::submit(&app, vec![chat.request(&app)?]).await?;
    let writer = ResponseWriter::new(&app, &chat.options, echoed, chat.ids.len());
    let (logprobs, assistant) = (chat.options.params.sampling.logprobs, chat.assistant(&app));
    let mut translated = Translated { app, assistant, logprobs, writer };
    if chat.options.stream {
        translated.writer.open();
        return Ok(stream::respond(run, translated));
    }
    stream::finish(run, &mut translated).await?;
    off_reactor(cost.is_large(), move || response(&translated.writer.response())).await
}

/// `POST /v1/responses/input_tokens`: number of prompt tokens of a request.
pub async fn input_tokens(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((chat, _), _) = body.read(&app, prepare).await?;
    Ok(response(&json!({"object": "response.input_tokens", "input_tokens": chat.ids.len()})))
}

/// State of a running request.
struct Translated {
    app: Arc<App>,
    assistant: Assistant,
    /// Number of alternatives per token; `None` without log probabilities.
    logprobs: Option<usize>,
    writer: ResponseWriter,
}

impl Translator for Translated {
    fn usage(&mut self) -> &mut Usage {
        &mut self.writer.usage
    }

    fn delta(&mut self, _: usize, delta: &Delta) {
        let piece = self.assistant.push(&delta.text, delta.finish.is_some());
        let texts = |k| logprobs::token_texts(self.app.tokenizer(), &delta.tokens, k);
        let scores = self.logprobs.map(texts).into_iter().flatten().map(Json::text);
        self.writer.write(piece, delta.tokens.len(), scores);
        if let Some(reason) = &delta.finish {
            let is_cut = *reason == FinishReason::Length;
            self.writer.close(if is_cut { Status::Incomplete } else { Status::Completed });
        }
    }

    fn end(&mut self, failure: Option<ApiError>) {
        failure.iter().for_each(|error| self.writer.fail(error));
    }

    /// One event at a time: each of the last ones repeats the whole output.
    fn write(&mut self, lines: &mut Vec<u8>) -> bool {
        let next = self.writer.events.pop_front();
        next.iter().for_each(|(name, event)| sse::event(lines, Some(name), |text| put(text, event)));
        next.is_some()
    }
}

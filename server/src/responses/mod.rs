//! `POST /v1/responses`: OpenAI's Responses API, on top of a chat.
//!
//! | file | what it owns |
//! |---|---|
//! | `input` | input items, converted to messages |
//! | `request` | the fields of a request, and those that the response repeats |
//! | `output` | output items, and the events of a stream |
//!
//! A response is what the last event of its stream would carry: one [`Writer`] makes both. Responses are not stored:
//! they have `"store": false`, and references to earlier responses are rejected.

mod input;
mod output;
mod request;

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use axum::response::sse::Event as SseEvent;
use engine::{Event, FinishReason};
use futures_util::stream;
use serde_json::json;

use super::app::App;
use super::assistant::Assistant;
use super::body;
use super::error::ApiError;
use super::json::{Json, off_reactor};
use super::logprobs;
use super::run::{self, Run};
use super::stream::{answer, block_if_large};
use output::{Status, Writer};
use request::prepare;
pub use request::read;

/// `POST /v1/responses`.
pub async fn responses(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((chat, frame), cost) = body.read(&app, prepare).await?;
    let default = app.engine.generation_defaults().max_new_tokens;
    let logprobs = chat.options.params.sampling.logprobs;
    let request = chat.options.request(&app, chat.ids.clone(), default, "input")?;
    let run = Run::submit(&app, vec![request]).await?;
    let assistant = Assistant::new(&app, &chat.tools, chat.reasoning.clone());
    let writer = Writer::new(&app, chat.options.adapter.as_deref(), frame, chat.ids.len());
    let mut reply = Reply { app, run: Some(run), assistant, logprobs, writer };
    if chat.options.stream {
        reply.writer.open();
        return Ok(reply.stream());
    }
    while reply.step().await? {
        reply.writer.events.clear();
    }
    off_reactor(cost.is_large(), move || reply.writer.response().into_response()).await
}

/// `POST /v1/responses/input_tokens`: number of prompt tokens of a request.
pub async fn input_tokens(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((chat, _), _) = body.read(&app, prepare).await?;
    Ok(Json::from(json!({"object": "response.input_tokens", "input_tokens": chat.ids.len()})).into_response())
}

/// `GET` and `DELETE /v1/responses/{id}`: always an error, because responses are not stored.
pub async fn stored(id: Result<Path<String>, PathRejection>) -> ApiError {
    match id {
        Ok(Path(id)) => ApiError::unknown_response(&id),
        Err(error) => ApiError::invalid("response_id", error.body_text()),
    }
}

/// State of a running request.
struct Reply {
    app: Arc<App>,
    /// `None` after its end.
    run: Option<Run>,
    assistant: Assistant,
    /// Number of alternatives per token; `None` without log probabilities.
    logprobs: Option<usize>,
    writer: Writer,
}

impl Reply {
    /// Handles the next event of the engine; `false` at the end.
    async fn step(&mut self) -> Result<bool, ApiError> {
        let Some(run) = &mut self.run else { return Ok(false) };
        match run.next().await {
            Some((_, Event::Started { cached_tokens })) => self.writer.usage.cached_tokens = cached_tokens,
            Some((_, Event::Delta(delta))) => {
                run::failed(&delta)?;
                let piece = self.assistant.push(&delta.text, delta.finish.is_some());
                let scores = block_if_large(&delta, || {
                    self.logprobs.map_or(Vec::new(), |k| logprobs::tokens(self.app.tokenizer(), &delta.tokens, k))
                });
                self.writer.usage.drafts += delta.drafts;
                self.writer.write(piece, delta.tokens.len(), scores);
                if let Some(reason) = &delta.finish {
                    let is_cut = *reason == FinishReason::Length;
                    self.writer.close(if is_cut { Status::Incomplete } else { Status::Completed });
                    self.run = None;
                }
            }
            // Never requested here.
            Some((_, Event::PromptLogprobs(_) | Event::Embedding(_))) => {}
            None => return run.failure().map_or(Ok(false), Err),
        }
        Ok(true)
    }

    /// Streams the events. A failure is the last event.
    fn stream(self) -> Response {
        answer(stream::unfold(self, |mut reply| async move {
            while reply.writer.events.is_empty() {
                match reply.step().await {
                    Ok(true) => {}
                    Ok(false) => return None,
                    Err(error) => {
                        reply.run = None;
                        reply.writer.fail(&error);
                    }
                }
            }
            let (name, event) = reply.writer.events.pop_front()?;
            Some((Ok::<_, Infallible>(SseEvent::default().event(name).data(event.write())), reply))
        }))
    }
}

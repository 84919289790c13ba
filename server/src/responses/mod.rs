//! `POST /v1/responses`: OpenAI's newer API over the same chat.
//!
//! | file | what it owns |
//! |---|---|
//! | `input` | items in: a conversation as a chat template takes it |
//! | `request` | the fields, read; those that the answer repeats |
//! | `output` | text out: items, and the events that tell of them |
//!
//! The whole answer is what its stream would have ended with: one [`Writer`] makes both. Nothing is stored: an answer
//! says `"store": false`, and whoever refers to an earlier one is told so.

mod input;
mod output;
mod request;

use std::collections::VecDeque;
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
use super::stream::{answer, aside};
use output::{Status, Writer};
use request::prepare;
pub use request::read;

/// The handler.
pub async fn responses(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((chat, frame), cost) = body.read(&app, prepare).await?;
    let default = app.engine.generation_defaults().max_new_tokens;
    let logprobs = chat.options.params.sampling.logprobs;
    let request = chat.options.request(&app, chat.ids.clone(), default, "input")?;
    let run = Run::submit(&app, vec![request]).await?;
    let speaker = Assistant::new(&app, &chat.tools, chat.reasoning);
    let writer = Writer::new(&app, frame, chat.ids.len());
    let mut reply = Reply { app, run: Some(run), speaker, logprobs, writer, queue: VecDeque::new() };
    if chat.options.stream {
        reply.queue = reply.writer.open().into();
        return Ok(reply.stream());
    }
    while reply.step().await? {
        reply.queue.clear();
    }
    off_reactor(cost.is_large(), move || reply.writer.response().into_response()).await
}

/// `POST /v1/responses/input_tokens`: how many tokens the prompt of such a request has.
pub async fn input_tokens(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((chat, _), _) = body.read(&app, prepare).await?;
    Ok(Json::from(json!({"object": "response.input_tokens", "input_tokens": chat.ids.len()})).into_response())
}

/// An answer, asked for by its id: none is kept.
pub async fn stored(id: Result<Path<String>, PathRejection>) -> ApiError {
    match id {
        Ok(Path(id)) => ApiError::no_response(&id),
        Err(error) => ApiError::invalid("response_id", error.body_text()),
    }
}

/// An answer in the making.
struct Reply {
    app: Arc<App>,
    /// `None` once it has ended.
    run: Option<Run>,
    speaker: Assistant,
    /// Alternatives per token, if log-probabilities were asked for.
    logprobs: Option<usize>,
    writer: Writer,
    /// Events that have not been sent.
    queue: VecDeque<Json>,
}

impl Reply {
    /// Hears the engine once; `false` at the end.
    async fn step(&mut self) -> Result<bool, ApiError> {
        let Some(run) = &mut self.run else { return Ok(false) };
        match run.next().await {
            Some((_, Event::Started { cached_tokens })) => self.writer.usage.cached_tokens = cached_tokens,
            Some((_, Event::Delta(delta))) => {
                run::failed(&delta)?;
                let said = self.speaker.hear(&delta.text, delta.finish.is_some());
                let scores = aside(&delta, || {
                    self.logprobs.map_or(Vec::new(), |k| logprobs::tokens(self.app.tokenizer(), &delta.tokens, k))
                });
                self.queue.extend(self.writer.write(said, delta.tokens.len(), scores));
                if let Some(reason) = &delta.finish {
                    let cut = *reason == FinishReason::Length;
                    self.queue.extend(self.writer.close(if cut { Status::Incomplete } else { Status::Completed }));
                    self.run = None;
                }
            }
            // Neither is ever asked for here.
            Some((_, Event::PromptLogprobs(_) | Event::Embedding(_))) => {}
            None => return run.broke_off().map_or(Ok(false), Err),
        }
        Ok(true)
    }

    /// Every event as it comes. A failure is an event too, and the last.
    fn stream(self) -> Response {
        answer(stream::unfold(self, |mut reply| async move {
            while reply.queue.is_empty() {
                match reply.step().await {
                    Ok(true) => {}
                    Ok(false) => return None,
                    Err(error) => {
                        reply.run = None;
                        reply.queue.extend(reply.writer.fail(&error));
                    }
                }
            }
            let event = reply.queue.pop_front()?;
            let name = match event.get("type") {
                Some(Json::Value(name)) => name.as_str().unwrap_or_default(),
                _ => "",
            };
            Some((Ok::<_, Infallible>(SseEvent::default().event(name).data(event.write())), reply))
        }))
    }
}

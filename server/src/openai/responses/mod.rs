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

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::extract::{Request, State};
use axum::response::Response;
use engine::{Event, FinishReason};
use serde_json::json;

use crate::app::App;
use crate::http::json::{off_reactor, put};
use crate::http::sse::{self, EventSource};
use crate::http::{ApiError, Json};
use crate::reply::{Assistant, Run, block_if_large, logprobs, run};
use crate::request::body;
use output::{Status, Writer};
use request::prepare;
pub use request::read;

/// `POST /v1/responses`.
pub async fn responses(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((chat, echoed), cost) = body.read(&app, prepare).await?;
    let default = app.engine.generation_defaults().max_new_tokens;
    let logprobs = chat.options.params.sampling.logprobs;
    let request = chat.options.request(&app, chat.ids.clone(), default, "input")?;
    let run = Run::submit(&app, vec![request]).await?;
    let assistant = Assistant::new(&app, &chat.tools, chat.reasoning.clone(), chat.shows_reasoning);
    let writer = Writer::new(&app, chat.options.adapter.as_deref(), echoed, chat.ids.len());
    let mut reply = Reply { app, run: Some(run), assistant, logprobs, writer };
    if chat.options.stream {
        reply.writer.open();
        return Ok(sse::respond(reply));
    }
    while poll_fn(|cx| reply.poll_step(cx)).await? {
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
    fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, ApiError>> {
        let Some(run) = &mut self.run else { return Poll::Ready(Ok(false)) };
        match ready!(run.poll_next(cx)) {
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
            None => return Poll::Ready(run.failure().map_or(Ok(false), Err)),
        }
        Poll::Ready(Ok(true))
    }
}

/// A failure is the last event.
impl EventSource for Reply {
    fn poll_events(&mut self, cx: &mut Context<'_>, lines: &mut Vec<u8>) -> Poll<bool> {
        if self.writer.events.is_empty() {
            let goes_on = ready!(self.poll_step(cx)).unwrap_or_else(|error| {
                self.run = None;
                self.writer.fail(&error);
                true
            });
            if !goes_on {
                return Poll::Ready(false);
            }
        }
        // One at a time: each of the last ones repeats the whole output.
        if let Some((name, event)) = self.writer.events.pop_front() {
            sse::event(lines, Some(&name), |text| put(text, &event));
        }
        Poll::Ready(true)
    }
}

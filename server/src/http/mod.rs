//! The HTTP side: OpenAI's API with vLLM's extensions, thin over [`engine::AsyncEngine`].
//!
//! | file | what it owns |
//! |---|---|
//! | `app` | state that all handlers share |
//! | `auth` | the API key |
//! | `body`, `fields`, `error` | JSON in, checked field by field; errors out |
//! | `options`, `structured`, `tools`, `messages`, `prompts` | what a request asks for: sampling and limits; a grammar; tools; a conversation as token ids; plain prompts |
//! | `assistant` | a text becomes an assistant's message: thoughts, content, tool calls |
//! | `run` | the engine requests of one call, merged into one stream of events |
//! | `reply`, `logprobs`, `stream` | answers: the frame, log-probabilities, server-sent events |
//! | `completions`, `chat`, `responses`, `embeddings`, `tokenize`, `status`, `metrics` | the routes |
//! | `openapi` | the description of all of these |
//! | `connection`, `serve` | listening, and stopping in order |
//!
//! No handler keeps state between calls. A handler that is dropped because its client went away drops its `Run`,
//! which cancels the requests and frees their blocks.

mod app;
mod assistant;
mod auth;
mod body;
mod chat;
mod completions;
mod connection;
mod embeddings;
mod error;
mod fields;
mod logprobs;
mod messages;
mod metrics;
mod openapi;
mod options;
mod prompts;
mod reply;
mod responses;
mod run;
mod serve;
mod status;
mod stream;
mod structured;
mod tokenize;
mod tools;

use std::sync::Arc;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};

pub use app::{App, Reasoning, ServerOptions};
pub use serve::serve;

/// All routes over a running engine.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/", get(status::index))
        .route("/health", get(status::health))
        .route("/version", get(status::version))
        .route("/metrics", get(status::metrics))
        .route("/v1/models", get(status::models))
        // The rest of the path: a model's name may have slashes.
        .route("/v1/models/{*name}", get(status::model))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/responses/{id}", get(responses::stored).delete(responses::stored))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/openapi.json", get(openapi::openapi))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .fallback(error::not_found)
        .method_not_allowed_fallback(error::method_not_allowed)
        .layer(from_fn_with_state(app.clone(), auth::check))
        .with_state(app)
}

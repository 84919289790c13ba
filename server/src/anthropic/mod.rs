//! Anthropic's Messages API, on top of a chat.
//!
//! | file | what it owns |
//! |---|---|
//! | `request`, `turns` | the fields of a request, and its turns, as the body of a chat |
//! | `output` | blocks of content, and the events of a stream |

mod output;
mod request;
mod turns;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::post;
use serde_json::{Value, json};

use crate::app::App;
use crate::http::json::response;
use crate::http::{ApiError, ErrorForm, call};
use crate::openapi::{Operation, Routes, Schema};
use crate::reply::{Run, stream};
use crate::request::body;
use output::Writer;

/// Path of the API.
const MESSAGES: &str = "/v1/messages";

/// The form of errors.
pub const ERRORS: ErrorForm = ErrorForm {
    is_path: |path| path.strip_prefix(MESSAGES).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')),
    body: |error| {
        let mut body = error_json(error);
        body["request_id"] = call::id().into();
        body
    },
    id_header: Some("request-id"),
};

/// Schemas of responses.
const SCHEMAS: &[Schema] = &[
    ("Message", "object", "A generated message of Anthropic's API."),
    ("Message.id", "string", "Unique id of the message."),
    ("Message.type", "string", "Always \"message\"."),
    ("Message.role", "string", "Always \"assistant\"."),
    ("Message.model", "string", "Name of the served model."),
    ("Message.content", "[object]", "Blocks of type thinking, text and tool_use."),
    (
        "Message.stop_reason",
        "string?",
        "Why generation stopped: end_turn, max_tokens, stop_sequence, tool_use or model_context_window_exceeded.",
    ),
    ("Message.stop_sequence", "string?", "The stop sequence that ended the message."),
    (
        "Message.usage",
        "object",
        "input_tokens without those of the cache, cache_read_input_tokens, cache_creation_input_tokens, output_tokens.",
    ),
    ("MessageTokens", "object", "Number of input tokens of a message."),
    ("MessageTokens.input_tokens", "integer", "Number of tokens of the prompt."),
];

/// Adds the routes.
pub fn add(routes: &mut Routes) {
    routes.schemas(SCHEMAS);
    let request = routes.request("MessagesRequest", "A request of Anthropic's Messages API.", request::read);
    let operation = Operation::post("Create a message, as in Anthropic's API").reads(&request).returns("Message");
    routes.add(&[MESSAGES], post(messages), operation.streams());
    let request =
        routes.request("CountTokensRequest", "A request whose tokens are counted.", request::read_without_output);
    let operation = Operation::post("Count the input tokens of a message").reads(&request).returns("MessageTokens");
    routes.add(&["/v1/messages/count_tokens"], post(count_tokens), operation);
}

/// The body of an error, without the id of the request.
fn error_json(error: &ApiError) -> Value {
    let error = error.clone().renamed(&request::NAMES);
    let kind = match error.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    };
    // Clients shorten the conversation when they read this text.
    let message = match error.excess() {
        Some((found, most)) => format!("prompt is too long: {found} tokens > {most} maximum"),
        None => error.message().to_string(),
    };
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

/// `POST /v1/messages`.
async fn messages(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let (request, _) = body.read(&app, request::prepare).await?;
    let run =
        Run::submit(&app, vec![request.chat.request(&app)?]).await?.counting(vec![request.chat.reasoning.clone()]);
    let mut writer = Writer::new(&app, &request);
    if request.chat.options.stream {
        return Ok(stream::respond(run, writer));
    }
    stream::finish(run, &mut writer).await?;
    Ok(response(&writer.message()))
}

/// `POST /v1/messages/count_tokens`.
async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let (tokens, _) = body.read(&app, request::count).await?;
    Ok(response(&json!({"input_tokens": tokens})))
}

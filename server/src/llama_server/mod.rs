//! The native API of llama-server, on top of completions, chats and embeddings.
//!
//! | file | what it owns |
//! |---|---|
//! | `request` | the fields of `/completion` and `/infill`, as the body of a completion |
//! | `output` | answers and their streams |
//! | `server` | what the server is: `/props`, `/slots`; and prompts and embeddings: `/apply-template`, `/embedding`, `/rerank` |

mod output;
mod request;
mod server;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{get, post};
use serde_json::{Value, json};

use crate::app::App;
use crate::http::{ApiError, ErrorForm, json};
use crate::openapi::{Operation, Routes, Schema};
use crate::reply::{Run, stream};
use crate::request::{Cost, Fields, Work, body};
use output::Writer;
use request::Asked;

/// Paths of the API.
const PATHS: [&str; 7] =
    ["/completion", "/completions", "/infill", "/props", "/slots", "/apply-template", "/embedding"];

/// The form of errors.
pub const ERRORS: ErrorForm = ErrorForm { is_path: |path| PATHS.contains(&path), body: error_json, id_header: None };

/// Schemas of responses.
const SCHEMAS: &[Schema] = &[
    ("LlamaCompletion", "object", "A completion of llama-server's API, or the last event of its stream."),
    ("LlamaCompletion.index", "integer", "Index of the prompt."),
    ("LlamaCompletion.content", "string", "The text; in the last event of a stream it is empty."),
    ("LlamaCompletion.tokens", "[integer]", "The token ids, with return_tokens or in a stream."),
    ("LlamaCompletion.id_slot", "integer", "Always the index of the prompt: there are no slots."),
    ("LlamaCompletion.stop", "boolean", "Whether this is the end."),
    ("LlamaCompletion.model", "string", "Name of the served model."),
    ("LlamaCompletion.tokens_predicted", "integer", "Generated tokens."),
    ("LlamaCompletion.tokens_evaluated", "integer", "Tokens of the prompt."),
    ("LlamaCompletion.generation_settings", "object", "The sampling parameters."),
    ("LlamaCompletion.prompt", "string", "The prompt."),
    ("LlamaCompletion.has_new_line", "boolean", "Whether the text has a line break."),
    ("LlamaCompletion.truncated", "boolean", "Always false: a prompt that does not fit is refused."),
    ("LlamaCompletion.stop_type", "string", "Why it ended: eos, limit, word or none."),
    ("LlamaCompletion.stopping_word", "string", "The stop string that ended the text."),
    ("LlamaCompletion.tokens_cached", "integer", "Tokens of prompt and text."),
    ("LlamaCompletion.timings", "object", "Numbers of tokens, and milliseconds."),
    ("LlamaCompletion.completion_probabilities", "[object]?", "With n_probs: one entry per token."),
    ("LlamaProps", "object", "Properties of the server."),
    ("LlamaProps.default_generation_settings", "object", "params: sampling parameters; n_ctx: the context."),
    ("LlamaProps.total_slots", "integer", "Maximum number of connections: there are no slots."),
    ("LlamaProps.model_alias", "string", "Name of the served model."),
    ("LlamaProps.model_path", "string", "Where the model was loaded from."),
    ("LlamaProps.modalities", "object", "vision and audio, which are false."),
    ("LlamaProps.chat_template", "string", "The chat template."),
    ("LlamaProps.build_info", "string", "Version of the server."),
    ("LlamaSlot", "object", "A request that is computed."),
    ("LlamaSlot.id", "integer", "Its number."),
    ("LlamaSlot.id_task", "integer", "Its number."),
    ("LlamaSlot.n_ctx", "integer", "Maximum context length."),
    ("LlamaSlot.is_processing", "boolean", "Whether it is computed now, and does not wait."),
    ("LlamaSlot.n_prompt_tokens", "integer", "Tokens of the prompt."),
    ("LlamaSlot.n_prompt_tokens_cache", "integer", "Those found in the prefix cache."),
    ("LlamaSlot.next_token", "object", "n_decoded: generated tokens; has_next_token."),
    ("LlamaPrompt", "object", "A rendered conversation."),
    ("LlamaPrompt.prompt", "string", "The prompt."),
    ("LlamaEmbedding", "object", "An embedding."),
    ("LlamaEmbedding.index", "integer", "Index of the text."),
    ("LlamaEmbedding.embedding", "[any]", "A list with one vector."),
];

/// Adds the routes.
pub fn add(routes: &mut Routes) {
    routes.schemas(SCHEMAS);
    let request = routes.request("LlamaCompletionRequest", "A completion of llama-server's API.", request::read);
    let operation = Operation::post("Complete prompts, as in llama-server").reads(&request);
    routes.add(&["/completion", "/completions"], post(completion), operation.returns("LlamaCompletion").streams());
    let request = routes.request("LlamaInfillRequest", "What is around the text to fill in.", request::read_infill);
    let operation = Operation::post("Fill in the middle of a text, as in llama-server").reads(&request);
    routes.add(&["/infill"], post(infill), operation.returns("LlamaCompletion").streams());
    let operation = Operation::get("Properties of the server, as in llama-server").returns("LlamaProps");
    routes.add(&["/props"], get(server::props), operation);
    let operation = Operation::get("Requests that are computed, as in llama-server").returns_list("LlamaSlot");
    routes.add(&["/slots"], get(server::slots), operation);
    let request = routes.request("LlamaTemplateRequest", "A conversation.", server::read_template);
    let operation = Operation::post("Render a conversation, as in llama-server").reads(&request);
    routes.add(&["/apply-template"], post(server::apply_template), operation.returns("LlamaPrompt"));
    let request = routes.request("LlamaEmbeddingRequest", "Texts to embed.", server::read_embedding);
    let operation = Operation::post("Embed texts, as in llama-server").reads(&request);
    routes.add(&["/embedding"], post(server::embedding), operation.returns_list("LlamaEmbedding"));
}

fn error_json(error: &ApiError) -> Value {
    let error = error.clone().renamed(&request::NAMES);
    let kind = match error.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::SERVICE_UNAVAILABLE => "unavailable_error",
        StatusCode::NOT_IMPLEMENTED => "not_supported_error",
        status if status.is_server_error() => "server_error",
        _ if error.excess().is_some() => "exceed_context_size_error",
        _ => "invalid_request_error",
    };
    let mut body = json!({"code": error.status().as_u16(), "message": error.message(), "type": kind});
    if let Some((found, most)) = error.excess() {
        (body["n_prompt_tokens"], body["n_ctx"]) = (found.into(), (most + 1).into());
    }
    json!({"error": body})
}

/// `POST /completion`.
async fn completion(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    answer(app, request, request::completion).await
}

/// `POST /infill`.
async fn infill(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    answer(app, request, request::infill).await
}

type Read = fn(&Work, &Fields<'_>) -> Result<(Asked, Cost), ApiError>;

async fn answer(app: Arc<App>, request: Request, read: Read) -> Result<Response, ApiError> {
    let mut body = body::receive_any_type(&app, request).await?;
    let (asked, cost) = body.read(&app, read).await?;
    let requests = asked.requests(&app)?;
    let streams = asked.options.stream;
    let mut writer = Writer::new(&app, asked);
    let run = Run::submit(&app, requests).await?;
    if streams {
        return Ok(stream::respond(run, writer));
    }
    stream::finish(run, &mut writer).await?;
    json::off_reactor(cost.is_large(), move || writer.whole()).await
}

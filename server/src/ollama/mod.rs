//! Ollama's API, on top of chats, completions and embeddings.
//!
//! | file | what it owns |
//! |---|---|
//! | `request`, `turns` | the fields of a request and its options, and its messages, as the body of a chat |
//! | `output` | answers and their streams, which are JSON lines |
//! | `embed` | embeddings |
//! | `models` | what is served, and requests to change that |

mod embed;
mod models;
mod output;
mod request;
mod turns;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::{delete, get, post};
use serde_json::json;

use crate::app::App;
use crate::http::json::response;
use crate::http::{ApiError, ErrorForm};
use crate::openapi::{Operation, Routes, Schema};
use crate::reply::{Run, stream};
use crate::request::body;
use output::{Kind, Writer};
use request::Asked;

/// The form of errors.
pub const ERRORS: ErrorForm = ErrorForm {
    is_path: |path| path.starts_with("/api/"),
    body: |error| {
        let error = error.clone().renamed(&request::NAMES);
        json!({"error": error.message()})
    },
    id_header: None,
};

/// Schemas of responses.
const SCHEMAS: &[Schema] = &[
    ("OllamaAnswer", "object", "An answer of Ollama's API, or a line of its stream."),
    ("OllamaAnswer.model", "string", "Name of the model in the request."),
    ("OllamaAnswer.created_at", "string", "Time."),
    ("OllamaAnswer.message", "object?", "Of a chat: role, content, and thinking and tool_calls if there are any."),
    ("OllamaAnswer.response", "string?", "Of a completion: its text."),
    ("OllamaAnswer.thinking", "string?", "Of a completion: the reasoning before the text."),
    ("OllamaAnswer.logprobs", "[object]?", "With logprobs: one entry per token."),
    ("OllamaAnswer.done", "boolean", "Whether this is the end."),
    ("OllamaAnswer.done_reason", "string?", "Why it ended: stop, length, load or unload."),
    ("OllamaAnswer.total_duration", "integer?", "Nanoseconds of the request."),
    ("OllamaAnswer.load_duration", "integer?", "Always 0: the model is loaded."),
    ("OllamaAnswer.prompt_eval_count", "integer?", "Tokens of the prompt."),
    ("OllamaAnswer.prompt_eval_duration", "integer?", "Nanoseconds until the prompt was computed."),
    ("OllamaAnswer.eval_count", "integer?", "Generated tokens."),
    ("OllamaAnswer.eval_duration", "integer?", "Nanoseconds of their generation."),
    ("OllamaEmbed", "object", "Embeddings."),
    ("OllamaEmbed.model", "string", "Name of the model in the request."),
    ("OllamaEmbed.embeddings", "[any]", "One vector of length 1 per input."),
    ("OllamaEmbed.total_duration", "integer", "Nanoseconds of the request."),
    ("OllamaEmbed.load_duration", "integer", "Always 0: the model is loaded."),
    ("OllamaEmbed.prompt_eval_count", "integer", "Tokens of all inputs."),
    ("OllamaEmbedding", "object", "An embedding."),
    ("OllamaEmbedding.embedding", "[number]", "The vector."),
    ("OllamaModels", "object", "The served models."),
    ("OllamaModels.models", "[object]", "The served model under each of its names, and its LoRA adapters."),
    ("OllamaModel", "object", "A model."),
    ("OllamaModel.license", "string", "Always empty."),
    ("OllamaModel.modelfile", "string", "Always empty: the model has none."),
    ("OllamaModel.parameters", "string", "Options that the checkpoint sets, one in a line."),
    ("OllamaModel.template", "string", "A template that says what the model takes; the real one is Jinja."),
    ("OllamaModel.details", "object", "Format, family and size."),
    ("OllamaModel.model_info", "object", "Architecture, number of parameters, context."),
    ("OllamaModel.capabilities", "[string]", "Of completion, tools, thinking, insert and embedding."),
    ("OllamaModel.modified_at", "string", "Time of the server's start."),
    ("OllamaStatus", "object", "The end of an action."),
    ("OllamaStatus.status", "string", "Always \"success\"."),
];

/// Adds the routes.
pub fn add(routes: &mut Routes) {
    routes.schemas(SCHEMAS);
    let request = routes.request("OllamaChatRequest", "A chat of Ollama's API.", request::read_chat);
    let operation = Operation::post("Answer a conversation, as in Ollama's API").reads(&request);
    routes.add(&["/api/chat"], post(chat), operation.returns("OllamaAnswer").streams_lines());
    let request = routes.request("OllamaGenerateRequest", "A completion of Ollama's API.", request::read_generate);
    let operation = Operation::post("Complete a prompt, as in Ollama's API").reads(&request);
    routes.add(&["/api/generate"], post(generate), operation.returns("OllamaAnswer").streams_lines());
    let request = routes.request("OllamaEmbedRequest", "Texts to embed.", embed::read);
    let operation = Operation::post("Embed texts, as in Ollama's API").reads(&request).returns("OllamaEmbed");
    routes.add(&["/api/embed"], post(embed::embed), operation);
    let request = routes.request("OllamaEmbeddingsRequest", "A text to embed.", embed::read_one);
    let operation = Operation::post("Embed a text, as in Ollama's API").reads(&request).returns("OllamaEmbedding");
    routes.add(&["/api/embeddings"], post(embed::embeddings), operation);
    let operation = Operation::get("List the served models, as in Ollama's API").returns("OllamaModels");
    routes.add(&["/api/tags"], get(models::tags), operation);
    let operation = Operation::get("List the loaded models, as in Ollama's API").returns("OllamaModels");
    routes.add(&["/api/ps"], get(models::ps), operation);
    let operation = Operation::get("Version of Ollama's API").returns("Version");
    routes.add(&["/api/version"], get(models::version), operation);
    let request = routes.request("OllamaShowRequest", "The name of a model.", models::name);
    let operation = Operation::post("Describe a model, as in Ollama's API").reads(&request).returns("OllamaModel");
    routes.add(&["/api/show"], post(models::show), operation);
    let operation = Operation::post("Succeeds for a served model, as in Ollama's API").reads(&request);
    routes.add(&["/api/pull"], post(models::pull), operation.returns("OllamaStatus"));
    let operation = || Operation::post("Not supported: models are chosen when the server starts");
    routes.add(&["/api/create"], post(models::refuse), operation());
    routes.add(&["/api/copy"], post(models::refuse), operation());
    routes.add(&["/api/push"], post(models::refuse), operation());
    let operation = Operation::delete("Not supported: models are chosen when the server starts");
    routes.add(&["/api/delete"], delete(models::refuse), operation);
}

/// `POST /api/chat`.
async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive_any_type(&app, request).await?;
    let (asked, _) = body.read(&app, request::chat).await?;
    answer(app, asked, Kind::Chat).await
}

/// `POST /api/generate`.
async fn generate(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive_any_type(&app, request).await?;
    let (asked, _) = body.read(&app, request::generate).await?;
    answer(app, asked, Kind::Completion).await
}

async fn answer(app: Arc<App>, asked: Asked, kind: Kind) -> Result<Response, ApiError> {
    let Asked { model, chat } = asked;
    let chat = match chat {
        Ok(chat) => chat,
        Err(reason) => return Ok(response(&output::loaded(&model, kind, reason))),
    };
    let request = chat.request(&app)?;
    let mut writer = Writer::new(&app, &chat, model, kind);
    let run = Run::submit(&app, vec![request]).await?;
    if chat.options.stream {
        return Ok(stream::respond(run, writer));
    }
    stream::finish(run, &mut writer).await?;
    Ok(response(&writer.whole()))
}

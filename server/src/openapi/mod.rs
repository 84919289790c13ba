//! `/openapi.json`: what this server takes and gives, as OpenAPI 3.1.
//!
//! Requests are described by the code that reads them: each route's reader runs over [`Fields::describing`], which records
//! the type, range and default of every field as this server's limits and model set them. The schemas of answers are
//! generated from the types of `answers`.

mod answers;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;
use super::work::Work;
use super::{chat, completions, embeddings, page, responses, tokenize};

/// The handler.
pub async fn openapi(State(app): State<Arc<App>>) -> Response {
    Json(app.openapi.get_or_init(|| document(&app))).into_response()
}

/// The operations under construction, and the schemas that they name.
struct Paths {
    work: Work,
    requests: Map<String, Value>,
    generator: SchemaGenerator,
    paths: Map<String, Value>,
}

fn document(app: &Arc<App>) -> Value {
    let settings = SchemaSettings::draft2020_12().with(|s| s.definitions_path = "/components/schemas".into());
    let (work, _waiting) = Work::new(app.clone());
    let generator = settings.into_generator();
    let mut paths = Paths { work, requests: Map::new(), generator, paths: Map::new() };
    let completion = paths.request("CompletionRequest", "Prompts to continue.", completions::Asked::read);
    paths.post::<answers::Completion>("/v1/completions", "Continue prompts", &completion, true);
    let chat = paths.request("ChatRequest", "A conversation to answer.", chat::Asked::read);
    paths.post::<answers::Chat>("/v1/chat/completions", "Answer a conversation", &chat, true);
    let items = paths.request("ResponsesRequest", "Items to answer. n is 1 here.", responses::read);
    paths.post::<answers::Response>("/v1/responses", "Answer items with items", &items, true);
    let summary = "Count the tokens of such a request's prompt";
    paths.post::<answers::InputTokens>("/v1/responses/input_tokens", summary, &items, false);
    let embeddings = paths.request("EmbeddingsRequest", "Texts that become vectors.", embeddings::Asked::read);
    paths.post::<answers::Embeddings>("/v1/embeddings", "Make vectors of texts", &embeddings, false);
    let description = "A text, or a conversation, to be tokenised.";
    let tokenize = paths.request("TokenizeRequest", description, tokenize::Tokenize::read);
    paths.post::<answers::Tokenize>("/tokenize", "Make token ids of a text or a conversation", &tokenize, false);
    let detokenize = paths.request("DetokenizeRequest", "Token ids that become a text.", tokenize::detokenized);
    paths.post::<answers::Detokenize>("/detokenize", "Make a text of token ids", &detokenize, false);
    paths.get::<answers::Models>("/v1/models", "The model that is served, as a list");
    paths.get::<answers::Model>("/v1/models/{name}", "The model that is served");
    for method in ["get", "delete"] {
        paths.refused("/v1/responses/{id}", method, "Nothing: answers are not stored");
    }
    paths.get::<answers::Health>("/health", "Whether the engine lives and makes progress");
    paths.get::<answers::Version>("/version", "The version of the server");
    paths.text("/metrics", "Numbers for Prometheus", "text/plain");
    paths.get::<answers::State>("/quire/state", "The engine now: blocks, requests, speed");
    paths.text("/quire/events", "The engine from now on, as server-sent events", "text/event-stream");
    for (path, kind) in page::files() {
        let summary = if path == "/" { "A chat, and the engine beside it" } else { "A file of the page" };
        paths.text(path, summary, kind.split(';').next().unwrap_or(kind));
    }
    paths.get::<Map<String, Value>>("/openapi.json", "This document");
    let error = paths.generator.subschema_for::<answers::Error>();
    let mut schemas = paths.generator.take_definitions(true);
    schemas.extend(paths.requests);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "OpenAI's API with vLLM's extensions. Fields that are not described are ignored; null is the same as absent. Defaults that depend on the model are not listed.",
            "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"key": []}],
        "paths": paths.paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "If the server has one (--api-key)."}},
            "responses": {"Error": {"description": "What is wrong, and with which field.", "content": json_content(error)}},
        },
    })
}

fn json_content(schema: Schema) -> Value {
    json!({"application/json": {"schema": schema}})
}

impl Paths {
    /// Describes what `read` reads, under this name; the reference to it.
    fn request<T>(
        &mut self,
        name: &str,
        description: &str,
        read: impl FnOnce(&Work, &Fields<'_>) -> Result<T, ApiError>,
    ) -> Value {
        let fields = Fields::describing();
        // What is wrong with an empty request is wrong after all has been read.
        let _ = read(&self.work, &fields);
        self.requests.insert(name.to_string(), fields.schema(description));
        json!({"$ref": format!("#/components/schemas/{name}")})
    }

    fn post<Answer: JsonSchema>(&mut self, path: &str, summary: &str, request: &Value, streams: bool) {
        let mut operation = operation(path, summary);
        let content = json!({"application/json": {"schema": request}});
        operation["requestBody"] = json!({"required": true, "content": content});
        let mut content = json_content(self.generator.subschema_for::<Answer>());
        if streams {
            content["text/event-stream"] =
                json!({"schema": {"type": "string", "description": "Server-sent events, with stream: true."}});
        }
        operation["responses"]["200"] = json!({"description": "The answer.", "content": content});
        self.add(path, "post", operation);
    }

    fn get<Answer: JsonSchema>(&mut self, path: &str, summary: &str) {
        let mut operation = operation(path, summary);
        let content = json_content(self.generator.subschema_for::<Answer>());
        operation["responses"]["200"] = json!({"description": "The answer.", "content": content});
        self.add(path, "get", operation);
    }

    fn text(&mut self, path: &str, summary: &str, media_type: &str) {
        let mut operation = operation(path, summary);
        operation["responses"]["200"] =
            json!({"description": "The answer.", "content": {media_type: {"schema": {"type": "string"}}}});
        self.add(path, "get", operation);
    }

    /// What is always an error, told so that it is clear which.
    fn refused(&mut self, path: &str, method: &str, summary: &str) {
        let mut operation = operation(path, summary);
        operation["operationId"] = format!("{method}_{}", operation_id(path)).into();
        self.add(path, method, operation);
    }

    fn add(&mut self, path: &str, method: &str, operation: Value) {
        self.paths.entry(path).or_insert_with(|| json!({}))[method] = operation;
    }
}

/// What all operations have: a summary, an id, the parameters of the path, and the error.
fn operation(path: &str, summary: &str) -> Value {
    let names = path.split('{').skip(1).filter_map(|rest| rest.split('}').next());
    let parameters: Vec<Value> =
        names.map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}})).collect();
    json!({
        "operationId": operation_id(path),
        "summary": summary,
        "parameters": parameters,
        "responses": {"default": {"$ref": "#/components/responses/Error"}},
    })
}

fn operation_id(path: &str) -> String {
    let words: Vec<&str> = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
    if words.is_empty() { "index".to_string() } else { words.join("_") }
}

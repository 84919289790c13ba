//! `/openapi.json`: what this server takes and gives, as OpenAPI 3.1.
//!
//! The schemas are generated from the types of `requests` and `answers`. Requests are not read through these types (each
//! field is checked by hand in [`super::fields`], so that an error can name it); `server/tests/openapi.rs` holds the two
//! together: every field that the code reads is described, and every value that a description forbids is refused.

mod answers;
mod requests;

use std::sync::LazyLock;

use axum::Json;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

use super::page;

static DOCUMENT: LazyLock<Value> = LazyLock::new(document);

/// The handler.
pub async fn openapi() -> Json<&'static Value> {
    Json(&DOCUMENT)
}

/// The operations under construction, and the schemas that they name.
struct Paths {
    generator: SchemaGenerator,
    paths: Map<String, Value>,
}

fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|s| s.definitions_path = "/components/schemas".into());
    let mut paths = Paths { generator: settings.into_generator(), paths: Map::new() };
    paths.post::<requests::Completion, answers::Completion>("/v1/completions", "Continue prompts", true);
    paths.post::<requests::Chat, answers::Chat>("/v1/chat/completions", "Answer a conversation", true);
    paths.post::<requests::Responses, answers::Response>("/v1/responses", "Answer items with items", true);
    paths.post::<requests::Responses, answers::InputTokens>(
        "/v1/responses/input_tokens",
        "Count the tokens of such a request's prompt",
        false,
    );
    paths.post::<requests::Embeddings, answers::Embeddings>("/v1/embeddings", "Make vectors of texts", false);
    paths.post::<requests::Tokenize, answers::Tokenize>(
        "/tokenize",
        "Make token ids of a text or a conversation",
        false,
    );
    paths.post::<requests::Detokenize, answers::Detokenize>("/detokenize", "Make a text of token ids", false);
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
    let schemas = paths.generator.take_definitions(true);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "OpenAI's API with vLLM's extensions. Fields that are not described are passed over; null is the same as absent.",
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
    fn post<Request: JsonSchema, Answer: JsonSchema>(&mut self, path: &str, summary: &str, streams: bool) {
        let mut operation = operation(path, summary);
        let request = self.generator.subschema_for::<Request>();
        operation["requestBody"] = json!({"required": true, "content": json_content(request)});
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

//! `/openapi.json`: the API as an OpenAPI 3.1 document.
//!
//! The code that reads a request also describes it: each route's reader runs over [`Fields::describing`], which records
//! the type, range and default of every field with this server's limits and model. `answers` has the schemas of
//! responses.

mod answers;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;
use super::work::Work;
use super::{adapters, chat, completions, embeddings, page, prefix_cache, responses, tokenize};
use answers::reference;

/// `GET /openapi.json`.
pub async fn openapi(State(app): State<Arc<App>>) -> Response {
    Json(app.openapi.get_or_init(|| document(&app))).into_response()
}

/// The document under construction.
struct Document {
    work: Work,
    schemas: Map<String, Value>,
    paths: Map<String, Value>,
}

fn document(app: &Arc<App>) -> Value {
    let (work, _waiting) = Work::new(app.clone());
    let mut document = Document { work, schemas: answers::schemas(), paths: Map::new() };
    let request =
        document.request("CompletionRequest", "A request for completions.", completions::CompletionRequest::read);
    document.post("/v1/completions", "Create completions", request.clone(), "Completion", true);
    let path = "/v1/completions/render";
    document.post(path, "Tokenize the prompts of a request for completions", request, "Rendered", false);
    let list = json!({"type": "array", "items": reference("Rendered")});
    document.paths[path]["post"]["responses"]["200"]["content"] = json_content(list);
    let request = document.request("ChatRequest", "A request for chat completions.", chat::ChatRequest::read);
    for path in ["/v1/chat/completions", "/chat/completions"] {
        document.post(path, "Create chat completions", request.clone(), "Chat", true);
    }
    let summary = "Render and tokenize the prompt of a request for chat completions";
    document.post("/v1/chat/completions/render", summary, request, "Rendered", false);
    let request = document.request("ResponsesRequest", "A request for a response; n must be 1.", responses::read);
    for path in ["/v1/responses", "/responses"] {
        document.post(path, "Create a response", request.clone(), "Response", true);
    }
    document.post("/v1/responses/input_tokens", "Count the input tokens of a response", request, "InputTokens", false);
    let request =
        document.request("EmbeddingsRequest", "A request for embeddings.", embeddings::EmbeddingsRequest::read);
    for path in ["/v1/embeddings", "/embeddings"] {
        document.post(path, "Create embeddings", request.clone(), "Embeddings", false);
    }
    let request = document.request("TokenizeRequest", "A text or a conversation.", tokenize::TokenizeRequest::read);
    document.post("/tokenize", "Tokenize a text or a conversation", request, "Tokenize", false);
    let request = document.request("DetokenizeRequest", "Token ids.", tokenize::token_ids);
    document.post("/detokenize", "Convert token ids to text", request, "Detokenize", false);
    for path in ["/v1/models", "/models"] {
        document.get(path, "List the served model and its LoRA adapters", "Models");
    }
    document.get("/v1/models/{name}", "Describe the served model or a LoRA adapter", "Model");
    let request = document.request("LoadLoraAdapterRequest", "An adapter to load.", adapters::LoadRequest::read);
    document.post_text("/v1/load_lora_adapter", "Load a LoRA adapter", request);
    let request = document.request("UnloadLoraAdapterRequest", "An adapter to unload.", adapters::unload_name);
    document.post_text("/v1/unload_lora_adapter", "Unload a LoRA adapter once its requests have ended", request);
    let mut reset = operation("/reset_prefix_cache", "Empty the prefix cache");
    let parameter = |(name, description): (&str, &str)| json!({"name": name, "in": "query", "description": description, "schema": {"type": "boolean", "default": false}});
    reset["parameters"] = prefix_cache::PARAMETERS.map(parameter).to_vec().into();
    reset["responses"]["200"] = json!({"description": "The cache is empty. The response has no body."});
    document.add("/reset_prefix_cache", "post", reset);
    document.get("/health", "Check that the engine runs, takes requests and makes progress", "Health");
    document.get("/ping", "The same as /health", "Health");
    document.get("/is_sleeping", "Whether the engine sleeps, which it never does", "Sleeping");
    // Always an error.
    document.add("/sleep", "post", operation("/sleep", "Not supported: the engine does not sleep"));
    let mut wake_up = operation("/wake_up", "Succeeds, because the engine is awake");
    wake_up["responses"]["200"] = json!({"description": "The engine is awake. The response has no body."});
    document.add("/wake_up", "post", wake_up);
    document.get("/version", "Version of the server", "Version");
    document.text("/metrics", "Metrics in Prometheus' text format", "text/plain");
    document.get("/quire/state", "State of the engine: blocks, requests and speed", "State");
    document.text("/quire/events", "State of the engine as server-sent events", "text/event-stream");
    for (path, kind) in page::files() {
        let summary =
            if path == "/" { "Web page with a chat and a view of the engine" } else { "File of the web page" };
        document.text(path, summary, kind.split(';').next().unwrap_or(kind));
    }
    document.respond("/openapi.json", "get", "This document", json_content(json!({"type": "object"})));
    let key =
        json!({"type": "http", "scheme": "bearer", "description": "Required if the server has keys (--api-key)."});
    let error = json!({"description": "An error.", "content": json_content(reference("Error"))});
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "OpenAI's API with vLLM's extensions. Unknown fields are ignored, except those that would change the answer, which are refused; null means absent. Defaults that depend on the model are not listed.",
            "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"key": []}],
        "paths": document.paths,
        "components": {
            "schemas": document.schemas,
            "securitySchemes": {"key": key},
            "responses": {"Error": error},
        },
    })
}

fn json_content(schema: Value) -> Value {
    json!({"application/json": {"schema": schema}})
}

impl Document {
    /// Adds the schema of what `read` reads, and returns a reference to it.
    fn request<T>(
        &mut self,
        name: &str,
        description: &str,
        read: impl FnOnce(&Work, &Fields<'_>) -> Result<T, ApiError>,
    ) -> Value {
        let fields = Fields::describing();
        // Readers of an empty request may fail, but not before they have read all fields.
        let _ = read(&self.work, &fields);
        self.schemas.insert(name.to_string(), fields.schema(description));
        reference(name)
    }

    fn post(&mut self, path: &str, summary: &str, request: Value, answer: &str, streams: bool) {
        let mut content = json_content(reference(answer));
        if streams {
            content["text/event-stream"] =
                json!({"schema": {"type": "string", "description": "Server-sent events, with stream: true."}});
        }
        self.respond(path, "post", summary, content);
        self.paths[path]["post"]["requestBody"] = json!({"required": true, "content": json_content(request)});
    }

    /// Adds a route whose response is text.
    fn post_text(&mut self, path: &str, summary: &str, request: Value) {
        self.respond(path, "post", summary, json!({"text/plain": {"schema": {"type": "string"}}}));
        self.paths[path]["post"]["requestBody"] = json!({"required": true, "content": json_content(request)});
    }

    fn get(&mut self, path: &str, summary: &str, answer: &str) {
        self.respond(path, "get", summary, json_content(reference(answer)));
    }

    fn text(&mut self, path: &str, summary: &str, media_type: &str) {
        self.respond(path, "get", summary, json!({media_type: {"schema": {"type": "string"}}}));
    }

    /// Adds an operation with the content of its response 200.
    fn respond(&mut self, path: &str, method: &str, summary: &str, content: Value) {
        let mut operation = operation(path, summary);
        operation["responses"]["200"] = json!({"description": "Success.", "content": content});
        self.add(path, method, operation);
    }

    fn add(&mut self, path: &str, method: &str, operation: Value) {
        self.paths.entry(path).or_insert_with(|| json!({}))[method] = operation;
    }
}

/// The parts that all operations have: summary, id, path parameters and the error response.
fn operation(path: &str, summary: &str) -> Value {
    let names = path.split('{').skip(1).filter_map(|rest| rest.split('}').next());
    let parameters: Vec<Value> =
        names.map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}})).collect();
    let words: Vec<&str> = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
    json!({
        "operationId": if words.is_empty() { "index".to_string() } else { words.join("_") },
        "summary": summary,
        "parameters": parameters,
        "responses": {"default": {"$ref": "#/components/responses/Error"}},
    })
}

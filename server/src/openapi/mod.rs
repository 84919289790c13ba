//! Routes and their description: the API as an OpenAPI 3.1 document.
//!
//! A folder of routes adds each with its [`Operation`]. The code that reads a request also describes it: its reader runs
//! over [`Fields::describing`], which records the type, range and default of every field with this server's limits and
//! model. The fields of responses are tables of [`Schema`] rows.

pub mod page;

use std::sync::Arc;

use axum::Router;
use axum::routing::MethodRouter;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::http::ApiError;
use crate::request::{Fields, Work};

/// An object or, behind it, one of its fields as `Object.field`: name, type and description. The type of a field is a JSON
/// type, `any` or another object, in brackets for a list and with a question mark if the field may be absent or `null`.
pub type Schema = (&'static str, &'static str, &'static str);

/// Schemas of errors.
const ERRORS: &[Schema] = &[
    ("Error", "object", "An error response."),
    ("Error.error", "ErrorObject", "The error."),
    ("ErrorObject", "object", "OpenAI's error object."),
    ("ErrorObject.message", "string", "What was found, what was expected and what to do."),
    ("ErrorObject.type", "string", "Kind of error, such as invalid_request_error or server_error."),
    ("ErrorObject.param", "string?", "The request field with the error."),
    ("ErrorObject.code", "string?", "Identifier of the error for programs."),
];

/// Routes, and their description if a request to describe needs it.
#[derive(Default)]
pub struct Routes {
    /// The router.
    pub router: Router<Arc<App>>,
    document: Option<Document>,
}

struct Document {
    work: Work,
    schemas: Map<String, Value>,
    paths: Map<String, Value>,
}

impl Routes {
    /// Routes that are described.
    pub fn describing(work: Work) -> Routes {
        let document = Document { work, schemas: Map::new(), paths: Map::new() };
        let mut routes = Routes { document: Some(document), ..Routes::default() };
        routes.schemas(ERRORS);
        routes
    }

    /// Adds schemas of responses.
    pub fn schemas(&mut self, rows: &[Schema]) {
        let Some(Document { schemas, .. }) = &mut self.document else { return };
        for &(name, kind, description) in rows {
            let Some((object, field)) = name.split_once('.') else {
                let empty = json!({"type": kind, "description": description, "properties": {}, "required": []});
                schemas.insert(name.to_string(), empty);
                continue;
            };
            let optional = kind.ends_with('?');
            let kind = kind.trim_end_matches('?');
            let mut schema = match kind.strip_prefix('[') {
                Some(item) => json!({"type": "array", "items": of_type(item.trim_end_matches(']'))}),
                None => of_type(kind),
            };
            if optional && kind != "any" {
                schema = json!({"anyOf": [schema, {"type": "null"}]});
            }
            schema["description"] = description.into();
            schemas[object]["properties"][field] = schema;
            if let (false, Some(required)) = (optional, schemas[object]["required"].as_array_mut()) {
                required.push(field.into());
            }
        }
    }

    /// Adds the schema of what `read` reads, and returns a reference to it.
    pub fn request<T>(
        &mut self,
        name: &str,
        description: &str,
        read: impl FnOnce(&Work, &Fields<'_>) -> Result<T, ApiError>,
    ) -> Value {
        if let Some(document) = &mut self.document {
            let fields = Fields::describing();
            // Readers of an empty request may fail, but not before they have read all fields.
            let _ = read(&document.work, &fields);
            document.schemas.insert(name.to_string(), fields.schema(description));
        }
        reference(name)
    }

    /// Adds a route under each of these paths. An asterisk in a path stands for its rest.
    pub fn add(&mut self, paths: &[&str], handler: MethodRouter<Arc<App>>, operation: Operation) {
        for path in paths {
            self.router = std::mem::take(&mut self.router).route(path, handler.clone());
            if let Some(document) = &mut self.document {
                let path = path.replace("{*", "{");
                document.paths.insert(path.clone(), json!({operation.method: operation.to_json(&path)}));
            }
        }
    }

    /// Describes another method of paths that were added.
    pub fn also(&mut self, paths: &[&str], operation: Operation) {
        let Some(document) = &mut self.document else { return };
        for path in paths {
            let path = path.replace("{*", "{");
            let mut described = operation.to_json(&path);
            if let Some(id) = described["operationId"].as_str() {
                described["operationId"] = format!("{}_{id}", operation.method).into();
            }
            if let Some(methods) = document.paths.get_mut(&path).and_then(Value::as_object_mut) {
                methods.insert(operation.method.to_string(), described);
            }
        }
    }

    /// The OpenAPI document.
    pub fn document(self, root: Option<&str>) -> Value {
        let (paths, schemas) = self.document.map(|document| (document.paths, document.schemas)).unwrap_or_default();
        let key = "Required if the server has keys (--api-key).";
        let error = json!({"description": "An error.", "content": json_content(reference("Error"))});
        json!({
            "openapi": "3.1.0",
            "info": {
                "title": "Quire",
                "version": env!("CARGO_PKG_VERSION"),
                "description": "OpenAI's API with vLLM's extensions. Unknown fields are ignored, except those that would change the answer, which are refused; null means absent. Defaults that depend on the model are not listed.",
                "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
            },
            "servers": [{"url": root.unwrap_or("/")}],
            "security": [{}, {"key": []}],
            "paths": paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": key}},
                "responses": {"Error": error},
            },
        })
    }
}

/// Schema of a JSON type or of an object of a table.
fn of_type(name: &str) -> Value {
    match name {
        "any" => json!({}),
        name if name.starts_with(|first: char| first.is_ascii_uppercase()) => reference(name),
        name => json!({"type": name}),
    }
}

/// Reference to the schema with this name.
fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn json_content(schema: Value) -> Value {
    json!({"application/json": {"schema": schema}})
}

/// Description of a route.
pub struct Operation {
    method: &'static str,
    summary: &'static str,
    query: Vec<Value>,
    request: Option<Value>,
    success: Option<Value>,
}

impl Operation {
    /// A route for GET.
    pub fn get(summary: &'static str) -> Operation {
        Operation { method: "get", summary, query: Vec::new(), request: None, success: None }
    }

    /// A route for POST. Its response is always an error unless it is described.
    pub fn post(summary: &'static str) -> Operation {
        Operation { method: "post", ..Operation::get(summary) }
    }

    /// A route for DELETE.
    pub fn delete(summary: &'static str) -> Operation {
        Operation { method: "delete", ..Operation::get(summary) }
    }

    /// A parameter of the query that is `true` or `false`.
    pub fn with_flag(mut self, name: &str, description: &str) -> Operation {
        let schema = json!({"type": "boolean", "default": false});
        self.query.push(json!({"name": name, "in": "query", "description": description, "schema": schema}));
        self
    }

    /// A parameter of the query with one of these values.
    pub fn with_word(mut self, name: &str, words: &[&str], description: &str) -> Operation {
        let schema = json!({"type": "string", "enum": words});
        self.query.push(json!({"name": name, "in": "query", "description": description, "schema": schema}));
        self
    }

    /// The request body has this schema.
    pub fn reads(self, request: &Value) -> Operation {
        Operation { request: Some(request.clone()), ..self }
    }

    fn responds(self, content: Value) -> Operation {
        Operation { success: Some(json!({"description": "Success.", "content": content})), ..self }
    }

    /// The response is an object with the schema of this name.
    pub fn returns(self, schema: &str) -> Operation {
        self.responds(json_content(reference(schema)))
    }

    /// The response is a list of objects with the schema of this name.
    pub fn returns_list(self, schema: &str) -> Operation {
        self.responds(json_content(json!({"type": "array", "items": reference(schema)})))
    }

    /// The response is any object.
    pub fn returns_object(self) -> Operation {
        self.responds(json_content(json!({"type": "object"})))
    }

    /// The response is text of this media type.
    pub fn returns_text(self, media_type: &str) -> Operation {
        self.responds(json!({media_type: {"schema": {"type": "string"}}}))
    }

    /// The response has no body.
    pub fn returns_nothing(self, description: &str) -> Operation {
        let description = format!("{description} The response has no body.");
        Operation { success: Some(json!({"description": description})), ..self }
    }

    /// The response may also be a stream.
    pub fn streams(self) -> Operation {
        self.also("text/event-stream", "Server-sent events, with stream: true.")
    }

    /// The response is a stream of JSON lines unless `stream` is false.
    pub fn streams_lines(self) -> Operation {
        self.also("application/x-ndjson", "JSON lines, without stream: false.")
    }

    /// The response may also be text of this media type.
    pub fn also(mut self, media_type: &str, description: &str) -> Operation {
        if let Some(success) = &mut self.success {
            success["content"][media_type] = json!({"schema": {"type": "string", "description": description}});
        }
        self
    }

    fn to_json(&self, path: &str) -> Value {
        let names = path.split('{').skip(1).filter_map(|rest| rest.split('}').next());
        let named = |name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}});
        let parameters: Vec<Value> = names.map(named).chain(self.query.iter().cloned()).collect();
        let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        let words: Vec<&str> = words.collect();
        let mut operation = json!({
            "operationId": if words.is_empty() { "index".to_string() } else { words.join("_") },
            "summary": self.summary,
            "parameters": parameters,
            "responses": {"default": {"$ref": "#/components/responses/Error"}},
        });
        if let Some(request) = &self.request {
            operation["requestBody"] = json!({"required": true, "content": json_content(request.clone())});
        }
        if let Some(success) = &self.success {
            operation["responses"]["200"] = success.clone();
        }
        operation
    }
}

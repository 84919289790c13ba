//! A line of a batch: a request to one of the routes, and its result as a line.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Extension, Request, State};
use axum::http::header;
use axum::response::Response;
use http_body_util::BodyExt;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::app::App;
use crate::http::{ApiError, Client, call, excerpt};
use crate::openai::{chat, completions, embeddings, responses};
use crate::stored::{Owner, is_passing, work_of};

/// First and last pause before a line is sent again that the server had no room for.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// The routes that lines may name.
pub const ENDPOINTS: [&str; 4] = ["/v1/responses", "/v1/chat/completions", "/v1/embeddings", "/v1/completions"];

/// A request of a batch.
#[derive(Debug, Deserialize)]
pub struct Line {
    /// The client's name of the request.
    pub custom_id: String,
    method: String,
    url: String,
    body: Box<RawValue>,
}

/// What of a body a batch must know.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Streams {
    stream: Option<bool>,
    background: Option<bool>,
}

/// The result of a line.
pub struct Done {
    /// Whether it goes to the file of errors.
    pub is_error: bool,
    /// The line, without its end.
    pub text: String,
}

impl Line {
    /// Reads a line. `endpoint` is the route of the batch, if it has one. The error has the client's name of the request, if it can be
    /// read.
    #[allow(clippy::result_large_err)] // as often as a line is wrong
    pub fn parse(text: &str, endpoint: Option<&str>) -> Result<Line, (Option<String>, ApiError)> {
        let line: Line = serde_json::from_str(text).map_err(|error| {
            let found: Value = serde_json::from_str(text).unwrap_or_default();
            let expected = "one JSON object with custom_id, method, url and body";
            (
                found["custom_id"].as_str().map(str::to_string),
                ApiError::bad_request(format!("the line is not valid: {error}; expected {expected}")),
            )
        })?;
        let refused = |error| Err((Some(line.custom_id.clone()), error));
        if line.method != "POST" {
            return refused(ApiError::wrong("method", &line.method.into(), "POST"));
        }
        match endpoint {
            Some(endpoint) if line.url != endpoint => refused(ApiError::wrong(
                "url",
                &line.url.as_str().into(),
                format_args!("{endpoint}, the endpoint of the batch"),
            )),
            _ if !ENDPOINTS.contains(&&*line.url) => refused(ApiError::wrong(
                "url",
                &line.url.as_str().into(),
                format_args!("one of {}", ENDPOINTS.join(", ")),
            )),
            _ => Ok(line),
        }
    }

    /// Runs the request below all others. `id` names it, and what it draws follows from that. If the server has no room for it now, it
    /// waits, unless `gives_up` says so; then the result is `None`.
    pub async fn run(&self, app: &Arc<App>, owner: Owner, id: &str, gives_up: impl Fn() -> bool) -> Option<Done> {
        let mut pause = PAUSES.0;
        loop {
            let work = async {
                match self.send(app, owner).await {
                    Ok(response) => read(response).await,
                    Err(error) => (error.status().as_u16(), error.to_json().to_string()),
                }
            };
            let (status, body) = call::scope(id.to_string(), work_of(id, true), work).await;
            let passing = ApiError::new(axum::http::StatusCode::from_u16(status).unwrap_or_default(), "");
            if !is_passing(&passing) {
                return Some(self.done(id, status, &body));
            }
            if gives_up() {
                return None;
            }
            sleep(pause).await;
            pause = (2 * pause).min(PAUSES.1);
        }
    }

    /// The result with a response whose body is this JSON. It stays as it is: numbers that are read and written again may have other digits.
    fn done(&self, id: &str, status: u16, body: &str) -> Done {
        let (id, name) = (Value::from(id), Value::from(self.custom_id.as_str()));
        let response = format!(r#"{{"status_code":{status},"request_id":{id},"body":{body}}}"#);
        let text = format!(r#"{{"id":{id},"custom_id":{name},"response":{response},"error":null}}"#);
        Done { is_error: status >= 400, text }
    }

    async fn send(&self, app: &Arc<App>, owner: Owner) -> Result<Response, ApiError> {
        let streams: Streams = serde_json::from_str(self.body.get()).unwrap_or_default();
        for (name, value) in [("stream", streams.stream), ("background", streams.background)] {
            if value == Some(true) {
                return Err(ApiError::invalid(name, "found true in a batch, expected false; remove it"));
            }
        }
        let request = Request::post(self.url.as_str()).header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(self.body.get().to_string()));
        let request = request.map_err(|error| ApiError::bad_request(format!("the line is not valid: {error}")))?;
        let app = State(app.clone());
        match self.url.as_str() {
            "/v1/chat/completions" => chat::chat_completions(app, request).await,
            "/v1/completions" => completions::completions(app, request).await,
            "/v1/embeddings" => embeddings::embeddings(app, request).await,
            _ => responses::responses(app, Extension(Client::Owner(owner)), request).await,
        }
    }
}

/// Status and body of a response.
async fn read(response: Response) -> (u16, String) {
    let status = response.status().as_u16();
    let failed = |error: &dyn std::fmt::Display| {
        (500, ApiError::internal(format!("reading the response failed: {error}")).to_json().to_string())
    };
    match response.into_body().collect().await {
        Ok(body) => match String::from_utf8(body.to_bytes().into()) {
            Ok(body) => (status, body),
            Err(error) => failed(&error),
        },
        Err(error) => failed(&error),
    }
}

/// The result of a line that was not sent.
pub fn unsent(id: &str, custom_id: Option<&str>, code: &str, message: &str) -> Done {
    let error = json!({"code": code, "message": message});
    let text = json!({"id": id, "custom_id": custom_id, "response": null, "error": error}).to_string();
    Done { is_error: true, text }
}

/// The message of a line that has the name of another.
pub fn repeated(custom_id: &str) -> String {
    format!("custom_id: found {} in two lines, expected another in each", excerpt(&custom_id.into()))
}

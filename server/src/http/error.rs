//! Errors as clients see them: a status and OpenAI's error object, or that of the API of the route ([`ErrorForm`]).
//!
//! ```json
//! {"error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": null}}
//! ```
//!
//! A message is one line and says what is wrong, what was found, what was expected and what to do.

use std::borrow::Cow;
use std::fmt::Display;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use engine::SubmitError;
use serde_json::{Value, json};

use super::call;

/// Maximum number of characters of a path, a header or a model name that a message repeats.
const MAX_NAME: usize = 200;

/// An error response. Displays as its message.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    status: StatusCode,
    /// vLLM's type of the error, instead of OpenAI's.
    kind: Option<&'static str>,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
    /// Number of tokens of a prompt that is too long, and the greatest number.
    excess: Option<(usize, usize)>,
}

/// The form of the errors of an API: which paths are its own, and the body of an error.
pub struct ErrorForm {
    /// Whether this is a path of the API.
    pub is_path: fn(&str) -> bool,
    /// The body of an error.
    pub body: fn(&ApiError) -> Value,
    /// Another header with the id of a call.
    pub id_header: Option<&'static str>,
}

/// Middleware: gives the errors of all layers the form of the API of their route.
pub async fn reshape(State(forms): State<&'static [ErrorForm]>, request: Request, next: Next) -> Response {
    let form = forms.iter().find(|form| (form.is_path)(request.uri().path()));
    let mut response = next.run(request).await;
    if let Some(name) = form.and_then(|form| form.id_header)
        && let Ok(id) = HeaderValue::try_from(call::id())
    {
        response.headers_mut().insert(name, id);
    }
    let Some((form, error)) = form.zip(response.extensions_mut().remove::<ApiError>()) else { return response };
    let (mut parts, _) = response.into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    (parts, Json((form.body)(&error))).into_response()
}

impl ApiError {
    /// An error without `param` and `code`.
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError { status, kind: None, code: None, param: None, message: message.into(), excess: None }
    }

    /// An error with vLLM's type, whose code is the status.
    pub fn of_kind(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { kind: Some(kind), ..ApiError::new(status, message) }
    }

    /// Sets `code`.
    pub fn with_code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// Sets `param`.
    pub fn with_param(self, param: &str) -> ApiError {
        ApiError { param: Some(param.to_string()), ..self }
    }

    /// Sets the number of tokens of a prompt that is too long, and the greatest number.
    pub fn with_excess(self, found: usize, most: usize) -> ApiError {
        ApiError { excess: Some((found, most)), ..self }
    }

    /// Number of tokens of a prompt that is too long, and the greatest number.
    pub fn excess(&self) -> Option<(usize, usize)> {
        self.excess
    }

    /// The error with the names that another API has for fields: pairs of our name and the other.
    pub fn renamed(mut self, names: &[(&str, &str)]) -> ApiError {
        let Some(param) = self.param.take() else { return self };
        let rest_of =
            |name: &str| param.strip_prefix(name).filter(|rest| rest.is_empty() || rest.starts_with(['.', '[']));
        let renamed = names.iter().find_map(|(ours, theirs)| Some(format!("{theirs}{}", rest_of(ours)?)));
        if let (Some(name), Some(problem)) = (&renamed, self.message.strip_prefix(&param)) {
            self.message = format!("{name}{problem}");
        }
        self.param = Some(renamed.unwrap_or(param));
        self
    }

    /// 400 without a parameter.
    pub fn bad_request(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// 400 for a parameter; `problem` follows its name in the message.
    pub fn invalid(param: impl Into<String>, problem: impl Display) -> ApiError {
        let param = param.into();
        let message = format!("{param}: {problem}");
        ApiError { param: Some(param), ..ApiError::bad_request(message) }
    }

    /// 400 for a parameter with a wrong value.
    pub fn wrong(param: impl Into<String>, found: &Value, expected: impl Display) -> ApiError {
        ApiError::found(param, &excerpt(found), expected)
    }

    /// Like [`ApiError::wrong`], with the found value in words.
    pub fn found(param: impl Into<String>, found: &str, expected: impl Display) -> ApiError {
        ApiError::invalid(param, format_args!("found {found}, expected {expected}"))
    }

    /// 400 for a parameter over its limit: `found` and `most` are numbers of `unit`.
    pub fn over(param: impl Into<String>, found: usize, most: usize, unit: &str, advice: &str) -> ApiError {
        ApiError::invalid(param, format_args!("found {found} {unit}, expected at most {most}; {advice}"))
    }

    /// 400 for a parameter that this server does not support. Such parameters are never silently ignored.
    pub fn unsupported(param: impl Into<String>, advice: impl Display) -> ApiError {
        ApiError::invalid(param, format_args!("not supported by this server; {advice}"))
    }

    /// 400 for a parameter that excludes `other`.
    pub fn conflict(param: impl Into<String>, other: impl Display) -> ApiError {
        ApiError::invalid(param, format_args!("found together with {other}, expected only one of the two; remove one"))
    }

    /// 400 for a parameter that has no effect without `other`.
    pub fn requires(param: impl Into<String>, other: &str) -> ApiError {
        ApiError::invalid(param, format_args!("found without {other}, expected both or neither; add or remove one"))
    }

    /// 400 for a request that exceeds the context length of `context` tokens.
    pub fn context_length(param: impl Into<String>, context: usize, problem: impl Display) -> ApiError {
        let problem = format_args!("this model's maximum context length is {context} tokens, {problem}");
        ApiError::invalid(param, problem).with_code("context_length_exceeded")
    }

    /// 404 for a model that this server does not serve.
    pub fn unknown_model(found: &str, served: &str) -> ApiError {
        let found = cut(found, MAX_NAME);
        let message =
            format!("The model `{found}` does not exist: expected `{served}`; GET /v1/models lists the models");
        let error = ApiError::new(StatusCode::NOT_FOUND, message).with_code("model_not_found");
        ApiError { param: Some("model".into()), ..error }
    }

    /// 403: the operator has not allowed it.
    pub fn forbidden(message: &str) -> ApiError {
        ApiError::new(StatusCode::FORBIDDEN, message.to_string())
    }

    /// An error about a header whose value is `found`.
    pub fn header(status: StatusCode, name: &str, found: Option<&str>, expected: &str) -> ApiError {
        let found = found.map_or("none".to_string(), |found| format!("{:?}", cut(found, MAX_NAME)));
        ApiError::new(status, format!("{name}: found {found}, expected {expected}"))
    }

    /// 414 for a request target longer than `most` bytes.
    pub fn long_target(most: usize) -> ApiError {
        let message = format!("the request target is too long, expected at most {most} bytes (--max-header-bytes)");
        ApiError::new(StatusCode::URI_TOO_LONG, message)
    }

    /// 429: the client should retry later.
    pub fn busy(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).with_code("rate_limit_exceeded")
    }

    /// 500.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// 503: the client should retry later or elsewhere.
    pub fn unavailable(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    /// The message: one line.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Status of the response.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Value of the header `Retry-After`, in seconds.
    pub fn retry_after(&self) -> Option<u32> {
        matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE).then_some(1)
    }

    /// The error object. A stream that fails after its first byte sends it as an event.
    pub fn to_json(&self) -> Value {
        let code = self.kind.map_or(json!(self.code), |_| self.status.as_u16().into());
        let kind = self.kind.unwrap_or(match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::INTERNAL_SERVER_ERROR | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
                "server_error"
            }
            _ => "invalid_request_error",
        });
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": code}})
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> ApiError {
        match error {
            SubmitError::Invalid { param, message } => {
                ApiError { param: Some(param.into()), ..ApiError::bad_request(message) }
            }
            SubmitError::UnknownAdapter(name) => ApiError::unknown_model(&name, "a model that takes requests"),
            SubmitError::NeverFits(message) => ApiError::bad_request(message),
            SubmitError::QueueFull { .. } => ApiError::busy(error.to_string()),
            SubmitError::Asleep | SubmitError::Closed => ApiError::unavailable(error.to_string()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.to_json())).into_response();
        let headers = response.headers_mut();
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        headers.extend(self.retry_after().map(|seconds| (header::RETRY_AFTER, seconds.into())));
        // For `reshape`.
        response.extensions_mut().insert(self);
        response
    }
}

/// 404 for an unknown path.
pub async fn not_found(method: Method, uri: Uri) -> ApiError {
    let path = cut(uri.path(), MAX_NAME);
    let message = format!("Invalid URL ({method} {path}), expected a route listed by GET /openapi.json");
    ApiError::new(StatusCode::NOT_FOUND, message)
}

/// 405 for a known path.
pub async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    let path = cut(uri.path(), MAX_NAME);
    let mut message = format!("Not allowed to {method} on {path}: expected a method that the `allow` header names");
    if method == Method::OPTIONS {
        message += "; start the server with --allowed-origins ORIGIN to let pages of that origin use it";
    }
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message)
}

/// A JSON value as a message shows it: long values are truncated.
pub fn excerpt(value: &Value) -> String {
    const LIMIT: usize = 60;
    let whole = match value {
        // Writing a container could take megabytes.
        Value::Array(items) if items.len() > 8 => return format!("a list of {} items", items.len()),
        Value::Object(fields) if fields.len() > 8 => return format!("an object of {} fields", fields.len()),
        Value::String(text) => format!("{:?}", text.chars().take(LIMIT + 1).collect::<String>()),
        _ => value.to_string(),
    };
    cut(&whole, LIMIT).into_owned()
}

/// The first `limit` characters, and an ellipsis if there are more.
fn cut(text: &str, limit: usize) -> Cow<'_, str> {
    match text.char_indices().nth(limit) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}

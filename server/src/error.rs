//! What a client is told when something is wrong: always the OpenAI error object, always a fitting status.
//!
//! ```json
//! {"error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": null}}
//! ```

use std::borrow::Cow;

use axum::Json;
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use engine::SubmitError;
use serde_json::{Value, json};

/// Characters of a path or a model's name that a message repeats.
const MAX_NAME: usize = 200;

/// A request that gets no answer but an error.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { status, kind, code: None, param: None, message: message.into() }
    }

    /// 400 that names the parameter; `problem` follows its name in the message.
    pub fn invalid(param: impl Into<String>, problem: impl std::fmt::Display) -> ApiError {
        let param = param.into();
        let message = format!("{param}: {problem}");
        ApiError { param: Some(param), ..ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message) }
    }

    /// 400 that names the parameter, shows the value that was found and says what would do.
    pub fn wrong(param: impl Into<String>, found: &Value, expected: impl std::fmt::Display) -> ApiError {
        ApiError::invalid(param, format_args!("found {}, expected {expected}", excerpt(found)))
    }

    /// 400 that names the parameter, tells of the value that was found and says what would do.
    pub fn found(param: impl Into<String>, found: &str, expected: impl std::fmt::Display) -> ApiError {
        ApiError::invalid(param, format_args!("found {found}, expected {expected}"))
    }

    /// 400 for what is larger than its limit: `found` and `most` count `what`.
    pub fn over(param: impl Into<String>, found: usize, most: usize, what: &str, advice: &str) -> ApiError {
        ApiError::invalid(param, format_args!("found {found} {what}, expected at most {most}; {advice}"))
    }

    /// 400 for a feature that this server does not have; never ignored in silence.
    pub fn unsupported(param: impl Into<String>, advice: impl std::fmt::Display) -> ApiError {
        ApiError::invalid(param, format_args!("not supported; {advice}"))
    }

    /// 400 for a body that is no JSON object.
    pub fn body(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400 with the numbers of a context that is too short.
    pub fn context_length(param: &str, message: String) -> ApiError {
        ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid(param, message) }
    }

    /// 404 for a model that is not served here.
    pub fn unknown_model(found: &str, served: &str) -> ApiError {
        let message = format!("model: {:?} does not exist, this server has {served:?}", cut(found, MAX_NAME));
        ApiError {
            code: Some("model_not_found"),
            param: Some("model".into()),
            ..ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        }
    }

    /// 400 for what refers to an earlier answer of `/v1/responses`.
    pub fn not_stored(param: &str) -> ApiError {
        ApiError::unsupported(param, "answers are not stored here; send the earlier items in input")
    }

    /// 404 for an earlier answer that is asked for by its id.
    pub fn no_response(id: &str) -> ApiError {
        let message = format!("response_id: {:?} is not here, answers are not stored", cut(id, MAX_NAME));
        let param = Some("response_id".into());
        ApiError { param, ..ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message) }
    }

    /// 401.
    pub fn unauthorized() -> ApiError {
        let message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`";
        ApiError {
            code: Some("invalid_api_key"),
            ..ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message)
        }
    }

    /// 413.
    pub fn too_large(limit: usize) -> ApiError {
        let message = format!("the body is larger than {limit} bytes (--max-body-bytes); send less");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// 403 for a request to a name that is not the server's.
    pub fn forbidden_host(found: &str) -> ApiError {
        let message = format!(
            "host: found {:?}, expected a loopback name such as localhost; start the server with --allowed-hosts NAME to \
             serve another name",
            cut(found, MAX_NAME)
        );
        let error = ApiError::new(StatusCode::FORBIDDEN, "permission_error", message);
        ApiError { code: Some("forbidden_host"), ..error }
    }

    /// 403 for a request that a page of another site has sent.
    pub fn forbidden_origin(found: &str) -> ApiError {
        let message = format!(
            "origin: found {:?}, expected a page of this server; start the server with --allowed-origins ORIGIN to serve \
             pages of another site",
            cut(found, MAX_NAME)
        );
        let error = ApiError::new(StatusCode::FORBIDDEN, "permission_error", message);
        ApiError { code: Some("forbidden_origin"), ..error }
    }

    /// 415 for a body that is not declared as JSON; `found` is its `Content-Type`.
    pub fn media_type(found: Option<&str>) -> ApiError {
        let found = found.map_or("none".to_string(), |found| format!("{:?}", cut(found, MAX_NAME)));
        let message = format!("content-type: found {found}, expected application/json");
        ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message)
    }

    /// 408: the request does not come.
    pub fn slow(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
    }

    /// 431.
    pub fn large_head(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "invalid_request_error", message)
    }

    /// 414.
    pub fn long_target(limit: usize) -> ApiError {
        let message = format!("the target of the request is too long, expected at most {limit} bytes");
        ApiError::new(StatusCode::URI_TOO_LONG, "invalid_request_error", message)
    }

    /// 505.
    pub fn version() -> ApiError {
        let message = "HTTP/2 is not spoken here, send HTTP/1.1";
        ApiError::new(StatusCode::HTTP_VERSION_NOT_SUPPORTED, "invalid_request_error", message)
    }

    /// 429: too much at once, later there is room.
    pub fn busy(message: impl Into<String>) -> ApiError {
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        ApiError { code: Some("rate_limit_exceeded"), ..error }
    }

    /// 504: the answer was not ready in the time that a request may take.
    pub fn timed_out(message: impl Into<String>) -> ApiError {
        let error = ApiError::new(StatusCode::GATEWAY_TIMEOUT, "server_error", message);
        ApiError { code: Some("request_timeout"), ..error }
    }

    /// 415 for a body that is packed.
    pub fn content_encoding(found: &str) -> ApiError {
        let message =
            format!("content-encoding: found {:?}, expected none: send the body as it is", cut(found, MAX_NAME));
        ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message)
    }

    /// 500: the fault is on this side.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// 503: try again later, or elsewhere.
    pub fn unavailable(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
    }

    /// The status of the answer.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// After how many seconds it is worth another try.
    pub fn retry_after(&self) -> Option<u32> {
        matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE).then_some(1)
    }

    /// The error object, also used inside a stream that has begun.
    pub fn to_json(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> ApiError {
        match error {
            SubmitError::Invalid { param, message } => ApiError {
                param: Some(param.into()),
                ..ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
            },
            SubmitError::NeverFits(message) => ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message),
            SubmitError::QueueFull { .. } => ApiError::busy(error.to_string()),
            SubmitError::Closed => ApiError::unavailable(error.to_string()),
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
        response
    }
}

/// 404 for a path that is not there.
pub async fn not_found(uri: Uri) -> ApiError {
    let message = format!("there is nothing at {}", cut(uri.path(), MAX_NAME));
    ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
}

/// 405 for a path that wants another method.
pub async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} does not take {method}", cut(uri.path(), MAX_NAME));
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
}

/// A value as it stands in a message: JSON, cut where it grows long.
pub fn excerpt(value: &Value) -> String {
    const LIMIT: usize = 60;
    let whole = match value {
        // A container may be megabytes of JSON; its size says enough.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_parameter_and_shows_what_was_found() {
        let error = ApiError::wrong("top_p", &json!(1.5), "a number above 0, at most 1").to_json();
        assert_eq!(error["error"]["param"], "top_p");
        assert_eq!(error["error"]["message"], "top_p: found 1.5, expected a number above 0, at most 1");
    }

    #[test]
    fn a_long_value_is_cut_in_a_message() {
        let text = excerpt(&Value::String("é".repeat(5000)));
        assert!(text.chars().count() < 70, "{text}");
        assert_eq!(excerpt(&json!(vec![0; 100])), "a list of 100 items");
    }
}

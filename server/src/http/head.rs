//! Limits of a request and where each is enforced.
//!
//! | limit | enforced in |
//! |---|---|
//! | connections, time for a head, unread bytes | `serve`, `connection` |
//! | bytes and number of headers | here, as middleware; far beyond them in `serve` |
//! | bytes of a body, time for it, bytes of all bodies | `request::body` |
//! | numbers and sizes of fields | where the field is read |
//! | products of fields, and memory of all requests | `request::cost` |
//! | streams, time of a request | `request::body`, `reply::run` |

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::ApiError;
use crate::settings::ServerOptions;

/// Middleware: rejects a head that is too large or does not have exactly one `Host` (RFC 9112, section 3.2).
pub async fn check(State(options): State<Arc<ServerOptions>>, request: Request, next: Next) -> Response {
    let (headers, limits) = (request.headers(), &options.limits);
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    let bytes = target + headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum::<usize>();
    let large = |found: usize, unit: &str, most: usize, flag: &str| {
        let message = format!("found {found} {unit}, expected at most {most}; send fewer or raise {flag}");
        ApiError::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, message).into_response()
    };
    let hosts = headers.get_all(header::HOST).iter().count();
    if headers.len() > limits.max_header_count {
        large(headers.len(), "headers", limits.max_header_count, "--max-header-count")
    } else if target > limits.max_header_bytes {
        ApiError::long_target(limits.max_header_bytes).into_response()
    } else if bytes > limits.max_header_bytes {
        large(bytes, "bytes of headers", limits.max_header_bytes, "--max-header-bytes")
    } else if hosts > 1 || hosts == 0 && request.version() == Version::HTTP_11 {
        ApiError::bad_request(format!("found {hosts} Host headers, expected one; send one")).into_response()
    } else {
        next.run(request).await
    }
}

//! What one request may ask for and how long it may take: one value, read by whoever enforces a part of it.
//!
//! | limit | enforced in |
//! |---|---|
//! | connections, time for a head, unread bytes | `serve`, `connection` |
//! | bytes and number of headers | here, as middleware; far beyond them in `serve` |
//! | bytes of a body, time for it, bytes of all bodies | `body` |
//! | numbers and sizes of fields | where the field is read |
//! | products of fields, and what all requests keep together | `cost` |
//! | streams, whole request | `call`, `run` |

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::app::App;
use super::error::ApiError;

/// Middleware: refuses a head that is too large, and one that does not say which host it means (RFC 9112, section 3.2).
pub async fn check_head(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let (headers, limits) = (request.headers(), &app.limits);
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    let bytes = target + headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum::<usize>();
    let large = |found: usize, what: &str, most: usize| {
        ApiError::large_head(format!("found {found} {what}, expected at most {most}")).into_response()
    };
    let hosts = headers.get_all(header::HOST).iter().count();
    match () {
        () if headers.len() > limits.max_header_count => large(headers.len(), "headers", limits.max_header_count),
        () if target > limits.max_header_bytes => ApiError::long_target(limits.max_header_bytes).into_response(),
        () if bytes > limits.max_header_bytes => large(bytes, "bytes of headers", limits.max_header_bytes),
        () if hosts > 1 || hosts == 0 && request.version() == Version::HTTP_11 => {
            ApiError::body(format!("found {hosts} Host headers, expected one")).into_response()
        }
        () => next.run(request).await,
    }
}

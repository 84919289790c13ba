//! CORS: browsers may use the server from the pages of allowed origins.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::app::App;
use super::settings::Cors;

/// Seconds for which a browser may cache the response to a preflight.
const MAX_AGE: &str = "600";

/// Middleware: answers preflights and adds CORS headers, for allowed origins. Preflights have no key, so it precedes `auth`.
pub async fn apply(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let cors = &app.options.cors;
    let origin = request.headers().get(header::ORIGIN).cloned();
    let Some(origin) = origin.filter(|origin| origin.to_str().is_ok_and(|origin| cors.allows(origin))) else {
        return next.run(request).await;
    };
    let is_preflight =
        request.method() == Method::OPTIONS && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let asked = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response = if is_preflight { StatusCode::NO_CONTENT.into_response() } else { next.run(request).await };
    cors.grant(&origin, response.headers_mut());
    if is_preflight {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, Cors::list(&cors.methods, "GET, POST"));
        // Clients send headers of their own, such as the SDK's `x-stainless-os`. None of them means anything here, except
        // the key, which a page has to know.
        match asked.filter(|_| cors.headers.is_empty()) {
            Some(asked) => headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked),
            None => headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, Cors::list(&cors.headers, "authorization")),
        };
        headers.append(header::VARY, HeaderValue::from_static("access-control-request-headers"));
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE));
    }
    response
}

//! Cross-origin requests from browsers: refused, as a browser does without these headers, unless origins are allowed.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::app::App;

/// Seconds that a browser may keep the answer to its preflight.
const MAX_AGE: &str = "600";

/// Which pages of other origins a browser lets use this server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cors {
    /// As browsers send them, `https://example.org`; `*` is all. Empty: none.
    pub origins: Vec<String>,
    /// Methods that they may use; empty: `GET` and `POST`.
    pub methods: Vec<String>,
    /// Headers that they may send; empty: those that clients of the API send.
    pub headers: Vec<String>,
}

impl Cors {
    /// Whether pages of this origin may use the server.
    pub(super) fn allows(&self, origin: &str) -> bool {
        self.origins.iter().any(|allowed| allowed == "*" || allowed.eq_ignore_ascii_case(origin))
    }

    fn list(items: &[String], default: &'static str) -> HeaderValue {
        match items {
            [] => HeaderValue::from_static(default),
            _ => HeaderValue::from_str(&items.join(", ")).unwrap_or(HeaderValue::from_static(default)),
        }
    }

    /// The headers for an allowed origin.
    fn grant(&self, origin: &HeaderValue, headers: &mut HeaderMap) {
        let any = self.origins.iter().any(|allowed| allowed == "*");
        let shown = if any { HeaderValue::from_static("*") } else { origin.clone() };
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, shown);
        headers.append(header::VARY, HeaderValue::from_static("origin"));
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-request-id, retry-after"));
    }
}

/// Middleware: answers preflights and marks answers, both for allowed origins only. A preflight carries no key, so this
/// comes before the keys are looked at.
pub async fn apply(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let cors = &app.cors;
    let origin = request.headers().get(header::ORIGIN).cloned();
    let Some(origin) = origin.filter(|origin| origin.to_str().is_ok_and(|origin| cors.allows(origin))) else {
        return next.run(request).await;
    };
    let asks =
        request.method() == Method::OPTIONS && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = if asks { StatusCode::NO_CONTENT.into_response() } else { next.run(request).await };
    cors.grant(&origin, response.headers_mut());
    if asks {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, Cors::list(&cors.methods, "GET, POST"));
        let default = "authorization, content-type, x-request-id";
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, Cors::list(&cors.headers, default));
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE));
    }
    response
}

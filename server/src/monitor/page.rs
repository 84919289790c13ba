//! `GET /`: a web page with a chat and a live view of the engine.
//!
//! The files of `server/page/` are compiled into the binary: plain HTML, CSS and JavaScript modules without a build
//! step. Those in `vendor/` are by other authors, as published. The content security policy allows nothing from other servers, and no inline script or style. The page needs
//! no key, but asks for one if the API requires it. Its URLs are relative, so that it works behind a proxy's path
//! prefix. Programs that ask for the page get the line by which clients of Ollama find a server.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::openapi::{Operation, Routes};

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const IMAGE: &str = "image/svg+xml";
const TEXT: &str = "text/plain; charset=utf-8";

/// Path, media type and contents of each file.
const FILES: [(&str, &str, &str); 28] = [
    ("/", HTML, include_str!("../../page/index.html")),
    ("/page/style.css", CSS, include_str!("../../page/style.css")),
    ("/page/chat.css", CSS, include_str!("../../page/chat.css")),
    ("/page/engine.css", CSS, include_str!("../../page/engine.css")),
    ("/page/icon.svg", IMAGE, include_str!("../../page/icon.svg")),
    ("/page/theme.js", SCRIPT, include_str!("../../page/theme.js")),
    ("/page/app.js", SCRIPT, include_str!("../../page/app.js")),
    ("/page/api.js", SCRIPT, include_str!("../../page/api.js")),
    ("/page/dom.js", SCRIPT, include_str!("../../page/dom.js")),
    ("/page/settings.js", SCRIPT, include_str!("../../page/settings.js")),
    ("/page/models.js", SCRIPT, include_str!("../../page/models.js")),
    ("/page/meter.js", SCRIPT, include_str!("../../page/meter.js")),
    ("/page/notice.js", SCRIPT, include_str!("../../page/notice.js")),
    ("/page/chat.js", SCRIPT, include_str!("../../page/chat.js")),
    ("/page/turn.js", SCRIPT, include_str!("../../page/turn.js")),
    ("/page/answer.js", SCRIPT, include_str!("../../page/answer.js")),
    ("/page/tokens.js", SCRIPT, include_str!("../../page/tokens.js")),
    ("/page/tree.js", SCRIPT, include_str!("../../page/tree.js")),
    ("/page/storage.js", SCRIPT, include_str!("../../page/storage.js")),
    ("/page/chats.js", SCRIPT, include_str!("../../page/chats.js")),
    ("/page/file.js", SCRIPT, include_str!("../../page/file.js")),
    ("/page/markdown.js", SCRIPT, include_str!("../../page/markdown.js")),
    ("/page/markup.js", SCRIPT, include_str!("../../page/markup.js")),
    ("/page/engine.js", SCRIPT, include_str!("../../page/engine.js")),
    ("/page/blocks.js", SCRIPT, include_str!("../../page/blocks.js")),
    ("/page/chart.js", SCRIPT, include_str!("../../page/chart.js")),
    ("/page/vendor/marked.esm.js", SCRIPT, include_str!("../../page/vendor/marked.esm.js")),
    ("/page/vendor/marked.LICENSE", TEXT, include_str!("../../page/vendor/marked.LICENSE")),
];

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Adds the routes of the page, which require no API key.
pub fn add(routes: &mut Routes) {
    for (path, kind, text) in FILES {
        let summary =
            if path == "/" { "Web page with a chat and a view of the engine" } else { "File of the web page" };
        let operation = Operation::get(summary).returns_text(kind.split(';').next().unwrap_or(kind));
        if path == "/" {
            let operation =
                operation.also("text/plain", "For programs: the line by which clients of Ollama find a server.");
            routes.add(&[path], get(async move |headers: HeaderMap| page(&headers, kind, text)), operation);
        } else {
            routes.add(&[path], get(async move || file(kind, text)), operation);
        }
    }
}

/// Leads browsers from a prefix such as `/llm` to `/llm/`, to which the URLs of the page are relative.
pub async fn add_slash(State(prefix): State<String>, request: Request, next: Next) -> Response {
    if request.uri().path() != prefix || !reads_html(request.headers()) {
        return next.run(request).await;
    }
    // Relative too: a proxy may have added a prefix of its own.
    let last = prefix.rsplit('/').next().unwrap_or_default();
    (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, format!("{last}/"))]).into_response()
}

/// Whether a client says that it reads HTML, as browsers do.
fn reads_html(headers: &HeaderMap) -> bool {
    let reads_html = |value: &HeaderValue| value.to_str().is_ok_and(|accepted| accepted.contains("text/html"));
    headers.get_all(header::ACCEPT).iter().any(reads_html)
}

/// The page for browsers.
fn page(headers: &HeaderMap, kind: &'static str, text: &'static str) -> Response {
    match reads_html(headers) {
        true => file(kind, text).into_response(),
        false => ([(header::VARY, "accept")], "Ollama is running").into_response(),
    }
}

fn file(kind: &'static str, text: &'static str) -> impl IntoResponse {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::VARY, "accept"),
        // A new binary has a new page, and the files are small.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text)
}

//! `GET /`: a web page with a chat and a live view of the engine.
//!
//! The files of `server/page/` are compiled into the binary: plain HTML, CSS and JavaScript modules without a build
//! step. The content security policy allows nothing from other servers, and no inline script or style. The page needs
//! no key, but asks for one if the API requires it. Its URLs are relative, so that it works behind a proxy's path
//! prefix. Programs that ask for the page get the line by which clients of Ollama find a server.

use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::openapi::{Operation, Routes};

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const IMAGE: &str = "image/svg+xml";

/// Path, media type and contents of each file.
const FILES: [(&str, &str, &str); 11] = [
    ("/", HTML, include_str!("../../page/index.html")),
    ("/page/style.css", CSS, include_str!("../../page/style.css")),
    ("/page/engine.css", CSS, include_str!("../../page/engine.css")),
    ("/page/icon.svg", IMAGE, include_str!("../../page/icon.svg")),
    ("/page/app.js", SCRIPT, include_str!("../../page/app.js")),
    ("/page/api.js", SCRIPT, include_str!("../../page/api.js")),
    ("/page/chat.js", SCRIPT, include_str!("../../page/chat.js")),
    ("/page/markdown.js", SCRIPT, include_str!("../../page/markdown.js")),
    ("/page/engine.js", SCRIPT, include_str!("../../page/engine.js")),
    ("/page/blocks.js", SCRIPT, include_str!("../../page/blocks.js")),
    ("/page/chart.js", SCRIPT, include_str!("../../page/chart.js")),
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

/// The page for browsers, which say that they read HTML.
fn page(headers: &HeaderMap, kind: &'static str, text: &'static str) -> Response {
    let reads_html = |value: &HeaderValue| value.to_str().is_ok_and(|accepted| accepted.contains("text/html"));
    match headers.get_all(header::ACCEPT).iter().any(reads_html) {
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

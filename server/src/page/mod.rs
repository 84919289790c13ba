//! `GET /`: a page with a chat and a live view of the engine.
//!
//! The files of `server/page/` are compiled into the binary as they are: plain HTML, CSS and JavaScript modules, no build step. The
//! content policy allows nothing from another server, and no inline script or style. The page needs no key; it asks for one if the API
//! needs one. Its addresses are relative, so that it works behind a proxy's prefix.

use axum::Router;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const IMAGE: &str = "image/svg+xml";

/// Path, type and contents of every file of the page.
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

/// The routes of the page, for any state. They stand outside of the API key.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    FILES
        .into_iter()
        .fold(Router::new(), |router, (path, kind, text)| router.route(path, get(async move || file(kind, text))))
}

/// Path and media type of every file.
pub fn files() -> impl Iterator<Item = (&'static str, &'static str)> {
    FILES.into_iter().map(|(path, kind, _)| (path, kind))
}

fn file(kind: &'static str, text: &'static str) -> impl IntoResponse {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // A new binary has a new page, and the files are small.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_its_own_files_and_nothing_from_elsewhere() {
        for (path, _, text) in FILES {
            for scheme in ["http://", "https://"] {
                let foreign = text.matches(scheme).count();
                let namespace = text.matches("http://www.w3.org/").count();
                assert!(foreign == namespace || scheme == "https://" && foreign == 0, "{path} names an address");
            }
            for word in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
                assert!(!text.contains(word), "{path} has {word}: text of a model must not become markup");
            }
            for quote in ['"', '\'', '`'] {
                let begin = format!("{quote}/");
                let is_path = |rest: &str| rest.starts_with(|c: char| c.is_ascii_alphabetic());
                assert!(
                    !text.split(&begin).skip(1).any(is_path),
                    "{path} has an absolute path: it breaks behind a prefix"
                );
            }
            for import in text.split("from './").skip(1) {
                let name = import.split('\'').next().unwrap_or_default();
                assert!(FILES.iter().any(|file| file.0 == format!("/page/{name}")), "{path} imports {name}");
            }
        }
        let page = FILES[0].2;
        assert!(!page.contains("style=") && !page.contains(" onclick"), "the policy allows nothing inline");
    }
}

//! `POST /reset_prefix_cache`, as in vLLM: empties the prefix cache, for example after the weights have changed or between two
//! measurements.
//!
//! A client that may use it can make every other request slow. So the route exists only where that is harmless or wanted, as in
//! vLLM's development mode: on a server that listens on a loopback address, or with `--server-dev-mode`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, Uri};

use crate::app::App;
use crate::http::ApiError;

/// Query parameters of the route, with their meaning.
pub const PARAMETERS: [(&str, &str); 2] = [
    ("reset_running_requests", "Compute running requests again instead of refusing while they own blocks."),
    ("reset_external", "Accepted; there is no cache outside of this process."),
];

/// `POST /reset_prefix_cache`.
pub async fn reset(State(app): State<Arc<App>>, uri: Uri) -> Result<StatusCode, ApiError> {
    let [reset_running, _] = read(uri.query().unwrap_or_default())?;
    match app.engine.reset_prefix_cache(reset_running).await {
        Some(true) => {
            tracing::info!("the prefix cache was emptied");
            Ok(StatusCode::OK)
        }
        Some(false) => {
            let message =
                "requests own blocks of the cache, expected none; try again later or set reset_running_requests=true";
            Err(ApiError::new(StatusCode::CONFLICT, message))
        }
        None => Err(ApiError::unavailable("the engine has stopped; see /health")),
    }
}

/// The route where clients may not use it.
pub async fn forbidden() -> ApiError {
    ApiError::forbidden("clients may not reset the prefix cache of this server; start it with --server-dev-mode")
}

/// Reads the values of [`PARAMETERS`]. As in vLLM, other parameters are ignored.
fn read(query: &str) -> Result<[bool; 2], ApiError> {
    let mut values = [false; 2];
    for (name, text) in query.split('&').filter_map(|pair| pair.split_once('=')) {
        let Some(at) = PARAMETERS.iter().position(|(known, _)| *known == name) else { continue };
        values[at] = match text.to_ascii_lowercase().as_str() {
            "true" | "1" => true,
            "false" | "0" => false,
            _ => return Err(ApiError::wrong(name, &text.into(), "true or false")),
        };
    }
    Ok(values)
}

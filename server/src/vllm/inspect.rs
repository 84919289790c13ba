//! `GET /load`, `GET /server_info`, `GET /tokenizer_info`, as in vLLM: what the server does, and with which model and tokenizer.

use std::path::Path;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::http::ApiError;

/// Longest `tokenizer_config.json` that is returned, in bytes.
const MAX_CONFIG: u64 = 16 << 20;

/// `GET /load`: the number of requests that have not ended.
pub async fn load(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"server_load": app.engine.num_unfinished()}))
}

/// `GET /server_info`: the model, the cache and the choices made at the start; with `config_format=json` as an object, otherwise as lines.
pub async fn server_info(State(app): State<Arc<App>>, uri: Uri) -> Result<Json<Value>, ApiError> {
    let format = uri.query().and_then(|query| query.split('&').find_map(|pair| pair.strip_prefix("config_format=")));
    let info = app.engine.info();
    let config = match format.unwrap_or("text") {
        "json" => json!({
            "model_config": {
                "model": app.options.root,
                "served_model_name": app.model,
                "architecture": info.architecture,
                "max_model_len": app.context(),
                "vocab_size": info.vocab_size,
                "num_parameters": info.num_parameters,
            },
            "cache_config": {"block_size": info.block_size, "num_gpu_blocks": info.num_blocks},
            "notes": info.notes,
        }),
        "text" => info.notes.join("\n").into(),
        other => return Err(ApiError::wrong("config_format", &other.into(), "text or json")),
    };
    Ok(Json(json!({"vllm_config": config, "version": env!("CARGO_PKG_VERSION")})))
}

/// `GET /tokenizer_info`: the contents of `tokenizer_config.json` if the model has one, and the chat template.
pub async fn tokenizer_info(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let read = app.clone();
    let config = tokio::task::spawn_blocking(move || config(&read.options.root)).await;
    let mut config = config.map_err(|error| ApiError::internal(format!("reading the file failed: {error}")))?;
    config.entry("tokenizer_class").or_insert("PreTrainedTokenizerFast".into());
    config.entry("model_max_length").or_insert(app.context().into());
    let template = app.engine.chat_template().and_then(|template| template.source().map(str::to_string));
    config.insert("chat_template".into(), template.into());
    config.insert("vocab_size".into(), app.vocab().into());
    Ok(Json(config.into()))
}

/// The contents of `tokenizer_config.json` of a checkpoint folder; empty if there is none.
fn config(root: &str) -> Map<String, Value> {
    let path = Path::new(root).join("tokenizer_config.json");
    let is_short = std::fs::metadata(&path).is_ok_and(|file| file.is_file() && file.len() <= MAX_CONFIG);
    let text = is_short.then(|| std::fs::read(&path).ok()).flatten();
    text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

/// The routes where clients may not use them.
pub async fn forbidden() -> ApiError {
    ApiError::forbidden("clients may not see how this server is configured; start it with --server-dev-mode")
}

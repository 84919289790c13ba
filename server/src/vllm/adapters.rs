//! `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, with vLLM's fields, messages and error types.
//!
//! A client names a folder of this machine, which the server reads. So the routes exist only where that is harmless or wanted: on a
//! server that listens on a loopback address, or with `--allow-runtime-lora-updating`. Of the folder, the server reads
//! `adapter_config.json` and `adapter_model.safetensors`, after checking their sizes.

use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use engine::AdapterError;

use crate::app::App;
use crate::http::ApiError;
use crate::request::{Cost, Fields, MAX_SHORT, Work, body};

/// Maximum number of bytes of a path.
const MAX_PATH: usize = 4096;

/// The fields of a request to load an adapter.
pub struct LoadRequest {
    name: String,
    path: String,
    replace: bool,
}

impl LoadRequest {
    /// Reads the fields.
    pub fn read(_: &Work, fields: &Fields<'_>) -> Result<LoadRequest, ApiError> {
        let name = adapter_name(fields)?;
        let description = "Folder of the adapter on the machine of the server.";
        let path = fields.str("lora_path", MAX_PATH, description)?.unwrap_or_default().to_string();
        let description = "Replace the adapter of this name, if there is one.";
        Ok(LoadRequest { name, path, replace: fields.flag("load_inplace", false, description)? })
    }
}

/// Reads the name of a request to unload an adapter.
pub fn unload_name(_: &Work, fields: &Fields<'_>) -> Result<String, ApiError> {
    let name = adapter_name(fields)?;
    let description = "Accepted, but adapters have no numbers: lora_name names the adapter.";
    fields.integer("lora_int_id", (i64::MIN, i64::MAX), description)?;
    Ok(name)
}

fn adapter_name(fields: &Fields<'_>) -> Result<String, ApiError> {
    let name = fields.str("lora_name", MAX_SHORT, "Name of the adapter: model in requests.")?;
    Ok(name.unwrap_or_default().to_string())
}

/// `POST /v1/load_lora_adapter`.
pub async fn load(State(app): State<Arc<App>>, request: Request) -> Result<String, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let read = |work: &Work, fields: &Fields<'_>| Ok((LoadRequest::read(work, fields)?, Cost::default()));
    let (LoadRequest { name, path, replace }, _) = body.read(&app, read).await?;
    if name.is_empty() || path.is_empty() {
        return Err(invalid("Both 'lora_name' and 'lora_path' must be provided."));
    }
    if app.is_model(&name) {
        let problem = "has the name of the base model; expected another.";
        return Err(invalid(format!("The lora adapter '{name}' {problem}")));
    }
    app.engine.load_adapter(&name, PathBuf::from(path), replace).await.map_err(failed)?;
    tracing::info!("loaded the LoRA adapter {name:?}");
    Ok(format!("Success: LoRA adapter '{name}' added successfully."))
}

/// `POST /v1/unload_lora_adapter`: responds when the requests of the adapter have ended.
pub async fn unload(State(app): State<Arc<App>>, request: Request) -> Result<String, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let read = |work: &Work, fields: &Fields<'_>| Ok((unload_name(work, fields)?, Cost::default()));
    let (name, _) = body.read(&app, read).await?;
    if name.is_empty() {
        return Err(invalid("either 'lora_name' and 'lora_int_id' needs to be provided."));
    }
    app.engine.unload_adapter(&name).await.map_err(failed)?;
    tracing::info!("removed the LoRA adapter {name:?}");
    Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
}

/// Both routes where clients may not change adapters.
pub async fn forbidden() -> ApiError {
    let message = "clients may not load adapters on this server; start it with --allow-runtime-lora-updating";
    ApiError::forbidden(message)
}

fn failed(error: AdapterError) -> ApiError {
    let message = error.to_string();
    match error {
        AdapterError::AlreadyLoaded(_) | AdapterError::NoName | AdapterError::Unloading(_) => invalid(message),
        AdapterError::NotFound(_) => ApiError::of_kind(StatusCode::NOT_FOUND, "NotFoundError", message),
        AdapterError::Read(error) if error.is_missing() => {
            ApiError::of_kind(StatusCode::NOT_FOUND, "NotFoundError", message)
        }
        AdapterError::Closed => ApiError::unavailable(message),
        _ => ApiError::of_kind(StatusCode::BAD_REQUEST, "BadRequestError", message),
    }
}

fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::of_kind(StatusCode::BAD_REQUEST, "InvalidUserInput", message)
}

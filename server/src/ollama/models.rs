//! What is served, and requests to change that.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::{Request, State};
use axum::response::Response;
use engine::Task;
use serde_json::{Value, json};
use text::ReasoningFormat;

use super::output::time;
use super::request::served;
use crate::app::App;
use crate::http::ApiError;
use crate::http::json::response;
use crate::request::{Cost, Fields, MAX_SHORT, Work, body};

/// The version of the API that is served here. Clients compare it with what they need.
const VERSION: &str = "0.12.6";

/// Seconds until a model is unloaded that never is: Go's longest duration, as in Ollama.
const NEVER: u64 = i64::MAX as u64 / 1_000_000_000;

/// `GET /api/version`.
pub async fn version() -> Json<Value> {
    Json(json!({"version": VERSION}))
}

/// `GET /api/tags`.
pub async fn tags(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"models": list(&app)}))
}

/// `GET /api/ps`: all models are loaded, and stay so.
pub async fn ps(State(app): State<Arc<App>>) -> Json<Value> {
    let mut models = list(&app);
    for model in &mut models {
        model["expires_at"] = time(SystemTime::now() + Duration::from_secs(NEVER)).into();
        model["size_vram"] = model["size"].clone();
        model["context_length"] = app.context().into();
    }
    Json(json!({"models": models}))
}

/// The served model under each of its names, and its adapters.
fn list(app: &App) -> Vec<Value> {
    let adapters = app.engine.adapters().into_iter().filter(|adapter| !adapter.is_unloading);
    let names = std::iter::once(&app.model).chain(&app.aliases).cloned();
    let names = names.chain(adapters.map(|adapter| adapter.name));
    let (size, details) = (size(&app.options.root), details(app));
    let one = |name: String| {
        // A name without a tag has this one.
        let name = if name.contains(':') { name } else { format!("{name}:latest") };
        let digest = digest(app, &name);
        json!({"name": name, "model": name, "modified_at": started(app), "size": size, "digest": digest, "details": details})
    };
    names.map(one).collect()
}

fn started(app: &App) -> String {
    time(UNIX_EPOCH + Duration::from_secs(app.created))
}

/// Size of the weights' files in bytes; 0 if they are not files.
fn size(root: &str) -> u64 {
    let root = Path::new(root);
    let bytes = |path: &Path| std::fs::metadata(path).map_or(0, |file| file.len());
    let is_weights = |path: &Path| {
        path.extension().is_some_and(|end| ["safetensors", "gguf", "bin"].iter().any(|known| end == *known))
    };
    match std::fs::read_dir(root) {
        Ok(entries) => entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| is_weights(path))
            .map(|path| bytes(&path))
            .sum(),
        Err(_) if is_weights(root) => bytes(root),
        Err(_) => 0,
    }
}

/// A text that tells models apart, with the form of a SHA-256: the weights are not hashed.
fn digest(app: &App, name: &str) -> String {
    let info = app.engine.info();
    let part = |number: u8| {
        let mut hasher = DefaultHasher::new();
        (number, name, &app.options.root, &info.architecture, info.num_parameters).hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    };
    (0..4).map(part).collect()
}

/// `llama` of `LlamaForCausalLM`.
fn family(app: &App) -> String {
    app.engine.info().architecture.split("For").next().unwrap_or_default().to_lowercase()
}

fn details(app: &App) -> Value {
    let (family, parameters) = (family(app), app.engine.info().num_parameters as f64);
    let size = match parameters {
        n if n >= 1e9 => format!("{:.1}B", n / 1e9),
        n if n >= 1e6 => format!("{:.2}M", n / 1e6),
        n => format!("{:.2}K", n / 1e3),
    };
    let format = if app.options.root.ends_with(".gguf") { "gguf" } else { "safetensors" };
    json!({"parent_model": "", "format": format, "family": family, "families": [family], "parameter_size": size,
        "quantization_level": app.engine.info().stored_as})
}

/// Reads the name of a model, `model` or, as in older clients, `name`.
pub fn name(work: &Work, fields: &Fields<'_>) -> Result<String, ApiError> {
    let name = fields.str("model", MAX_SHORT, "Name of the model.")?;
    let name = name.or(fields.str("name", MAX_SHORT, "Older name of model.")?).unwrap_or(&work.model);
    for field in ["verbose", "insecure", "stream"] {
        fields.describe(field, "Accepted without effect.", || json!({}));
    }
    let bare = served(work, name);
    match work.is_model(bare) || work.adapter(bare).is_some() {
        true => Ok(name.to_string()),
        false => Err(ApiError::unknown_model(name, &work.model)),
    }
}

/// `POST /api/show`.
pub async fn show(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive_any_type(&app, request).await?;
    body.read(&app, |work, fields| Ok((name(work, fields)?, Cost::default()))).await?;
    let (info, family, defaults) = (app.engine.info(), family(&app), app.engine.generation_defaults());
    let mut parameters = vec![format!("num_ctx {}", app.context())];
    let number = |name: &str, value: Option<f32>| value.map(|value| format!("{name} {value}"));
    parameters.extend(number("temperature", defaults.temperature));
    parameters.extend(number("top_p", defaults.top_p));
    parameters.extend(number("min_p", defaults.min_p));
    parameters.extend(defaults.top_k.map(|k| format!("top_k {k}")));
    let has_tools = app.engine.chat_template().is_some_and(|template| template.mentions("tools"));
    let fills_in = crate::request::Infill::of(app.tokenizer()).is_some();
    let capabilities = [
        ("completion", info.generates),
        ("tools", info.generates && has_tools),
        ("thinking", info.generates && app.reasoning != ReasoningFormat::Off),
        ("insert", info.generates && fills_in),
        ("embedding", !info.generates && matches!(info.pooler.task, Task::Embed { .. })),
    ];
    let capabilities: Vec<&str> = capabilities.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect();
    let context = format!("{family}.context_length");
    let mut model_info = json!({
        "general.architecture": family,
        "general.parameter_count": info.num_parameters,
    });
    model_info[context] = app.context().into();
    Ok(response(&json!({
        "license": "",
        "modelfile": "",
        "parameters": parameters.join("\n"),
        // Clients look for the names in it.
        "template": if fills_in { "{{ .Prompt }}{{ .Suffix }}" } else { "{{ .Prompt }}" },
        "details": details(&app),
        "model_info": model_info,
        "capabilities": capabilities,
        "modified_at": started(&app),
    })))
}

/// `POST /api/pull`: a served model is there.
pub async fn pull(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive_any_type(&app, request).await?;
    body.read(&app, |work, fields| Ok((name(work, fields)?, Cost::default()))).await?;
    Ok(response(&json!({"status": "success"})))
}

/// The routes that would change what is served.
pub async fn refuse() -> ApiError {
    ApiError::forbidden("clients may not change the models of this server; start it with the model that it shall serve")
}

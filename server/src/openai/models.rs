//! `GET /v1/models` and `GET /v1/models/{name}`.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use engine::AdapterInfo;
use serde_json::{Value, json};

use crate::app::App;
use crate::http::ApiError;

/// `GET /v1/models`.
pub async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let adapters = app.engine.adapters().into_iter().filter(|adapter| !adapter.is_unloading);
    let names = std::iter::once(&app.model).chain(&app.aliases);
    let data: Vec<Value> =
        names.map(|name| describe(&app, name)).chain(adapters.map(|it| describe_adapter(&app, &it))).collect();
    Json(json!({"object": "list", "data": data}))
}

/// `GET /v1/models/{name}`.
pub async fn model(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(name) = name.map_err(|error| ApiError::invalid("model", error.body_text()))?;
    if app.is_model(&name) {
        return Ok(Json(describe(&app, &name)));
    }
    let adapter = app.adapter(&name).ok_or_else(|| ApiError::unknown_model(&name, &app.model))?;
    Ok(Json(describe_adapter(&app, &adapter)))
}

fn describe(app: &App, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": app.created,
        "owned_by": app.options.owned_by.as_deref().unwrap_or("quire"),
        "root": app.options.root,
        "parent": null,
        "max_model_len": app.context(),
    })
}

/// A LoRA adapter: a model whose parent is the served one.
fn describe_adapter(app: &App, adapter: &AdapterInfo) -> Value {
    let mut model = describe(app, &adapter.name);
    model["root"] = adapter.path.display().to_string().into();
    model["parent"] = app.model.as_str().into();
    model
}

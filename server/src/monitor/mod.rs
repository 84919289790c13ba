//! What people and programs watch: health, metrics, the state of the engine, and a web page that shows it.

pub mod page;
mod state;
mod status;
pub mod watchdog;

use axum::routing::get;

use crate::openapi::{Operation, Routes, Schema};

/// The message of a 503 while the server stops.
pub const STOPPING: &str = "the server is stopping; send requests to another";

/// Schemas of responses.
const SCHEMAS: &[Schema] = &[
    ("Health", "object", "State of a healthy server."),
    ("Health.status", "string", "Always \"ok\"."),
    ("State", "object", "State of the engine; docs/state.md defines each field."),
    ("State.model", "string", "Name of the served model."),
    ("State.max_model_len", "integer", "Maximum context length, prompt plus output."),
    ("State.version", "string", "Version of the server."),
    ("State.ranks", "object", "Numbers of ranks: tensor_parallel and pipeline_parallel."),
    ("State.adapters", "[object]", "LoRA adapters and their running and waiting requests."),
    ("State.adapters_left_out", "integer", "Number of adapters missing from the list."),
    ("State.stored", "object", "Stored records, and the work whose results will be stored."),
    ("State.uptime", "number", "Seconds since the engine started."),
    ("State.block_size", "integer", "Tokens per block."),
    ("State.blocks", "object", "Number of blocks by state."),
    ("State.map", "object", "Owners of each block."),
    ("State.requests", "[object]", "Running and waiting requests."),
    ("State.requests_left_out", "integer", "Number of requests missing from the list."),
    ("State.stats", "object", "Gauges and counters."),
    ("State.rates", "object", "Speed over the last two seconds."),
    ("State.history", "object", "Speed over the last minute."),
    ("Version", "object", "Version of the server."),
    ("Version.version", "string", "Version number."),
];

/// Adds the routes, except those of the page.
pub fn add(routes: &mut Routes) {
    routes.schemas(SCHEMAS);
    let operation = Operation::get("Check that the engine runs, takes requests and makes progress").returns("Health");
    routes.add(&["/health", "/ping"], get(status::health), operation);
    routes.add(&["/version"], get(status::version), Operation::get("Version of the server").returns("Version"));
    let operation = Operation::get("Metrics in Prometheus' text format").returns_text("text/plain");
    routes.add(&["/metrics"], get(status::metrics), operation);
    let operation = Operation::get("State of the engine: blocks, requests and speed").returns("State");
    routes.add(&["/quire/state"], get(state::state), operation);
    let operation = Operation::get("State of the engine as server-sent events").returns_text("text/event-stream");
    routes.add(&["/quire/events"], get(state::events), operation);
}

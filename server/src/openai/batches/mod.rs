//! `/v1/batches`: files of requests that run below all others, over restarts.
//!
//! | file | what it owns |
//! |---|---|
//! | `line` | a request of a batch, and its result |
//! | `state` | a batch as it is kept and shown |
//! | `run` | runs the lines of a batch to their end |
//!
//! The results are the pieces of two files, of outputs and of errors, which are numbered like the lines of the input. So a line has
//! ended if a piece has its number, and a restart runs the others.

pub mod line;
mod run;
mod state;

use axum::extract::{Path, Request};
use axum::http::Uri;
use axum::response::Response;
use serde_json::{Value, json};
use store::{Change, Kind, NewRecord, Record};

use super::files;
use super::own::Own;
use super::responses::{ComputedBy, metadata};
use crate::http::ApiError;
use crate::http::json::response;
use crate::request::{Cost, Fields, Work, body};
use crate::stored::{Query, Stored};
use line::ENDPOINTS;
pub use run::{lines_at_once, resume};
use state::Batch;

/// Greatest number of batches of a page.
const MAX_PAGE: usize = 100;

/// Time in which a batch must end, in seconds.
const WINDOW: u64 = 24 * 3600;

/// The fields of a new batch.
pub struct NewBatch {
    input_file_id: String,
    endpoint: &'static str,
    metadata: Value,
    output_ttl: Option<u64>,
}

/// Reads the fields.
pub fn read(_: &Work, fields: &Fields<'_>) -> Result<NewBatch, ApiError> {
    let file = fields.str("input_file_id", usize::MAX, "Id of an uploaded file of purpose batch.")?.map(str::to_string);
    let input_file_id = fields.required("input_file_id", file, "the id of a file")?;
    let endpoint = fields.word("endpoint", &ENDPOINTS, "The route of all lines.")?;
    let endpoint = fields.required("endpoint", endpoint, &format!("one of {}", ENDPOINTS.join(", ")))?;
    let window = fields.word("completion_window", &["24h"], "Time in which the batch must end.")?;
    fields.required("completion_window", window, "24h")?;
    let description = "How long the files of results are kept: anchor is created_at, seconds a number.";
    let output_ttl = match fields.object("output_expires_after", description)? {
        Some(after) => Some(files::expires_after(after.get("seconds").unwrap_or(&Value::Null))?.as_secs()),
        None => None,
    };
    Ok(NewBatch { input_file_id, endpoint, metadata: metadata(fields)?.into(), output_ttl })
}

/// `POST /v1/batches`.
pub async fn create(own: Own, request: Request) -> Result<Response, ApiError> {
    let Own { app, stored, owner } = &own;
    let mut body = body::receive(app, request).await?;
    let (new, _) = body.read(app, |work, fields| Ok((read(work, fields)?, Cost::default()))).await?;
    if stored.running().is_stopping() {
        return Err(ApiError::unavailable("the server is stopping; send requests to another"));
    }
    let input = files::find(&own, &new.input_file_id).await;
    let input = input.map_err(|error| if error.status() == 404 { error.with_param("input_file_id") } else { error })?;
    let input: Value = serde_json::from_slice(&input.body).unwrap_or_default();
    if input["purpose"] != "batch" {
        let found = format!("a file of purpose {}", input["purpose"]);
        return Err(ApiError::found("input_file_id", &found, "one of purpose \"batch\""));
    }
    let id = stored.fresh_id("batch")?;
    let [output, errors] = [stored.fresh_id("file")?, stored.fresh_id("file")?];
    let now = stored.store().now();
    let batch = Batch {
        endpoint: new.endpoint.to_string(),
        input_file_id: new.input_file_id,
        output_file_id: output.clone(),
        error_file_id: errors.clone(),
        metadata: new.metadata.to_string(),
        output_ttl: new.output_ttl,
        computed_by: ComputedBy::of(app),
        expires_at: now + WINDOW,
        status: "validating".to_string(),
        ..Batch::default()
    };
    // Outputs are about as long as inputs. What exceeds it takes from the rest of the store, or waits.
    let reserved = input["bytes"].as_u64().unwrap_or(0).saturating_mul(2).clamp(4096, 64 << 20);
    let file = |name: &str, reserved| {
        let body = files::body(name, "batch_output", 0);
        NewRecord { kind: Kind::File, owner: *owner, is_open: true, reserved, ttl: None, body }
    };
    let record =
        NewRecord { kind: Kind::Batch, owner: *owner, is_open: true, reserved: 4096, ttl: None, body: batch.encode() };
    stored
        .apply(vec![
            Change::Insert { id: output, record: file(&format!("{id}_output.jsonl"), reserved) },
            Change::Insert { id: errors, record: file(&format!("{id}_error.jsonl"), 4096) },
            Change::Insert { id: id.clone(), record },
        ])
        .await?;
    run::begin(app, &id);
    Ok(response(&batch.describe(&id, now)))
}

/// The batch as it is now.
fn describe(stored: &Stored, id: &str, record: &Record) -> Result<Value, ApiError> {
    let mut batch = Batch::decode(id, &record.body)?;
    if let Some(live) = stored.running().get(id) {
        let [total, completed, failed] = live.counts();
        if total > 0 {
            (batch.total, batch.completed, batch.failed) = (total, completed, failed);
        }
        if live.ended() == Some(crate::stored::Ended::Cancelled) {
            batch.status = "cancelling".to_string();
        }
    }
    Ok(batch.describe(id, record.created))
}

/// `GET /v1/batches`.
pub async fn list(own: Own, uri: Uri) -> Result<Response, ApiError> {
    let show = |id: &str, record: &Record| describe(&own.stored, id, record);
    Ok(response(&own.list(Kind::Batch, &Query::of(&uri), MAX_PAGE, |_| true, show).await?))
}

/// `GET /v1/batches/{id}`.
pub async fn get(own: Own, Path(id): Path<String>) -> Result<Response, ApiError> {
    let record = own.find(Kind::Batch, &id).await?;
    Ok(response(&describe(&own.stored, &id, &record)?))
}

/// `POST /v1/batches/{id}/cancel`. Lines that have ended keep their results.
pub async fn cancel(own: Own, Path(id): Path<String>) -> Result<Response, ApiError> {
    let record = own.find(Kind::Batch, &id).await?;
    let Own { app, stored, .. } = &own;
    if record.is_open {
        // One that was left to another server is cancelled by this one.
        if stored.running().get(&id).is_none() {
            run::begin(app, &id);
        }
        if let Some(live) = stored.running().get(&id) {
            live.cancel();
        }
    }
    Ok(response(&describe(stored, &id, &record)?))
}

/// The unfinished batch that reads a file, if there is one.
pub async fn reading(stored: &Stored, file: &str) -> Result<Option<String>, ApiError> {
    let file = file.to_string();
    let unfinished = stored.read(store::Store::unfinished).await?;
    let mut batches = unfinished.into_iter().filter(|(_, record)| record.kind == Kind::Batch);
    let reads =
        batches.find(|(id, record)| Batch::decode(id, &record.body).is_ok_and(|batch| batch.input_file_id == file));
    Ok(reads.map(|(id, _)| id))
}

/// The files of the results of a batch, if the record is one.
pub fn results(id: &str, record: &Record) -> Vec<String> {
    let batch = if record.kind == Kind::Batch { Batch::decode(id, &record.body).ok() } else { None };
    batch.map_or(Vec::new(), |batch| vec![batch.output_file_id, batch.error_file_id])
}

/// An error of the whole batch.
fn problem(code: &str, message: &str) -> String {
    json!({"code": code, "message": message, "line": null, "param": null}).to_string()
}

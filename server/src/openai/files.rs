//! `/v1/files`: uploads, and the results of batches.
//!
//! A file is a record whose parts are its pieces. It is open while it is uploaded or written, and does not exist for clients until it
//! is complete; the next start removes an upload that was cut off.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Path, Request};
use axum::http::{Uri, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use serde_json::{Value, json};
use store::{Change, Kind, NewRecord, Record};
use tokio::time::timeout;

use super::batches;
use super::own::Own;
use crate::http::ApiError;
use crate::http::json::response;
use crate::http::multipart::Multipart;
use crate::stored::{Query, Stored};

/// List of a file's pieces.
pub const PIECES: u8 = 0;

/// Size of a piece: with what the store adds, a page of 64 KiB.
const PIECE: usize = 60 << 10;

/// Pieces of an answer are read up to this size.
const READ_BYTES: usize = 256 << 10;

/// Greatest number of files of a page.
const MAX_PAGE: usize = 10_000;

/// Longest value of a field.
const MAX_FIELD: usize = 1024;

/// Purposes of uploads.
const PURPOSES: [&str; 6] = ["batch", "user_data", "assistants", "fine-tune", "vision", "evals"];

/// Longest and shortest time that a file may ask for, in seconds.
const EXPIRES_AFTER: (u64, u64) = (3600, 30 * 86400);

/// What a file is called and for, as the body of its record.
pub fn body(filename: &str, purpose: &str, bytes: u64) -> Vec<u8> {
    json!({"filename": filename, "purpose": purpose, "bytes": bytes}).to_string().into_bytes()
}

fn describe(id: &str, record: &Record) -> Value {
    let found: Value = serde_json::from_slice(&record.body).unwrap_or_default();
    json!({
        "id": id,
        "object": "file",
        "bytes": found["bytes"],
        "created_at": record.created,
        "expires_at": record.expires,
        "filename": found["filename"],
        "purpose": found["purpose"],
        "status": "processed",
        "status_details": null,
    })
}

/// A complete file of a client.
pub async fn find(own: &Own, id: &str) -> Result<Record, ApiError> {
    let record = own.find(Kind::File, id).await?;
    if record.is_open { Err(own.stored.missing(id, record.kind)) } else { Ok(record) }
}

/// Fields of an upload.
#[derive(Default)]
struct Form {
    purpose: Option<String>,
    expires_after: Option<Duration>,
    /// Name and size of the file.
    file: Option<(String, u64)>,
}

/// `POST /v1/files`.
pub async fn upload(own: Own, request: Request) -> Result<Response, ApiError> {
    let Own { app, stored, .. } = &own;
    let most = app.options.limits.max_file_bytes;
    let stated =
        request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    let (head, body) = request.into_parts();
    let mut form = Multipart::new(&head.headers, body, most)?;
    if stated.is_some_and(|length| length > most as u64) {
        return Err(ApiError::over(
            "file",
            stated.unwrap_or(0) as usize,
            most,
            "bytes",
            "send less or raise --max-file-bytes",
        ));
    }
    let id = stored.fresh_id("file")?;
    // A shutdown waits for an upload.
    let _busy = app.activity.clone();
    let received = receive(&own, (&id, stated.unwrap_or(0)), &mut form).await;
    let finished = match received {
        Ok(form) => finish(stored, &id, form).await,
        Err(error) => Err(error),
    };
    if finished.is_err() {
        // It may not have begun.
        let _ = stored.apply(vec![Change::Delete { id: id.clone() }]).await;
    }
    finished?;
    let record = find(&own, &id).await?;
    Ok(response(&describe(&id, &record)))
}

/// Receives the fields, and the file into its record.
async fn receive(
    Own { app, stored, owner }: &Own,
    (id, stated): (&str, u64),
    multipart: &mut Multipart,
) -> Result<Form, ApiError> {
    let limit = app.options.limits.body_timeout;
    let slow = |_| {
        let message =
            format!("the body is incomplete, expected {PIECE} bytes within {} s (--body-timeout)", limit.as_secs_f64());
        ApiError::new(axum::http::StatusCode::REQUEST_TIMEOUT, message)
    };
    let mut form = Form::default();
    while let Some(part) = timeout(limit, multipart.next()).await.map_err(slow)?? {
        let Some(file_name) = part.file_name.filter(|_| part.name == "file") else {
            let value = field(multipart, &part.name, limit).await?;
            match part.name.as_str() {
                "file" => return Err(ApiError::found("file", "a text", "a file, with its filename")),
                "purpose" if PURPOSES.contains(&value.as_str()) => form.purpose = Some(value),
                "purpose" => {
                    return Err(ApiError::wrong(
                        "purpose",
                        &value.into(),
                        format_args!("one of {}", PURPOSES.join(", ")),
                    ));
                }
                "expires_after[anchor]" if value != "created_at" => {
                    return Err(ApiError::wrong("expires_after.anchor", &value.into(), "created_at"));
                }
                "expires_after[seconds]" => {
                    form.expires_after = Some(expires_after(
                        &value.parse().map_or_else(|_| value.into(), |seconds: u64| seconds.into()),
                    )?)
                }
                _ => {}
            }
            continue;
        };
        if form.file.is_some() {
            return Err(ApiError::found("file", "two files", "one"));
        }
        let record = NewRecord {
            kind: Kind::File,
            owner: *owner,
            is_open: true,
            reserved: stated + stated / 8 + 4096,
            ttl: None,
            body: body("", "", 0),
        };
        stored.apply(vec![Change::Insert { id: id.to_string(), record }]).await?;
        let (mut piece, mut number, mut size) = (Vec::new(), 0, 0);
        loop {
            let full = async {
                while piece.len() < PIECE {
                    match multipart.chunk().await? {
                        Some(chunk) => piece.extend(chunk),
                        None => return Ok(true),
                    }
                }
                Ok::<_, ApiError>(false)
            };
            let is_last = timeout(limit, full).await.map_err(slow)??;
            while piece.len() >= PIECE || (is_last && !piece.is_empty()) {
                let bytes: Vec<u8> = piece.drain(..piece.len().min(PIECE)).collect();
                size += bytes.len() as u64;
                stored.apply(vec![Change::Part { id: id.to_string(), list: PIECES, number, bytes }]).await?;
                number += 1;
            }
            if is_last {
                break;
            }
        }
        form.file = Some((file_name, size));
    }
    Ok(form)
}

/// Reads the seconds of `expires_after`.
pub fn expires_after(seconds: &Value) -> Result<Duration, ApiError> {
    let (least, most) = EXPIRES_AFTER;
    let found = seconds.as_u64().filter(|seconds| (least..=most).contains(seconds));
    let expected =
        || ApiError::wrong("expires_after.seconds", seconds, format_args!("a whole number from {least} to {most}"));
    found.map(Duration::from_secs).ok_or_else(expected)
}

/// The value of a field, which is short.
async fn field(multipart: &mut Multipart, name: &str, limit: Duration) -> Result<String, ApiError> {
    let mut value = Vec::new();
    let slow =
        |_| ApiError::new(axum::http::StatusCode::REQUEST_TIMEOUT, "the body arrives too slowly; send it faster");
    while let Some(chunk) = timeout(limit, multipart.chunk()).await.map_err(slow)?? {
        value.extend(chunk);
        if value.len() > MAX_FIELD {
            return Err(ApiError::over(name, value.len(), MAX_FIELD, "bytes", "send a shorter value"));
        }
    }
    String::from_utf8(value).map_err(|_| ApiError::found(name, "bytes that are not UTF-8", "a text"))
}

/// Completes an upload.
async fn finish(stored: &Stored, id: &str, form: Form) -> Result<(), ApiError> {
    let Some((name, size)) = form.file else { return Err(ApiError::wrong("file", &Value::Null, "a file")) };
    let Some(purpose) = form.purpose else {
        return Err(ApiError::wrong("purpose", &Value::Null, format_args!("one of {}", PURPOSES.join(", "))));
    };
    let mut changes = vec![Change::Update { id: id.to_string(), body: body(&name, &purpose, size), is_open: false }];
    changes.extend(form.expires_after.map(|after| Change::Expire { id: id.to_string(), after }));
    stored.apply(changes).await
}

/// `GET /v1/files`.
pub async fn list(own: Own, uri: Uri) -> Result<Response, ApiError> {
    let query = Query::of(&uri);
    let purpose = query.get("purpose").map(str::to_string);
    let keep = move |record: &Record| {
        let is_asked = |purpose: &String| {
            serde_json::from_slice::<Value>(&record.body).is_ok_and(|body| body["purpose"] == purpose.as_str())
        };
        !record.is_open && purpose.as_ref().is_none_or(is_asked)
    };
    let show = |id: &str, record: &Record| Ok(describe(id, record));
    Ok(response(&own.list(Kind::File, &query, MAX_PAGE, keep, show).await?))
}

/// `GET /v1/files/{id}`.
pub async fn get(own: Own, Path(id): Path<String>) -> Result<Response, ApiError> {
    let record = find(&own, &id).await?;
    Ok(response(&describe(&id, &record)))
}

/// `GET /v1/files/{id}/content`.
pub async fn content(own: Own, Path(id): Path<String>) -> Result<Response, ApiError> {
    let record = find(&own, &id).await?;
    let length = describe(&id, &record)["bytes"].to_string();
    let pieces = unfold(Some((own.stored, id, 0)), |state| async move {
        let (stored, id, next) = state?;
        match read(&stored, &id, next).await {
            Ok((bytes, _)) if bytes.is_empty() => None,
            Ok((bytes, next)) => Some((Ok(Bytes::from(bytes)), Some((stored, id, next)))),
            // The length tells the client that it is not whole.
            Err(error) => Some((Err(std::io::Error::other(error.to_string())), None)),
        }
    });
    let headers = [(header::CONTENT_TYPE, "application/octet-stream".to_string()), (header::CONTENT_LENGTH, length)];
    Ok((headers, Body::from_stream(pieces)).into_response())
}

/// The next pieces of a file, and the number of the piece behind them.
pub async fn read(stored: &Stored, id: &str, from: u64) -> Result<(Vec<u8>, u64), ApiError> {
    let key = id.to_string();
    let pieces = stored.read(move |store| store.parts(&key, PIECES, from, READ_BYTES)).await?;
    let next = pieces.last().map_or(from, |(number, _)| number + 1);
    Ok((pieces.into_iter().flat_map(|(_, bytes)| bytes).collect(), next))
}

/// `DELETE /v1/files/{id}`.
pub async fn delete(own: Own, Path(id): Path<String>) -> Result<Response, ApiError> {
    find(&own, &id).await?;
    if let Some(batch) = batches::reading(&own.stored, &id).await? {
        return Err(ApiError::invalid(
            "id",
            format_args!(
                "found a file that the batch {batch} reads, expected one that no unfinished batch reads; cancel the batch first"
            ),
        ));
    }
    Ok(response(&own.delete(Kind::File, id, "file").await?))
}

//! `/v1/conversations`: lists of items that responses continue and extend.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::{Path, Request};
use axum::http::Uri;
use axum::response::Response;
use serde_json::{Value, json};
use store::{Change, Kind, NewRecord, Record};

use super::own::Own;
use super::responses::{identified, metadata, page};
use crate::app::App;
use crate::http::ApiError;
use crate::http::json::response;
use crate::request::{Cost, Fields, Work, body};
use crate::stored::{Owner, Query, Stored, refused};

/// List of the items.
const ITEMS: u8 = 0;

/// Items of one request.
const MAX_ITEMS: usize = 20;

/// The fields of a new conversation.
pub fn read(_: &Work, fields: &Fields<'_>) -> Result<(Vec<Value>, Value), ApiError> {
    Ok((items_of(fields)?, metadata(fields)?.into()))
}

fn items_of(fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let item = json!({"type": "object"});
    let items = fields.list("items", MAX_ITEMS, "the number of requests", &item, "Items of the conversation.")?;
    let items = items.cloned().unwrap_or_default();
    match items.iter().find(|item| !item.is_object()) {
        Some(other) => Err(ApiError::wrong("items", other, "a list of objects")),
        None => Ok(items),
    }
}

fn describe(id: &str, record: &Record) -> Value {
    let metadata: Value = serde_json::from_slice(&record.body).unwrap_or_default();
    json!({"id": id, "object": "conversation", "created_at": record.created, "metadata": metadata})
}

/// `POST /v1/conversations`.
pub async fn create(own: Own, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&own.app, request).await?;
    let ((items, metadata), _) = body.read(&own.app, |work, fields| Ok((read(work, fields)?, Cost::default()))).await?;
    let id = own.stored.fresh_id("conv")?;
    let record = NewRecord {
        kind: Kind::Conversation,
        owner: own.owner,
        is_open: false,
        reserved: 0,
        ttl: None,
        body: metadata.to_string().into_bytes(),
    };
    let mut changes = vec![Change::Insert { id: id.clone(), record }];
    changes.extend(append(&own.stored, &id, items).await?.0);
    own.stored.apply(changes).await?;
    let record = own.find(Kind::Conversation, &id).await?;
    Ok(response(&describe(&id, &record)))
}

/// `GET /v1/conversations/{id}`.
pub async fn get(own: Own, Path(id): Path<String>) -> Result<Response, ApiError> {
    let record = own.find(Kind::Conversation, &id).await?;
    Ok(response(&describe(&id, &record)))
}

/// `POST /v1/conversations/{id}`: replaces the metadata.
pub async fn update(own: Own, Path(id): Path<String>, request: Request) -> Result<Response, ApiError> {
    let record = own.find(Kind::Conversation, &id).await?;
    let mut body = body::receive(&own.app, request).await?;
    let (metadata, _) = body.read(&own.app, |_, fields| Ok((Value::from(metadata(fields)?), Cost::default()))).await?;
    let body = metadata.to_string().into_bytes();
    own.change(Kind::Conversation, &id, vec![Change::Replace { id: id.clone(), body: body.clone() }]).await?;
    Ok(response(&describe(&id, &Record { body, ..record })))
}

/// `DELETE /v1/conversations/{id}`.
pub async fn delete(own: Own, Path(id): Path<String>) -> Result<Response, ApiError> {
    own.find(Kind::Conversation, &id).await?;
    Ok(response(&own.delete(Kind::Conversation, id, "conversation.deleted").await?))
}

/// `GET /v1/conversations/{id}/items`.
pub async fn list_items(own: Own, Path(id): Path<String>, uri: Uri) -> Result<Response, ApiError> {
    let items = tokio::task::spawn_blocking(move || items(&own.app, &id, &own.owner, u64::MAX)).await;
    let items = items.map_err(|error| ApiError::internal(format!("reading the items failed: {error}")))??;
    Ok(response(&page(items, &Query::of(&uri))?))
}

/// `POST /v1/conversations/{id}/items`.
pub async fn add_items(own: Own, Path(id): Path<String>, request: Request) -> Result<Response, ApiError> {
    own.find(Kind::Conversation, &id).await?;
    let mut body = body::receive(&own.app, request).await?;
    let (items, _) = body.read(&own.app, |_, fields| Ok((items_of(fields)?, Cost::default()))).await?;
    let (changes, _) = append(&own.stored, &id, items).await?;
    let added = changes.iter().filter_map(|change| match change {
        Change::Part { bytes, .. } => serde_json::from_slice(bytes).ok(),
        _ => None,
    });
    let added: Vec<Value> = added.collect();
    own.change(Kind::Conversation, &id, changes).await?;
    Ok(response(&crate::stored::page_json(added, false)))
}

/// The items of a conversation up to this number.
pub fn items(app: &App, id: &str, owner: &Owner, last: u64) -> Result<Vec<Value>, ApiError> {
    let stored = app.stored()?;
    stored.find(Kind::Conversation, id, owner)?;
    let parts = stored.store().parts(id, ITEMS, 0, usize::MAX).map_err(refused)?;
    let parts = parts.into_iter().take_while(|(number, _)| *number <= last);
    Ok(parts.filter_map(|(_, bytes)| serde_json::from_slice(&bytes).ok()).collect())
}

/// The items that a response adds: those of its request and its output.
pub fn turn(input: &str, response: &str) -> Vec<Value> {
    let mut items: Vec<Value> = serde_json::from_str(input).unwrap_or_default();
    let response: Value = serde_json::from_str(response).unwrap_or_default();
    items.extend(response["output"].as_array().into_iter().flatten().cloned());
    items
}

/// The changes that append items to a conversation, and the number of the last one. Requests that run at once each append theirs:
/// no two get the same numbers.
pub async fn append(stored: &Stored, id: &str, items: Vec<Value>) -> Result<(Vec<Change>, u64), ApiError> {
    /// The last number of this process. The store knows those of earlier ones.
    static LAST: AtomicU64 = AtomicU64::new(0);
    let key = id.to_string();
    let kept = stored.read(move |store| store.part_before(&key, ITEMS, u64::MAX)).await?.unwrap_or(0);
    let count = items.len() as u64;
    let last = LAST.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| Some(last.max(kept) + count));
    let first = last.unwrap_or_else(|last| last).max(kept) + 1;
    let items = identified(items, &format!("{id} {first}"));
    let part = |(item, number): (Value, u64)| {
        let bytes = item.to_string().into_bytes();
        Change::Part { id: id.to_string(), list: ITEMS, number, bytes }
    };
    Ok((items.into_iter().zip(first..).map(part).collect(), first + count - 1))
}

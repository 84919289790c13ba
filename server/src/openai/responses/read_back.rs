//! Responses that are kept: read, deleted, cancelled, and their events from any number on.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::Path;
use axum::http::Uri;
use axum::response::Response;
use futures_util::stream::unfold;
use serde_json::Value;
use store::{Change, Kind, Record};
use tokio::sync::watch;
use tokio::time::timeout;

use super::super::own::Own;
use super::EVENTS;
use super::kept::{Kept, items_until, list};
use super::replay::Block;
use crate::app::App;
use crate::http::json::{respond, response};
use crate::http::{ApiError, sse};
use crate::stored::{Latest, Query, Stored, page_json};

/// Time after which a reader looks for news that nobody told it.
const LOOK: Duration = Duration::from_secs(1);

/// Bytes of events that are read at a time.
const READ_BYTES: usize = 64 << 10;

/// Greatest number of items of a page.
const MAX_PAGE: usize = 100;

async fn find(own: &Own, id: &str) -> Result<(Record, Kept), ApiError> {
    let record = own.find(Kind::Response, id).await?;
    let kept = Kept::decode(id, &record.body)?;
    Ok((record, kept))
}

/// The response as it is now. One that has ended stays as it was written.
fn now(stored: &Stored, id: &str, record: &Record, kept: Kept) -> Response {
    if !record.is_open {
        return respond(kept.response.into_bytes());
    }
    let mut unfinished = kept.response();
    if stored.running().get(id).is_some() {
        unfinished["status"] = "in_progress".into();
    }
    response(&unfinished)
}

/// `GET /v1/responses/{id}`, also as the stream of its events.
pub async fn get(own: Own, Path(id): Path<String>, uri: Uri) -> Result<Response, ApiError> {
    let (record, kept) = find(&own, &id).await?;
    let query = Query::of(&uri);
    let after = query.number("starting_after", (0, u64::MAX - 1))?;
    if query.flag("stream")? {
        if !kept.streams {
            let expected =
                "a response that was requested with background: true and stream: true, whose events are kept";
            return Err(ApiError::invalid("stream", format_args!("expected {expected}")));
        }
        return Ok(stream(&own.app, &id, after.map_or(0, |after| after + 1)));
    }
    if after.is_some() {
        return Err(ApiError::requires("starting_after", "stream=true"));
    }
    Ok(now(&own.stored, &id, &record, kept))
}

/// `DELETE /v1/responses/{id}`.
pub async fn delete(own: Own, Path(id): Path<String>) -> Result<Response, ApiError> {
    find(&own, &id).await?;
    end(&own.stored, &id).await;
    Ok(response(&own.delete(Kind::Response, id, "response").await?))
}

/// `POST /v1/responses/{id}/cancel`. A response that has ended is returned as it is.
pub async fn cancel(own: Own, Path(id): Path<String>) -> Result<Response, ApiError> {
    let (record, kept) = find(&own, &id).await?;
    if !kept.background {
        let expected = "a response that was requested with background: true; to end another, close its connection";
        return Err(ApiError::invalid("id", format_args!("cannot be cancelled, expected {expected}")));
    }
    if record.is_open && !end(&own.stored, &id).await {
        // Nothing runs: this server has left it.
        let mut response = kept.response();
        response["status"] = "cancelled".into();
        let kept = Kept { body: String::new(), earlier: String::new(), response: response.to_string(), ..kept };
        match own.stored.apply(vec![Change::Update { id: id.clone(), body: kept.encode(), is_open: false }]).await {
            Err(error) if error.status() == 409 => {}
            other => other?,
        }
    }
    let (record, kept) = find(&own, &id).await?;
    Ok(now(&own.stored, &id, &record, kept))
}

/// Asks running work to end and waits until it has. Returns whether any ran.
async fn end(stored: &Stored, id: &str) -> bool {
    let Some(live) = stored.running().get(id) else { return false };
    let mut news = live.news();
    live.cancel();
    while stored.running().get(id).is_some_and(|other| Arc::ptr_eq(&other, &live)) {
        let _ = timeout(LOOK, news.changed()).await;
    }
    true
}

/// `GET /v1/responses/{id}/input_items`: all items that the response continued and those of its request.
pub async fn input_items(own: Own, Path(id): Path<String>, uri: Uri) -> Result<Response, ApiError> {
    let (_, kept) = find(&own, &id).await?;
    let items = tokio::task::spawn_blocking(move || {
        let mut items = match &kept.previous {
            Some(previous) => items_until(&own.app, previous, &own.owner, usize::MAX)?,
            None => Vec::new(),
        };
        items.extend(list(&kept.input));
        Ok::<_, ApiError>(items)
    });
    let items = items.await.map_err(|error| ApiError::internal(format!("reading the items failed: {error}")))??;
    Ok(response(&page(items, &Query::of(&uri))?))
}

/// The page of a list of items that a query asks for.
pub fn page(mut items: Vec<Value>, query: &Query<'_>) -> Result<Value, ApiError> {
    let limit = query.limit(MAX_PAGE)?;
    if query.newest_first()? {
        items.reverse();
    }
    if let Some(after) = query.get("after") {
        let at = items.iter().position(|item| item["id"] == after);
        let at = at.ok_or_else(|| ApiError::wrong("after", &after.into(), "the id of an item of this list"))?;
        items.drain(..=at);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    Ok(page_json(items, has_more))
}

/// Where a reader is.
struct Reader {
    app: Arc<App>,
    id: String,
    /// Number of the next event.
    next: u64,
    /// Counts as a reader of the work while the client receives lines.
    _reads: Option<watch::Receiver<u64>>,
}

/// The stream of a response's events from this number on, to its end or that of the server.
pub fn stream(app: &Arc<App>, id: &str, next: u64) -> Response {
    let reader = Reader { app: app.clone(), id: id.to_string(), next, _reads: None };
    let events = unfold(reader, |mut reader| async move { reader.read().await.map(|lines| (lines, reader)) });
    sse::respond(Box::pin(events))
}

/// The lines of an event: its type and its JSON.
pub fn lines_of((name, event): &(String, String)) -> Vec<u8> {
    let mut lines = Vec::with_capacity(name.len() + event.len() + 16);
    sse::event(&mut lines, Some(name), |text| text.extend_from_slice(event.as_bytes()));
    lines
}

impl Reader {
    /// Waits for further events; `None` at the end.
    async fn read(&mut self) -> Option<Vec<u8>> {
        let stored = self.app.stored().ok()?.clone();
        let mut looks = false;
        loop {
            let live = stored.running().get(&self.id);
            let mut news = live.as_ref().map(|live| live.news());
            // After the subscription, so that nothing is missed.
            match live.as_ref().map_or(Latest::Unknown, |live| live.after(self.next)) {
                Latest::Events(lines, next) => {
                    (self.next, self._reads) = (next, news);
                    return Some(lines);
                }
                Latest::None if !looks => {
                    if let Some(news) = &mut news {
                        looks = timeout(LOOK, news.changed()).await.is_err();
                        continue;
                    }
                }
                Latest::None | Latest::Unknown => {}
            }
            looks = false;
            let (id, next) = (self.id.clone(), self.next);
            // The state first: what is written with the end is found after it.
            let found = stored.read(move |store| {
                let is_open = store.is_open(&id)?;
                let from = store.part_before(&id, EVENTS, next)?.unwrap_or(next);
                Ok((is_open, store.parts(&id, EVENTS, from, READ_BYTES)?))
            });
            let (is_open, blocks) = match found.await {
                Ok(found) => found,
                Err(error) => {
                    let mut lines = Vec::new();
                    sse::event(&mut lines, Some("error"), |text| crate::http::json::put(text, &error.to_json()));
                    return if std::mem::replace(&mut self.next, u64::MAX) == u64::MAX { None } else { Some(lines) };
                }
            };
            let mut lines = Vec::new();
            for (number, bytes) in blocks {
                let events = Block::decode(&bytes).unwrap_or_default().events;
                for (event, number) in events.iter().zip(number..) {
                    if number >= self.next {
                        lines.extend(lines_of(event));
                        self.next = number + 1;
                    }
                }
            }
            if !lines.is_empty() {
                self._reads = news;
                return Some(lines);
            }
            if !is_open || stored.running().is_stopping() {
                return None;
            }
            match &mut news {
                Some(news) => drop(timeout(LOOK, news.changed()).await),
                None => tokio::time::sleep(LOOK / 10).await,
            }
        }
    }
}

//! The records of one client.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use serde_json::{Value, json};
use store::{Change, Kind, Page, Record, StoreError};

use crate::app::App;
use crate::http::{ApiError, Client};
use crate::stored::{Owner, Query, Stored, page_json};

/// The store, for the client that sent a request.
pub struct Own {
    /// The server.
    pub app: Arc<App>,
    /// The store.
    pub stored: Arc<Stored>,
    /// The client's name in it.
    pub owner: Owner,
}

impl FromRequestParts<Arc<App>> for Own {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Own, ApiError> {
        let stored = app.stored()?.clone();
        let owner = stored.owner(parts.extensions.get().unwrap_or(&Client::Key(None)));
        Ok(Own { app: app.clone(), stored, owner })
    }
}

impl Own {
    /// A record of the client.
    pub async fn find(&self, kind: Kind, id: &str) -> Result<Record, ApiError> {
        let (key, owner) = (id.to_string(), self.owner);
        self.stored
            .read(move |store| Ok(store.get(&key)?.filter(|record| record.is_of(kind, &owner))))
            .await?
            .ok_or_else(|| self.stored.missing(id, kind))
    }

    /// A page of the client's records that `keep` keeps, as `describe` shows them. It has `most` or less.
    pub async fn list(
        &self,
        kind: Kind,
        query: &Query<'_>,
        most: usize,
        keep: impl Fn(&Record) -> bool + Send + 'static,
        describe: impl Fn(&str, &Record) -> Result<Value, ApiError>,
    ) -> Result<Value, ApiError> {
        let (limit, newest_first) = (query.limit(most)?, query.newest_first()?);
        let (after, owner) = (query.get("after").map(str::to_string), self.owner);
        let behind = after.clone();
        let listed = self.stored.read(move |store| {
            let page = Page { after: behind.as_deref(), limit, newest_first, keep: &keep };
            match store.list(kind, &owner, &page) {
                Err(StoreError::Missing(_)) => Ok(None),
                other => other.map(Some),
            }
        });
        let listed = listed.await?.ok_or_else(|| self.stored.missing(&after.unwrap_or_default(), kind));
        let (records, has_more) = listed?;
        let records = records.iter().map(|(id, record)| describe(id, record)).collect::<Result<_, _>>()?;
        Ok(page_json(records, has_more))
    }

    /// Makes changes of a record, which another request may have deleted.
    pub async fn change(&self, kind: Kind, id: &str, changes: Vec<Change>) -> Result<(), ApiError> {
        let done = self.stored.apply(changes).await;
        done.map_err(|error| if error.status() == 409 { self.stored.missing(id, kind) } else { error })
    }

    /// Deletes a record. Returns what the client reads of it.
    pub async fn delete(&self, kind: Kind, id: String, object: &str) -> Result<Value, ApiError> {
        self.change(kind, &id, vec![Change::Delete { id: id.clone() }]).await?;
        Ok(json!({"id": id, "object": object, "deleted": true}))
    }
}

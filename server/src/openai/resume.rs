//! Takes up the work that an earlier server left.

use std::collections::HashSet;
use std::sync::Arc;

use store::{Change, Kind};

use super::{batches, responses};
use crate::app::App;
use crate::http::ApiError;
use crate::stored::Stored;

/// Takes up unfinished work. What this server cannot continue with the same bits is left, with a reason in the log.
pub async fn resume(app: &Arc<App>, stored: &Arc<Stored>) -> Result<(), ApiError> {
    let unfinished = stored.read(store::Store::unfinished).await?;
    let (mut resumed, mut left) = (0, 0);
    let results: HashSet<String> = unfinished.iter().flat_map(|(id, record)| batches::results(id, record)).collect();
    for (id, record) in unfinished {
        let reason = match record.kind {
            Kind::Response => responses::resume(app, &id, &record),
            Kind::Batch => batches::resume(app, &id, &record),
            // Its batch completes it.
            Kind::File if results.contains(&id) => continue,
            // An upload that was cut off.
            Kind::File | Kind::Conversation => {
                stored.apply(vec![Change::Delete { id }]).await?;
                continue;
            }
        };
        match reason {
            None => {
                stored.running().note_resumed();
                resumed += 1;
            }
            Some(reason) => {
                tracing::warn!("{id} is not continued: {reason}");
                stored.running().note_left();
                left += 1;
            }
        }
    }
    if resumed + left > 0 {
        tracing::info!("unfinished work of an earlier start: {resumed} continued, {left} left");
    }
    Ok(())
}

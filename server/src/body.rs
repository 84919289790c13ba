//! A request's body becomes [`Fields`]: content type, size and JSON are checked here, once for all routes.
//!
//! JSON takes time to parse, to read and even to drop. All of that happens in one place, [`Received::read`], which moves
//! all but small bodies off the threads that serve everybody else ([`super::work`]).
//!
//! The bytes of a body are taken from the budget of all requests as they arrive, and given back when the request's
//! parsed form no longer needs them; from then on the request holds what its [`Cost`] says, until it is answered. A request for
//! which nothing is left is answered 429 at once: waiting would only move the queue from the client to the server.

use std::sync::Arc;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::header;
use futures_util::StreamExt;
use serde_json::Value;
use tokio::time::timeout;

use super::app::App;
use super::call;
use super::connection::Busy;
use super::cost::{Cost, Reserved};
use super::error::ApiError;
use super::fields::Fields;
use super::origin;
use super::work::Work;

/// A body that is refused is read and dropped up to so many times the limit, so that most clients get to see the error
/// instead of a closed connection.
const DRAINED: usize = 8;

/// A body that has arrived in whole. A handler keeps it until it has its answer, which a stop waits for.
pub struct Received {
    bytes: Vec<u8>,
    reserved: Reserved,
    _busy: Busy,
}

/// Receives the body.
pub async fn receive(app: &App, request: Request) -> Result<Received, ApiError> {
    let limits = &app.limits;
    let (bytes, reserved) = timeout(limits.body_timeout, checked_bytes(app, request)).await.map_err(|_| {
        app.metrics.rejected("timeout");
        ApiError::slow(format!("the body did not arrive within {} s", limits.body_timeout.as_secs_f64()))
    })??;
    Ok(Received { bytes, reserved, _busy: app.activity.begin() })
}

impl Received {
    /// Parses the body and makes of its fields what the handler needs, and what that costs. All heavy work on a request
    /// belongs in `read`.
    pub async fn read<T: Send + 'static>(
        &mut self,
        app: &Arc<App>,
        read: impl FnOnce(&Work, &Fields<'_>) -> Result<(T, Cost), ApiError> + Send + 'static,
    ) -> Result<(T, Cost), ApiError> {
        let (bytes, reserved) = (std::mem::take(&mut self.bytes), std::mem::take(&mut self.reserved));
        let (work, _waiting) = Work::new(app.clone());
        let length = bytes.len();
        let read = move || {
            let fields = Fields::parse(&bytes, &work.limits)?;
            let (read, cost) = read(&work, &fields)?;
            cost.check(&work.limits)?;
            let streams = fields.get("stream")? == Some(&Value::Bool(true));
            Ok((read, cost, streams, reserved))
        };
        let (read, cost, streams, mut reserved) = app.lanes.run(length, read).await?;
        app.budget.resize(&mut reserved, cost.bytes()).inspect_err(|_| app.metrics.rejected("inflight"))?;
        call::keep(reserved);
        if streams {
            call::take_stream_place(app)?;
        }
        Ok((read, cost))
    }
}

async fn checked_bytes(app: &App, request: Request) -> Result<(Vec<u8>, Reserved), ApiError> {
    check_type(&request)?;
    read_bytes(app, request.into_body()).await
}

fn check_type(request: &Request) -> Result<(), ApiError> {
    origin::check_media_type(request.headers())?;
    if let Some(found) = request.headers().get(header::CONTENT_ENCODING)
        && !found.as_bytes().eq_ignore_ascii_case(b"identity")
    {
        return Err(ApiError::content_encoding(&String::from_utf8_lossy(found.as_bytes())));
    }
    Ok(())
}

async fn read_bytes(app: &App, body: Body) -> Result<(Vec<u8>, Reserved), ApiError> {
    let most = app.limits.max_body_bytes;
    // What is not written to takes no memory, and growing would copy.
    let expected = body.size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0);
    let (mut bytes, mut reserved) = (Vec::with_capacity(expected.min(most)), Reserved::default());
    let mut chunks = body.into_data_stream();
    let (mut seen, mut refused) = (0, None);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| ApiError::body(format!("the body could not be read: {error}")))?;
        seen += chunk.len();
        if seen > most {
            refused = Some(ApiError::too_large(most));
        } else if refused.is_none() {
            refused = app.budget.resize(&mut reserved, seen).err();
            if refused.is_some() {
                app.metrics.rejected("inflight");
            }
        }
        match refused {
            None => bytes.extend_from_slice(&chunk),
            Some(_) if seen <= most.saturating_mul(DRAINED) => {
                (bytes, reserved) = (Vec::new(), Reserved::default());
            }
            Some(_) => break,
        }
    }
    refused.map_or(Ok((bytes, reserved)), Err)
}

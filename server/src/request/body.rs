//! Receives request bodies: checks their content type and size, parses them, and accounts for their memory.
//!
//! Parsing JSON, reading its fields and dropping it take time. All of that happens in [`Received::read`], which moves
//! all but small bodies off the threads that serve connections ([`ParsePool`](crate::http::ParsePool)).
//!
//! The bytes of a body are taken from the memory budget of all requests when the first arrives, if the head states their
//! number, else as they arrive. They are returned once the request is parsed. From then on the request holds its [`Cost`] until it is answered. If the budget is exhausted, the request
//! is rejected with 429: waiting would only move the queue from the client to the server.
//!
//! An incomplete body must arrive at a minimum rate, [`MIN_BYTES`] in each [`TICKS`]th of `--body-timeout`. One that is
//! slower for [`PATIENCE`] such ticks is rejected with 408. If another body waits for its memory, it gives way after one
//! tick that is too slow to complete it within the time limit.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use futures_util::StreamExt;
use tokio::time::{Instant, interval_at, sleep, timeout};

use super::cost::Cost;
use super::fields::Fields;
use super::structured::compiled;
use super::work::Work;
use crate::app::App;
use crate::http::{ApiError, INLINE, LANES, Reserved, call, largest_part, origin};
use crate::settings::Limits;

/// A rejected body is read and discarded up to this many times the limit, so that most clients receive the error
/// instead of a closed connection.
const DISCARD_FACTOR: usize = 8;

/// Ticks in `--body-timeout`.
const TICKS: u32 = 60;

/// Number of bytes of an incomplete body that must arrive in a tick.
const MIN_BYTES: usize = 4 << 10;

/// Number of ticks in succession in which a body may be slower.
const PATIENCE: u32 = 10;

/// Effort of a string besides its bytes: a short text takes as long to tokenize as this many bytes of a long one.
const STRING: usize = 64;

/// A complete body. A shutdown waits while a handler holds it.
pub struct Received {
    bytes: Vec<u8>,
    reserved: Reserved,
    /// `None` for stored work, which no shutdown waits for and which holds no permit of a stream.
    busy: Option<Arc<()>>,
}

/// Receives the body of a request.
pub async fn receive(app: &App, request: Request) -> Result<Received, ApiError> {
    origin::check_media_type(request.headers())?;
    receive_checked(app, request).await
}

/// Receives the body of a request of an API whose clients do not say that it is JSON.
pub async fn receive_any_type(app: &App, request: Request) -> Result<Received, ApiError> {
    origin::check_undeclared(request.headers())?;
    receive_checked(app, request).await
}

async fn receive_checked(app: &App, request: Request) -> Result<Received, ApiError> {
    let limits = &app.options.limits;
    let (bytes, reserved) = timeout(limits.body_timeout, checked_bytes(app, request)).await.map_err(|_| {
        app.metrics.rejected("timeout");
        let seconds = limits.body_timeout.as_secs_f64();
        let message =
            format!("the body is incomplete, expected all of it within {seconds} s (--body-timeout); send it faster");
        ApiError::new(StatusCode::REQUEST_TIMEOUT, message)
    })??;
    Ok(Received { bytes, reserved, busy: Some(app.activity.clone()) })
}

impl Received {
    /// A body that was received earlier.
    pub fn stored(bytes: Vec<u8>) -> Received {
        Received { bytes, reserved: Reserved::default(), busy: None }
    }

    /// Parses the body and converts its fields with `read`, which also returns the request's cost. All expensive work
    /// on a request belongs in `read`.
    pub async fn read<T: Send + 'static>(
        &mut self,
        app: &Arc<App>,
        read: impl FnOnce(&Work, &Fields<'_>) -> Result<(T, Cost), ApiError> + Send + 'static,
    ) -> Result<(T, Cost), ApiError> {
        let (bytes, mut reserved) = (std::mem::take(&mut self.bytes), std::mem::take(&mut self.reserved));
        // Complete now.
        app.budget.resize(&mut reserved, bytes.len(), false)?;
        let (work, _waiting) = Work::new(app.clone());
        let effort = effort(&bytes, &app.options.limits);
        let read = move || {
            let fields = Fields::parse(&bytes, &work.options.limits)?;
            let (read, cost) = read(&work, &fields)?;
            cost.check(&work.options.limits)?;
            Ok((read, cost, reserved))
        };
        let (read, cost, mut reserved) = app.parse_pool.run(effort, read).await?;
        app.budget.resize(&mut reserved, cost.bytes(), false).inspect_err(|_| app.metrics.rejected("inflight"))?;
        call::hold_memory(reserved);
        if let Some(permits) = app.streams.as_ref().filter(|_| cost.streams && self.busy.is_some()) {
            let permit = permits.clone().try_acquire_owned().map_err(|_| {
                app.metrics.rejected("streams");
                let most = app.options.limits.max_concurrent_streams.unwrap_or(0);
                ApiError::busy(format!(
                    "{most} responses stream, the limit of --max-concurrent-streams; try again later"
                ))
            })?;
            call::hold_stream(permit);
        }
        Ok((read, cost))
    }
}

impl Received {
    /// Which of these fields the body has.
    pub async fn has<const N: usize>(&mut self, app: &App, names: [&'static str; N]) -> Result<[bool; N], ApiError> {
        let (bytes, options) = (std::mem::take(&mut self.bytes), app.options.clone());
        let effort = effort(&bytes, &app.options.limits);
        let read = move || {
            let fields = Fields::parse(&bytes, &options.limits)?;
            let found = names.map(|name| fields.raw(name).is_some());
            drop(fields);
            Ok((bytes, found))
        };
        let (bytes, found) = app.parse_pool.run(effort, read).await?;
        self.bytes = bytes;
        Ok(found)
    }

    /// A request with this body, for the handler of another route.
    pub fn into_request(self) -> Request {
        let mut request = Request::new(Body::from(self.bytes));
        request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        request
    }
}

/// Upper bound of the work on a body, in bytes of text to tokenize: stop strings, bad words and messages count as the texts
/// that they are.
fn effort(body: &[u8], limits: &Limits) -> usize {
    if body.len() > LANES[1].0 {
        // It has the bytes of a long text, beside which strings do not matter: fields limit their number.
        return body.len();
    }
    let strings = body.iter().filter(|&&byte| byte == b'"').count() / 2;
    let effort = body.len() + STRING * strings;
    // A field that is compiled takes milliseconds, however short it is.
    let is_compiled = |fields: Fields<'_>| compiled().any(|name| fields.raw(name).is_some());
    if effort <= INLINE && Fields::parse(body, limits).is_ok_and(is_compiled) { INLINE + 1 } else { effort }
}

async fn checked_bytes(app: &App, request: Request) -> Result<(Vec<u8>, Reserved), ApiError> {
    if let Some(found) = request.headers().get(header::CONTENT_ENCODING)
        && !found.as_bytes().eq_ignore_ascii_case(b"identity")
    {
        let found = String::from_utf8_lossy(found.as_bytes());
        let expected = "none; send the body uncompressed";
        return Err(ApiError::header(StatusCode::UNSUPPORTED_MEDIA_TYPE, "content-encoding", Some(&found), expected));
    }
    read_bytes(app, request.into_body()).await
}

async fn read_bytes(app: &App, body: Body) -> Result<(Vec<u8>, Reserved), ApiError> {
    let limits = &app.options.limits;
    let (largest, allowed) = (largest_part(limits.max_inflight_bytes), limits.max_body_bytes);
    let most = allowed.min(largest);
    let stated = body.size_hint().exact().map_or(0, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    let too_large = || {
        let flag = if largest < allowed { "--max-inflight-bytes" } else { "--max-body-bytes" };
        let message = format!("the body is too large, expected at most {most} bytes; send less or raise {flag}");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    let discarded = allowed.saturating_mul(DISCARD_FACTOR);
    if stated > discarded {
        return Err(too_large());
    }
    // Unused capacity costs no memory, but growing would copy.
    let (mut bytes, mut reserved) = (Vec::with_capacity(stated.min(most)), Reserved::default());
    let mut chunks = body.into_data_stream();
    let (mut seen, mut refused) = (0, None::<ApiError>);
    let tick = (limits.body_timeout / TICKS).max(Duration::from_millis(1));
    let mut ticks = interval_at(Instant::now() + tick, tick);
    let (mut arrived, mut slow_ticks) = (0, 0);
    loop {
        let chunk = tokio::select! {
            biased;
            chunk = chunks.next() => chunk,
            _ = ticks.tick() => {
                slow_ticks = if arrived < MIN_BYTES { slow_ticks + 1 } else { 0 };
                let is_late = arrived < MIN_BYTES.max(stated.min(most) / TICKS as usize);
                arrived = 0;
                if slow_ticks >= PATIENCE || (is_late && !reserved.is_empty() && app.budget.is_wanted()) {
                    app.metrics.rejected("timeout");
                    return Err(refused.unwrap_or_else(|| too_slow(tick)));
                }
                continue;
            }
        };
        let Some(chunk) = chunk else { break };
        let chunk = chunk
            .map_err(|error| ApiError::bad_request(format!("the body could not be read: {error}; send it again")))?;
        seen += chunk.len();
        arrived += chunk.len();
        let needed = seen.max(stated);
        if needed > most {
            refused = Some(too_large());
        } else if refused.is_none() {
            let waited;
            (waited, refused) = grow(app, &mut reserved, needed, tick).await;
            if waited {
                // The client could not send meanwhile.
                (arrived, slow_ticks) = (most, 0);
                ticks.reset();
            }
            if refused.is_some() {
                app.metrics.rejected("inflight");
            }
        }
        match refused {
            None => bytes.extend_from_slice(&chunk),
            Some(_) if seen <= discarded => {
                (bytes, reserved) = (Vec::new(), Reserved::default());
            }
            Some(_) => break,
        }
    }
    refused.map_or(Ok((bytes, reserved)), Err)
}

/// Resizes what an incomplete body holds. If there is no space, waits two ticks in which slow bodies give way. Returns whether it
/// waited, and the error.
async fn grow(app: &App, reserved: &mut Reserved, bytes: usize, tick: Duration) -> (bool, Option<ApiError>) {
    let mut result = app.budget.resize(reserved, bytes, true);
    let deadline = Instant::now() + 2 * tick;
    let waiting = result.is_err().then(|| app.budget.wait());
    while result.is_err() && Instant::now() < deadline {
        sleep(tick / 8).await;
        result = app.budget.resize(reserved, bytes, true);
    }
    (waiting.is_some(), result.err())
}

/// 408 for a body that does not arrive.
fn too_slow(tick: Duration) -> ApiError {
    let (least, seconds) = (MIN_BYTES >> 10, tick.as_secs_f64());
    let message =
        format!("the body arrives too slowly, expected at least {least} KiB every {seconds} s; send it faster");
    ApiError::new(StatusCode::REQUEST_TIMEOUT, message)
}

#[cfg(test)]
#[path = "../../tests/unit/body.rs"]
mod tests;

//! Responses in the background: accepted once they are kept, computed by a task that begins from the record, at first as after a
//! restart.
//!
//! ```text
//! POST ─▶ record (request, seed, model) ─▶ 200 queued
//!              │
//!              ▼          events, kept before they are sent
//!         task: run ──────────────────────────────────────▶ readers (GET … stream)
//!              │                                               ▲
//!              ├─ end: last events and response, in one commit ┘
//!              └─ stop or crash: the record stays; the next start runs it again and cuts what it gives as before (`replay`)
//! ```

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use engine::{Event, GenerationRequest};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use store::{Change, Kind, NewRecord, Record};
use tokio::time::{Instant, sleep, sleep_until};

use super::kept::{ComputedBy, Earlier, Kept, identified, list, take_up};
use super::output::{ResponseWriter, Status};
use super::replay::{Block, Differs, Replay};
use super::request::{Form, prepare};
use super::{EVENTS, Translated, read_back};
use crate::app::App;
use crate::http::json::response;
use crate::http::{ApiError, call};
use crate::openai::chat::Prepared;
use crate::openai::conversations;
use crate::openai::work::{Pauses, Task, spawn};
use crate::reply::{Run, fix, stream};
use crate::request::body::Received;
use crate::request::{Fields, Work};
use crate::stored::{Ended, Live, Owner, Stored, is_passing, work_of};

/// Pause before events that could not be written are written again.
const PAUSE: Duration = Duration::from_secs(1);

/// Time between two commits of events, at which those of all responses are kept together.
const PERIOD: Duration = Duration::from_millis(50);

/// Room that is reserved for a token of an answer that is kept as text, and as events.
const TOKEN_BYTES: (u64, u64) = (16, 512);
/// Room that is reserved for an answer at most.
const MAX_RESERVED: u64 = 1 << 20;

/// Keeps a request and begins its work.
pub async fn accept(app: &Arc<App>, owner: Owner, chat: Prepared, form: Form) -> Result<Response, ApiError> {
    let stored = app.stored()?;
    if stored.running().is_stopping() || app.engine.is_draining() {
        return Err(ApiError::unavailable("the server is stopping; send requests to another"));
    }
    let id = stored.fresh_id("resp")?;
    let mut request = chat.request(app)?;
    fix(&mut request, work_of(&id, false), 0);
    let (created, streams) = (time_of(&id), chat.options.stream);
    let Form { echoed, keep } = form;
    let mut writer = ResponseWriter::new(app, (id.clone(), created), &chat.options, echoed, chat.ids.len());
    let queued = serde_json::to_value(writer.queued()).unwrap_or_default();
    let kept = Kept {
        body: keep.body,
        earlier: Value::from(keep.earlier).to_string(),
        input: Value::from(identified(keep.input, &id)).to_string(),
        previous: keep.previous,
        conversation: keep.conversation.map(|id| (id, 0)),
        background: true,
        streams,
        computed_by: ComputedBy::of(app),
        asked: digest(&request),
        response: queued.to_string(),
    };
    let each = if streams { TOKEN_BYTES.1 } else { TOKEN_BYTES.0 };
    let tokens = request.params.max_tokens.unwrap_or(app.context()) as u64;
    let reserved = (tokens * each + 2 * kept.response.len() as u64 + 4096).min(MAX_RESERVED);
    let body = kept.encode();
    let record = NewRecord { kind: Kind::Response, owner, is_open: true, reserved, ttl: None, body };
    let mut changes = vec![Change::Insert { id: id.clone(), record }];
    if streams {
        writer.open(true);
        let events = std::mem::take(&mut writer.events).into_iter().map(|(name, event)| (name, text_of(&event)));
        let bytes = Block { events: events.collect(), ..Block::default() }.encode();
        changes.push(Change::Part { id: id.clone(), list: EVENTS, number: 0, bytes });
    }
    stored.apply(changes).await?;
    begin(app, &id);
    if streams { Ok(read_back::stream(app, &id, 0)) } else { Ok(response(&queued)) }
}

/// Begins the work of a record, unless it runs or the server stops.
fn begin(app: &Arc<App>, id: &str) {
    spawn(app, id, |Task { app, stored, id, live }| async move {
        call::scope(id.clone(), work_of(&id, false), attempt(&app, &stored, &id, &live)).await
    });
}

/// Takes up a record after a start. Returns why it is left.
pub fn resume(app: &Arc<App>, id: &str, record: &Record) -> Option<String> {
    take_up(app, Kept::decode(id, &record.body).map(|kept| kept.computed_by), || begin(app, id))
}

/// How a run ended.
enum Outcome {
    Over,
    Failed(ApiError),
    Ended(Ended),
    /// The record is gone.
    Gone,
}

/// Runs the work once. An error is a reason to try again.
async fn attempt(app: &Arc<App>, stored: &Arc<Stored>, id: &str, live: &Live) -> Result<(), ApiError> {
    let key = id.to_string();
    let found = stored.read(move |store| Ok((store.get(&key)?, store.parts(&key, EVENTS, 0, usize::MAX)?))).await?;
    let (Some(record), blocks) = found else { return Ok(()) };
    if !record.is_open {
        return Ok(());
    }
    let kept = Kept::decode(id, &record.body)?;
    let blocks: Vec<Block> = blocks.iter().filter_map(|(_, bytes)| Block::decode(bytes)).collect();
    let num_events = blocks.iter().map(|block| block.events.len() as u64).sum();
    let ending = Ending { stored, id, live, kept: &kept, num_events };
    if live.ended() == Some(Ended::Cancelled) {
        return ending.without_run(Status::Cancelled, None).await;
    }
    let (earlier, own) = (list(&kept.earlier), list(&kept.input));
    let read = move |work: &Work, fields: &Fields<'_>| prepare(work, fields, Earlier::Found(earlier, own));
    let prepared = Received::stored(kept.body.clone().into_bytes()).read(app, read).await;
    let ((chat, form), _) = match prepared {
        Err(error) if !is_passing(&error) => return ending.without_run(Status::Failed, Some(error)).await,
        other => other?,
    };
    let mut request = chat.request(app)?;
    fix(&mut request, work_of(id, false), 0);
    if digest(&request) != kept.asked {
        let error = ApiError::internal(
            "the settings of the server have changed since the request was accepted: its prompt or its sampling would be another; send it again",
        );
        return ending.without_run(Status::Failed, Some(error)).await;
    }
    let mut run = match Run::submit(app, vec![request]).await {
        Err(error) if !is_passing(&error) => return ending.without_run(Status::Failed, Some(error)).await,
        other => other?.counting(vec![chat.reasoning.clone()]),
    };
    let writer = ResponseWriter::new(app, (id.to_string(), time_of(id)), &chat.options, form.echoed, chat.ids.len());
    let mut translated = Translated::new(app, &chat, writer);
    let mut journal = Journal::new(stored, id, live, Replay::new(blocks));
    if kept.streams {
        translated.writer.open(true);
    }
    let outcome = match journal.take(&mut translated, None) {
        Ok(()) => journal.follow(&mut run, &mut translated).await,
        Err(differs) => differs.into(),
    };
    match outcome {
        Outcome::Gone | Outcome::Ended(Ended::Stopped) => return Ok(()),
        // The server stops, or its engine has ended: the next start takes it up.
        Outcome::Failed(error) if is_passing(&error) => {
            return if app.engine.is_draining() || !app.engine.is_alive() { Ok(()) } else { Err(error) };
        }
        Outcome::Failed(error) if !journal.replay.is_over() => {
            return ending.without_run(Status::Failed, Some(error)).await;
        }
        Outcome::Ended(Ended::Cancelled) if !journal.replay.is_over() => {
            return ending.without_run(Status::Cancelled, None).await;
        }
        Outcome::Failed(error) => translated.writer.fail(&error),
        Outcome::Ended(Ended::Cancelled) => translated.writer.close(Status::Cancelled),
        Outcome::Over => {}
    }
    // Everything is repeated, so these are new.
    let _ = journal.take(&mut translated, None);
    drop(run);
    let response = text_of(&translated.writer.response());
    ending.keep(response, std::mem::take(&mut journal.pending), journal.next).await
}

/// When a response was made. The record is made later, perhaps in another second.
fn time_of(id: &str) -> u64 {
    store::created_at(id).unwrap_or(0)
}

/// Digest of what the engine is asked.
fn digest(request: &GenerationRequest) -> String {
    let digest = Sha256::digest(format!("{request:?}"));
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text_of(json: &impl serde::Serialize) -> String {
    // Keys are strings.
    serde_json::to_string(json).unwrap_or_default()
}

impl From<Differs> for Outcome {
    fn from(_: Differs) -> Outcome {
        Outcome::Failed(ApiError::internal(
            "the continuation differs from what was sent before the restart: the model or its arithmetic has changed; send the request again",
        ))
    }
}

/// Events, with the number of the first.
type Numbered = (u64, Vec<(String, String)>);

/// What is being written: the changes, and the events that they keep.
type Writing = (Write, Vec<Change>, Numbered);

type Write = Pin<Box<dyn Future<Output = Result<(), ApiError>> + Send>>;

/// Keeps the events of a run before readers get them.
struct Journal<'a> {
    stored: &'a Arc<Stored>,
    id: &'a str,
    live: &'a Live,
    replay: Replay,
    cached_tokens: u64,
    /// Events to be kept, and the number of the first of them.
    pending: Block,
    next: u64,
    /// When they are written, if they are not the first.
    due: Instant,
    write: Option<Writing>,
}

impl<'a> Journal<'a> {
    fn new(stored: &'a Arc<Stored>, id: &'a str, live: &'a Live, replay: Replay) -> Journal<'a> {
        let pending = Block::default();
        Journal { stored, id, live, replay, cached_tokens: 0, pending, next: 0, due: Instant::now(), write: None }
    }

    /// Runs to the end.
    async fn follow(&mut self, run: &mut Run, translated: &mut Translated) -> Outcome {
        let outcome = loop {
            if Instant::now() >= self.due {
                self.begin_write(None);
            }
            let waits = self.write.is_none() && !self.pending.events.is_empty();
            tokio::select! {
                biased;
                ended = self.live.end() => break Outcome::Ended(ended),
                written = wait(&mut self.write) => if !self.written(written) { return Outcome::Gone },
                () = sleep_until(self.due), if waits => {}
                next = run.next() => match next {
                    Some((prompt, event)) => match self.event(translated, run, prompt, event) {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => break Outcome::Failed(error),
                        Err(differs) => {
                            tracing::error!("{} is not continued: the second run gives something else than the first", self.id);
                            break differs.into();
                        }
                    },
                    None => break run.failure().map_or(Outcome::Over, Outcome::Failed),
                },
            }
        };
        while self.write.is_some() && self.live.ended() != Some(Ended::Stopped) {
            let written = wait(&mut self.write).await;
            if !self.written(written) {
                return Outcome::Gone;
            }
        }
        outcome
    }

    /// Translates an event of the engine. The inner error is that of the run.
    fn event(
        &mut self,
        translated: &mut Translated,
        run: &Run,
        prompt: usize,
        event: Event,
    ) -> Result<Result<(), ApiError>, Differs> {
        match event {
            Event::Started { cached_tokens } => {
                let cached_tokens = self.replay.cached_tokens(cached_tokens);
                self.cached_tokens = cached_tokens as u64;
                Ok(stream::translate(translated, run, prompt, Event::Started { cached_tokens }))
            }
            Event::Delta(delta) => {
                for (delta, is_kept) in self.replay.cut(delta)? {
                    let cut = (delta.tokens.len() as u32, delta.text.len() as u32);
                    if let Err(error) = stream::translate(translated, run, prompt, Event::Delta(delta)) {
                        return Ok(Err(error));
                    }
                    self.take(translated, Some(cut).filter(|_| !is_kept))?;
                }
                Ok(Ok(()))
            }
            other => Ok(stream::translate(translated, run, prompt, other)),
        }
    }

    /// Takes the events that a delta gave, with its size if that is to be kept.
    fn take(&mut self, translated: &mut Translated, cut: Option<(u32, u32)>) -> Result<(), Differs> {
        self.pending.cuts.extend(cut);
        for (name, event) in translated.writer.events.drain(..) {
            let event = text_of(&event);
            match self.replay.is_new(&name, &event)? {
                true => self.pending.events.push((name, event)),
                false => self.next += 1,
            }
        }
        Ok(())
    }

    /// Begins to write what waits, or what could not be written, unless something is being written. The end of the response is
    /// written with its record.
    fn begin_write(&mut self, again: Option<(Vec<Change>, Numbered)>) {
        if self.write.is_some() || (again.is_none() && self.pending.events.is_empty()) {
            return;
        }
        let is_again = again.is_some();
        let (changes, events) = again.unwrap_or_else(|| {
            let block = Block { cached_tokens: self.cached_tokens, ..std::mem::take(&mut self.pending) };
            let number = self.next;
            self.next += block.events.len() as u64;
            let bytes = block.encode();
            (vec![Change::Part { id: self.id.to_string(), list: EVENTS, number, bytes }], (number, block.events))
        });
        self.due = self.stored.next_tick(PERIOD).into();
        let (stored, copy) = (self.stored.clone(), changes.clone());
        let write = async move {
            if is_again {
                sleep(PAUSE).await;
            }
            stored.apply(copy).await
        };
        self.write = Some((Box::pin(write), changes, events));
    }

    /// Notes the end of a write. Returns whether the record exists.
    fn written(&mut self, result: Result<(), ApiError>) -> bool {
        let Some((_, changes, (number, events))) = self.write.take() else { return true };
        match result {
            Ok(()) if self.live.has_readers() => {
                self.live.tell_events(number, events.iter().map(read_back::lines_of).collect());
            }
            Ok(()) => self.live.tell(),
            Err(error) if error.status() == 409 => return false,
            Err(_) => self.begin_write(Some((changes, (number, events)))),
        }
        true
    }
}

/// Waits for a write; forever if there is none.
async fn wait(write: &mut Option<Writing>) -> Result<(), ApiError> {
    match write {
        Some((write, ..)) => write.await,
        None => std::future::pending().await,
    }
}

/// Writes the end of a response.
struct Ending<'a> {
    stored: &'a Arc<Stored>,
    id: &'a str,
    live: &'a Live,
    kept: &'a Kept,
    num_events: u64,
}

impl Ending<'_> {
    /// Ends a response that has no run.
    async fn without_run(&self, status: Status, error: Option<ApiError>) -> Result<(), ApiError> {
        let mut response = self.kept.response();
        response["status"] = status.name().into();
        let mut last = Block::default();
        if let Some(error) = error {
            tracing::warn!("{} has failed: {error}", self.id);
            response["error"] = json!({"code": "server_error", "message": error.message()});
            let name = format!("response.{}", status.name());
            let event = json!({"type": name, "sequence_number": self.num_events, "response": response});
            last.events.push((name, event.to_string()));
        }
        self.keep(response.to_string(), last, self.num_events).await
    }

    /// Keeps the response with its last events. Tries until the store takes it.
    async fn keep(&self, response: String, last: Block, number: u64) -> Result<(), ApiError> {
        let mut kept = Kept { body: String::new(), earlier: String::new(), response, ..self.kept.clone() };
        let mut appends = kept.conversation.is_some();
        let mut pauses = Pauses::default();
        loop {
            match self.write(&mut kept, appends, &last, number).await {
                Ok(()) => break,
                Err(error) if error.status() == 409 => {
                    // It has ended or is gone, or its conversation is.
                    if !std::mem::take(&mut appends) {
                        break;
                    }
                }
                Err(_) if self.live.ended() == Some(Ended::Stopped) => return Ok(()),
                Err(_) => pauses.pause(self.live).await,
            }
        }
        self.live.tell();
        Ok(())
    }

    /// Writes the response with its last events, and appends its items to its conversation.
    async fn write(&self, kept: &mut Kept, appends: bool, last: &Block, number: u64) -> Result<(), ApiError> {
        let id = self.id.to_string();
        let mut changes = Vec::new();
        if kept.streams && !last.events.is_empty() {
            changes.push(Change::Part { id: id.clone(), list: EVENTS, number, bytes: last.encode() });
        }
        if let Some((conversation, at)) = kept.conversation.as_mut().filter(|_| appends) {
            let items = conversations::turn(&kept.input, &kept.response);
            let (more, last) = conversations::append(self.stored, conversation, items).await?;
            *at = last;
            changes.extend(more);
        }
        changes.push(Change::Update { id, body: kept.encode(), is_open: false });
        self.stored.apply(changes).await
    }
}

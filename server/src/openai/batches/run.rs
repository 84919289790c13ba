//! Runs the lines of a batch to their end: each exactly once, as far as anyone can see.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use store::{Change, Record};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::line::{Done, Line, repeated, unsent};
use super::problem;
use super::state::Batch;
use crate::app::App;
use crate::http::{ApiError, call};
use crate::openai::files;
use crate::openai::responses::take_up;
use crate::openai::work::{Task, spawn};
use crate::stored::{Ended, Live, Owner, Stored};

/// Number of lines of a batch that run at once: as many as a step takes, and as many as that where a step takes few, so that some wait.
pub fn lines_at_once(app: &App) -> usize {
    app.engine.info().max_num_seqs.max(64)
}

/// Greatest number of lines of a batch.
const MAX_LINES: u64 = 50_000;

/// Pause before a failed write is tried again.
const PAUSE: Duration = Duration::from_secs(1);

/// Begins the work of a batch, unless it runs or the server stops.
pub fn begin(app: &Arc<App>, id: &str) {
    spawn(app, id, |Task { app, stored, id, live }| async move { work(&app, &stored, &id, &live).await });
}

/// Takes up a record after a start. Returns why it is left.
pub fn resume(app: &Arc<App>, id: &str, record: &Record) -> Option<String> {
    take_up(app, Batch::decode(id, &record.body).map(|batch| batch.computed_by), || begin(app, id))
}

/// Why the lines that are left do not run.
#[derive(Clone, Copy)]
struct Skip {
    code: &'static str,
    message: &'static str,
    status: &'static str,
}

const EXPIRED: Skip = Skip {
    code: "batch_expired",
    message: "This request could not be executed before the completion window expired.",
    status: "expired",
};
const CANCELLED: Skip = Skip {
    code: "batch_cancelled",
    message: "This request was not executed: the batch was cancelled.",
    status: "cancelled",
};

/// Runs a batch once, from the lines that have no result. An error is a reason to try again.
async fn work(app: &Arc<App>, stored: &Arc<Stored>, id: &str, live: &Arc<Live>) -> Result<(), ApiError> {
    let key = id.to_string();
    let Some(record) = stored.read(move |store| store.get(&key)).await?.filter(|record| record.is_open) else {
        return Ok(());
    };
    let mut batch = Batch::decode(id, &record.body)?;
    if batch.total == 0 {
        match count(stored, &batch.input_file_id, app.options.limits.max_body_bytes).await? {
            Ok(total) => batch.total = total,
            Err((code, message)) => return fail(stored, id, batch, problem(code, &message)).await,
        }
        batch.enter("in_progress", stored.store().now());
        stored.apply(vec![Change::Update { id: id.to_string(), body: batch.encode(), is_open: true }]).await?;
    }
    let [completed, failed] = ended(stored, &batch).await?;
    live.count([batch.total, completed.len() as u64, failed.len() as u64]);
    let done: HashSet<u64> = completed.iter().chain(&failed).map(|(number, _)| *number).collect();
    let work = Lines {
        app: app.clone(),
        stored: stored.clone(),
        live: live.clone(),
        id: id.to_string(),
        owner: record.owner,
        batch: Arc::new(batch.clone()),
    };
    let left = batch.expires_at.saturating_sub(stored.store().now());
    let mut running = JoinSet::new();
    let skip = tokio::select! {
        run = work.run(&done, None, &mut running) => {
            run?;
            None
        }
        () = sleep(Duration::from_secs(left)) => Some(EXPIRED),
        ended = live.end() => match ended {
            Ended::Stopped => return Ok(()),
            Ended::Cancelled => Some(CANCELLED),
        },
    };
    if let Some(skip) = skip {
        // What the lines that ran have left to the store is written before its answer.
        running.shutdown().await;
        stored.apply(Vec::new()).await?;
        let done = ended(stored, &batch).await?;
        let done = done.iter().flatten().map(|(number, _)| *number).collect();
        if skip.status == "cancelled" {
            batch.enter("cancelling", stored.store().now());
        }
        work.run(&done, Some(skip), &mut running).await?;
    }
    finish(stored, id, batch, skip.map_or("completed", |skip| skip.status)).await
}

/// Numbers and sizes of the lines that have a result: of those with an output, and of those with an error.
async fn ended(stored: &Stored, batch: &Batch) -> Result<[Vec<(u64, usize)>; 2], ApiError> {
    let files = [batch.output_file_id.clone(), batch.error_file_id.clone()];
    let read = move |store: &store::Store| {
        Ok([store.part_numbers(&files[0], files::PIECES)?, store.part_numbers(&files[1], files::PIECES)?])
    };
    stored.read(read).await
}

/// Ends a batch without results.
async fn fail(stored: &Stored, id: &str, mut batch: Batch, error: String) -> Result<(), ApiError> {
    batch.errors.push(error);
    batch.enter("failed", stored.store().now());
    let mut changes = vec![Change::Update { id: id.to_string(), body: batch.encode(), is_open: false }];
    changes.extend([batch.output_file_id, batch.error_file_id].map(|id| Change::Delete { id }));
    stored.apply(changes).await
}

/// Completes the files of results and the batch.
async fn finish(stored: &Arc<Stored>, id: &str, mut batch: Batch, status: &str) -> Result<(), ApiError> {
    batch.enter("finalizing", stored.store().now());
    let files = [batch.output_file_id.clone(), batch.error_file_id.clone()];
    let sums = stored.read(move |store| {
        let sizes = [store.part_numbers(&files[0], files::PIECES)?, store.part_numbers(&files[1], files::PIECES)?];
        let (mut next, mut tokens) = (0, (0, 0));
        loop {
            let pieces = store.parts(&files[0], files::PIECES, next, 1 << 20)?;
            let Some((last, _)) = pieces.last() else { return Ok((sizes, tokens)) };
            next = last + 1;
            for (_, piece) in pieces {
                let usage =
                    serde_json::from_slice::<Value>(&piece).unwrap_or_default()["response"]["body"]["usage"].take();
                let count = |names: [&str; 2]| names.iter().find_map(|name| usage[name].as_u64()).unwrap_or(0);
                tokens.0 += count(["prompt_tokens", "input_tokens"]);
                tokens.1 += count(["completion_tokens", "output_tokens"]);
            }
        }
    });
    let (sizes, tokens) = sums.await?;
    (batch.completed, batch.failed, batch.tokens) = (sizes[0].len() as u64, sizes[1].len() as u64, tokens);
    batch.enter(status, stored.store().now());
    let mut changes = vec![Change::Update { id: id.to_string(), body: batch.encode(), is_open: false }];
    let names = [(&batch.output_file_id, "output"), (&batch.error_file_id, "error")];
    for ((file, name), pieces) in names.into_iter().zip(sizes) {
        let file = file.clone();
        if pieces.is_empty() {
            changes.push(Change::Delete { id: file });
            continue;
        }
        let bytes = pieces.iter().map(|(_, len)| *len as u64).sum();
        let body = files::body(&format!("{id}_{name}.jsonl"), "batch_output", bytes);
        changes.push(Change::Update { id: file.clone(), body, is_open: false });
        changes.extend(batch.output_ttl.map(|ttl| Change::Expire { id: file, after: Duration::from_secs(ttl) }));
    }
    stored.apply(changes).await
}

/// Number of lines of an input, or why it cannot run.
async fn count(stored: &Stored, file: &str, longest: usize) -> Result<Result<u64, (&'static str, String)>, ApiError> {
    let (mut reader, mut total) = (Reader::new(file, longest), 0);
    loop {
        match reader.next(stored).await? {
            None => break,
            Some(_) => total += 1,
        }
        if total > MAX_LINES {
            return Ok(Err((
                "too_many_tasks",
                format!("the file has more than {MAX_LINES} lines, expected at most so many; split it"),
            )));
        }
    }
    let empty = || ("empty_file", "the file has no request, expected one JSON object per line".to_string());
    Ok(if total == 0 { Err(empty()) } else { Ok(total) })
}

/// Reads the lines of a file that are not blank.
struct Reader<'a> {
    file: &'a str,
    /// Number of the next piece.
    next: u64,
    buffer: Vec<u8>,
    is_over: bool,
    longest: usize,
    /// The line is too long: its rest is skipped.
    skips: bool,
}

impl<'a> Reader<'a> {
    fn new(file: &'a str, longest: usize) -> Reader<'a> {
        Reader { file, next: 0, buffer: Vec::new(), is_over: false, longest, skips: false }
    }

    /// The next line; an inner error is that of the line.
    async fn next(&mut self, stored: &Stored) -> Result<Option<Result<String, String>>, ApiError> {
        let mut searched = 0;
        loop {
            let end = self.buffer[searched..].iter().position(|byte| *byte == b'\n').map(|at| searched + at);
            let line: Vec<u8> = match end {
                Some(end) => self.buffer.drain(..=end).collect(),
                None if self.is_over && self.buffer.is_empty() && !self.skips => return Ok(None),
                None if self.is_over => std::mem::take(&mut self.buffer),
                None => {
                    searched = self.buffer.len();
                    if searched > self.longest {
                        (self.buffer, self.skips, searched) = (Vec::new(), true, 0);
                    }
                    let (bytes, next) = files::read(stored, self.file, self.next).await?;
                    self.is_over = bytes.is_empty();
                    self.next = next;
                    self.buffer.extend(bytes);
                    continue;
                }
            };
            if std::mem::take(&mut self.skips) || line.len() > self.longest {
                let longest = self.longest;
                return Ok(Some(Err(format!(
                    "the line is too long, expected at most {longest} bytes (--max-body-bytes)"
                ))));
            }
            let text = String::from_utf8_lossy(&line);
            let text = text.trim();
            if !text.is_empty() {
                return Ok(Some(Ok(text.to_string())));
            }
            searched = 0;
        }
    }
}

/// Lines that run.
type Running = JoinSet<Result<(), ApiError>>;

/// The lines of a batch.
struct Lines {
    app: Arc<App>,
    stored: Arc<Stored>,
    live: Arc<Live>,
    id: String,
    owner: Owner,
    batch: Arc<Batch>,
}

impl Lines {
    /// Runs the lines that have not ended, or ends them as `skip` says.
    async fn run(&self, done: &HashSet<u64>, skip: Option<Skip>, running: &mut Running) -> Result<(), ApiError> {
        let mut reader = Reader::new(&self.batch.input_file_id, self.app.options.limits.max_body_bytes);
        let mut number = 0;
        let (hasher, mut names) = (RandomState::new(), HashSet::new());
        while let Some(text) = reader.next(&self.stored).await? {
            let at = number;
            number += 1;
            let parsed = match &text {
                Ok(text) => Line::parse(text, Some(&self.batch.endpoint)),
                Err(message) => Err((None, ApiError::bad_request(message.clone()))),
            };
            let name = match &parsed {
                Ok(line) => Some(&line.custom_id),
                Err((name, _)) => name.as_ref(),
            };
            let is_repeated = name.is_some_and(|name| !names.insert(hasher.hash_one(name)));
            if done.contains(&at) {
                continue;
            }
            let id = format!("batch_req_{}", call::derived_id(&self.id, at));
            let known = match (&parsed, skip) {
                (Err((name, error)), _) => Some(unsent(&id, name.as_deref(), "invalid_request", error.message())),
                (Ok(line), _) if is_repeated => {
                    Some(unsent(&id, Some(&line.custom_id), "duplicate_custom_id", &repeated(&line.custom_id)))
                }
                (Ok(line), Some(skip)) => Some(unsent(&id, Some(&line.custom_id), skip.code, skip.message)),
                (Ok(_), None) => None,
            };
            while running.len() >= lines_at_once(&self.app) {
                join(running.join_next().await)?;
            }
            let (app, stored, live, owner, batch) =
                (self.app.clone(), self.stored.clone(), self.live.clone(), self.owner, self.batch.clone());
            running.spawn(async move {
                let result = match (known, parsed) {
                    (Some(known), _) => known,
                    (None, Ok(line)) => {
                        let gives_up = || live.ended().is_some() || !app.engine.is_alive();
                        match line.run(&app, owner, &id, gives_up).await {
                            Some(result) => result,
                            // The batch ends, or the server does.
                            None => return Ok(()),
                        }
                    }
                    (None, Err(_)) => return Ok(()),
                };
                keep(&stored, &live, &batch, at, result).await
            });
        }
        while let Some(ended) = running.join_next().await {
            join(Some(ended))?;
        }
        Ok(())
    }
}

fn join(ended: Option<Result<Result<(), ApiError>, tokio::task::JoinError>>) -> Result<(), ApiError> {
    match ended {
        None => Ok(()),
        Some(Ok(result)) => result,
        Some(Err(error)) => Err(ApiError::internal(format!("a line has failed: {error}"))),
    }
}

/// Keeps the result of a line, with the end of the line. Tries until the store takes it, or the batch ends.
async fn keep(stored: &Stored, live: &Live, batch: &Batch, number: u64, result: Done) -> Result<(), ApiError> {
    let file = if result.is_error { &batch.error_file_id } else { &batch.output_file_id };
    let bytes = format!("{}\n", result.text).into_bytes();
    let change = Change::Part { id: file.clone(), list: files::PIECES, number, bytes };
    loop {
        match stored.apply(vec![change.clone()]).await {
            Ok(()) => break,
            Err(error) if error.status() == 409 || live.ended() == Some(Ended::Stopped) => return Err(error),
            Err(error) => {
                tracing::warn!("the result of a line waits: {error}");
                sleep(PAUSE).await;
            }
        }
    }
    live.count_line(result.is_error);
    Ok(())
}

//! Requests of a program that embeds the server: the bodies of the routes, as the same JSON, without HTTP.
//!
//! The readers are those of the routes, so a field has one name, one default and one check. What differs is the length: a limit of
//! tokens that exceeds the rest of the context is cut to it, and not refused, as in vLLM's Python classes.
//!
//! ```
//! use std::sync::Arc;
//! use engine::{AsyncEngine, EngineConfig};
//! use server::{App, ServerOptions, local};
//!
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! let engine = AsyncEngine::start(EngineConfig::default(), &|_, _| {})?;
//! let app = Arc::new(App::new(engine, local::options(ServerOptions::default())));
//! let body = br#"{"prompt": "The capital of France is", "max_tokens": 5, "temperature": 0}"#;
//! let request = local::prepare(&app, local::Route::Completions, body)?;
//! let mut run = local::Run::submit(&app, vec![request]).await?;
//! while let Some((prompt, event)) = run.next().await {
//!     println!("{prompt}: {event:?}");
//! }
//! assert!(run.failure().is_none());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::io::{self, BufRead, Read, Write};
use std::sync::Arc;

use engine::GenerationRequest;
use text::ReasoningFormat;
use tokio::task::JoinSet;

use crate::app::App;
use crate::http::ApiError;
use crate::openai::batches::line::{Line, unsent};
use crate::openai::batches::lines_at_once;
use crate::openai::chat::{ChatRequest, Prepared};
use crate::openai::completions::CompletionRequest;
use crate::openai::embeddings;
pub use crate::reply::{Run, failed};
use crate::request::{Fields, Work, pooled, prompts};
use crate::settings::{Limits, ServerOptions};
use crate::vllm::pooling::{score::prepare_score, vectors};
use crate::vllm::sleep as sleeping;

/// Greatest number of sequences per prompt, that of vLLM.
const MAX_N: usize = 16384;

/// The route whose body a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/embeddings`.
    Embeddings,
    /// `/classify`.
    Classify,
}

/// Settings for the requests of the program itself: no limits of what strangers may ask for, templates in requests are rendered,
/// and reasoning stays in the text unless a parser is set.
pub fn options(settings: ServerOptions) -> ServerOptions {
    // Sums of sizes must not overflow.
    let most = usize::MAX >> 8;
    ServerOptions {
        trust_request_chat_template: true,
        reasoning_parser: settings.reasoning_parser.or(Some(ReasoningFormat::Off)),
        limits: Limits {
            max_inflight_bytes: most,
            max_json_values: most,
            max_request_tokens: most,
            max_prompts: most,
            max_n: MAX_N,
            max_sequences: most,
            max_logprob_entries: most,
            max_stop: most,
            max_stop_token_ids: most,
            max_allowed_token_ids: most,
            max_bad_words: most,
            max_logit_bias: most,
            max_messages: most,
            max_tools: most,
            ..settings.limits
        },
        ..settings
    }
}

/// Reads and tokenizes a body with one prompt.
///
/// # Errors
/// A field is wrong, or the prompt does not fit the context.
pub fn prepare(app: &Arc<App>, route: Route, body: &[u8]) -> Result<GenerationRequest, ApiError> {
    let (work, _waiting) = Work::new(app.clone());
    let fields = Fields::parse(body, &work.options.limits)?;
    match route {
        Route::Completions => completion(&work, &fields),
        Route::Chat => chat(&work, &fields),
        Route::Embeddings => {
            let ((requests, _), _) = embeddings::prepare(&work, &fields)?;
            only("input", requests)
        }
        Route::Classify => {
            let ((requests, _), _) = vectors::prepare_classes(&work, &fields)?;
            only("input", requests)
        }
    }
}

/// What a route returns of a vector that the engine gave: its first elements, the scores of logits.
pub fn finish(app: &App, vector: Vec<f32>, dimensions: Option<usize>, use_activation: Option<bool>) -> Vec<f32> {
    pooled::finish(app.pooler(), vector, dimensions, use_activation)
}

/// Runs a body of `/score` to its end. Returns the token ids and the score of each pair.
///
/// # Errors
/// A field is wrong, a prompt does not fit the context, or the engine has failed.
pub async fn score(app: &Arc<App>, body: &[u8]) -> Result<Vec<(Vec<u32>, f32)>, ApiError> {
    let (plan, pooled) = {
        let (work, _waiting) = Work::new(app.clone());
        let fields = Fields::parse(body, &work.options.limits)?;
        prepare_score(&work, &fields)?.0
    };
    let ids = plan.token_ids();
    let (scores, _) = plan.scores(app, pooled.use_activation).await?;
    Ok(ids.into_iter().zip(scores).collect())
}

/// Gives memory back, as `/sleep` does with these parameters.
///
/// # Errors
/// A parameter has another value, requests are unfinished, or this engine cannot sleep at this level.
pub async fn sleep(app: &App, level: i64, mode: &str) -> Result<(), ApiError> {
    sleeping::fall_asleep(app, &format!("level={level}&mode={mode}")).await
}

/// Takes the memory again, as `/wake_up` does.
///
/// # Errors
/// Memory cannot be allocated, or the weights cannot be read.
pub async fn wake_up(app: &App) -> Result<(), ApiError> {
    sleeping::wake(app).await
}

/// The metrics of `/metrics`, which count requests of the program too, in Prometheus' text format.
pub fn metrics(app: &App) -> String {
    app.metrics_page()
}

/// Renders the prompt of a body of [`Route::Chat`].
///
/// # Errors
/// A field is wrong, or the template refuses the messages.
pub fn render(app: &Arc<App>, body: &[u8]) -> Result<String, ApiError> {
    let (work, _waiting) = Work::new(app.clone());
    let fields = Fields::parse(body, &work.options.limits)?;
    ChatRequest::read(&work, &fields)?.conversation.render(app)
}

/// Numbers of the lines of a batch: those with an output, and those with an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchCounts {
    /// Lines that were answered.
    pub completed: usize,
    /// Lines that were refused or have failed.
    pub failed: usize,
}

/// Runs the lines of a batch, as `/v1/batches` does, and writes each result when it is complete. Blank lines are skipped, and a line
/// that is wrong has an error as its result.
///
/// # Errors
/// The input cannot be read, the output cannot be written, or the engine has ended.
pub async fn run_batch(
    app: &Arc<App>,
    input: &mut impl BufRead,
    output: &mut impl Write,
    mut progress: impl FnMut(BatchCounts),
) -> io::Result<BatchCounts> {
    let (mut counts, mut running, mut number) = (BatchCounts::default(), JoinSet::new(), 0_u64);
    let longest = app.options.limits.max_body_bytes as u64;
    let mut is_over = false;
    loop {
        while !is_over && running.len() < lines_at_once(app) {
            let mut text = Vec::new();
            is_over = input.take(longest + 1).read_until(b'\n', &mut text)? == 0;
            if text.len() as u64 > longest {
                let message = format!("line {}: expected at most {longest} bytes (--max-body-bytes)", number + 1);
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
            let text = String::from_utf8_lossy(&text).trim().to_string();
            number += u64::from(!is_over);
            if text.is_empty() {
                continue;
            }
            let (app, id) = (app.clone(), format!("batch_req_{number}"));
            running.spawn(async move {
                match Line::parse(&text, None) {
                    Ok(line) => line.run(&app, [0; 32], &id, || !app.engine.is_alive()).await,
                    Err((name, error)) => Some(unsent(&id, name.as_deref(), "invalid_request", error.message())),
                }
            });
        }
        let Some(done) = running.join_next().await else { return Ok(counts) };
        let done = done.map_err(io::Error::other)?.ok_or_else(|| io::Error::other("the engine has ended"))?;
        if done.is_error {
            counts.failed += 1
        } else {
            counts.completed += 1
        }
        writeln!(output, "{}", done.text)?;
        output.flush()?;
        progress(counts);
    }
}

fn completion(work: &Work, fields: &Fields<'_>) -> Result<GenerationRequest, ApiError> {
    let CompletionRequest { mut options, add_special, prompts, .. } = CompletionRequest::read(work, fields)?;
    let limit = options.max_tokens.take().map(|(_, asked)| asked);
    let tokenized = prompts::tokenize(work, prompts, "prompt", add_special, options.truncate_prompt_tokens)?;
    let (ids, _) = only("prompt", tokenized)?;
    options.request(work, ids, limit, "prompt")
}

fn chat(work: &Work, fields: &Fields<'_>) -> Result<GenerationRequest, ApiError> {
    let (Prepared { mut options, ids, param, .. }, _) = Prepared::new(work, ChatRequest::read(work, fields)?)?;
    let limit = options.max_tokens.take().map(|(_, asked)| asked);
    options.request(work, ids, limit, param)
}

/// The only item of a list.
fn only<T>(param: &str, mut items: Vec<T>) -> Result<T, ApiError> {
    match (items.pop(), items.len()) {
        (Some(item), 0) => Ok(item),
        (_, others) => Err(ApiError::found(param, &format!("{} prompts", others + 1), "one prompt in each request")),
    }
}

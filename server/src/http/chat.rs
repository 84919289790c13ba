//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use engine::text::ReasoningParser;
use engine::{Delta, TokenLogprobs};
use serde_json::{Map, Value, json};

use super::app::{App, Reasoning};
use super::assistant::{Assistant, Said};
use super::body;
use super::error::ApiError;
use super::fields::Fields;
use super::logprobs;
use super::messages::Conversation;
use super::options::{MAX_LOGPROBS, Options, truncate};
use super::reply::{self, Envelope, Usage, choices};
use super::run::Run;
use super::stream::{self, Chunks};
use super::tools::Tools;

/// The handler.
pub async fn chat_completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let Prepared { options, ids, tools, reasoning } = body.read(&app, |app, fields| prepare(app, fields)).await?;
    let logprobs = options.params.sampling.logprobs;
    let speaker = || Assistant::new(&app, &tools, reasoning);
    let mut chat = Chat {
        app: app.clone(),
        speakers: std::iter::repeat_with(speaker).take(options.params.n).collect(),
        n: options.params.n,
        logprobs,
        return_token_ids: options.return_token_ids,
        prompt_token_ids: if options.return_token_ids { ids.clone() } else { Vec::new() },
    };
    let default = app.engine.generation_defaults().max_new_tokens;
    let (prompt_tokens, prompt_logprobs) = (ids.len(), options.params.prompt_logprobs);
    let request = options.request(&app, ids.clone(), default, "messages")?;
    let run = Run::submit(&app, vec![request]).await?;
    if options.stream {
        let envelope = Envelope::new(&app, "chatcmpl", "chat.completion.chunk");
        return Ok(stream::respond(run, chat, envelope, &options, prompt_tokens));
    }
    let (mut usage, mut reply) = (Usage { prompt_tokens, ..Usage::default() }, Map::new());
    for answer in run.collect().await? {
        usage.completion_tokens += answer.completion_tokens();
        usage.cached_tokens += answer.cached_tokens;
        reply = choices(answer.sequences.iter().map(|sequence| chat.message(sequence)).collect());
        if let (Some(k), Some(found)) = (prompt_logprobs, &answer.prompt_logprobs) {
            reply.insert("prompt_logprobs".into(), logprobs::prompt(app.tokenizer(), &ids, found, k));
        }
    }
    if options.return_token_ids {
        reply.insert("prompt_token_ids".into(), ids.into());
    }
    let envelope = Envelope::new(&app, "chatcmpl", "chat.completion");
    Ok(Json(envelope.wrap(reply, Some(usage.to_json()))).into_response())
}

/// A chat request, read.
pub struct Prepared {
    /// Sampling and limits.
    pub options: Options,
    /// The prompt.
    pub ids: Vec<u32>,
    /// What may be called.
    pub tools: Tools,
    /// Whether thoughts are split off; if so, whether the prompt has opened them.
    pub reasoning: Option<bool>,
}

impl Prepared {
    /// Renders and tokenises the conversation, and holds the model to the tools that it must call.
    pub fn new(
        app: &App,
        mut options: Options,
        tools: Tools,
        conversation: &Conversation,
    ) -> Result<Prepared, ApiError> {
        tools.hold(app, &mut options.params)?;
        let prompt = conversation.render(app)?;
        let opened = match app.reasoning {
            Reasoning::Off => None,
            Reasoning::Tags => Some(ReasoningParser::is_opened_by(&prompt)),
            Reasoning::Always => Some(true),
        };
        // A grammar holds a text from its first letter: there are thoughts in it only if it writes the tag itself.
        let reasoning = opened.map(|opened| opened && options.params.structured_outputs.is_none());
        let ids = truncate(conversation.encode(app, &prompt)?, options.truncate_prompt_tokens);
        Ok(Prepared { options, ids, tools, reasoning })
    }
}

/// What is asked for, and the prompt.
fn prepare(app: &App, fields: &Fields) -> Result<Prepared, ApiError> {
    app.check_model(fields)?;
    fields.refuse("echo", "end the messages with the text and set continue_final_message")?;
    let mut options = Options::read(app, fields, &["max_completion_tokens", "max_tokens"])?;
    if let Some((name, 0)) = options.max_tokens {
        return Err(ApiError::wrong(name, &Value::from(0), "at least 1"));
    }
    options.params.sampling.logprobs = wanted_logprobs(fields)?;
    Prepared::new(app, options, Tools::read(fields)?, &Conversation::read(fields)?)
}

/// `logprobs` switches them on here, `top_logprobs` says how many alternatives.
fn wanted_logprobs(fields: &Fields) -> Result<Option<usize>, ApiError> {
    let top = fields.count("top_logprobs", 0, MAX_LOGPROBS)?;
    match (fields.bool("logprobs")?.unwrap_or(false), top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid("top_logprobs", "only together with logprobs: true")),
    }
}

/// A chat request in flight: all that its choices need.
struct Chat {
    app: Arc<App>,
    n: usize,
    /// One per sequence.
    speakers: Vec<Assistant>,
    /// Alternatives per token, if log-probabilities were asked for.
    logprobs: Option<usize>,
    return_token_ids: bool,
    /// For the first chunk of a stream; empty unless token ids were asked for.
    prompt_token_ids: Vec<u32>,
}

impl Chat {
    /// The choice of a whole answer.
    fn message(&mut self, sequence: &Delta) -> Value {
        let said = self.hear(sequence);
        self.choice(sequence, "message", said.message())
    }

    /// What a delta adds to the message of its sequence.
    fn hear(&mut self, delta: &Delta) -> Said {
        let speaker = self.speakers.get_mut(delta.index as usize);
        speaker.map(|speaker| speaker.hear(&delta.text, delta.finish.is_some())).unwrap_or_default()
    }

    fn choice(&self, delta: &Delta, key: &str, content: Value) -> Value {
        let (mut finish_reason, stop_reason) = reply::finish(delta.finish.as_ref());
        let called = self.speakers.get(delta.index as usize).is_some_and(Assistant::has_called);
        if called && finish_reason == "stop" {
            finish_reason = "tool_calls".into();
        }
        let mut choice = json!({
            "index": delta.index,
            key: content,
            "logprobs": self.logprobs.map(|k| logprobs::chat(self.app.tokenizer(), &delta.tokens, k)),
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        });
        if self.return_token_ids {
            choice["token_ids"] = delta.tokens.iter().map(|token| token.id).collect();
        }
        choice
    }
}

impl Chunks for Chat {
    /// Each choice begins with its role.
    fn opening(&mut self) -> Vec<Map<String, Value>> {
        let role = |index| {
            let delta = json!({"role": "assistant", "content": ""});
            choices(vec![json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null})])
        };
        let mut opening: Vec<_> = (0..self.n).map(role).collect();
        if let (true, Some(first)) = (self.return_token_ids, opening.first_mut()) {
            first.insert("prompt_token_ids".into(), std::mem::take(&mut self.prompt_token_ids).into());
        }
        opening
    }

    /// A stream can not ask for them.
    fn prompt_logprobs(&mut self, _: usize, _: Vec<Option<TokenLogprobs>>) {}

    fn chunk(&mut self, _: usize, delta: &Delta) -> Option<Map<String, Value>> {
        let content = self.hear(delta).delta();
        let tells = content.as_object().is_some_and(|content| !content.is_empty())
            || delta.finish.is_some()
            || self.logprobs.is_some()
            || self.return_token_ids;
        tells.then(|| choices(vec![self.choice(delta, "delta", content)]))
    }
}

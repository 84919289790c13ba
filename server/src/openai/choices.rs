//! What chats and completions have in common: responses and chunks that are choices in an envelope, written field by field.

use std::borrow::Cow;
use std::sync::Arc;

use axum::extract::Request;
use axum::response::Response;
use engine::{Delta, FinishReason, GenerationRequest, StopCause, TokenLogprobs};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::{Value, json};
use text::{ReasoningParser, Tokenizer};

use super::logprobs::{Logprobs, Prompt, PromptLogprobs};
use crate::app::App;
use crate::http::json::{self, Items, put};
use crate::http::{ApiError, call, sse};
use crate::reply::{CallPiece, Envelope, Piece, Run, Translator, Usage, response_id, stream};
use crate::request::{Cost, Fields, Options, StreamUsage, TOKEN_ID, Work, body};

/// A request for texts.
pub struct Generation {
    /// State of the server.
    pub app: Arc<App>,
    /// The fields of the request.
    pub options: Options,
    /// The prompts, which choices share.
    pub prompts: Vec<Arc<Prompt>>,
}

impl Generation {
    /// Tokenizer of the model.
    pub fn tokenizer(&self) -> Arc<Tokenizer> {
        self.app.engine.tokenizer().clone()
    }

    /// Whether choices have more of each token than its text.
    pub fn needs_tokens(&self) -> bool {
        self.options.params.sampling.logprobs.is_some() || self.options.return_token_ids
    }

    /// The field `prompt_logprobs` with `k` alternatives per token, if the engine has computed them.
    pub fn prompt_logprobs(&self, prompt: usize, k: Option<usize>) -> Option<(&'static str, Field)> {
        let (k, prompt) = (k?, self.prompts[prompt].clone());
        prompt.logprobs.as_ref()?;
        Some(("prompt_logprobs", Field::PromptLogprobs(PromptLogprobs { tokenizer: self.tokenizer(), prompt, k })))
    }

    fn set_prompt_logprobs(&mut self, prompt: usize, logprobs: Option<Vec<Option<TokenLogprobs>>>) {
        // No choice shares it yet.
        if let Some(prompt) = Arc::get_mut(&mut self.prompts[prompt]) {
            prompt.logprobs = logprobs;
        }
    }
}

/// A request whose response has choices.
pub trait Choices: Send + Unpin + Sized + 'static {
    /// Prefix of the id of a response, its type, and the type of a chunk.
    const NAMES: [&'static str; 3];

    /// The request.
    fn generation(&mut self) -> &mut Generation;

    /// Parsers of the reasoning of each prompt, if there may be any.
    fn reasoning(&self) -> Vec<Option<ReasoningParser>> {
        Vec::new()
    }

    /// Choice of a delta, which is a whole sequence if `is_whole`; `None` if a chunk would be empty.
    fn choice<'a>(&mut self, prompt: usize, delta: &'a Delta, is_whole: bool) -> Option<Choice<'a>>;

    /// Writes the chunks before the first event.
    fn open(&mut self, _writer: &mut ChunkWriter) {}

    /// Further fields of a whole response.
    fn more(&mut self) -> Vec<(&'static str, Field)> {
        Vec::new()
    }
}

/// A request with those of the engine, one per prompt, and their cost.
pub type Submission<C> = Result<((C, Vec<GenerationRequest>), Cost), ApiError>;

/// Responds to a request that `prepare` reads, whole or as a stream.
pub async fn respond<C: Choices>(
    app: Arc<App>,
    request: Request,
    prepare: fn(&Work, &Fields<'_>) -> Submission<C>,
) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((mut choices, requests), cost) = body.read(&app, prepare).await?;
    let generation = choices.generation();
    call::set_request_id(generation.options.request_id.take());
    let needs_tokens = generation.needs_tokens();
    let prompt_tokens = generation.prompts.iter().map(|prompt| prompt.ids.len()).sum();
    let mut usage = Usage { prompt_tokens, ..Usage::default() };
    let options = &generation.options;
    let ([prefix, whole, chunk], stream_usage) = (C::NAMES, options.stream_usage);
    let streams = options.stream;
    let envelope = Envelope::new(&app, options.adapter.as_deref(), prefix, if streams { chunk } else { whole });
    let run = Run::submit(&app, requests).await?.counting(choices.reasoning());
    if streams {
        let mut writer = ChunkWriter { envelope, usage, stream_usage, lines: Vec::new() };
        choices.open(&mut writer);
        return Ok(stream::respond(run, Chunks { choices, writer }));
    }
    let outputs = run.collect(needs_tokens).await?;
    json::off_reactor(cost.is_large(), move || {
        let mut sequences = Vec::new();
        for (i, output) in outputs.into_iter().enumerate() {
            usage.add(&output);
            choices.generation().set_prompt_logprobs(i, output.prompt_logprobs);
            sequences.extend(output.sequences.into_iter().map(|sequence| (i, sequence)));
        }
        let mut more = choices.more();
        let params = choices.generation().options.kv_transfer_params(&app, envelope.id(), prompt_tokens);
        more.extend(params.map(|params| ("kv_transfer_params", params.into())));
        let all = sequences.iter().filter_map(|(i, sequence)| choices.choice(*i, sequence, true));
        let mut text = Vec::new();
        envelope.write(&mut text, ("choices", all), &more, Some(usage_json(&usage)));
        json::respond(text)
    })
    .await
}

/// A prompt as the engine would compute it.
#[derive(Serialize)]
struct Rendered {
    request_id: String,
    model: String,
    token_ids: Vec<u32>,
}

/// Responds with the token ids of each prompt, and generates nothing.
pub async fn render<C: Choices>(
    app: Arc<App>,
    request: Request,
    prepare: fn(&Work, &Fields<'_>) -> Submission<C>,
    is_list: bool,
) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let id = response_id(C::NAMES[0]);
    // Written in the closure, off the threads that serve connections.
    let read = move |work: &Work, fields: &Fields<'_>| {
        let ((_, requests), cost) = prepare(work, fields)?;
        let rendered = |request: GenerationRequest| Rendered {
            request_id: id.clone(),
            model: request.adapter.unwrap_or_else(|| work.model.clone()),
            token_ids: request.prompt,
        };
        let all = requests.into_iter().map(rendered);
        let reply = if is_list { json::response(&Items::new(all)) } else { json::response(&all.last()) };
        let repeated_bytes = cost.repeated_bytes + TOKEN_ID * cost.prompt_tokens;
        Ok((reply, Cost { repeated_bytes, ..cost }))
    };
    Ok(body.read(&app, read).await?.0)
}

/// The field `usage`.
fn usage_json(usage: &Usage) -> Value {
    let mut details = usage.draft_details();
    details.insert("reasoning_tokens".into(), usage.reasoning_tokens.into());
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": details,
    })
}

/// Writes chunks.
pub struct ChunkWriter {
    envelope: Envelope,
    usage: Usage,
    stream_usage: StreamUsage,
    /// Events that have not been sent.
    lines: Vec<u8>,
}

impl ChunkWriter {
    /// Writes a chunk with these choices and further fields.
    pub fn write(&mut self, choices: impl IntoIterator<Item: Serialize>, more: &[(&str, Field)]) {
        // With `include_usage` all chunks have the field, which is `null` in all but the last unless every chunk has a
        // usage.
        let usage = match self.stream_usage {
            StreamUsage { in_all: true, .. } => Some(usage_json(&self.usage)),
            StreamUsage { at_end, .. } => at_end.then_some(Value::Null),
        };
        sse::event(&mut self.lines, None, |text| self.envelope.write(text, ("choices", choices), more, usage));
    }
}

/// A stream of chunks, which ends with `[DONE]` or with an error.
struct Chunks<C> {
    choices: C,
    writer: ChunkWriter,
}

impl<C: Choices> Translator for Chunks<C> {
    fn usage(&mut self) -> &mut Usage {
        &mut self.writer.usage
    }

    fn prompt_logprobs(&mut self, prompt: usize, logprobs: Vec<Option<TokenLogprobs>>) {
        self.choices.generation().set_prompt_logprobs(prompt, Some(logprobs));
    }

    fn delta(&mut self, prompt: usize, delta: &Delta) {
        if let Some(choice) = self.choices.choice(prompt, delta, false) {
            self.writer.write([choice], &[]);
        }
    }

    fn end(&mut self, failure: Option<ApiError>) {
        let ChunkWriter { envelope, usage, stream_usage, lines } = &mut self.writer;
        if let Some(error) = failure {
            return sse::event(lines, None, |text| put(text, &error.to_json()));
        }
        if stream_usage.at_end {
            let (none, usage) = (("choices", [(); 0]), Some(usage_json(usage)));
            sse::event(lines, None, |text| envelope.write::<()>(text, none, &[], usage));
        }
        sse::event(lines, None, |text| text.extend_from_slice(b"[DONE]"));
    }

    fn write(&mut self, lines: &mut Vec<u8>) -> bool {
        let is_empty = self.writer.lines.is_empty();
        lines.append(&mut self.writer.lines);
        !is_empty
    }
}

/// A choice of a response or of a chunk.
pub struct Choice<'a> {
    /// Index among the choices.
    pub index: usize,
    /// What was generated.
    pub content: Content<'a>,
    /// Log probabilities, if requested.
    pub logprobs: Option<Logprobs<'a>>,
    /// Why the sequence ended.
    pub finish: Option<&'a FinishReason>,
    /// Whether a stop is the end of a tool call.
    pub has_called: bool,
    /// Further fields.
    pub more: Vec<(&'static str, Field)>,
}

impl Serialize for Choice<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let finish_reason = self.finish.map(|finish| match finish {
            FinishReason::Length => "length",
            FinishReason::Stop(_) if self.has_called => "tool_calls",
            FinishReason::Stop(_) => "stop",
            FinishReason::Grammar(_) | FinishReason::Error(_) => "error",
        });
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("index", &self.index)?;
        map.serialize_entry(self.content.name(), &self.content)?;
        map.serialize_entry("logprobs", &self.logprobs)?;
        map.serialize_entry("finish_reason", &finish_reason)?;
        // `stop_reason` is vLLM's: the stop string or token, `null` for an end-of-sequence token.
        match self.finish {
            Some(FinishReason::Stop(Some(StopCause::Token(id)))) => map.serialize_entry("stop_reason", id)?,
            Some(FinishReason::Stop(Some(StopCause::Text(text)))) => map.serialize_entry("stop_reason", text)?,
            _ => map.serialize_entry("stop_reason", &())?,
        }
        for (name, value) in &self.more {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

/// The content of a choice.
pub enum Content<'a> {
    /// Text of a completion.
    Text(Cow<'a, str>),
    /// A whole message of a chat.
    Message(Piece),
    /// The fields of a message that are not empty.
    Delta(Piece),
}

impl Content<'_> {
    fn name(&self) -> &'static str {
        match self {
            Content::Text(_) => "text",
            Content::Message(_) => "message",
            Content::Delta(_) => "delta",
        }
    }
}

impl Serialize for Content<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (piece, is_whole) = match self {
            Content::Text(text) => return serializer.serialize_str(text),
            Content::Message(piece) => (piece, true),
            Content::Delta(piece) => (piece, false),
        };
        let Piece { reasoning, content, calls } = piece;
        let mut map = serializer.serialize_map(None)?;
        if is_whole {
            map.serialize_entry("role", "assistant")?;
            // Without text, `content` is `null` if there is anything else.
            map.serialize_entry("content", &Some(content).filter(|text| !text.is_empty() || piece.is_empty()))?;
        }
        if is_whole && reasoning.is_empty() {
            // vLLM's clients read it of every message.
            map.serialize_entry("reasoning", &())?;
        }
        // Clients read one or the other name of the reasoning.
        for name in ["reasoning", "reasoning_content"].into_iter().filter(|_| !reasoning.is_empty()) {
            map.serialize_entry(name, reasoning)?;
        }
        if !is_whole && !content.is_empty() {
            map.serialize_entry("content", content)?;
        }
        if !calls.is_empty() {
            let calls: Vec<Value> = calls.iter().map(|call| call_json(call, !is_whole)).collect();
            map.serialize_entry("tool_calls", &calls)?;
        }
        map.end()
    }
}

/// A tool call, with its index in a delta.
fn call_json(call: &CallPiece, is_delta: bool) -> Value {
    let arguments = &call.arguments;
    let mut json = match &call.begun {
        None => json!({"function": {"arguments": arguments}}),
        Some((id, name)) => json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}),
    };
    if is_delta {
        json["index"] = call.index.into();
    }
    json
}

/// A further field of a response or of a choice. Those that may be long become JSON when they are written.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Field {
    /// JSON.
    Json(Value),
    /// Token ids; `None` is null.
    Ids(Option<Vec<u32>>),
    /// Log probabilities of a prompt.
    PromptLogprobs(PromptLogprobs),
}

impl From<Value> for Field {
    fn from(json: Value) -> Field {
        Field::Json(json)
    }
}

/// `token_ids` of a choice.
pub fn token_ids(delta: &Delta) -> (&'static str, Field) {
    ("token_ids", Field::Ids(Some(delta.tokens.iter().map(|token| token.id).collect())))
}

//! The fields of a request and its options.

use serde_json::{Map, Value, json};

use super::turns;
use crate::app::{App, LogprobFormat};
use crate::http::ApiError;
use crate::openai::chat::{ChatRequest, Prepared};
use crate::openai::completions::CompletionRequest;
use crate::request::unsupported::{EMPTY, Field, refuse};
use crate::request::{Cost, EXTENSIONS, Fields, MAX_SHORT, Translation, Work, accept, repeat_penalty};
use text::ReasoningFormat;

/// Options with their names in our routes.
const OPTIONS: [(&str, &str); 10] = [
    ("temperature", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("typical_p", "typical_p"),
    ("presence_penalty", "presence_penalty"),
    ("frequency_penalty", "frequency_penalty"),
    ("seed", "seed"),
    ("stop", "stop"),
    ("num_predict", "max_tokens"),
];

/// Names of our fields, and their names in errors here.
pub const NAMES: [(&str, &str); 13] = [
    ("temperature", "options.temperature"),
    ("top_k", "options.top_k"),
    ("top_p", "options.top_p"),
    ("min_p", "options.min_p"),
    ("typical_p", "options.typical_p"),
    ("presence_penalty", "options.presence_penalty"),
    ("frequency_penalty", "options.frequency_penalty"),
    ("seed", "options.seed"),
    ("stop", "options.stop"),
    ("max_tokens", "options.num_predict"),
    ("repetition_penalty", "options.repeat_penalty"),
    ("response_format", "format"),
    ("reasoning_effort", "think"),
];

/// Options that would change the answer: names, values that ask for nothing, and what to do instead.
const UNSUPPORTED_OPTIONS: [(&str, &[f64]); 2] = [("mirostat", &[0.0]), ("tfs_z", &[0.0, 1.0])];

/// Fields that would change the answer.
const UNSUPPORTED: [Field; 3] = [
    (&["template"], EMPTY, "use /v1/chat/completions with chat_template, or raw"),
    (&["context"], EMPTY, "send the conversation to /api/chat"),
    (&["images"], EMPTY, "remove it: this model accepts only text"),
];

/// Fields that change nothing in an answer of this server.
const ACCEPTED: [(&str, &str); 3] = [
    ("keep_alive", "Accepted without effect: the model stays loaded."),
    ("truncate", "Accepted without effect: a prompt that does not fit is refused."),
    ("shift", "Accepted without effect: an answer ends with the context."),
];

/// A request, ready to run.
pub struct Asked {
    /// Name of the model in the request.
    pub model: String,
    /// The chat; or, of a request without a prompt, which only loads the model, the reason of its end.
    pub chat: Result<Prepared, &'static str>,
}

/// Prepares a chat.
pub fn chat(work: &Work, fields: &Fields<'_>) -> Result<(Asked, Cost), ApiError> {
    work.must_generate()?;
    read_chat(work, fields)
}

/// Prepares a completion.
pub fn generate(work: &Work, fields: &Fields<'_>) -> Result<(Asked, Cost), ApiError> {
    work.must_generate()?;
    read_generate(work, fields)
}

/// The name of a served model, of which clients may have a form with a tag.
pub fn served<'a>(app: &App, name: &'a str) -> &'a str {
    let is_served = |name: &str| app.is_model(name) || app.adapter(name).is_some();
    name.strip_suffix(":latest").filter(|bare| !is_served(name) && is_served(bare)).unwrap_or(name)
}

/// Reads a chat.
pub fn read_chat(work: &Work, fields: &Fields<'_>) -> Result<(Asked, Cost), ApiError> {
    let mut body = Translation::new(work, fields, ChatRequest::read);
    let model = common(work, fields, &mut body)?;
    body.copy_all(&["tools", "logprobs", "top_logprobs"]);
    think(work, fields, &mut body)?;
    let messages = turns::read(fields, &work.options.limits)?;
    if messages.is_empty() && !fields.is_describing() {
        return Ok((Asked { chat: Err(loads(work, fields, &model)?), model }, Cost::default()));
    }
    body.set("messages", &messages);
    let (chat, cost) = prepared(work, body.read(work)?)?;
    Ok((Asked { model, chat: Ok(chat) }, cost))
}

/// Reads a completion: of a prompt as it is (`raw`), or of a chat with one question.
pub fn read_generate(work: &Work, fields: &Fields<'_>) -> Result<(Asked, Cost), ApiError> {
    let limits = &work.options.limits;
    let prompt = fields.str("prompt", limits.max_text_bytes, "The prompt; without it, the model is only loaded.")?;
    let system = fields.str("system", limits.max_text_bytes, "System message before the prompt.")?;
    let suffix = fields.str("suffix", limits.max_text_bytes, "Text after the answer, for a model that fills in.")?;
    let raw = fields.flag("raw", false, "Complete the prompt as it is, without the chat template.")?;
    let prompt = if fields.is_describing() { Some("") } else { prompt.filter(|prompt| !prompt.is_empty()) };
    let Some(prompt) = prompt else {
        let mut body = Translation::new(work, fields, ChatRequest::read);
        let model = common(work, fields, &mut body)?;
        return Ok((Asked { chat: Err(loads(work, fields, &model)?), model }, Cost::default()));
    };
    let suffix = suffix.filter(|suffix| !suffix.is_empty());
    if raw || suffix.is_some() {
        let mut body = Translation::new(work, fields, CompletionRequest::read);
        let model = common(work, fields, &mut body)?;
        if fields.get("logprobs")? == Some(&Value::Bool(true)) {
            body.set("logprobs", &fields.get("top_logprobs")?.unwrap_or(&json!(0)));
        }
        body.set("prompt", prompt);
        suffix.iter().for_each(|suffix| body.set("suffix", suffix));
        let (mut chat, cost) = Prepared::plain(work, body.read(work)?)?;
        chat.cut_limit(work);
        return Ok((Asked { model, chat: Ok(chat) }, cost));
    }
    let mut body = Translation::new(work, fields, ChatRequest::read);
    let model = common(work, fields, &mut body)?;
    body.copy_all(&["logprobs", "top_logprobs"]);
    think(work, fields, &mut body)?;
    let mut messages = Vec::new();
    messages.extend(system.filter(|text| !text.is_empty()).map(|text| json!({"role": "system", "content": text})));
    messages.push(json!({"role": "user", "content": prompt}));
    body.set("messages", &messages);
    let mut request = body.read(work)?;
    request.conversation.param = "prompt";
    let (chat, cost) = prepared(work, request)?;
    Ok((Asked { model, chat: Ok(chat) }, cost))
}

fn prepared(work: &Work, request: ChatRequest) -> Result<(Prepared, Cost), ApiError> {
    let (mut chat, cost) = Prepared::new(work, request)?;
    chat.cut_limit(work);
    // They are held as JSON until the answer is written.
    let asked = chat.options.params.sampling.logprobs.filter(|_| !chat.options.stream);
    let mut per_output_token = work.logprob_entries(asked, LogprobFormat::Chat);
    per_output_token.bytes *= 2;
    Ok((chat, Cost { per_output_token, ..cost }))
}

/// The reason of the end of a request that only loads the model, or unloads it, which has no effect.
fn loads(work: &Work, fields: &Fields<'_>, model: &str) -> Result<&'static str, ApiError> {
    let name = served(work, model);
    if !work.is_model(name) && work.adapter(name).is_none() {
        return Err(ApiError::unknown_model(name, &work.model));
    }
    let keep = fields.get("keep_alive")?;
    let is_zero =
        |keep: &Value| keep.as_f64() == Some(0.0) || keep.as_str().is_some_and(|text| ["0", "0s"].contains(&text));
    Ok(if keep.is_some_and(is_zero) { "unload" } else { "load" })
}

/// Reads the fields that both routes have. Returns the name of the model.
fn common<T>(work: &Work, fields: &Fields<'_>, body: &mut Translation<'_, '_, T>) -> Result<String, ApiError> {
    refuse(fields, &UNSUPPORTED)?;
    accept(fields, &ACCEPTED);
    body.copy_all(&EXTENSIONS);
    body.copy("logit_bias", "logit_bias");
    let description = "Name of the model; :latest behind it has no effect.";
    let model = fields.str("model", MAX_SHORT, description)?.unwrap_or(&work.model).to_string();
    body.set("model", served(work, &model));
    let stream = fields.flag("stream", true, "Stream the answer as JSON lines.")?;
    body.set("stream", &stream);
    fields.check_bytes("format", "format", work.options.limits.max_schema_bytes, "--max-schema-bytes")?;
    let schema = json!({"anyOf": [{"const": "json"}, {"const": ""}, {"type": "object"}]});
    match fields.any("format", &schema, "Format of the answer: json, or a JSON schema.")? {
        None => {}
        Some(Value::String(text)) if text.is_empty() => {}
        Some(Value::String(text)) if text == "json" => body.set("response_format", &json!({"type": "json_object"})),
        Some(schema @ Value::Object(_)) => {
            body.set("response_format", &json!({"type": "json_schema", "schema": schema}));
        }
        Some(other) => return Err(ApiError::wrong("format", other, "json or a JSON schema")),
    }
    let description = "Sampling and limits: temperature, top_k, top_p, min_p, typical_p, presence_penalty, frequency_penalty, seed, \
                       stop, num_predict, repeat_penalty with repeat_last_n. Defaults are those of the other routes. Unknown \
                       options are ignored.";
    if let Some(options) = fields.object("options", description)? {
        options_of(options, body)?;
    }
    Ok(model)
}

fn options_of<T>(options: &Map<String, Value>, body: &mut Translation<'_, '_, T>) -> Result<(), ApiError> {
    let given = |name: &str| options.get(name).filter(|value| !value.is_null());
    for (name, neutral) in UNSUPPORTED_OPTIONS {
        if given(name).is_some_and(|value| !value.as_f64().is_some_and(|value| neutral.contains(&value))) {
            return Err(ApiError::unsupported(format!("options.{name}"), "use temperature, top_k, top_p or min_p"));
        }
    }
    for (name, ours) in OPTIONS {
        match given(name) {
            None => {}
            // No limit, and no fixed seed.
            Some(value) if name == "num_predict" && value.as_f64().is_some_and(|limit| limit <= 0.0) => {
                body.set("n_predict", &-1);
            }
            Some(value) if name == "seed" && value.as_i64() == Some(-1) => {}
            Some(value) => body.set(ours, value),
        }
    }
    let window = given("repeat_last_n").and_then(Value::as_i64);
    let names = ["options.repeat_penalty", "options.repeat_last_n"];
    if let Some(penalty) = repeat_penalty(given("repeat_penalty"), window, names)? {
        body.set("repetition_penalty", penalty);
    }
    Ok(())
}

/// Reads `think`.
fn think<T>(work: &Work, fields: &Fields<'_>, body: &mut Translation<'_, '_, T>) -> Result<(), ApiError> {
    const LEVELS: [&str; 4] = ["low", "medium", "high", "max"];
    let schema = json!({"anyOf": [{"type": "boolean"}, {"type": "string", "enum": LEVELS}]});
    let description = "Whether a model that reasons does so, or how much: low, medium, high or max.";
    let found = fields.any("think", &schema, description)?;
    match found {
        None => Ok(()),
        Some(Value::Bool(false)) => {
            body.set("reasoning_effort", "none");
            Ok(())
        }
        Some(found) if work.reasoning == ReasoningFormat::Off => {
            Err(ApiError::wrong("think", found, "false: this model does not think"))
        }
        Some(Value::Bool(true)) => {
            body.set("chat_template_kwargs", &json!({"enable_thinking": true}));
            Ok(())
        }
        Some(Value::String(level)) if LEVELS.contains(&level.as_str()) => {
            body.set("reasoning_effort", level);
            Ok(())
        }
        Some(other) => {
            Err(ApiError::wrong("think", other, format_args!("true, false or one of {}", LEVELS.join(", "))))
        }
    }
}

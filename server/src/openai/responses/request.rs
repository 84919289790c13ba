//! Fields of `/v1/responses`, and those that the response repeats.

use serde_json::{Map, Value, json};

use super::super::chat::{ChatRequest, Prepared};
use super::input;
use super::json::Json;
use super::kept::{self, Earlier, Keep};
use crate::app::LogprobFormat;
use crate::http::ApiError;
use crate::request::{
    Conversation, Cost, Fields, MAX_SHORT, Options, Reasoning, Tools, Work, alternatives, beside_output, structured,
    template_kwargs, unsupported, user,
};

/// Field of the token limit.
const LIMIT: &str = "max_output_tokens";

/// Fields of a request that its response repeats.
type Repeated = Vec<(String, Json)>;

/// What a response needs besides the chat.
pub struct Form {
    /// Fields that it repeats.
    pub echoed: Repeated,
    /// What is kept of it.
    pub keep: Keep,
}

/// Prepares the chat of a request.
pub fn prepare(work: &Work, fields: &Fields<'_>, earlier: Earlier<'_>) -> Result<((Prepared, Form), Cost), ApiError> {
    work.must_generate()?;
    let (request, form) = read_after(work, fields, earlier)?;
    let echoed = &form.echoed;
    let repeated: usize =
        echoed.iter().map(|(_, value)| if let Json::Text(text) = value { text.get().len() } else { 0 }).sum();
    let (prepared, cost) = Prepared::new(work, request)?;
    // A stream keeps its log probabilities too. They are held as JSON and repeated by each of the last events.
    let asked = prepared.options.params.sampling.logprobs;
    let mut per_output_token = work.logprob_entries(asked, LogprobFormat::Chat);
    per_output_token.bytes *= 2;
    Ok(((prepared, form), Cost { per_output_token, repeated_bytes: 2 * repeated, ..cost }))
}

/// Reads the fields of a request that continues nothing.
pub fn read(work: &Work, fields: &Fields<'_>) -> Result<(ChatRequest, Form), ApiError> {
    read_after(work, fields, Earlier::Found(Vec::new(), Vec::new()))
}

/// Reads the fields of a request.
fn read_after(work: &Work, fields: &Fields<'_>, earlier: Earlier<'_>) -> Result<(ChatRequest, Form), ApiError> {
    let limits = &work.options.limits;
    let adapter = work.choose_model(fields)?;
    unsupported::refuse(fields, &unsupported::RESPONSES)?;
    let mut keep = Keep::read(work, fields, earlier)?;
    let description = "Maximum number of tokens to generate; default: the rest of the context.";
    let mut options = Options::read(work, fields, (LIMIT, description), 1)?;
    if options.params.n != 1 {
        return Err(ApiError::wrong("n", &Value::from(options.params.n), "1; use /v1/chat/completions for more"));
    }
    options.adapter = adapter;
    options.params.sampling.logprobs = num_logprobs(work, fields)?;
    let (format, constraint) = structured::text_format(fields, limits)?;
    if let Some(constraint) = constraint {
        if let Some(other) = &options.params.structured_outputs {
            return Err(ApiError::conflict(constraint.param, other.param));
        }
        options.params.structured_outputs = Some(constraint.into());
    }
    let description =
        "auto truncates the beginning of an input that exceeds the context; disabled, the default, rejects it.";
    if fields.word("truncation", &["auto", "disabled"], description)? == Some("auto") {
        options.truncate_prompt_tokens = Some(beside_output(work, options.max_tokens.unwrap_or((LIMIT, 1)))?);
    }
    let tools = Tools::read(fields, limits, true)?;
    let reasoning = Reasoning::read(fields)?;
    options.thinking_budget = reasoning.budget(work, options.thinking_budget)?;
    let kwargs = template_kwargs(fields, reasoning.effort)?;
    let echoed = echoed(work, fields, &options, &tools, (format, &keep))?;
    let messages = input::messages(fields, limits, &keep.earlier, &keep.referred)?;
    if keep.store || keep.conversation.is_some() {
        keep.input = kept::own_items(fields.get("input")?, &keep.referred);
    }
    let conversation = Conversation::of("input", messages, tools.definitions.clone(), kwargs);
    let (shows_reasoning, stops_reasoning) = reasoning.is_shown(fields)?;
    Ok((ChatRequest { options, tools, conversation, shows_reasoning, stops_reasoning }, Form { echoed, keep }))
}

/// Number of alternatives per token; `None` without log probabilities.
fn num_logprobs(work: &Work, fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let top = alternatives(work, fields, "top_logprobs", "Number of most likely alternatives per token.")?;
    let description = "Additional output; \"message.output_text.logprobs\" adds log probabilities.";
    let included = fields.strings("include", (64, MAX_SHORT), description)?;
    let included = included.iter().any(|name| name == "message.output_text.logprobs");
    Ok(top.filter(|&top| top > 0).or(included.then_some(0)))
}

/// Fields that the response has from its first event on. Those of the client are repeated as they were sent.
fn echoed(
    work: &Work,
    fields: &Fields<'_>,
    options: &Options,
    tools: &Tools,
    (format, keep): (Map<String, Value>, &Keep),
) -> Result<Vec<(String, Json)>, ApiError> {
    let description = "System message, inserted before the input.";
    fields.str("instructions", work.options.limits.max_text_bytes, description)?;
    let sent = |name: &str, default: Value| {
        fields.raw(name).map_or(Json::Value(default), |raw| Json::Text(raw.to_owned().into()))
    };
    let sampling = &options.params.sampling;
    let reasoning = fields.get("reasoning")?;
    let reasoning = |name: &str| reasoning.map_or(Value::Null, |reasoning| reasoning[name].clone());
    let short = |name, description| fields.str(name, MAX_SHORT, description);
    let description = "Accepted, but it applies only to built-in tools.";
    let max_tool_calls = fields.count("max_tool_calls", (1, usize::MAX), description)?;
    let echoed = json!({
        "background": keep.background,
        "conversation": keep.conversation.as_ref().map(|id| json!({"id": id})),
        "max_output_tokens": options.max_tokens.map(|(_, limit)| limit),
        "max_tool_calls": max_tool_calls,
        "metadata": metadata(fields)?,
        "parallel_tool_calls": tools.parallel,
        "previous_response_id": keep.previous,
        "prompt_cache_key": short("prompt_cache_key", "Returned in the response; not used.")?,
        "reasoning": {"effort": reasoning("effort"), "summary": reasoning("summary")},
        "safety_identifier": short("safety_identifier", "Returned in the response; not used.")?,
        "service_tier": "default",
        "store": keep.store,
        "temperature": shortest(sampling.temperature),
        "text": {"format": format},
        "top_logprobs": sampling.logprobs.unwrap_or(0),
        "top_p": shortest(sampling.top_p),
        "user": user(fields)?,
    });
    let mut echoed = Json::from(echoed);
    for (name, default) in [
        ("instructions", Value::Null),
        ("tool_choice", "auto".into()),
        ("tools", json!([])),
        ("truncation", "disabled".into()),
    ] {
        echoed.set(name, sent(name, default));
    }
    match echoed {
        Json::Object(fields) => Ok(fields),
        _ => Ok(Vec::new()),
    }
}

/// The shortest decimal of a float32: 0.6 and not 0.6000000238418579.
fn shortest(x: f32) -> Option<f64> {
    x.to_string().parse().ok()
}

/// Reads `metadata`, with the limits of OpenAI's API.
pub fn metadata(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let Some(pairs) = fields.object("metadata", "Up to 16 short strings by name, returned in the response.")? else {
        return Ok(Map::new());
    };
    let short = |text: &str, most: usize| text.chars().take(most + 1).count() <= most;
    let fits = |(key, value): (&String, &Value)| short(key, 64) && value.as_str().is_some_and(|text| short(text, 512));
    if pairs.len() > 16 || !pairs.iter().all(fits) {
        let expected = "up to 16 strings of at most 512 characters, with names of at most 64";
        return Err(ApiError::wrong("metadata", &Value::Object(pairs.clone()), expected));
    }
    Ok(pairs.clone())
}

//! The fields of `/v1/responses`, checked; and those that the answer repeats.

use serde_json::{Map, Value, json};

use super::super::app::App;
use super::super::chat::Prepared;
use super::super::error::ApiError;
use super::super::fields::Fields;
use super::super::messages::{Conversation, template_kwargs};
use super::super::options::{MAX_LOGPROBS, Options};
use super::super::structured;
use super::super::tools::Tools;
use super::input;

/// The token limit's field.
const LIMIT: &str = "max_output_tokens";

/// Fields with an effect that a client would miss.
const UNSUPPORTED: [(&str, &str); 4] = [
    ("background", "answers come on the connection that asked for them"),
    ("prompt", "send instructions and input"),
    ("prompt_logprobs", "use /v1/chat/completions"),
    ("best_of", "use /v1/chat/completions"),
];

/// The chat that is asked for, and the frame of its answer: what of the request it repeats.
pub fn prepare(app: &App, fields: &Fields) -> Result<(Prepared, Map<String, Value>), ApiError> {
    app.check_model(fields)?;
    for (name, advice) in UNSUPPORTED {
        fields.refuse(name, advice)?;
    }
    for name in ["previous_response_id", "conversation"] {
        if fields.get(name).is_some() {
            return Err(ApiError::not_stored(name));
        }
    }
    fields.bool("store")?;
    let mut options = Options::read(app, fields, &[LIMIT])?;
    if options.params.n != 1 {
        return Err(ApiError::unsupported("n", "one answer at a time; use /v1/chat/completions"));
    }
    if let Some((name, 0)) = options.max_tokens {
        return Err(ApiError::wrong(name, &Value::from(0), "at least 1"));
    }
    options.params.sampling.logprobs = wanted_logprobs(fields)?;
    let format = text_format(fields)?;
    if let Some(asked) = structured::text_format(&format)? {
        if let Some(other) = &options.params.structured_outputs {
            return Err(ApiError::invalid(asked.param, format_args!("not together with {}", other.param)));
        }
        options.params.structured_outputs = Some(asked);
    }
    match fields.str("truncation")? {
        None | Some("disabled") => {}
        Some("auto") => options.fit_prompt(app, LIMIT)?,
        Some(other) => return Err(ApiError::wrong("truncation", &Value::from(other), "auto or disabled")),
    }
    let (list, choice) = (nested_tools(fields)?, nested_choice(fields));
    let tools = Tools::new(fields, list.as_ref(), choice.as_ref())?;
    let frame = frame(fields, &options, &tools, format)?;
    let messages = input::messages(fields)?;
    let effort = fields.object("reasoning")?.and_then(|reasoning| reasoning.get("effort"));
    let kwargs = template_kwargs(fields, "reasoning.effort", effort)?;
    let conversation = Conversation::of("input", messages, tools.definitions.clone(), kwargs);
    Ok((Prepared::new(app, options, tools, &conversation)?, frame))
}

/// `top_logprobs` or a line of `include` switches them on.
fn wanted_logprobs(fields: &Fields) -> Result<Option<usize>, ApiError> {
    let top = fields.count("top_logprobs", 0, MAX_LOGPROBS)?;
    let included = fields.strings("include", 64)?.iter().any(|name| name == "message.output_text.logprobs");
    Ok(top.filter(|&top| top > 0).or(included.then_some(0)))
}

fn text_format(fields: &Fields) -> Result<Map<String, Value>, ApiError> {
    match fields.object("text")?.and_then(|text| text.get("format")) {
        None | Some(Value::Null) => Ok(Map::from_iter([("type".to_string(), "text".into())])),
        Some(Value::Object(format)) => Ok(format.clone()),
        Some(other) => Err(ApiError::wrong("text.format", other, "an object")),
    }
}

/// The functions as a chat has them. What is wrong with one is told by its place here.
fn nested_tools(fields: &Fields) -> Result<Option<Vec<Value>>, ApiError> {
    let Some(list) = fields.list("tools")? else { return Ok(None) };
    let nested = list.iter().enumerate().map(|(i, tool)| {
        let wrong =
            |field: &str, expected: &str| ApiError::wrong(format!("tools[{i}].{field}"), &tool[field], expected);
        if tool["type"] != "function" {
            return Err(wrong("type", "\"function\": this server has no tools of its own"));
        }
        if tool["name"].as_str().is_none_or(str::is_empty) {
            return Err(wrong("name", "a string"));
        }
        if !(tool["parameters"].is_null() || tool["parameters"].is_object()) {
            return Err(wrong("parameters", "a JSON schema"));
        }
        let mut function = tool.as_object().cloned().unwrap_or_default();
        function.shift_remove("type");
        Ok(json!({"type": "function", "function": function}))
    });
    nested.collect::<Result<_, _>>().map(Some)
}

/// `{"type": "function", "name": …}` as a chat has it; all else as it is.
fn nested_choice(fields: &Fields) -> Option<Value> {
    let choice = fields.get("tool_choice")?;
    match choice["name"].as_str() {
        Some(name) if choice["type"] == "function" => Some(json!({"type": "function", "function": {"name": name}})),
        _ => Some(choice.clone()),
    }
}

/// What every form of the answer says, from the first event on.
fn frame(
    fields: &Fields,
    options: &Options,
    tools: &Tools,
    format: Map<String, Value>,
) -> Result<Map<String, Value>, ApiError> {
    let as_sent = |name: &str| fields.get(name).cloned().unwrap_or(Value::Null);
    let or = |name: &str, default: Value| fields.get(name).cloned().unwrap_or(default);
    let sampling = &options.params.sampling;
    let reasoning = |name: &str| fields.get("reasoning").map_or(Value::Null, |reasoning| reasoning[name].clone());
    let frame = json!({
        "background": false,
        "instructions": as_sent("instructions"),
        "max_output_tokens": options.max_tokens.map(|(_, limit)| limit),
        "max_tool_calls": fields.count("max_tool_calls", 1, usize::MAX)?,
        "metadata": metadata(fields)?,
        "parallel_tool_calls": tools.parallel,
        "previous_response_id": null,
        "prompt_cache_key": fields.str("prompt_cache_key")?,
        "reasoning": {"effort": reasoning("effort"), "summary": reasoning("summary")},
        "safety_identifier": fields.str("safety_identifier")?,
        "service_tier": "default",
        "store": false,
        "temperature": shortest(sampling.temperature),
        "text": {"format": format},
        "tool_choice": or("tool_choice", "auto".into()),
        "tools": or("tools", json!([])),
        "top_logprobs": sampling.logprobs.unwrap_or(0),
        "top_p": shortest(sampling.top_p),
        "truncation": or("truncation", "disabled".into()),
        "user": fields.str("user")?,
    });
    match frame {
        Value::Object(frame) => Ok(frame),
        _ => Ok(Map::new()),
    }
}

/// 0.6 and not 0.6000000238418579.
fn shortest(x: f32) -> Option<f64> {
    x.to_string().parse().ok()
}

/// Up to 16 pairs of short texts, as in OpenAI's API.
fn metadata(fields: &Fields) -> Result<Map<String, Value>, ApiError> {
    let Some(pairs) = fields.object("metadata")? else { return Ok(Map::new()) };
    let short = |text: &str, most: usize| text.chars().take(most + 1).count() <= most;
    let fits = |(key, value): (&String, &Value)| short(key, 64) && value.as_str().is_some_and(|text| short(text, 512));
    if pairs.len() > 16 || !pairs.iter().all(fits) {
        let expected = "up to 16 texts of at most 512 characters, under names of at most 64";
        return Err(ApiError::wrong("metadata", &Value::Object(pairs.clone()), expected));
    }
    Ok(pairs.clone())
}

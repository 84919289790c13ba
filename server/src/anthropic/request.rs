//! The fields of a request.

use serde_json::{Map, Value, json};
use text::ReasoningFormat;

use super::turns;
use crate::http::ApiError;
use crate::openai::chat::{ChatRequest, Prepared};
use crate::request::unsupported::{EMPTY, Field, refuse};
use crate::request::{Cost, EXTENSIONS, Fields, SAMPLING, Translation, Work, accept, check_name};

/// Fields of a chat with other names here: their name there, and that in errors here.
pub const NAMES: [(&str, &str); 4] = [
    ("stop", "stop_sequences"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
];

/// Fields that change nothing in an answer of this server. Clients send them, so that they are accepted.
const ACCEPTED: [(&str, &str); 7] = [
    ("metadata", "Accepted without effect: no request is traced to a user."),
    ("cache_control", "Accepted without effect: every prefix is cached."),
    ("context_management", "Accepted without effect: the conversation is computed as it is sent."),
    ("service_tier", "Accepted without effect: there is one tier."),
    ("speed", "Accepted without effect: there is one speed."),
    ("diagnostics", "Accepted without effect."),
    ("inference_geo", "Accepted without effect."),
];

/// Fields that would change the answer.
const UNSUPPORTED: [Field; 2] = [
    (&["mcp_servers"], EMPTY, "remove it: this server calls no other; connect the client to them"),
    (&["container"], EMPTY, "remove it: this server runs no code"),
];

/// Words of `output_config.effort`.
const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];

/// Minimum of `thinking.budget_tokens`.
const MIN_BUDGET: u64 = 1024;

/// Field of the token limit.
const LIMIT: &str = "max_tokens";

/// A request, ready to run.
pub struct Message {
    /// The chat.
    pub chat: Prepared,
    /// The token limit was cut to the rest of the context.
    pub is_cut: bool,
}

/// Reads the fields of a request for a message.
pub fn read(work: &Work, fields: &Fields<'_>) -> Result<ChatRequest, ApiError> {
    let description =
        "Maximum number of tokens to generate; 0 only computes the prompt. It is cut to the rest of the context.";
    let limit = fields.count(LIMIT, (0, usize::MAX), description)?;
    let limit = fields.required(LIMIT, limit, "a number of tokens")?;
    let mut body = Translation::new(work, fields, ChatRequest::read);
    body.copy("stop_sequences", "stop");
    body.copy_all(&["stream", "temperature", "top_p", "top_k", "include_reasoning", "chat_template", "logit_bias"]);
    body.copy_all(&SAMPLING);
    body.copy_all(&EXTENSIONS);
    let mut chat = read_prompt(work, fields, body, Some(limit))?;
    chat.options.max_tokens = Some((LIMIT, limit));
    Ok(chat)
}

/// Reads the fields of a request whose tokens are counted.
pub fn read_without_output(work: &Work, fields: &Fields<'_>) -> Result<ChatRequest, ApiError> {
    let mut body = Translation::new(work, fields, ChatRequest::read);
    body.copy("chat_template", "chat_template");
    read_prompt(work, fields, body, None)
}

/// Tokenizes the prompt of a request, and cuts its limit to the rest of the context.
pub fn prepare(work: &Work, fields: &Fields<'_>) -> Result<(Message, Cost), ApiError> {
    work.must_generate()?;
    let (mut chat, cost) = Prepared::new(work, read(work, fields)?)?;
    let is_cut = chat.cut_limit(work);
    Ok((Message { chat, is_cut }, cost))
}

/// Counts the tokens of a prompt, which may be longer than the context.
pub fn count(work: &Work, fields: &Fields<'_>) -> Result<(usize, Cost), ApiError> {
    let (chat, cost) = Prepared::new(work, read_without_output(work, fields)?)?;
    Ok((chat.ids.len(), cost))
}

/// Reads the fields that make the prompt. `limit` is the token limit.
fn read_prompt(
    work: &Work,
    fields: &Fields<'_>,
    mut body: Translation<'_, '_, ChatRequest>,
    limit: Option<usize>,
) -> Result<ChatRequest, ApiError> {
    let limits = &work.options.limits;
    refuse(fields, &UNSUPPORTED)?;
    accept(fields, &ACCEPTED);
    body.copy("model", "model");
    let thinking = Thinking::read(fields, limit)?;
    let effort = output_config(fields, limits.max_schema_bytes, &mut body)?;
    match (thinking, effort) {
        (Thinking::Disabled, _) => body.set("reasoning_effort", "none"),
        (_, Some(effort)) => body.set("reasoning_effort", &effort),
        _ => {}
    }
    let kwargs = fields.object("chat_template_kwargs", "Variables for the chat template.")?;
    let mut kwargs = kwargs.cloned().unwrap_or_default();
    if let Thinking::Enabled { is_shown, budget } = thinking {
        // A model that does not reason keeps every limit, and clients send one to each.
        if let Some(budget) = budget.filter(|_| work.reasoning != ReasoningFormat::Off) {
            body.set("thinking_token_budget", &budget);
        }
        kwargs.entry("enable_thinking").or_insert(true.into());
        if !is_shown {
            body.set("include_reasoning", &false);
        }
    }
    if !kwargs.is_empty() {
        body.set("chat_template_kwargs", &kwargs);
    }
    tools(fields, limits.max_schema_bytes, limits.max_tools, &mut body)?;
    tool_choice(fields, &mut body)?;
    let messages = turns::read(fields, limits)?;
    if messages.last().is_some_and(|last| last["role"] == "assistant") {
        // The answer continues it.
        body.set("continue_final_message", &true);
    }
    body.set("messages", &messages);
    let mut chat = body.read(work)?;
    chat.conversation.counts_all = true;
    Ok(chat)
}

/// The field `thinking`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Thinking {
    /// The model decides.
    Free,
    Enabled {
        is_shown: bool,
        /// Maximum number of its tokens.
        budget: Option<u64>,
    },
    Disabled,
}

impl Thinking {
    fn read(fields: &Fields<'_>, limit: Option<usize>) -> Result<Thinking, ApiError> {
        let description = "An object of type enabled, disabled or adaptive. budget_tokens limits the thinking; \
                           display: \"omitted\" returns none of it.";
        let Some(thinking) = fields.object("thinking", description)? else { return Ok(Thinking::Free) };
        let given = |name: &str| thinking.get(name).unwrap_or(&Value::Null);
        let wrong = |name: &str, expected: &str| ApiError::wrong(format!("thinking.{name}"), given(name), expected);
        let is_shown = match given("display").as_str() {
            Some("omitted") => false,
            Some("summarized" | "full") => true,
            None if given("display").is_null() => true,
            _ => return Err(wrong("display", "summarized or omitted")),
        };
        match given("type").as_str() {
            Some("disabled") => Ok(Thinking::Disabled),
            Some("adaptive") if is_shown => Ok(Thinking::Free),
            Some("adaptive") => Ok(Thinking::Enabled { is_shown, budget: None }),
            Some("enabled") => {
                let most = limit.filter(|limit| *limit > 0).map_or(u64::MAX, |limit| limit as u64);
                match given("budget_tokens").as_u64() {
                    Some(budget) if budget >= MIN_BUDGET && budget < most => {
                        Ok(Thinking::Enabled { is_shown, budget: Some(budget) })
                    }
                    _ => Err(wrong("budget_tokens", &format!("a number from {MIN_BUDGET}, below {LIMIT}"))),
                }
            }
            _ => Err(wrong("type", "enabled, disabled or adaptive")),
        }
    }
}

/// Reads `output_config`, and `output_format`, the older name of its format. Returns the effort.
fn output_config(
    fields: &Fields<'_>,
    most: usize,
    body: &mut Translation<'_, '_, ChatRequest>,
) -> Result<Option<&'static str>, ApiError> {
    for name in ["output_config", "output_format"] {
        fields.check_bytes(name, name, most, "--max-schema-bytes")?;
    }
    let description = "effort: low, medium, high, xhigh or max; format: an object of type json_schema with a schema.";
    let config = fields.object("output_config", description)?;
    let older = fields.object("output_format", "Older name of output_config.format.")?;
    let given = |name: &str| config.and_then(|config| config.get(name)).filter(|value| !value.is_null());
    let effort = match given("effort") {
        None => None,
        Some(found) => {
            let effort = EFFORTS.iter().copied().find(|effort| found == effort);
            let expected = format!("one of {}", EFFORTS.join(", "));
            Some(effort.ok_or_else(|| ApiError::wrong("output_config.effort", found, expected))?)
        }
    };
    let format = match (given("format"), older) {
        (None, None) => return Ok(effort),
        (Some(Value::Object(format)), None) => ("output_config.format", format),
        (None, Some(format)) => ("output_format", format),
        (Some(_), Some(_)) => return Err(ApiError::conflict("output_format", "output_config.format")),
        (Some(other), None) => return Err(ApiError::wrong("output_config.format", other, "an object")),
    };
    let (path, format) = format;
    let field = |name: &str| format.get(name).unwrap_or(&Value::Null);
    if field("type") != "json_schema" {
        return Err(ApiError::wrong(format!("{path}.type"), field("type"), "json_schema"));
    }
    if !field("schema").is_object() {
        return Err(ApiError::wrong(format!("{path}.schema"), field("schema"), "a JSON schema"));
    }
    body.set("response_format", &json!({"type": "json_schema", "schema": field("schema")}));
    Ok(effort)
}

/// Reads `tools`.
fn tools(
    fields: &Fields<'_>,
    most_bytes: usize,
    most: usize,
    body: &mut Translation<'_, '_, ChatRequest>,
) -> Result<(), ApiError> {
    const TOOLS: &str = "tools";
    let item = json!({"type": "object", "required": ["name", "input_schema"], "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "input_schema": {"type": "object", "description": "A JSON schema."},
        "strict": {"type": "boolean", "description": "Constrain the input to the schema even if no call is required."},
        "type": {"const": "custom"},
    }});
    fields.check_bytes(TOOLS, TOOLS, most_bytes, "--max-schema-bytes")?;
    let description = "Functions that the model may call. Their cache_control, defer_loading, eager_input_streaming, \
                       input_examples and allowed_callers are accepted without effect.";
    let Some(list) = fields.list(TOOLS, most, "--max-tools", &item, description)? else { return Ok(()) };
    let tools: Vec<Value> = list.iter().enumerate().map(|(i, tool)| function(i, tool)).collect::<Result<_, _>>()?;
    body.set(TOOLS, &tools);
    Ok(())
}

/// A tool as the function of a chat.
fn function(index: usize, tool: &Value) -> Result<Value, ApiError> {
    let path = |name: &str| format!("tools[{index}].{name}");
    let wrong = |name: &str, expected: &str| ApiError::wrong(path(name), &tool[name], expected);
    if !tool.is_object() {
        return Err(ApiError::wrong(format!("tools[{index}]"), tool, "an object with name and input_schema"));
    }
    if !tool["type"].is_null() && tool["type"] != "custom" {
        return Err(wrong("type", "\"custom\": this server has no built-in tools"));
    }
    let name = tool["name"].as_str().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| wrong("name", "a non-empty string"))?;
    check_name(&path("name"), name)?;
    let Value::Object(schema) = &tool["input_schema"] else { return Err(wrong("input_schema", "a JSON schema")) };
    let mut schema = schema.clone();
    schema.entry("type").or_insert("object".into());
    let mut function = Map::from_iter([("name".to_string(), Value::from(name))]);
    match &tool["description"] {
        Value::Null => {}
        text @ Value::String(_) => {
            function.insert("description".into(), text.clone());
        }
        _ => return Err(wrong("description", "a string")),
    }
    function.insert("parameters".into(), schema.into());
    match &tool["strict"] {
        Value::Null => {}
        strict @ Value::Bool(_) => {
            function.insert("strict".into(), strict.clone());
        }
        _ => return Err(wrong("strict", "true or false")),
    }
    Ok(json!({"type": "function", "function": function}))
}

/// Reads `tool_choice`.
fn tool_choice(fields: &Fields<'_>, body: &mut Translation<'_, '_, ChatRequest>) -> Result<(), ApiError> {
    let description = "Whether the model calls a function: an object of type auto, any, none, or tool with a name; \
                       disable_parallel_tool_use: at most one call.";
    let Some(choice) = fields.object("tool_choice", description)? else { return Ok(()) };
    let given = |name: &str| choice.get(name).unwrap_or(&Value::Null);
    let wrong = |name: &str, expected: &str| ApiError::wrong(format!("tool_choice.{name}"), given(name), expected);
    match given("type").as_str() {
        Some(word @ ("auto" | "none")) => body.set("tool_choice", word),
        Some("any") => body.set("tool_choice", "required"),
        Some("tool") => {
            let name = given("name").as_str().ok_or_else(|| wrong("name", "the name of one of the tools"))?;
            body.set("tool_choice", &json!({"type": "function", "function": {"name": name}}));
        }
        _ => return Err(wrong("type", "auto, any, tool or none")),
    }
    match given("disable_parallel_tool_use") {
        Value::Null => {}
        Value::Bool(disable) => body.set("parallel_tool_calls", &!disable),
        _ => return Err(wrong("disable_parallel_tool_use", "true or false")),
    }
    Ok(())
}

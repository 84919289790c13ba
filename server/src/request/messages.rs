//! Conversations: messages are checked, rendered by the model's chat template and tokenized.
//!
//! This module checks what the API requires: a list of objects with a role and text. The template decides which roles
//! exist and in which order they may come; messages are adapted to it when they are rendered.

use serde_json::{Map, Value, json};
use text::{ChatInput, ChatTemplate};

use super::fields::Fields;
use super::reasoning::{EFFORTS, Reasoning};
use super::work::Work;
use crate::app::App;
use crate::http::ApiError;
use crate::settings::Limits;

/// Field of the messages.
const MESSAGES: &str = "messages";

/// A checked conversation and the options of its template.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// Field of the messages, for errors.
    pub param: &'static str,
    /// Tokenize all of a prompt that is too long too, so that its length is known.
    pub counts_all: bool,
    messages: Vec<Value>,
    tools: Option<Value>,
    add_generation_prompt: bool,
    continue_final_message: bool,
    kwargs: Map<String, Value>,
    add_special_tokens: bool,
    /// A template in place of the model's.
    template: Option<String>,
}

impl Conversation {
    /// Reads `messages` and the options of the template; `None` without messages. See [`Conversation::read_options`].
    pub fn read(
        fields: &Fields<'_>,
        limits: &Limits,
        tools: Option<Value>,
        reasoning: &Reasoning<'_>,
        responds: bool,
    ) -> Result<Option<Conversation>, ApiError> {
        let mut conversation = Conversation::read_options(fields, limits, tools, reasoning, responds)?;
        let messages = Conversation::read_messages(fields, limits)?;
        Ok(messages.map(|messages| {
            conversation.set_messages(messages);
            conversation
        }))
    }

    /// Reads the options of the template, and no messages. `tools` are the definitions of available tools. `reasoning` may have the
    /// effort. `responds` says whether the model responds to the conversation.
    pub fn read_options(
        fields: &Fields<'_>,
        limits: &Limits,
        tools: Option<Value>,
        reasoning: &Reasoning<'_>,
        responds: bool,
    ) -> Result<Conversation, ApiError> {
        let description =
            "Chat template in Jinja, instead of that of the model; --trust-request-chat-template allows it.";
        let template = fields.str("chat_template", limits.max_text_bytes, description)?;
        let template = template.filter(|template| !template.is_empty()).map(str::to_string);
        let description = "Continue the last message instead of responding to it.";
        let continue_final_message = fields.flag("continue_final_message", false, description)?;
        let description = match responds {
            true => {
                "Append the start of an assistant message to the prompt; default: true unless a message is continued."
            }
            false => "Append the start of an assistant message to the conversation; default false.",
        };
        let add_generation_prompt =
            fields.bool("add_generation_prompt", description)?.unwrap_or(responds && !continue_final_message);
        if continue_final_message && add_generation_prompt {
            return Err(ApiError::conflict("continue_final_message", "add_generation_prompt: true"));
        }
        let description = "Reasoning effort, passed to the chat template.";
        let effort = fields.word("reasoning_effort", &EFFORTS, description)?.or(reasoning.effort);
        let kwargs = template_kwargs(fields, effort)?;
        let description = "Also add the tokenizer's special tokens; default false, but true for a plain prompt.";
        let add_special_tokens = fields.bool("add_special_tokens", description)?.unwrap_or(false);
        Ok(Conversation {
            param: MESSAGES,
            counts_all: false,
            messages: Vec::new(),
            tools,
            add_generation_prompt,
            continue_final_message,
            kwargs,
            add_special_tokens,
            template,
        })
    }

    /// Reads `messages`; `None` without the field.
    pub fn read_messages(fields: &Fields<'_>, limits: &Limits) -> Result<Option<Vec<Value>>, ApiError> {
        let description = "Messages of the conversation.";
        let list = fields.list(MESSAGES, limits.max_messages, "--max-messages", &message_schema(), description)?;
        list.map(|list| messages(MESSAGES, list)).transpose()
    }

    /// Reads `messages` that are a list of conversations with these options, which all of them have.
    pub fn read_batch(&self, fields: &Fields<'_>, limits: &Limits) -> Result<Vec<Vec<Value>>, ApiError> {
        let conversation = json!({"type": "array", "minItems": 1, "items": message_schema()});
        let description = "Conversations, each a list of messages.";
        let list = fields.list(MESSAGES, limits.max_prompts, "--max-prompts", &conversation, description)?;
        let one = |(i, value): (usize, &Value)| {
            let path = format!("{MESSAGES}[{i}]");
            let list = value.as_array().ok_or_else(|| ApiError::wrong(&path, value, "a list of messages"))?;
            if list.len() > limits.max_messages {
                let advice = "send fewer or raise --max-messages";
                return Err(ApiError::over(&path, list.len(), limits.max_messages, "items", advice));
            }
            messages(&path, list)
        };
        let conversations: Option<Vec<Vec<Value>>> =
            list.map(|list| list.iter().enumerate().map(one).collect()).transpose()?;
        let given = conversations.filter(|conversations| !conversations.is_empty());
        let conversations = fields.required(MESSAGES, given, "a list of conversations, each a list of messages")?;
        // Each conversation is rendered with them.
        let shared = ["chat_template", "chat_template_kwargs", "documents", "tools"];
        let bytes: usize = shared.iter().filter_map(|name| Some(fields.raw(name)?.get().len())).sum();
        let (all, most) = (bytes.saturating_mul(conversations.len()), limits.max_text_bytes);
        if all > most {
            let what = format!("bytes of {} ({bytes} in {} conversations)", shared.join(", "), conversations.len());
            return Err(ApiError::over(
                MESSAGES,
                all,
                most,
                &what,
                "send fewer conversations or raise --max-text-bytes",
            ));
        }
        Ok(conversations)
    }

    /// Sets the messages, which the options apply to.
    pub fn set_messages(&mut self, messages: Vec<Value>) {
        self.messages = messages;
    }

    /// A conversation to respond to. `param` is the field of the messages.
    pub fn of(
        param: &'static str,
        messages: Vec<Value>,
        tools: Option<Value>,
        kwargs: Map<String, Value>,
    ) -> Conversation {
        Conversation { param, messages, tools, add_generation_prompt: true, kwargs, ..Conversation::default() }
    }

    /// Number of tool calls in the messages.
    pub fn num_calls(&self) -> usize {
        let calls = self.messages.iter().filter_map(|message| message.get("tool_calls")?.as_array());
        calls.map(Vec::len).sum()
    }

    /// Renders the prompt.
    pub fn render(&self, app: &App) -> Result<String, ApiError> {
        let own = app.engine.chat_template().map(AsRef::as_ref);
        if self.template.is_some() && !app.options.trust_request_chat_template {
            let advice = "start the server with --trust-request-chat-template, or with --chat-template";
            return Err(ApiError::unsupported("chat_template", advice));
        }
        let mut kwargs = app.options.default_chat_template_kwargs.clone().unwrap_or_default();
        kwargs.extend(self.kwargs.iter().map(|(name, value)| (name.clone(), value.clone())));
        let input = ChatInput {
            messages: &self.messages,
            tools: self.tools.as_ref(),
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message,
            kwargs: &kwargs,
        };
        let rendered = match (&self.template, own) {
            (Some(source), own) => own.unwrap_or(&ChatTemplate::default()).render_with(source, &input),
            (None, Some(own)) => own.render(&input),
            (None, None) => {
                let advice =
                    "this model has no chat template: use /v1/completions, or start the server with --chat-template";
                return Err(ApiError::unsupported(self.param, advice));
            }
        };
        rendered.map_err(|error| ApiError::invalid(self.param, error))
    }

    /// Tokenizes a rendered prompt; see [`Work::encode`]. The template writes special tokens itself, so that none are
    /// added by default.
    pub fn encode(&self, work: &Work, text: &str, must_fit: bool) -> Result<Vec<u32>, ApiError> {
        work.encode(text, self.add_special_tokens, self.param, must_fit && !self.counts_all)
    }
}

/// Reads the template's variables: `chat_template_kwargs` and `documents`. Adds the reasoning effort under the names that
/// templates use: `reasoning_effort` (gpt-oss) and `enable_thinking` (Qwen3).
pub fn template_kwargs(fields: &Fields<'_>, effort: Option<&str>) -> Result<Map<String, Value>, ApiError> {
    let description = "Variables for the chat template.";
    let mut kwargs = fields.object("chat_template_kwargs", description)?.cloned().unwrap_or_default();
    let description = "Documents for a template that has a variable of this name.";
    if let Some(documents) =
        fields.any("documents", &json!({"type": "array", "items": {"type": "object"}}), description)?
    {
        if !documents.is_array() {
            return Err(ApiError::wrong("documents", documents, "a list of objects"));
        }
        kwargs.entry("documents").or_insert(documents.clone());
    }
    if let Some(name) = effort {
        kwargs.entry("reasoning_effort").or_insert(name.into());
        kwargs.entry("enable_thinking").or_insert((name != "none").into());
    }
    Ok(kwargs)
}

/// JSON schema of a message.
fn message_schema() -> Value {
    json!({"type": "object", "required": ["role"], "properties": {
        "role": {"type": "string", "description": "Role of the author; the chat template defines the roles."},
        "content": {"description": "A string, a list of text parts, or null."},
    }})
}

/// Checks the messages of the list at `path`.
fn messages(path: &str, list: &[Value]) -> Result<Vec<Value>, ApiError> {
    if list.is_empty() {
        return Err(ApiError::found(path, "an empty list", "at least one message"));
    }
    list.iter().enumerate().map(|(i, value)| message(format!("{path}[{i}]"), value)).collect()
}

fn message(path: String, value: &Value) -> Result<Value, ApiError> {
    let Value::Object(fields) = value else {
        return Err(ApiError::wrong(path, value, "an object with role and content"));
    };
    let mut message = fields.clone();
    let role = fields.get("role").unwrap_or(&Value::Null);
    if !role.is_string() {
        return Err(ApiError::wrong(format!("{path}.role"), role, "a string"));
    }
    match fields.get("content") {
        None | Some(Value::Null | Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            message.insert("content".into(), join_parts(&format!("{path}.content"), parts)?.into());
        }
        Some(other) => {
            let expected = "a string, a list of text parts, or null";
            return Err(ApiError::wrong(format!("{path}.content"), other, expected));
        }
    }
    Ok(Value::Object(message))
}

/// Text of a list of parts at `path`, one per line as in vLLM. Parts are those of chat completions and of responses.
pub fn join_parts(path: &str, parts: &[Value]) -> Result<String, ApiError> {
    let text = |(index, part): (usize, &'_ Value)| {
        let path = format!("{path}[{index}]");
        let field = match part["type"].as_str() {
            Some("text" | "input_text" | "output_text" | "reasoning_text" | "summary_text") => "text",
            Some("refusal") => "refusal",
            Some(_) => {
                let expected = "text, input_text, output_text or refusal: this model accepts only text";
                return Err(ApiError::wrong(format!("{path}.type"), &part["type"], expected));
            }
            None => return Err(ApiError::wrong(path, part, "an object with type \"text\" and text")),
        };
        let text = part[field].as_str().map(str::to_string);
        text.ok_or_else(|| ApiError::wrong(format!("{path}.{field}"), &part[field], "a string"))
    };
    Ok(parts.iter().enumerate().map(text).collect::<Result<Vec<String>, _>>()?.join("\n"))
}

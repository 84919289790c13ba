//! Converts `system` and `messages` to the messages of a chat.
//!
//! A turn is a list of blocks here. In a chat, the results of tools are messages of their own, in front of the user's, and an
//! assistant's text, thinking and calls are fields of one message. Turns of one role in succession are one message.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::http::ApiError;
use crate::request::{Fields, check_name};
use crate::settings::Limits;

/// Begins a block of Claude Code's system prompt that differs in every request, and so would keep the rest from being cached.
const BILLING: &str = "x-anthropic-billing-header";

/// Reads the messages.
pub fn read(fields: &Fields<'_>, limits: &Limits) -> Result<Vec<Value>, ApiError> {
    let block = json!({"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}});
    let system = json!({"anyOf": [{"type": "string"}, {"type": "array", "items": block}]});
    let description = "System prompt: a text, or a list of text blocks.";
    let system = fields.any("system", &system, description)?;
    let item = json!({"type": "object", "required": ["role", "content"], "properties": {
        "role": {"type": "string", "enum": ["user", "assistant", "system"]},
        "content": {"description": "A text, or a list of blocks: text, document and search_result with text, tool_result, tool_use, \
                                    thinking, redacted_thinking."},
    }});
    let description = "Turns of the conversation. The answer continues a last turn of the assistant.";
    let turns = fields.list("messages", limits.max_messages, "--max-messages", &item, description)?;
    let turns = turns.map(Vec::as_slice);
    let turns = fields.required("messages", turns, "a list of at least one message")?;
    if turns.is_empty() {
        return Err(ApiError::found("messages", "an empty list", "at least one message"));
    }
    let mut chat = Chat::default();
    if let Some(system) = system {
        let parts: Vec<String> =
            texts("system", system)?.into_iter().filter(|part| !part.starts_with(BILLING)).collect();
        if !parts.is_empty() {
            chat.say("system", parts);
        }
    }
    for (index, turn) in turns.iter().enumerate() {
        chat.turn(&format!("messages[{index}]"), turn)?;
    }
    let messages = chat.messages;
    if messages.last().is_some_and(|last| last.get("tool_calls").is_some()) {
        let expected = "a user's message with a tool_result for each tool_use";
        return Err(ApiError::found("messages", "tool_use in the last message", expected));
    }
    Ok(messages)
}

/// The messages so far.
#[derive(Default)]
struct Chat<'a> {
    messages: Vec<Value>,
    /// Names of called functions by the id of the call.
    called: HashMap<&'a str, &'a str>,
}

impl<'a> Chat<'a> {
    fn turn(&mut self, path: &str, turn: &'a Value) -> Result<(), ApiError> {
        if !turn.is_object() {
            return Err(ApiError::wrong(path, turn, "an object with role and content"));
        }
        let content = &turn["content"];
        let path_of_content = format!("{path}.content");
        match turn["role"].as_str() {
            Some("system") => self.say("system", texts(&path_of_content, content)?),
            Some("user") => self.user(&path_of_content, content)?,
            Some("assistant") => self.assistant(&path_of_content, content)?,
            _ => return Err(ApiError::wrong(format!("{path}.role"), &turn["role"], "user, assistant or system")),
        }
        Ok(())
    }

    fn user(&mut self, path: &str, content: &'a Value) -> Result<(), ApiError> {
        let mut said = Vec::new();
        for block in blocks(path, content)? {
            match block.kind {
                "tool_result" => {
                    let id = block.name("tool_use_id")?;
                    let content = match &block.value["content"] {
                        Value::Null => String::new(),
                        content => texts(&format!("{}.content", block.path), content)?.join("\n"),
                    };
                    let mut message = json!({"role": "tool", "tool_call_id": id, "content": content});
                    // Some templates need the name, which the result does not have.
                    if let Some(name) = self.called.get(id) {
                        message["name"] = (*name).into();
                    }
                    self.messages.push(message);
                }
                _ => said.push(block.text()?),
            }
        }
        // Without text, the results are the whole turn.
        if !said.is_empty() {
            self.say("user", said);
        }
        Ok(())
    }

    fn assistant(&mut self, path: &str, content: &'a Value) -> Result<(), ApiError> {
        let (mut said, mut thought, mut calls) = (Vec::new(), Vec::new(), Vec::new());
        for block in blocks(path, content)? {
            match block.kind {
                "thinking" => thought.push(block.string("thinking")?.to_string()),
                // It can be read by those who have encrypted it.
                "redacted_thinking" => {}
                "tool_use" => {
                    let (id, name, input) = (block.name("id")?, block.name("name")?, &block.value["input"]);
                    if !input.is_object() {
                        return Err(ApiError::wrong(format!("{}.input", block.path), input, "an object"));
                    }
                    self.called.insert(id, name);
                    let function = json!({"name": name, "arguments": input.to_string()});
                    calls.push(json!({"id": id, "type": "function", "function": function}));
                }
                _ => said.push(block.text()?),
            }
        }
        self.say("assistant", said);
        let Some(last) = self.messages.last_mut() else { return Ok(()) };
        if !thought.is_empty() {
            let before = last["reasoning_content"].as_str().map(str::to_string);
            last["reasoning_content"] = before.into_iter().chain(thought).collect::<Vec<_>>().join("\n").into();
        }
        match last.get_mut("tool_calls").and_then(Value::as_array_mut) {
            _ if calls.is_empty() => {}
            Some(before) => before.extend(calls),
            None => last["tool_calls"] = calls.into(),
        }
        Ok(())
    }

    /// Adds texts to the last message if it has this role, else a message.
    fn say(&mut self, role: &str, texts: Vec<String>) {
        let parts = texts.into_iter().map(|text| json!({"type": "text", "text": text}));
        match self.messages.last_mut() {
            Some(last) if last["role"] == role => {
                if let Some(content) = last["content"].as_array_mut() {
                    content.extend(parts);
                }
            }
            _ => self.messages.push(json!({"role": role, "content": parts.collect::<Vec<_>>()})),
        }
    }
}

/// A block of content.
struct Block<'a> {
    path: String,
    kind: &'a str,
    value: &'a Value,
}

/// The blocks of a content, which may be a text.
fn blocks<'a>(path: &str, content: &'a Value) -> Result<Vec<Block<'a>>, ApiError> {
    let block = |(index, value): (usize, &'a Value)| {
        let path = format!("{path}[{index}]");
        match value["type"].as_str() {
            Some(kind) => Ok(Block { path, kind, value }),
            None => Err(ApiError::wrong(path, value, "a block with a type")),
        }
    };
    match content {
        Value::String(_) => Ok(vec![Block { path: path.to_string(), kind: "text", value: content }]),
        Value::Array(list) => list.iter().enumerate().map(block).collect(),
        other => Err(ApiError::wrong(path, other, "a text or a list of blocks")),
    }
}

/// The texts of a content.
fn texts(path: &str, content: &Value) -> Result<Vec<String>, ApiError> {
    blocks(path, content)?.iter().map(Block::text).collect()
}

impl<'a> Block<'a> {
    fn string(&self, field: &str) -> Result<&'a str, ApiError> {
        let found = &self.value[field];
        found.as_str().ok_or_else(|| ApiError::wrong(format!("{}.{field}", self.path), found, "a string"))
    }

    /// A short string, which messages may repeat.
    fn name(&self, field: &str) -> Result<&'a str, ApiError> {
        let name = self.string(field)?;
        check_name(&format!("{}.{field}", self.path), name)?;
        Ok(name)
    }

    /// The text of a block that is text.
    fn text(&self) -> Result<String, ApiError> {
        if let Value::String(text) = self.value {
            return Ok(text.clone());
        }
        let inner = |value: &Value, path: String| Ok::<_, ApiError>(texts(&path, value)?.join("\n"));
        let titled = |names: &[&str], text: String| {
            let lines = names.iter().filter_map(|name| self.value[*name].as_str()).map(str::to_string);
            lines.chain([text]).collect::<Vec<_>>().join("\n")
        };
        match self.kind {
            "text" => self.string("text").map(str::to_string),
            "tool_reference" => self.string("tool_name").map(str::to_string),
            "search_result" => {
                let text = inner(&self.value["content"], format!("{}.content", self.path))?;
                Ok(titled(&["title", "source"], text))
            }
            "document" => {
                let (source, path) = (&self.value["source"], format!("{}.source", self.path));
                let text = match source["type"].as_str() {
                    Some("text") => {
                        let wrong = || ApiError::wrong(format!("{path}.data"), &source["data"], "a string");
                        source["data"].as_str().map(str::to_string).ok_or_else(wrong)?
                    }
                    Some("content") => inner(&source["content"], format!("{path}.content"))?,
                    _ => {
                        let expected = "text or content: this model accepts only text";
                        return Err(ApiError::wrong(format!("{path}.type"), &source["type"], expected));
                    }
                };
                Ok(titled(&["title", "context"], text))
            }
            _ => {
                let expected = "a type of block that is text here: this model accepts only text, and this server has no tools of its own";
                Err(ApiError::wrong(format!("{}.type", self.path), &self.value["type"], expected))
            }
        }
    }
}

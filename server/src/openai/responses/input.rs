//! Converts `instructions` and `input` to the messages of a chat.
//!
//! An assistant's turn is several items here (reasoning, text, one item per call) and one message in a chat.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::http::ApiError;
use crate::request::{Fields, check_name, join_parts};
use crate::settings::Limits;

/// Reads the messages. `earlier` are items that come after the instructions and before the input, and `referred` other items that it
/// refers to.
pub fn messages(
    fields: &Fields<'_>,
    limits: &Limits,
    earlier: &[Value],
    referred: &[Value],
) -> Result<Vec<Value>, ApiError> {
    let known: HashMap<&str, &Value> = earlier
        .iter()
        .chain(referred)
        .filter(|item| item["type"] != "item_reference")
        .filter_map(|item| Some((item["id"].as_str()?, item)))
        .collect();
    let mut turns = Turns::default();
    // The caller describes the field and checks its length.
    if let Some(Value::String(text)) = fields.get("instructions")?
        && !text.is_empty()
    {
        turns.messages.push(json!({"role": "system", "content": text}));
    }
    for (index, value) in earlier.iter().enumerate() {
        Item { path: format!("earlier[{index}]"), value }.add(&mut turns, &known)?;
    }
    let before = turns.messages.len();
    let expected = "a string or a list of at least one item";
    let description = "An item of type message, function_call, function_call_output or reasoning.";
    let item = json!({"type": "object", "description": description});
    let schema = json!({"anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": limits.max_messages, "items": item},
    ]});
    fields.check_items("input", limits.max_messages, "--max-messages")?;
    let found = fields.any("input", &schema, "Input of the model: a text or a list of items.")?;
    let Some(found) = found else {
        return fields.required("input", None, expected);
    };
    match found {
        Value::String(text) => turns.messages.push(json!({"role": "user", "content": text})),
        Value::Array(items) if !items.is_empty() => {
            for (index, value) in items.iter().enumerate() {
                let item = Item { path: format!("input[{index}]"), value };
                item.add(&mut turns, &known)?;
            }
        }
        other => return Err(ApiError::wrong("input", other, expected)),
    }
    let mut messages = turns.messages;
    // Reasoning without a message or call after it is dropped.
    messages.retain(|message| message.as_object().is_some_and(|fields| fields.len() > 2 || !is_turn(message)));
    // Items before them may be merged or dropped.
    if earlier.is_empty() && messages.len() == before {
        return Err(ApiError::found("input", "no message", "at least one message or function_call_output"));
    }
    Ok(messages)
}

/// The messages so far.
#[derive(Default)]
struct Turns<'a> {
    messages: Vec<Value>,
    /// Names of called functions by the id of the call.
    called: HashMap<&'a str, &'a str>,
}

/// An empty assistant message.
fn turn() -> Value {
    json!({"role": "assistant", "content": null})
}

fn is_turn(message: &Value) -> bool {
    message["role"] == "assistant" && message["content"].is_null()
}

/// One item and its path.
struct Item<'a> {
    path: String,
    value: &'a Value,
}

impl<'a> Item<'a> {
    fn wrong(&self, field: &str, expected: &str) -> ApiError {
        ApiError::wrong(format!("{}.{field}", self.path), &self.value[field], expected)
    }

    fn text(&self, field: &str) -> Result<&'a str, ApiError> {
        self.value[field].as_str().ok_or_else(|| self.wrong(field, "a string"))
    }

    /// Adds it to the messages. An item may refer to one of the known ones.
    fn add(&self, turns: &mut Turns<'a>, known: &HashMap<&'a str, &'a Value>) -> Result<(), ApiError> {
        let messages = &mut turns.messages;
        if !self.value.is_object() {
            return Err(ApiError::wrong(self.path.as_str(), self.value, "an object"));
        }
        match self.value["type"].as_str() {
            // A message may omit its type.
            Some("message") => self.message(messages),
            None if self.value["type"].is_null() => self.message(messages),
            Some("function_call") => self.call(turns),
            Some("function_call_output") => self.call_output(turns),
            Some("reasoning") => self.reasoning(messages),
            Some("item_reference") => {
                let expected = "the id of an item of a response that is kept, of previous_response_id or of conversation; \
                                or send the item";
                let value = known.get(self.text("id")?).ok_or_else(|| self.wrong("id", expected))?;
                Item { path: self.path.clone(), value }.add(turns, known)
            }
            _ => Err(self.wrong("type", "message, function_call, function_call_output or reasoning")),
        }
    }

    fn message(&self, messages: &mut Vec<Value>) -> Result<(), ApiError> {
        let role = self.text("role")?;
        if !["user", "assistant", "system", "developer"].contains(&role) {
            return Err(self.wrong("role", "user, assistant, system or developer"));
        }
        let content = self.content("content")?;
        match messages.last_mut() {
            Some(last) if role == "assistant" && is_turn(last) && last.get("tool_calls").is_none() => {
                last["content"] = content.into();
            }
            _ => messages.push(json!({"role": role, "content": content})),
        }
        Ok(())
    }

    /// A short string, which other items may repeat.
    fn name(&self, field: &str) -> Result<&'a str, ApiError> {
        let name = self.text(field)?;
        check_name(&format!("{}.{field}", self.path), name)?;
        Ok(name)
    }

    fn call(&self, turns: &mut Turns<'a>) -> Result<(), ApiError> {
        let (id, name, arguments) = (self.name("call_id")?, self.name("name")?, self.text("arguments")?);
        turns.called.insert(id, name);
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let last = last_turn(&mut turns.messages);
        match last.get_mut("tool_calls").and_then(Value::as_array_mut) {
            Some(calls) => calls.push(call),
            None => last["tool_calls"] = json!([call]),
        }
        Ok(())
    }

    fn call_output(&self, turns: &mut Turns<'a>) -> Result<(), ApiError> {
        let (id, content) = (self.name("call_id")?, self.content("output")?);
        let mut message = json!({"role": "tool", "tool_call_id": id, "content": content});
        // Some templates need the name, which the output does not have.
        if let Some(name) = turns.called.get(id) {
            message["name"] = (*name).into();
        }
        turns.messages.push(message);
        Ok(())
    }

    fn reasoning(&self, messages: &mut Vec<Value>) -> Result<(), ApiError> {
        let text = match &self.value["content"] {
            Value::Null => String::new(),
            _ => self.content("content")?,
        };
        messages.push(turn());
        if !text.is_empty() {
            last_turn(messages)["reasoning_content"] = text.into();
        }
        Ok(())
    }

    /// A string, or a list of text parts.
    fn content(&self, field: &str) -> Result<String, ApiError> {
        match &self.value[field] {
            Value::String(text) => Ok(text.clone()),
            Value::Array(parts) => join_parts(&format!("{}.{field}", self.path), parts),
            _ => Err(self.wrong(field, "a string or a list of text parts")),
        }
    }
}

/// The last message if it is an assistant's, else a new one.
fn last_turn(messages: &mut Vec<Value>) -> &mut Value {
    if messages.last().is_none_or(|last| last["role"] != "assistant") {
        messages.push(turn());
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

//! `instructions` and `input` become the messages of a chat.
//!
//! An assistant's turn is several items there (thoughts, text, one for each call) and one message here.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::super::error::ApiError;
use super::super::fields::Fields;
use super::super::settings::Limits;
use super::super::tools::check_name;

/// The conversation, checked.
pub fn messages(fields: &Fields<'_>, limits: &Limits) -> Result<Vec<Value>, ApiError> {
    let mut turns = Turns::default();
    // The caller has described it and checked its length.
    if let Some(Value::String(text)) = fields.get("instructions")?
        && !text.is_empty()
    {
        turns.messages.push(json!({"role": "system", "content": text}));
    }
    let before = turns.messages.len();
    let expected = "a text, or a list of at least one item";
    let item = json!({"type": "object", "description": "A message, function_call, function_call_output or reasoning."});
    let schema = json!({"anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": limits.max_messages, "items": item},
    ]});
    fields.check_items("input", limits.max_messages, "--max-messages")?;
    let found = fields.any("input", &schema, "What is answered.")?;
    let Some(found) = found else {
        return fields.required("input", None, expected);
    };
    match found {
        Value::String(text) => turns.messages.push(json!({"role": "user", "content": text})),
        Value::Array(items) if !items.is_empty() => {
            for (index, value) in items.iter().enumerate() {
                let item = Item { path: format!("input[{index}]"), value };
                item.add(&mut turns)?;
            }
        }
        other => return Err(ApiError::wrong("input", other, expected)),
    }
    let mut messages = turns.messages;
    // Reasoning that no message or call follows is left out.
    messages.retain(|message| message.as_object().is_some_and(|fields| fields.len() > 2 || !is_turn(message)));
    if messages.len() == before {
        return Err(ApiError::invalid("input", "expected at least one message or tool output"));
    }
    Ok(messages)
}

/// The messages so far.
#[derive(Default)]
struct Turns<'a> {
    messages: Vec<Value>,
    /// Names of the functions that were called, by the id of the call.
    called: HashMap<&'a str, &'a str>,
}

/// An assistant's message with nothing in it yet.
fn turn() -> Value {
    json!({"role": "assistant", "content": null})
}

fn is_turn(message: &Value) -> bool {
    message["role"] == "assistant" && message["content"].is_null()
}

/// One item, and where it stands.
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

    fn add(&self, turns: &mut Turns<'a>) -> Result<(), ApiError> {
        let messages = &mut turns.messages;
        if !self.value.is_object() {
            return Err(ApiError::wrong(self.path.as_str(), self.value, "an item: an object"));
        }
        match self.value["type"].as_str() {
            // A message may leave its type out.
            Some("message") => self.message(messages),
            None if self.value["type"].is_null() => self.message(messages),
            Some("function_call") => self.call(turns),
            Some("function_call_output") => self.call_output(turns),
            Some("reasoning") => self.reasoning(messages),
            Some("item_reference") => Err(ApiError::not_stored(&format!("{}.id", self.path))),
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

    /// A text that other items may repeat, so it is short.
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
        // Some templates want the name, which the output does not repeat.
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

    /// A text, or a list of parts that are texts.
    fn content(&self, field: &str) -> Result<String, ApiError> {
        match &self.value[field] {
            Value::String(text) => Ok(text.clone()),
            Value::Array(parts) => parts
                .iter()
                .enumerate()
                .map(|(i, part)| part_text(&format!("{}.{field}[{i}]", self.path), part))
                .collect(),
            _ => Err(self.wrong(field, "a string or a list of text parts")),
        }
    }
}

/// The assistant's message at the end, a new one if another's is there.
fn last_turn(messages: &mut Vec<Value>) -> &mut Value {
    if messages.last().is_none_or(|last| last["role"] != "assistant") {
        messages.push(turn());
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

fn part_text<'a>(path: &str, part: &'a Value) -> Result<&'a str, ApiError> {
    let field = match part["type"].as_str() {
        Some("input_text" | "output_text" | "text" | "reasoning_text" | "summary_text") => "text",
        Some("refusal") => "refusal",
        _ => {
            let expected = "input_text, output_text or refusal: this model reads text only";
            return Err(ApiError::wrong(format!("{path}.type"), &part["type"], expected));
        }
    };
    part[field].as_str().ok_or_else(|| ApiError::wrong(format!("{path}.{field}"), &part[field], "a string"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(body: Value) -> Result<Vec<Value>, ApiError> {
        let (body, limits) = (body.to_string(), Limits::default());
        messages(&Fields::parse(body.as_bytes(), &limits).unwrap(), &limits)
    }

    #[test]
    fn the_items_of_a_turn_become_one_message() {
        let call =
            |id: &str, name: &str| json!({"type": "function_call", "call_id": id, "name": name, "arguments": "{}"});
        let input = json!([
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
            call("1", "f"), call("2", "g"),
            {"type": "function_call_output", "call_id": "2", "output": "42"},
        ]);
        let made =
            |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "Wait.", "reasoning_content": "hm", "tool_calls": [made("1", "f"), made("2", "g")]},
            {"role": "tool", "tool_call_id": "2", "content": "42", "name": "g"},
        ]);
        assert_eq!(Value::from(read(json!({"instructions": "Be brief.", "input": input})).unwrap()), expected);
        assert_eq!(Value::from(read(json!({"input": "hi"})).unwrap()), json!([{"role": "user", "content": "hi"}]));
    }

    #[test]
    fn errors_name_the_place() {
        let user = |content: Value| json!([{"role": "user", "content": content}]);
        for (input, param) in [
            (Value::Null, "input"),
            (json!([]), "input"),
            (json!(5), "input"),
            (json!([{"type": "reasoning", "summary": []}]), "input"),
            (json!(["hi"]), "input[0]"),
            (json!([{"content": "hi"}]), "input[0].role"),
            (json!([{"role": "tool", "content": "hi"}]), "input[0].role"),
            (user(json!(5)), "input[0].content"),
            (user(json!([{"type": "input_image"}])), "input[0].content[0].type"),
            (user(json!([{"type": "input_text"}])), "input[0].content[0].text"),
            (json!([{"type": "function_call", "name": "f", "arguments": "{}"}]), "input[0].call_id"),
            (json!([{"type": "function_call_output", "call_id": "1"}]), "input[0].output"),
            (json!([{"type": "item_reference", "id": "msg_1"}]), "input[0].id"),
            (json!([{"type": "web_search_call"}]), "input[0].type"),
            (json!([{"type": 5, "role": "user", "content": "hi"}]), "input[0].type"),
        ] {
            let error = read(json!({"input": input})).unwrap_err().to_json();
            assert_eq!(error["error"]["param"], param, "{input}: {error}");
        }
    }
}

//! Converts messages to those of a chat: one for one, with ids for the calls of tools, which are optional here.

use std::collections::VecDeque;

use serde_json::{Map, Value, json};

use crate::http::ApiError;
use crate::request::{Fields, check_name};
use crate::settings::Limits;

/// Reads the messages, of which there may be none.
pub fn read(fields: &Fields<'_>, limits: &Limits) -> Result<Vec<Value>, ApiError> {
    let item = json!({"type": "object", "required": ["role"], "properties": {
        "role": {"type": "string", "description": "Role of the author: system, user, assistant or tool."},
        "content": {"type": "string"},
        "thinking": {"type": "string"},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
        "tool_name": {"type": "string", "description": "Of a tool's result: the name of the function."},
    }});
    let description = "Messages of the conversation; without them, the model is only loaded.";
    let list = fields.list("messages", limits.max_messages, "--max-messages", &item, description)?;
    let mut calls = Calls::default();
    list.into_iter().flatten().enumerate().map(|(index, message)| calls.message(index, message)).collect()
}

/// The calls so far.
#[derive(Default)]
struct Calls {
    count: usize,
    /// Ids and names of those without a result.
    open: VecDeque<(String, String)>,
}

impl Calls {
    fn message(&mut self, index: usize, message: &Value) -> Result<Value, ApiError> {
        let path = format!("messages[{index}]");
        let Value::Object(given) = message else {
            return Err(ApiError::wrong(path, message, "an object with role and content"));
        };
        let given = |name: &str| given.get(name).filter(|value| !value.is_null());
        if let Some(images) = given("images").filter(|images| **images != json!([])) {
            return Err(ApiError::wrong(format!("{path}.images"), images, "none: this model accepts only text"));
        }
        let mut chat = Map::new();
        for (theirs, ours) in [("role", "role"), ("content", "content"), ("thinking", "reasoning_content")] {
            given(theirs).into_iter().for_each(|value| drop(chat.insert(ours.into(), value.clone())));
        }
        match given("tool_calls") {
            None => {}
            Some(Value::Array(list)) => {
                let calls =
                    list.iter().enumerate().map(|(i, call)| self.call(&format!("{path}.tool_calls[{i}]"), call));
                chat.insert("tool_calls".into(), calls.collect::<Result<Vec<_>, _>>()?.into());
            }
            Some(other) => return Err(ApiError::wrong(format!("{path}.tool_calls"), other, "a list of calls")),
        }
        if given("role").is_some_and(|role| role == "tool") {
            let text = |name: &str| match given(name) {
                None => Ok(None),
                Some(Value::String(text)) => check_name(&format!("{path}.{name}"), text).map(|()| Some(text.clone())),
                Some(other) => Err(ApiError::wrong(format!("{path}.{name}"), other, "a string")),
            };
            let (id, name) = (text("tool_call_id")?, text("tool_name")?.or(text("name")?));
            // A result is that of the first call that it can be for.
            let is_it = |(open, called): &(String, String)| match (&id, &name) {
                (Some(id), _) => id == open,
                (None, Some(name)) => name == called,
                (None, None) => true,
            };
            let call = self.open.iter().position(is_it).and_then(|at| self.open.remove(at));
            let (open, called) = call.unzip();
            id.or(open).into_iter().for_each(|id| drop(chat.insert("tool_call_id".into(), id.into())));
            name.or(called).into_iter().for_each(|name| drop(chat.insert("name".into(), name.into())));
        }
        Ok(chat.into())
    }

    fn call(&mut self, path: &str, call: &Value) -> Result<Value, ApiError> {
        let function = &call["function"];
        let wrong =
            |name: &str, found: &Value, expected: &str| ApiError::wrong(format!("{path}.{name}"), found, expected);
        let name = function["name"].as_str().ok_or_else(|| wrong("function.name", &function["name"], "a string"))?;
        check_name(&format!("{path}.function.name"), name)?;
        let arguments = match &function["arguments"] {
            Value::Null => "{}".to_string(),
            arguments @ Value::Object(_) => arguments.to_string(),
            Value::String(text) => text.clone(),
            other => return Err(wrong("function.arguments", other, "an object")),
        };
        self.count += 1;
        // Nine letters and digits, as Mistral's templates require.
        let fresh = || format!("call{:05}", self.count);
        let id = match &call["id"] {
            Value::Null => fresh(),
            Value::String(id) if id.is_empty() => fresh(),
            Value::String(id) => id.clone(),
            other => return Err(wrong("id", other, "a string")),
        };
        check_name(&format!("{path}.id"), &id)?;
        self.open.push_back((id.clone(), name.to_string()));
        Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
    }
}

//! Messages as a template can read them.
//!
//! The API allows what many templates do not handle: the role `developer`, several system messages, at the beginning or later, `null`
//! content, empty lists of calls, arguments of calls as text. A client cannot know the template, so messages are adapted to it. How it
//! handles them is found out once, by rendering short conversations when it is loaded.

use serde_json::{Map, Value, json};

/// A text that no template contains.
const MARK: &str = "QUIREPROBE";

/// How a template handles messages that not every template handles.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Traits {
    /// It has the role `developer`. Otherwise such messages are system messages.
    has_developer: bool,
    /// It refuses or drops the second of two system messages at the beginning. They become one.
    has_one_system_message: bool,
    /// It refuses or drops a system message behind a user's. Such messages join the one at the beginning.
    has_leading_system_only: bool,
    /// It shows the calls of a message only if its content is `null`. Otherwise absent content is an empty text.
    has_null_content: bool,
    /// It reads the arguments of calls as text. Otherwise they are objects.
    has_text_arguments: bool,
}

impl Traits {
    /// Finds out the traits of a template. `render` renders messages with tools, or fails; `mentions` says whether the source
    /// contains a text.
    pub fn of(render: impl Fn(&[Value], Option<&Value>) -> Option<String>, mentions: impl Fn(&str) -> bool) -> Traits {
        let shows = |messages: &[Value], tools| render(messages, tools).is_some_and(|prompt| prompt.contains(MARK));
        let user = json!({"role": "user", "content": "Hello"});
        let system = |text: &str| json!({"role": "system", "content": text});
        let takes_system = shows(&[system(MARK), user.clone()], None);
        let takes_two = shows(&[system("Hello"), system(MARK), user.clone()], None);
        let answer = json!({"role": "assistant", "content": "Hello"});
        let takes_later = shows(&[user.clone(), answer, user.clone(), system(MARK)], None);
        let tools = json!([{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]);
        let shows_call = |content: Value, arguments: Value| {
            let function = json!({"name": "f", "arguments": arguments});
            let call = json!({"id": "call00001", "type": "function", "function": function});
            let answer = json!({"role": "assistant", "content": content, "tool_calls": [call]});
            shows(&[user.clone(), answer], Some(&tools))
        };
        let (object, text) = (json!({"x": MARK}), json!({"x": MARK}).to_string());
        let forms = [(false, false), (true, false), (false, true), (true, true)];
        let form = forms.into_iter().find(|&(is_null, is_text)| {
            let content = if is_null { Value::Null } else { "".into() };
            shows_call(content, if is_text { text.clone().into() } else { object.clone() })
        });
        let (has_null_content, has_text_arguments) = form.unwrap_or_default();
        Traits {
            has_developer: mentions("'developer'") || mentions("\"developer\""),
            has_one_system_message: takes_system && !takes_two,
            has_leading_system_only: takes_system && !takes_later,
            has_null_content,
            has_text_arguments,
        }
    }

    /// Adapts messages to the template.
    pub fn adapt(self, messages: &mut Vec<Value>) {
        for message in messages.iter_mut().filter_map(Value::as_object_mut) {
            self.adapt_message(message);
        }
        let is_system = |message: &Value| message["role"] == "system" && message["content"].is_string();
        let mut leading = messages.iter().take_while(|message| is_system(message)).count();
        if self.has_leading_system_only && messages[leading..].iter().any(is_system) {
            let (later, others): (Vec<Value>, Vec<Value>) = messages.drain(leading..).partition(is_system);
            leading += later.len();
            messages.extend(later);
            messages.extend(others);
        }
        if self.has_one_system_message && leading > 1 {
            let texts: Vec<&str> =
                messages[..leading].iter().filter_map(|message| message["content"].as_str()).collect();
            messages[0]["content"] = texts.join("\n\n").into();
            messages.drain(1..leading);
        }
    }

    fn adapt_message(self, message: &mut Map<String, Value>) {
        // `null` means "not given", and clients repeat answers with all fields that an answer can have.
        message.retain(|_, value| !value.is_null());
        alias_reasoning(message);
        if !self.has_developer && message.get("role").is_some_and(|role| role == "developer") {
            message.insert("role".into(), "system".into());
        }
        let has_calls = match message.get_mut("tool_calls") {
            Some(Value::Array(calls)) if calls.is_empty() => {
                message.shift_remove("tool_calls");
                false
            }
            Some(calls) => {
                if !self.has_text_arguments {
                    parse_arguments(calls);
                }
                true
            }
            None => false,
        };
        if message.get("content").is_none_or(|content| content == "") {
            let absent = if has_calls && self.has_null_content { Value::Null } else { "".into() };
            message.insert("content".into(), absent);
        }
    }
}

/// Copies the reasoning of a message to the names that templates read: `reasoning_content`, and in a few `thinking`.
fn alias_reasoning(message: &mut Map<String, Value>) {
    let names = ["reasoning_content", "thinking", "reasoning"];
    let Some(reasoning) = names.iter().find_map(|name| message.get(*name)).cloned() else { return };
    message.entry("thinking").or_insert(reasoning.clone());
    message.insert("reasoning_content".to_string(), reasoning);
}

/// Parses the arguments of past calls: the API has them as JSON text, most templates expect objects. Text that is not a JSON
/// object stays as it is, because a model may have written anything.
fn parse_arguments(calls: &mut Value) {
    for call in calls.as_array_mut().into_iter().flatten() {
        let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments")) else {
            continue;
        };
        let parsed = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
        if let Some(object) = parsed.filter(Value::is_object) {
            *arguments = object;
        }
    }
}

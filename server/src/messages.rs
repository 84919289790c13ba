//! A conversation becomes token ids: messages are checked, rendered by the model's chat template and tokenised.
//!
//! What the API promises is checked here (a list of objects with a role, content of text); which roles exist and in
//! which order they may come is the template's business.

use engine::ChatInput;
use serde_json::{Map, Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;
use super::settings::Limits;
use super::work::Work;

/// A checked conversation and how it is to be rendered.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// The field that it came from, for errors.
    param: &'static str,
    messages: Vec<Value>,
    tools: Option<Value>,
    add_generation_prompt: bool,
    continue_final_message: bool,
    kwargs: Map<String, Value>,
    add_special_tokens: bool,
}

impl Conversation {
    /// Reads `messages` and the fields that steer the template. `tools` are the definitions of what may be called.
    pub fn read(fields: &Fields<'_>, limits: &Limits, tools: Option<Value>) -> Result<Option<Conversation>, ApiError> {
        fields.refuse("chat_template", "the model's own template is used")?;
        let continue_final_message =
            fields.flag("continue_final_message", false, "Go on with the last message instead of answering it.")?;
        let add_generation_prompt = fields
            .bool(
                "add_generation_prompt",
                "End the prompt where an answer begins; true unless a message is continued.",
            )?
            .unwrap_or(!continue_final_message);
        if continue_final_message && add_generation_prompt {
            let problem = "cannot be together with add_generation_prompt; set one of the two to false";
            return Err(ApiError::invalid("continue_final_message", problem));
        }
        let effort =
            fields.word("reasoning_effort", &EFFORTS, "How long to think; the chat template knows what that means.")?;
        let kwargs = template_kwargs(fields, effort)?;
        let description =
            "Begin with the tokenizer's special tokens too; false by default, but true for a plain prompt.";
        let add_special_tokens = fields.bool("add_special_tokens", description)?.unwrap_or(false);
        let item = json!({"type": "object", "required": ["role"], "properties": {
            "role": {"type": "string", "description": "Who speaks; the chat template knows which roles exist."},
            "content": {"description": "A text, a list of text parts, or null."},
        }});
        let description = "The conversation.";
        let list = fields.list("messages", limits.max_messages, "--max-messages", &item, description)?;
        let Some(list) = list else { return Ok(None) };
        if list.is_empty() {
            return Err(ApiError::invalid("messages", "found an empty list, expected at least one message"));
        }
        let messages = list.iter().enumerate().map(|(i, value)| message(i, value)).collect::<Result<_, _>>()?;
        Ok(Some(Conversation {
            param: "messages",
            messages,
            tools,
            add_generation_prompt,
            continue_final_message,
            kwargs,
            add_special_tokens,
        }))
    }

    /// These messages, to be answered. `param` is the field that they came from.
    pub fn of(
        param: &'static str,
        mut messages: Vec<Value>,
        tools: Option<Value>,
        kwargs: Map<String, Value>,
    ) -> Conversation {
        messages.iter_mut().filter_map(|message| message.get_mut("tool_calls")).for_each(parse_arguments);
        Conversation {
            param,
            messages,
            tools,
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs,
            add_special_tokens: false,
        }
    }

    /// The prompt as text.
    pub fn render(&self, app: &App) -> Result<String, ApiError> {
        let Some(template) = app.engine.chat_template() else {
            let advice = "this model has no chat template; use /v1/completions";
            return Err(ApiError::unsupported(self.param, advice));
        };
        let input = ChatInput {
            messages: &self.messages,
            tools: self.tools.as_ref(),
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message,
            kwargs: &self.kwargs,
        };
        template.render(&input).map_err(|error| ApiError::invalid(self.param, error))
    }

    /// The token ids of what was rendered; see [`Work::encode`]. The template writes the special tokens itself, so none
    /// are added by default.
    pub fn encode(&self, work: &Work, text: &str, must_fit: bool) -> Result<Vec<u32>, ApiError> {
        work.encode(text, self.add_special_tokens, self.param, must_fit)
    }
}

/// How long to think.
pub const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];

/// What the template gets beside the conversation: `chat_template_kwargs`, and the effort under the names that templates
/// look for: that of gpt-oss, and the switch of Qwen3.
pub fn template_kwargs(fields: &Fields<'_>, effort: Option<&str>) -> Result<Map<String, Value>, ApiError> {
    let description = "Variables of the model's chat template.";
    let mut kwargs = fields.object("chat_template_kwargs", description)?.cloned().unwrap_or_default();
    if let Some(name) = effort {
        kwargs.entry("reasoning_effort").or_insert(name.into());
        kwargs.entry("enable_thinking").or_insert((name != "none").into());
    }
    Ok(kwargs)
}

fn message(index: usize, value: &Value) -> Result<Value, ApiError> {
    let path = format!("messages[{index}]");
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
            let texts = parts.iter().enumerate().map(|(i, part)| text_part(&format!("{path}.content[{i}]"), part));
            message.insert("content".into(), texts.collect::<Result<String, _>>()?.into());
        }
        Some(other) => {
            let expected = "a string, a list of text parts, or null";
            return Err(ApiError::wrong(format!("{path}.content"), other, expected));
        }
    }
    if let Some(calls) = message.get_mut("tool_calls") {
        parse_arguments(calls);
    }
    Ok(Value::Object(message))
}

fn text_part<'a>(path: &str, part: &'a Value) -> Result<&'a str, ApiError> {
    match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
        (Some("text"), Some(text)) => Ok(text),
        (Some("text"), None) => Err(ApiError::wrong(format!("{path}.text"), &part["text"], "a string")),
        (None, _) => Err(ApiError::wrong(path, part, "an object with type \"text\" and text")),
        (Some(_), _) => {
            Err(ApiError::wrong(format!("{path}.type"), &part["type"], "\"text\": this model reads text only"))
        }
    }
}

/// Templates expect the arguments of past calls as objects, the API sends them as JSON text. Text that is no JSON object
/// (a model may have written anything) stays text.
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(body: Value) -> Result<Conversation, ApiError> {
        let (body, limits) = (body.to_string(), Limits::default());
        let fields = Fields::parse(body.as_bytes(), &limits).unwrap();
        let found = Conversation::read(&fields, &limits, None)?;
        fields.required("messages", found, "a list of messages")
    }

    fn param(body: Value) -> String {
        read(body).unwrap_err().to_json()["error"]["param"].as_str().unwrap().to_string()
    }

    #[test]
    fn text_parts_are_joined_as_they_are() {
        let parts = json!([{"type": "text", "text": "Count to "}, {"type": "text", "text": "twelve."}]);
        let conversation = read(json!({"messages": [{"role": "user", "content": parts}]})).unwrap();
        assert_eq!(conversation.messages[0]["content"], "Count to twelve.");
    }

    #[test]
    fn errors_name_the_place() {
        assert_eq!(param(json!({})), "messages");
        assert_eq!(param(json!({"messages": ["hi"]})), "messages[0]");
        assert_eq!(param(json!({"messages": [{"content": "hi"}]})), "messages[0].role");
        assert_eq!(param(json!({"messages": [{"role": "user", "content": 5}]})), "messages[0].content");
        let image = json!([{"type": "text", "text": "a"}, {"type": "image_url"}]);
        assert_eq!(param(json!({"messages": [{"role": "user", "content": image}]})), "messages[0].content[1].type");
    }

    #[test]
    fn past_tool_calls_become_objects_where_they_are_json_and_stay_text_where_not() {
        let call = |arguments: &str| json!({"function": {"name": "f", "arguments": arguments}});
        let calls = json!([call("{\"a\": 1}"), call("{broken"), call("42")]);
        let conversation = read(json!({"messages": [{"role": "assistant", "tool_calls": calls}]})).unwrap();
        let arguments = |i: usize| conversation.messages[0]["tool_calls"][i]["function"]["arguments"].clone();
        assert_eq!([arguments(0), arguments(1), arguments(2)], [json!({"a": 1}), json!("{broken"), json!("42")]);
    }

    #[test]
    fn a_message_is_either_continued_or_answered() {
        let messages = json!([{"role": "assistant", "content": "The red"}]);
        let continued = read(json!({"messages": messages, "continue_final_message": true})).unwrap();
        assert!(continued.continue_final_message && !continued.add_generation_prompt);
        let both = json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": true});
        assert_eq!(param(both), "continue_final_message");
    }
}

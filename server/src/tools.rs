//! What a chat says about tools: which there are, and whether one must be called.

use std::sync::Arc;

use engine::text::Tool;
use engine::{GenerationParams, StructuredOutput};
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;
use super::settings::Limits;

/// Most bytes of a function's name.
pub const MAX_NAME: usize = 256;

/// Whether the model calls functions.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Choice {
    /// Its text is text.
    None,
    /// As it likes.
    Auto,
    /// It must call some.
    Required,
    /// It must call this one, once.
    Named(String),
}

/// `tools`, `tool_choice` and `parallel_tool_calls`, checked.
#[derive(Clone, Debug)]
pub struct Tools {
    /// As the chat template gets them; `None` without any.
    pub definitions: Option<Value>,
    /// Several calls may come in one message.
    pub parallel: bool,
    functions: Vec<Tool>,
    choice: Choice,
}

impl Tools {
    /// Reads the fields as a chat has them.
    pub fn read(fields: &Fields<'_>, limits: &Limits) -> Result<Tools, ApiError> {
        let function = json!({"type": "object", "required": ["name"], "properties": {
            "name": {"type": "string", "maxLength": MAX_NAME},
            "description": {"type": "string"},
            "parameters": {"type": "object", "description": "A JSON schema."},
        }});
        let item = json!({"type": "object", "required": ["type", "function"], "properties": {
            "type": {"const": "function"},
            "function": function,
        }});
        Tools::new(fields, Tools::list(fields, limits, &item)?, Tools::choice(fields)?)
    }

    /// The field `tools`, whose items `item` describes.
    pub fn list<'b>(fields: &'b Fields<'_>, limits: &Limits, item: &Value) -> Result<Option<&'b Vec<Value>>, ApiError> {
        fields.check_bytes("tools", "tools", limits.max_schema_bytes, "--max-schema-bytes")?;
        fields.list("tools", limits.max_tools, "--max-tools", item, "Functions that may be called.")
    }

    /// The field `tool_choice`.
    pub fn choice<'b>(fields: &'b Fields<'_>) -> Result<Option<&'b Value>, ApiError> {
        let schema = json!({"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, {"type": "object"}]});
        fields.any("tool_choice", &schema, "Whether to call a function, or which one, as an object with its name.")
    }

    /// With these values for the fields `tools` and `tool_choice`.
    pub fn new(fields: &Fields<'_>, list: Option<&Vec<Value>>, choice: Option<&Value>) -> Result<Tools, ApiError> {
        let list = list.filter(|list| !list.is_empty());
        let functions = list.into_iter().flatten().enumerate().map(|(i, tool)| function(i, tool));
        let functions: Vec<Tool> = functions.collect::<Result<_, _>>()?;
        Ok(Tools {
            choice: wanted(choice, &functions)?,
            definitions: list.map(|list| Value::Array(list.clone())),
            parallel: fields.flag("parallel_tool_calls", true, "Several calls may come in one message.")?,
            functions,
        })
    }

    /// Whether calls are looked for in the text.
    pub fn are_parsed(&self) -> bool {
        self.choice != Choice::None
    }

    /// Names of the functions.
    pub fn names(&self) -> Vec<String> {
        self.functions.iter().map(|tool| tool.name.clone()).collect()
    }

    /// Makes the model write what the choice demands, and shows its markers.
    pub fn hold(&self, app: &App, params: &mut GenerationParams) -> Result<(), ApiError> {
        if !self.are_parsed() {
            return Ok(());
        }
        if app.tool_format.special_marker(app.tokenizer()).is_some() {
            params.skip_special_tokens = false;
        }
        let (functions, parallel) = match &self.choice {
            Choice::None | Choice::Auto => return Ok(()),
            Choice::Required => (self.functions.clone(), self.parallel),
            Choice::Named(name) => (self.functions.iter().filter(|tool| tool.name == *name).cloned().collect(), false),
        };
        if let Some(other) = &params.structured_outputs {
            return Err(ApiError::invalid(
                "tool_choice",
                format_args!("a required tool call cannot be combined with {}; leave one of the two out", other.param),
            ));
        }
        let grammar = app.tool_format.grammar(&functions, parallel, app.tokenizer());
        params.structured_outputs = Some(Arc::new(StructuredOutput { grammar, param: "tools" }));
        Ok(())
    }
}

fn function(index: usize, tool: &Value) -> Result<Tool, ApiError> {
    let path = format!("tools[{index}]");
    if tool.get("type").and_then(Value::as_str) != Some("function") {
        return Err(ApiError::wrong(path + ".type", tool.get("type").unwrap_or(&Value::Null), "\"function\""));
    }
    let field = |name| tool.get("function").and_then(|function| function.get(name)).unwrap_or(&Value::Null);
    let name = field("name").as_str().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| ApiError::wrong(format!("{path}.function.name"), field("name"), "a string"))?;
    check_name(&format!("{path}.function.name"), name)?;
    let parameters = match field("parameters") {
        Value::Null => None,
        schema @ Value::Object(fields) => Some(schema.clone()).filter(|_| !fields.is_empty()),
        other => return Err(ApiError::wrong(path + ".function.parameters", other, "a JSON schema")),
    };
    Ok(Tool { name: name.to_string(), parameters })
}

/// Names are repeated in messages, parsers and grammars, so they are short.
pub fn check_name(path: &str, name: &str) -> Result<(), ApiError> {
    match name.len() {
        found if found > MAX_NAME => Err(ApiError::over(path, found, MAX_NAME, "bytes", "shorten the name")),
        _ => Ok(()),
    }
}

fn wanted(value: Option<&Value>, functions: &[Tool]) -> Result<Choice, ApiError> {
    const PARAM: &str = "tool_choice";
    let choice = match value {
        None if functions.is_empty() => Choice::None,
        None => Choice::Auto,
        Some(value) => match (value.as_str(), value["function"]["name"].as_str()) {
            (Some("none"), _) => Choice::None,
            (Some("auto"), _) => Choice::Auto,
            (Some("required"), _) => Choice::Required,
            (None, Some(name)) if value["type"] == "function" => Choice::Named(name.to_string()),
            _ => {
                let expected = "none, auto, required or {\"type\": \"function\", \"function\": {\"name\": …}}";
                return Err(ApiError::wrong(PARAM, value, expected));
            }
        },
    };
    match &choice {
        Choice::None => Ok(choice),
        _ if functions.is_empty() => Err(ApiError::invalid(PARAM, "there are no tools to choose from; send tools")),
        Choice::Named(name) if functions.iter().all(|tool| tool.name != *name) => {
            Err(ApiError::wrong(PARAM, &Value::from(name.as_str()), "the name of one of the tools"))
        }
        _ => Ok(choice),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(body: Value) -> Result<Tools, ApiError> {
        let (body, limits) = (body.to_string(), Limits::default());
        Tools::read(&Fields::parse(body.as_bytes(), &limits).unwrap(), &limits)
    }

    #[test]
    fn a_choice_has_one_of_four_forms() {
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let named = json!({"type": "function", "function": {"name": "f"}});
        for (choice, wanted) in [
            (Value::Null, Choice::Auto),
            (json!("none"), Choice::None),
            (json!("auto"), Choice::Auto),
            (json!("required"), Choice::Required),
            (named, Choice::Named("f".into())),
        ] {
            assert_eq!(read(json!({"tools": tools, "tool_choice": choice})).unwrap().choice, wanted);
        }
        assert_eq!(read(json!({})).unwrap().choice, Choice::None);
        assert!(read(json!({"tools": [], "tool_choice": "none"})).unwrap().definitions.is_none());
    }
}

//! Tools of a chat: which functions exist, and whether the model must call one.

use std::sync::Arc;

use engine::text::Tool;
use engine::{GenerationParams, StructuredOutput};
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;
use super::settings::Limits;

/// Maximum number of bytes of a function's name.
pub const MAX_NAME: usize = 256;

/// The field `tool_choice`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Choice {
    None,
    Auto,
    /// At least one call.
    Required,
    /// One call of this function.
    Named(String),
}

/// The fields `tools`, `tool_choice` and `parallel_tool_calls`.
#[derive(Clone, Debug)]
pub struct Tools {
    /// Definitions for the chat template; `None` without tools.
    pub definitions: Option<Value>,
    /// A message may have several calls.
    pub parallel: bool,
    functions: Vec<Tool>,
    choice: Choice,
}

impl Tools {
    /// Reads the fields of a chat.
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

    /// Reads the field `tools`; `item` is the schema of its items.
    pub fn list<'b>(fields: &'b Fields<'_>, limits: &Limits, item: &Value) -> Result<Option<&'b Vec<Value>>, ApiError> {
        fields.check_bytes("tools", "tools", limits.max_schema_bytes, "--max-schema-bytes")?;
        fields.list("tools", limits.max_tools, "--max-tools", item, "Functions that the model may call.")
    }

    /// Reads the field `tool_choice`.
    pub fn choice<'b>(fields: &'b Fields<'_>) -> Result<Option<&'b Value>, ApiError> {
        let schema = json!({"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, {"type": "object"}]});
        let description =
            "Whether the model calls a function: none, auto, required, or an object with a function's name.";
        fields.any("tool_choice", &schema, description)
    }

    /// Checks the values of `tools` and `tool_choice`, and reads `parallel_tool_calls`.
    pub fn new(fields: &Fields<'_>, list: Option<&Vec<Value>>, choice: Option<&Value>) -> Result<Tools, ApiError> {
        let list = list.filter(|list| !list.is_empty());
        let functions = list.into_iter().flatten().enumerate().map(|(i, tool)| function(i, tool));
        let functions: Vec<Tool> = functions.collect::<Result<_, _>>()?;
        Ok(Tools {
            choice: checked_choice(choice, &functions)?,
            definitions: list.map(|list| Value::Array(list.clone())),
            parallel: fields.flag("parallel_tool_calls", true, "Allow several calls in one message.")?,
            functions,
        })
    }

    /// Whether calls in the text are parsed.
    pub fn are_parsed(&self) -> bool {
        self.choice != Choice::None
    }

    /// Names of the functions.
    pub fn names(&self) -> Vec<String> {
        self.functions.iter().map(|tool| tool.name.clone()).collect()
    }

    /// Constrains the output to required calls, and keeps the special tokens that mark calls.
    pub fn constrain(&self, app: &App, params: &mut GenerationParams) -> Result<(), ApiError> {
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
            let problem = "found a required call together with";
            return Err(ApiError::invalid(
                "tool_choice",
                format_args!("{problem} {}, expected only one of the two; remove one", other.param),
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
    let name =
        name.ok_or_else(|| ApiError::wrong(format!("{path}.function.name"), field("name"), "a non-empty string"))?;
    check_name(&format!("{path}.function.name"), name)?;
    let parameters = match field("parameters") {
        Value::Null => None,
        schema @ Value::Object(fields) => Some(schema.clone()).filter(|_| !fields.is_empty()),
        other => return Err(ApiError::wrong(path + ".function.parameters", other, "a JSON schema")),
    };
    Ok(Tool { name: name.to_string(), parameters })
}

/// Checks the length of a name. Names are repeated in messages, parsers and grammars, so they must be short.
pub fn check_name(path: &str, name: &str) -> Result<(), ApiError> {
    match name.len() {
        found if found > MAX_NAME => Err(ApiError::over(path, found, MAX_NAME, "bytes", "send a shorter name")),
        _ => Ok(()),
    }
}

fn checked_choice(value: Option<&Value>, functions: &[Tool]) -> Result<Choice, ApiError> {
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
        _ if functions.is_empty() => Err(ApiError::requires(PARAM, "tools")),
        Choice::Named(name) if functions.iter().all(|tool| tool.name != *name) => {
            Err(ApiError::wrong(PARAM, &Value::from(name.as_str()), "the name of one of the tools"))
        }
        _ => Ok(choice),
    }
}

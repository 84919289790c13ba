//! What a chat says about tools: which there are, and whether one must be called.

use engine::text::Tool;
use engine::{GenerationParams, StructuredOutput};
use serde_json::Value;

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;

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
    pub fn read(fields: &Fields) -> Result<Tools, ApiError> {
        Tools::new(fields, fields.list("tools")?, fields.get("tool_choice"))
    }

    /// With these in the place of the fields `tools` and `tool_choice`.
    pub fn new(fields: &Fields, list: Option<&Vec<Value>>, choice: Option<&Value>) -> Result<Tools, ApiError> {
        let list = list.filter(|list| !list.is_empty());
        let functions = list.into_iter().flatten().enumerate().map(|(i, tool)| function(i, tool));
        let functions: Vec<Tool> = functions.collect::<Result<_, _>>()?;
        Ok(Tools {
            choice: wanted(choice, &functions)?,
            definitions: list.map(|list| Value::Array(list.clone())),
            parallel: fields.bool("parallel_tool_calls")?.unwrap_or(true),
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
                format_args!("a call that must come, not with {}", other.param),
            ));
        }
        let grammar = app.tool_format.grammar(&functions, parallel, app.tokenizer());
        params.structured_outputs = Some(StructuredOutput { grammar, param: "tools" });
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
    let parameters = match field("parameters") {
        Value::Null => None,
        schema @ Value::Object(fields) => Some(schema.clone()).filter(|_| !fields.is_empty()),
        other => return Err(ApiError::wrong(path + ".function.parameters", other, "a JSON schema")),
    };
    Ok(Tool { name: name.to_string(), parameters })
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
    use serde_json::json;

    fn read(body: Value) -> Result<Tools, ApiError> {
        Tools::read(&Fields::new(body).unwrap())
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

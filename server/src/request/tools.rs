//! Tools of a chat: which functions exist, and whether the model must call one.

use std::sync::Arc;

use engine::{GenerationParams, StructuredOutput};
use serde_json::{Value, json};
use text::{Calls, Tool, with_schema_options};

use super::fields::Fields;
use super::structured::{FORMATS, TOOLS};
use crate::app::App;
use crate::http::ApiError;
use crate::settings::{Limits, ServerOptions};

/// Types of tools.
const FUNCTION: &str = "function";
const NAMESPACE: &str = "namespace";
const SEARCH: &str = "web_search";

/// Maximum number of bytes of a function's name.
const MAX_NAME: usize = 256;

/// The field `tool_choice`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ToolChoice {
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
    /// Number of calls in the conversation so far.
    pub earlier_calls: usize,
    /// The functions.
    pub functions: Arc<[Tool]>,
    /// Functions that are in a namespace, and its name.
    pub namespaces: Arc<[(String, String)]>,
    /// Which functions are strict: the arguments match the schema even where the model need not call.
    strict: Vec<bool>,
    choice: ToolChoice,
}

impl Tools {
    /// Reads the fields. A function's definition is nested in the field `function` of its tool, as in chats; or, if
    /// `flat`, it is the tool itself, as in responses. There, functions may also be in a namespace, and a search of the web without
    /// access to it, which Codex names in all requests, is a tool that is never called.
    pub fn read(fields: &Fields<'_>, limits: &Limits, flat: bool) -> Result<Tools, ApiError> {
        let properties = json!({
            "name": {"type": "string", "maxLength": MAX_NAME},
            "description": {"type": "string"},
            "parameters": {"type": "object", "description": "A JSON schema."},
            "strict": {"type": "boolean", "description": "Constrain the arguments to the schema even if no call is required."},
        });
        let function = |required: &[&str]| json!({"type": "object", "required": required, "properties": properties});
        let mut item = match flat {
            true => function(&["type"]),
            false => json!({
                "type": "object",
                "required": ["type", "function"],
                "properties": {"function": function(&["name"])},
            }),
        };
        item["properties"]["type"] = match flat {
            true => json!({"enum": [FUNCTION, NAMESPACE, SEARCH]}),
            false => json!({"const": FUNCTION}),
        };
        fields.check_bytes(TOOLS, TOOLS, limits.max_schema_bytes, "--max-schema-bytes")?;
        let description = "Functions that the model may call.";
        let list = fields.list(TOOLS, limits.max_tools, "--max-tools", &item, description)?;
        let schema = json!({"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, {"type": "object"}]});
        let description =
            "Whether the model calls a function: none, auto, required, or an object with a function's name.";
        let choice = fields.any("tool_choice", &schema, description)?;
        let mut offered = Vec::new();
        for (i, tool) in list.into_iter().flatten().enumerate() {
            offer(format!("tools[{i}]"), tool, flat, &mut offered)?;
        }
        if offered.len() > limits.max_tools {
            let advice = "send fewer or raise --max-tools";
            return Err(ApiError::over(TOOLS, offered.len(), limits.max_tools, "functions", advice));
        }
        let (mut functions, mut definitions, mut strict, mut namespaces) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (path, tool, namespace) in offered {
            let (function, is_strict) = parse_function(&path, tool, flat)?;
            namespaces.extend(namespace.map(|namespace| (function.name.clone(), namespace.to_string())));
            functions.push(function);
            strict.push(is_strict);
            definitions.push(if flat { nested(tool) } else { tool.clone() });
        }
        let twice = |(name, _): &&(String, String)| functions.iter().filter(|tool| tool.name == *name).count() > 1;
        if let Some((name, namespace)) = namespaces.iter().find(twice) {
            let found = format!("the function {name} in namespace {namespace} and elsewhere");
            return Err(ApiError::found(TOOLS, &found, "functions of different names"));
        }
        Ok(Tools {
            choice: checked_choice(choice, flat, &functions)?,
            definitions: (!definitions.is_empty()).then(|| definitions.into()),
            parallel: fields.flag("parallel_tool_calls", true, "Allow several calls in one message.")?,
            earlier_calls: 0,
            functions: functions.into(),
            namespaces: namespaces.into(),
            strict,
        })
    }

    /// No functions.
    pub fn none() -> Tools {
        Tools {
            definitions: None,
            parallel: true,
            earlier_calls: 0,
            functions: Vec::new().into(),
            namespaces: Vec::new().into(),
            strict: Vec::new(),
            choice: ToolChoice::None,
        }
    }

    /// The definitions that the prompt shows.
    pub fn shown(&self, options: &ServerOptions) -> Option<Value> {
        let is_hidden = options.exclude_tools_when_tool_choice_none && !self.are_parsed();
        self.definitions.clone().filter(|_| !is_hidden)
    }

    /// Whether calls in the text are parsed.
    pub fn are_parsed(&self) -> bool {
        self.choice != ToolChoice::None
    }

    /// Constrains the output to required calls, or calls of strict functions to their schemas, and keeps the special tokens that
    /// mark calls. Returns whether the output is constrained so.
    pub fn constrain(&self, app: &App, params: &mut GenerationParams) -> Result<bool, ApiError> {
        if !self.are_parsed() {
            return Ok(false);
        }
        if app.tool_format.has_special_marker(app.tokenizer()) {
            params.skip_special_tokens = false;
        }
        let (functions, calls) = match &self.choice {
            // Another constraint on the output applies to the whole answer.
            ToolChoice::Auto
                if self.strict.contains(&true) && params.structured_outputs.is_none() && params.beam.is_none() =>
            {
                let tool = |(tool, strict): (&Tool, &bool)| Tool {
                    name: tool.name.clone(),
                    parameters: tool.parameters.clone().filter(|_| *strict),
                };
                (
                    self.functions.iter().zip(&self.strict).map(tool).collect(),
                    Calls::Optional(app.reasoning.opening_text(app.tokenizer())),
                )
            }
            ToolChoice::None | ToolChoice::Auto => return Ok(false),
            ToolChoice::Required if self.parallel => (self.functions.to_vec(), Calls::Several),
            ToolChoice::Required => (self.functions.to_vec(), Calls::One),
            ToolChoice::Named(name) => {
                (self.functions.iter().filter(|tool| tool.name == *name).cloned().collect(), Calls::One)
            }
        };
        // The format of messages stands beside calls: where one is required, there is no message.
        if let Some(other) = params.structured_outputs.as_ref().filter(|other| !FORMATS.contains(&other.param)) {
            let problem = "found a required call together with";
            return Err(ApiError::invalid(
                "tool_choice",
                format_args!("{problem} {}, expected only one of the two; remove one", other.param),
            ));
        }
        let grammar = app.tool_format.grammar(&functions, calls, app.tokenizer());
        let grammar = grammar.map_err(|problem| ApiError::invalid(TOOLS, problem))?;
        params.structured_outputs = Some(Arc::new(StructuredOutput { grammar, param: TOOLS }));
        Ok(true)
    }
}

/// Adds the functions of a tool, each with its path and namespace.
fn offer<'a>(
    path: String,
    tool: &'a Value,
    flat: bool,
    to: &mut Vec<(String, &'a Value, Option<&'a str>)>,
) -> Result<(), ApiError> {
    match &tool["type"] {
        kind if flat && kind == NAMESPACE => {
            let name = tool["name"].as_str().filter(|name| !name.is_empty());
            let name =
                name.ok_or_else(|| ApiError::wrong(format!("{path}.name"), &tool["name"], "a non-empty string"))?;
            check_name(&format!("{path}.name"), name)?;
            let tools = tool["tools"].as_array();
            let tools =
                tools.ok_or_else(|| ApiError::wrong(format!("{path}.tools"), &tool["tools"], "a list of functions"))?;
            to.extend(tools.iter().enumerate().map(|(i, tool)| (format!("{path}.tools[{i}]"), tool, Some(name))));
        }
        kind if flat && kind == SEARCH && tool["external_web_access"] == false => {}
        _ => to.push((path, tool, None)),
    }
    Ok(())
}

/// A flat tool as chat templates expect it.
fn nested(tool: &Value) -> Value {
    let mut function = tool.as_object().cloned().unwrap_or_default();
    function.shift_remove("type");
    json!({"type": "function", "function": function})
}

/// A function, and whether it is strict.
fn parse_function(path: &str, tool: &Value, flat: bool) -> Result<(Tool, bool), ApiError> {
    if tool["type"] != FUNCTION {
        let expected = "\"function\": this server has no built-in tools";
        return Err(ApiError::wrong(format!("{path}.type"), &tool["type"], expected));
    }
    let (path, function) =
        if flat { (path.to_string(), tool) } else { (format!("{path}.function"), &tool["function"]) };
    let name = function["name"].as_str().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| ApiError::wrong(format!("{path}.name"), &function["name"], "a non-empty string"))?;
    check_name(&format!("{path}.name"), name)?;
    let is_strict = match &function["strict"] {
        Value::Null => false,
        Value::Bool(is_strict) => *is_strict,
        other => return Err(ApiError::wrong(path + ".strict", other, "true or false")),
    };
    let parameters = match &function["parameters"] {
        Value::Null => None,
        Value::Object(fields) if fields.is_empty() => None,
        schema @ Value::Object(_) => Some(with_schema_options(schema.clone(), is_strict)),
        other => return Err(ApiError::wrong(path + ".parameters", other, "a JSON schema")),
    };
    Ok((Tool { name: name.to_string(), parameters }, is_strict))
}

/// Checks the length of a name. Names are repeated in messages, parsers and grammars, so they must be short.
pub fn check_name(path: &str, name: &str) -> Result<(), ApiError> {
    match name.len() {
        found if found > MAX_NAME => Err(ApiError::over(path, found, MAX_NAME, "bytes", "send a shorter name")),
        _ => Ok(()),
    }
}

fn checked_choice(value: Option<&Value>, flat: bool, functions: &[Tool]) -> Result<ToolChoice, ApiError> {
    const PARAM: &str = "tool_choice";
    let form = match flat {
        true => "{\"type\": \"function\", \"name\": …}",
        false => "{\"type\": \"function\", \"function\": {\"name\": …}}",
    };
    let name = |value: &'_ Value| -> Option<String> {
        let flat = value["name"].as_str().filter(|_| flat);
        flat.or(value["function"]["name"].as_str()).map(str::to_string)
    };
    let choice = match value {
        None => ToolChoice::Auto,
        Some(value) => match (value.as_str(), name(value)) {
            (Some("none"), _) => ToolChoice::None,
            (Some("auto"), _) => ToolChoice::Auto,
            (Some("required"), _) => ToolChoice::Required,
            (None, Some(name)) if value["type"] == "function" => ToolChoice::Named(name),
            _ => return Err(ApiError::wrong(PARAM, value, format_args!("none, auto, required or {form}"))),
        },
    };
    match &choice {
        ToolChoice::None => Ok(choice),
        // Agents send it with an empty list.
        ToolChoice::Auto if functions.is_empty() => Ok(ToolChoice::None),
        _ if functions.is_empty() => Err(ApiError::requires(PARAM, TOOLS)),
        ToolChoice::Named(name) if functions.iter().all(|tool| tool.name != *name) => {
            Err(ApiError::wrong(PARAM, &Value::from(name.as_str()), "the name of one of the tools"))
        }
        _ => Ok(choice),
    }
}

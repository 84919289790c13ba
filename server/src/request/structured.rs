//! Structured output: OpenAI's `response_format`, vLLM's `structured_outputs`, and the older `guided_*` fields with the names that
//! llama-server and SGLang have for them.
//!
//! At most one of them may be set, and unknown keys are refused. Grammars and schemas are checked when the engine compiles them.

use engine::StructuredOutput;
use serde_json::{Map, Value, json};
use text::{Grammar, with_white_space};

use super::fields::Fields;
use crate::http::ApiError;
use crate::settings::Limits;

/// Maximum number of choices.
const MAX_CHOICES: usize = 4096;

/// Constraints: name in `structured_outputs`, names as a field of its own, description, and type of the value.
const CONSTRAINTS: [(&str, &[&str], &str, &str); 4] = [
    ("json", &["guided_json", "json_schema"], "JSON schema of the output, as an object or as a string.", "any"),
    ("regex", &["guided_regex", "regex"], "Regular expression that the whole output matches.", "string"),
    ("choice", &["guided_choice"], "Strings of which the output is one.", "array"),
    (
        "grammar",
        &["guided_grammar", "grammar", "ebnf"],
        "Grammar of the output: EBNF if it begins with name ::=, otherwise Lark.",
        "string",
    ),
];

/// The fields with constraints of several kinds.
const FORMAT: &str = "response_format";
const OUTPUTS: &str = "structured_outputs";
/// The field of `/v1/responses` that holds the format of the answer.
const TEXT: &str = "text";
const TEXT_FORMAT: &str = "text.format";
/// The fields that constrain only messages, and not calls.
pub(super) const FORMATS: [&str; 2] = [FORMAT, TEXT_FORMAT];
/// The fields of Anthropic's and of Ollama's API that hold the format of the answer.
const OTHERS: [&str; 2] = ["output_config", "format"];
/// The schemas of calls' arguments.
pub const TOOLS: &str = "tools";

/// All fields that are compiled to constraints.
pub fn compiled() -> impl Iterator<Item = &'static str> {
    let own = CONSTRAINTS.iter().flat_map(|(_, names, ..)| names.iter().copied());
    [FORMAT, OUTPUTS, TEXT, TOOLS].into_iter().chain(OTHERS).chain(own)
}

/// The constraints of `structured_outputs`, in words.
const ONE_OF: &str = "one of json, regex, choice, grammar, structural_tag and json_object";

/// The flag that limits the size of all constraints.
const FLAG: &str = "--max-schema-bytes";

/// Reads the constraint on the output, if any.
pub fn read(fields: &Fields<'_>, limits: &Limits) -> Result<Option<StructuredOutput>, ApiError> {
    let most = limits.max_schema_bytes;
    for name in [FORMAT, OUTPUTS] {
        fields.check_bytes(name, name, most, FLAG)?;
    }
    let mut found: Vec<StructuredOutput> =
        response_format(fields)?.into_iter().chain(structured_outputs(fields)?).collect();
    for (kind, names, description, form) in CONSTRAINTS {
        for name in names {
            fields.check_bytes(name, name, most, FLAG)?;
            let schema = match form {
                "array" => {
                    json!({"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": {"type": "string"}})
                }
                "any" => json!({}),
                form => json!({"type": form}),
            };
            // llama-server's clients send an empty grammar for none.
            if let Some(value) = fields.any(name, &schema, description)?.filter(|value| *value != "") {
                found.push(StructuredOutput { grammar: grammar(kind, name, value)?, param: name });
            }
        }
    }
    match &found[..] {
        [first, second, ..] => Err(ApiError::conflict(second.param, first.param)),
        _ => Ok(found.pop()),
    }
}

/// Reads `text` of `/v1/responses`: its format and the constraint. The schema's fields are beside the type.
pub fn text_format(
    fields: &Fields<'_>,
    limits: &Limits,
) -> Result<(Map<String, Value>, Option<StructuredOutput>), ApiError> {
    fields.check_bytes(TEXT, TEXT_FORMAT, limits.max_schema_bytes, FLAG)?;
    let text = fields.object(TEXT, "format: an object of type text, json_object, json_schema or structural_tag.")?;
    let format = match text.and_then(|text| text.get("format")) {
        None | Some(Value::Null) => Map::from_iter([("type".to_string(), "text".into())]),
        Some(Value::Object(format)) => format.clone(),
        Some(other) => return Err(ApiError::wrong(TEXT_FORMAT, other, "an object")),
    };
    let constraint = of_format(TEXT_FORMAT, &format, false)?;
    Ok((format, constraint))
}

fn response_format(fields: &Fields<'_>) -> Result<Option<StructuredOutput>, ApiError> {
    let description = "An object of type text, json_object, json_schema or structural_tag.";
    let Some(format) = fields.object(FORMAT, description)? else { return Ok(None) };
    of_format(FORMAT, format, true)
}

/// Constraint of a format. Its schema is beside the type, or, if `is_nested`, in the object `json_schema`.
fn of_format(
    param: &'static str,
    format: &Map<String, Value>,
    is_nested: bool,
) -> Result<Option<StructuredOutput>, ApiError> {
    if format.get("type").is_some_and(|kind| kind == "structural_tag") {
        return Ok(Some(StructuredOutput { grammar: tags(param, &Value::Object(format.clone()))?, param }));
    }
    let given = |name: &str| format.get(name).filter(|value| !value.is_null());
    let known = ["type", "schema", "name", "strict", "description"];
    let is_known = |name: &str| known.contains(&name) || is_nested && name == "json_schema";
    if let Some(name) = format.keys().find(|name| given(name).is_some() && !is_known(name)) {
        return Err(ApiError::unsupported(format!("{param}.{name}"), "remove it, or use structured_outputs"));
    }
    let nested = given("json_schema").filter(|_| is_nested);
    let schema = match (nested.and_then(|named| named.get("schema")), given("schema")) {
        (Some(_), Some(_)) => return Err(ApiError::conflict(format!("{param}.schema"), "json_schema.schema")),
        (nested, beside) => nested.or(beside),
    };
    let strict = nested.map_or_else(|| format.get("strict"), |named| named.get("strict"));
    let path = format!("{param}.{}", if is_nested && given("schema").is_none() { "json_schema" } else { "schema" });
    let kind = format.get("type").unwrap_or(&Value::Null);
    let grammar = match (kind.as_str(), schema) {
        (Some("text"), None) => return Ok(None),
        (Some("json_object"), None) => Grammar::JsonObject,
        // llama-server and Together take a schema here too.
        (Some("json_schema" | "json_object"), Some(schema)) if is_schema(schema) => match strict {
            Some(Value::Bool(true)) => Grammar::StrictSchema(schema.to_string()),
            _ => Grammar::JsonSchema(schema.to_string()),
        },
        (Some("json_schema" | "json_object"), schema) => {
            return Err(ApiError::wrong(path, schema.unwrap_or(&Value::Null), "a JSON schema"));
        }
        (Some("text"), Some(_)) => return Err(ApiError::conflict(path, "type text")),
        _ => {
            let expected = "text, json_object, json_schema or structural_tag";
            return Err(ApiError::wrong(format!("{param}.type"), kind, expected));
        }
    };
    Ok(Some(StructuredOutput { grammar, param }))
}

fn tags(param: &str, tag: &Value) -> Result<Grammar, ApiError> {
    text::structural_tag(tag).map_err(|problem| ApiError::invalid(param, problem))
}

fn structured_outputs(fields: &Fields<'_>) -> Result<Option<StructuredOutput>, ApiError> {
    let description = format!("Constraint on the output: {ONE_OF}.");
    let Some(object) = fields.object(OUTPUTS, &description)? else { return Ok(None) };
    // `false` is the neutral value of options, and a schema.
    let is_constraint = |name: &str| CONSTRAINTS.iter().any(|(kind, ..)| *kind == name);
    let is_set = |name: &str, value: &Value| !value.is_null() && (is_constraint(name) || *value != false);
    let given = |name: &str| object.get(name).filter(|value| is_set(name, value));
    for name in object.keys().filter(|name| given(name).is_some()) {
        let advice = match name.as_str() {
            name if is_constraint(name) || ["json_object", "structural_tag"].contains(&name) => continue,
            "disable_any_whitespace" | "whitespace_pattern" | "disable_additional_properties" => continue,
            _ => "remove it",
        };
        return Err(ApiError::unsupported(format!("{OUTPUTS}.{name}"), advice));
    }
    let mut constraints = CONSTRAINTS.iter().filter_map(|&(kind, ..)| Some((kind, given(kind)?)));
    let grammar = match (constraints.next(), constraints.next(), given("json_object"), given("structural_tag")) {
        (Some((kind, value)), None, None, None) => grammar(kind, OUTPUTS, value)?,
        (None, None, Some(Value::Bool(true)), None) => Grammar::JsonObject,
        (None, None, Some(other), None) => {
            return Err(ApiError::wrong("structured_outputs.json_object", other, "true or false"));
        }
        (None, None, None, Some(tag)) => tags("structured_outputs.structural_tag", tag)?,
        (None, None, None, None) => return Ok(None),
        _ => return Err(ApiError::found(OUTPUTS, "several constraints", ONE_OF)),
    };
    let grammar = match given("disable_additional_properties") {
        None => grammar,
        Some(Value::Bool(true)) => closed(grammar)?,
        Some(other) => {
            return Err(ApiError::wrong("structured_outputs.disable_additional_properties", other, "true or false"));
        }
    };
    let grammar = match (given("disable_any_whitespace"), given("whitespace_pattern")) {
        (None, None) => grammar,
        (Some(Value::Bool(true)), None) => spaced(grammar, "disable_any_whitespace", None)?,
        (None, Some(Value::String(pattern))) => spaced(grammar, "whitespace_pattern", Some(pattern))?,
        (Some(Value::Bool(true)), Some(_)) => {
            return Err(ApiError::conflict("structured_outputs.whitespace_pattern", "disable_any_whitespace"));
        }
        (Some(other), _) => {
            return Err(ApiError::wrong("structured_outputs.disable_any_whitespace", other, "true or false"));
        }
        (None, Some(other)) => {
            let expected = "a regular expression as a string";
            return Err(ApiError::wrong("structured_outputs.whitespace_pattern", other, expected));
        }
    };
    Ok(Some(StructuredOutput { grammar, param: OUTPUTS }))
}

/// The grammar of JSON with this white space between its tokens; `None` allows none. `option` asks for it.
fn spaced(grammar: Grammar, option: &str, pattern: Option<&str>) -> Result<Grammar, ApiError> {
    let Some(schema) = schema_of(&grammar, option)? else { return Ok(grammar) };
    Ok(Grammar::JsonSchema(with_white_space(schema, pattern).to_string()))
}

/// The grammar of JSON whose objects have no other properties than those that the schema names.
fn closed(grammar: Grammar) -> Result<Grammar, ApiError> {
    let Some(mut schema) = schema_of(&grammar, "disable_additional_properties")? else { return Ok(grammar) };
    close(&mut schema);
    Ok(Grammar::JsonSchema(schema.to_string()))
}

/// The schema of a grammar of JSON; `None` if it is not valid, which its compilation says. `option` asks for it.
fn schema_of(grammar: &Grammar, option: &str) -> Result<Option<Value>, ApiError> {
    match grammar {
        Grammar::JsonObject => Ok(Some(json!({"type": "object"}))),
        Grammar::JsonSchema(text) => Ok(serde_json::from_str(text).ok()),
        _ => Err(ApiError::unsupported(format!("structured_outputs.{option}"), "it is for json and json_object")),
    }
}

/// Keywords whose value is a schema or a list of schemas, and those whose value has schemas by name.
const OF_SCHEMAS: [&str; 16] = [
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "contains",
    "additionalItems",
    "unevaluatedItems",
    "not",
    "if",
    "then",
    "else",
    "contentSchema",
    "items",
    "prefixItems",
    "allOf",
    "anyOf",
    "oneOf",
];
const BY_NAME: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];

/// Forbids other properties where a schema names some and does not say whether there are others. The parser of JSON has bounded the depth.
fn close(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(close),
        Value::Object(fields) => {
            for (name, value) in fields.iter_mut() {
                match value {
                    Value::Object(named) if BY_NAME.contains(&name.as_str()) => named.values_mut().for_each(close),
                    value if OF_SCHEMAS.contains(&name.as_str()) => close(value),
                    _ => {}
                }
            }
            let names_some =
                ["properties", "patternProperties"].iter().any(|name| fields.get(*name).is_some_and(Value::is_object));
            if names_some && !fields.contains_key("additionalProperties") {
                fields.insert("additionalProperties".to_string(), false.into());
            }
        }
        _ => {}
    }
}

/// Grammar of one constraint.
fn grammar(kind: &str, param: &str, value: &Value) -> Result<Grammar, ApiError> {
    let text =
        |expected: &str| value.as_str().ok_or_else(|| ApiError::wrong(param, value, expected)).map(str::to_string);
    match kind {
        "regex" => text("a regular expression as a string").map(Grammar::Regex),
        "grammar" => text("a grammar as a string").map(Grammar::from_text),
        "choice" => {
            let choices = value.as_array().filter(|items| (1..=MAX_CHOICES).contains(&items.len()));
            let one = |item: &Value| item.as_str().filter(|text| !text.is_empty()).map(str::to_string);
            let choices = choices.and_then(|items| items.iter().map(one).collect::<Option<_>>());
            let expected = format_args!("a list of 1 to {MAX_CHOICES} non-empty strings");
            choices.map(Grammar::Choice).ok_or_else(|| ApiError::wrong(param, value, expected))
        }
        _ => match value {
            Value::String(text) => Ok(Grammar::JsonSchema(text.clone())),
            schema if is_schema(schema) => Ok(Grammar::JsonSchema(schema.to_string())),
            other => Err(ApiError::wrong(param, other, "a JSON schema")),
        },
    }
}

fn is_schema(value: &Value) -> bool {
    value.is_object() || value.is_boolean()
}

//! Structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and the older `guided_*` fields.
//!
//! At most one of them may be set. Grammars and schemas are checked when the engine compiles them.

use engine::{Grammar, StructuredOutput};
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::Fields;
use super::settings::Limits;

/// Maximum number of choices.
const MAX_CHOICES: usize = 4096;

/// Constraints: name in `structured_outputs`, name as a field of its own, description, and type of the value.
const CONSTRAINTS: [(&str, &str, &str, &str); 4] = [
    ("json", "guided_json", "JSON schema of the output, as an object or as a string.", "any"),
    ("regex", "guided_regex", "Regular expression that the whole output matches.", "string"),
    ("choice", "guided_choice", "Strings of which the output is one.", "array"),
    ("grammar", "guided_grammar", "Grammar of the output: EBNF if it begins with name ::=, otherwise Lark.", "string"),
];

/// The constraints of `structured_outputs`, in words.
const ONE_OF: &str = "one of json, regex, choice, grammar, structural_tag and json_object";

/// The flag that limits the size of all constraints.
const FLAG: &str = "--max-schema-bytes";

/// Reads the constraint on the output, if any.
pub fn read(fields: &Fields<'_>, limits: &Limits) -> Result<Option<StructuredOutput>, ApiError> {
    let most = limits.max_schema_bytes;
    for name in ["response_format", "structured_outputs"] {
        fields.check_bytes(name, name, most, FLAG)?;
    }
    let mut found: Vec<StructuredOutput> =
        response_format(fields)?.into_iter().chain(structured_outputs(fields)?).collect();
    for (kind, name, description, form) in CONSTRAINTS {
        fields.check_bytes(name, name, most, FLAG)?;
        let schema = match form {
            "array" => json!({"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": {"type": "string"}}),
            "any" => json!({}),
            form => json!({"type": form}),
        };
        if let Some(value) = fields.any(name, &schema, description)? {
            found.push(StructuredOutput { grammar: grammar(kind, name, value)?, param: name });
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
    fields.check_bytes("text", "text.format", limits.max_schema_bytes, FLAG)?;
    let text = fields.object("text", "format: an object of type text, json_object, json_schema or structural_tag.")?;
    let format = match text.and_then(|text| text.get("format")) {
        None | Some(Value::Null) => Map::from_iter([("type".to_string(), "text".into())]),
        Some(Value::Object(format)) => format.clone(),
        Some(other) => return Err(ApiError::wrong("text.format", other, "an object")),
    };
    let constraint = of_format("text.format", &format, ("text.format.schema", format.get("schema")))?;
    Ok((format, constraint))
}

fn response_format(fields: &Fields<'_>) -> Result<Option<StructuredOutput>, ApiError> {
    const PARAM: &str = "response_format";
    let description = "An object of type text, json_object, json_schema or structural_tag.";
    let Some(format) = fields.object(PARAM, description)? else { return Ok(None) };
    let schema = format.get("json_schema").and_then(|named| named.get("schema"));
    of_format(PARAM, format, ("response_format.json_schema", schema))
}

/// Constraint of a format. `path` is where its schema belongs.
fn of_format(
    param: &'static str,
    format: &Map<String, Value>,
    (path, schema): (&str, Option<&Value>),
) -> Result<Option<StructuredOutput>, ApiError> {
    let kind = format.get("type").unwrap_or(&Value::Null);
    let grammar = match kind.as_str() {
        Some("text") => return Ok(None),
        Some("json_object") => Grammar::JsonObject,
        Some("json_schema") => match schema.filter(|schema| is_schema(schema)) {
            Some(schema) if is_strict(param, format) => Grammar::StrictSchema(schema.to_string()),
            Some(schema) => Grammar::JsonSchema(schema.to_string()),
            None => return Err(ApiError::wrong(path, schema.unwrap_or(&Value::Null), "a JSON schema")),
        },
        Some("structural_tag") => tags(param, &Value::Object(format.clone()))?,
        _ => {
            let expected = "text, json_object, json_schema or structural_tag";
            return Err(ApiError::wrong(format!("{param}.type"), kind, expected));
        }
    };
    Ok(Some(StructuredOutput { grammar, param }))
}

fn tags(param: &str, tag: &Value) -> Result<Grammar, ApiError> {
    engine::text::structural_tag(tag).map_err(|problem| ApiError::invalid(param, problem))
}

/// Whether a format is strict. Its fields are in `json_schema`, or beside the type in `/v1/responses`.
fn is_strict(param: &str, format: &Map<String, Value>) -> bool {
    let named = if param == "response_format" { format.get("json_schema") } else { None };
    named.map_or_else(|| format.get("strict"), |named| named.get("strict")) == Some(&Value::Bool(true))
}

fn structured_outputs(fields: &Fields<'_>) -> Result<Option<StructuredOutput>, ApiError> {
    const PARAM: &str = "structured_outputs";
    let description = format!("Constraint on the output: {ONE_OF}.");
    let Some(object) = fields.object(PARAM, &description)? else { return Ok(None) };
    let given = |name: &str| object.get(name).filter(|value| !value.is_null());
    let mut constraints = CONSTRAINTS.iter().filter_map(|&(kind, ..)| Some((kind, given(kind)?)));
    let json_object = given("json_object") == Some(&Value::Bool(true));
    let grammar = match (constraints.next(), constraints.next(), json_object) {
        (Some((kind, value)), None, false) => grammar(kind, PARAM, value)?,
        (None, None, true) => Grammar::JsonObject,
        (None, None, false) if given("structural_tag").is_some() => {
            let tag = given("structural_tag").unwrap_or(&Value::Null);
            tags("structured_outputs.structural_tag", tag)?
        }
        // Neutral values of other options.
        (None, ..) if object.values().all(|value| value.is_null() || value == &Value::Bool(false)) => return Ok(None),
        (None, ..) => return Err(ApiError::found(PARAM, "no known constraint", ONE_OF)),
        _ => return Err(ApiError::found(PARAM, "several constraints", ONE_OF)),
    };
    Ok(Some(StructuredOutput { grammar, param: PARAM }))
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

//! Structured output: OpenAI's `response_format`, vLLM's `structured_outputs`, and the older `guided_*` fields.
//!
//! At most one of them may ask for something. Whether a grammar makes sense is found where it is compiled.

use engine::{Grammar, StructuredOutput};
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::Fields;
use super::settings::Limits;

/// Most texts to choose from.
const MAX_CHOICES: usize = 4096;

/// Names of one rule in vLLM's object, as a field of its own, its description, and the type of its value.
const RULES: [(&str, &str, &str, &str); 4] = [
    ("json", "guided_json", "A JSON schema, or its text.", "any"),
    ("regex", "guided_regex", "A regular expression that the text matches as a whole.", "string"),
    ("choice", "guided_choice", "Texts to choose from.", "array"),
    ("grammar", "guided_grammar", "A grammar in Lark's syntax.", "string"),
];

/// The flag that bounds all of them.
const FLAG: &str = "--max-schema-bytes";

/// What the request's texts must match, if anything.
pub fn read(fields: &Fields<'_>, limits: &Limits) -> Result<Option<StructuredOutput>, ApiError> {
    let most = limits.max_schema_bytes;
    let mut found: Vec<StructuredOutput> = Vec::new();
    for name in ["response_format", "structured_outputs"] {
        fields.check_bytes(name, name, most, FLAG)?;
    }
    found.extend(response_format(fields)?);
    found.extend(structured_outputs(fields)?);
    for (kind, name, description, form) in RULES {
        fields.check_bytes(name, name, most, FLAG)?;
        let schema = match form {
            "array" => json!({"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": {"type": "string"}}),
            "any" => json!({}),
            form => json!({"type": form}),
        };
        if let Some(value) = fields.any(name, &schema, description)? {
            found.push(StructuredOutput { grammar: rule(kind, name, value)?, param: name });
        }
    }
    match <[StructuredOutput; 1]>::try_from(found) {
        Ok([one]) => Ok(Some(one)),
        Err(many) if many.is_empty() => Ok(None),
        Err(many) => Err(ApiError::invalid(many[1].param, format_args!("not together with {}", many[0].param))),
    }
}

/// `text` of `/v1/responses`: its format, in which the schema's fields stand beside the type, and the grammar of it.
pub fn text_format(
    fields: &Fields<'_>,
    limits: &Limits,
) -> Result<(Map<String, Value>, Option<StructuredOutput>), ApiError> {
    fields.check_bytes("text", "text.format", limits.max_schema_bytes, FLAG)?;
    let text = fields.object("text", "format: an object whose type is text, json_object or json_schema.")?;
    let format = match text.and_then(|text| text.get("format")) {
        None | Some(Value::Null) => Map::from_iter([("type".to_string(), "text".into())]),
        Some(Value::Object(format)) => format.clone(),
        Some(other) => return Err(ApiError::wrong("text.format", other, "an object")),
    };
    let wanted = of_text_format(&format)?;
    Ok((format, wanted))
}

fn of_text_format(format: &Map<String, Value>) -> Result<Option<StructuredOutput>, ApiError> {
    of_format("text.format", format, ("text.format.schema", format.get("schema")))
}

fn response_format(fields: &Fields<'_>) -> Result<Option<StructuredOutput>, ApiError> {
    const PARAM: &str = "response_format";
    let description = "An object whose type is text, json_object or json_schema.";
    let Some(format) = fields.object(PARAM, description)? else { return Ok(None) };
    let schema = format.get("json_schema").and_then(|named| named.get("schema"));
    of_format(PARAM, format, ("response_format.json_schema", schema))
}

/// What a format of this type asks for; `schema` with its place.
fn of_format(
    param: &'static str,
    format: &Map<String, Value>,
    (place, schema): (&str, Option<&Value>),
) -> Result<Option<StructuredOutput>, ApiError> {
    let kind = format.get("type").unwrap_or(&Value::Null);
    let grammar = match kind.as_str() {
        Some("text") => return Ok(None),
        Some("json_object") => Grammar::JsonObject,
        Some("json_schema") => match schema.filter(|schema| is_schema(schema)) {
            Some(schema) => Grammar::JsonSchema(schema.to_string()),
            None => return Err(ApiError::wrong(place, schema.unwrap_or(&Value::Null), "a JSON schema")),
        },
        _ => return Err(ApiError::wrong(format!("{param}.type"), kind, "text, json_object or json_schema")),
    };
    Ok(Some(StructuredOutput { grammar, param }))
}

fn structured_outputs(fields: &Fields<'_>) -> Result<Option<StructuredOutput>, ApiError> {
    const PARAM: &str = "structured_outputs";
    let description = "What the text must match: one of json, regex, choice, grammar and json_object.";
    let Some(object) = fields.object(PARAM, description)? else { return Ok(None) };
    let given = |name: &str| object.get(name).filter(|value| !value.is_null());
    let mut rules = RULES.iter().filter_map(|&(kind, ..)| Some((kind, given(kind)?)));
    let json_object = given("json_object").and_then(Value::as_bool).unwrap_or(false);
    let grammar = match (rules.next(), rules.next(), json_object) {
        (Some((kind, value)), None, false) => rule(kind, PARAM, value)?,
        (None, None, true) => Grammar::JsonObject,
        (None, ..) if given("structural_tag").is_none() => return nothing(object),
        (None, ..) => return Err(ApiError::unsupported("structured_outputs.structural_tag", "use grammar")),
        _ => return Err(ApiError::invalid(PARAM, "expected only one of json, regex, choice, grammar and json_object")),
    };
    Ok(Some(StructuredOutput { grammar, param: PARAM }))
}

/// Options without a rule: nothing is asked for only if nothing is there.
fn nothing(object: &Map<String, Value>) -> Result<Option<StructuredOutput>, ApiError> {
    if object.values().all(|value| value.is_null() || value == &Value::Bool(false)) {
        return Ok(None);
    }
    Err(ApiError::invalid("structured_outputs", "expected one of json, regex, choice, grammar and json_object"))
}

/// One rule. A JSON schema may come as an object or as its text.
fn rule(kind: &str, param: &str, value: &Value) -> Result<Grammar, ApiError> {
    let text =
        |expected: &str| value.as_str().ok_or_else(|| ApiError::wrong(param, value, expected)).map(str::to_string);
    match kind {
        "regex" => text("a regular expression").map(Grammar::Regex),
        "grammar" => text("a grammar").map(Grammar::Lark),
        "choice" => {
            let choices = value.as_array().filter(|items| (1..=MAX_CHOICES).contains(&items.len()));
            let one = |item: &Value| item.as_str().filter(|text| !text.is_empty()).map(str::to_string);
            let choices = choices.and_then(|items| items.iter().map(one).collect::<Option<_>>());
            let expected = format_args!("1 to {MAX_CHOICES} strings, none of them empty");
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

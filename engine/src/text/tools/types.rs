//! The JSON types that a schema allows, for formats that do not write the type of a value.

use serde_json::Value;

use super::written::quote;

/// A set of JSON types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Types(u8);

const NAMES: [&str; 7] = ["string", "number", "integer", "boolean", "null", "array", "object"];
const STRING: u8 = 1;
const ALL: u8 = 0x7f;

/// Greatest nesting of alternatives that is read; deeper ones allow every type.
const MAX_DEPTH: usize = 8;

impl Types {
    /// Types of an argument of a function with this schema.
    pub fn of_property(schema: Option<&Value>, name: &str) -> Types {
        let Some(schema) = schema else { return Types(ALL) };
        schema["properties"].get(name).map_or(Types(ALL), |property| Types(of(schema, property, 0)))
    }

    /// Whether every value is a string.
    pub fn are_text(self) -> bool {
        self.0 == STRING
    }

    /// Appends the JSON of a value that is written without its type: JSON of an allowed type if it is that, else a string.
    pub fn write(self, text: &str, json: &mut String) {
        let trimmed = text.trim();
        let word = match trimmed {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            other => other,
        };
        let type_of = |value: &Value| match value {
            Value::String(_) => 0,
            Value::Number(number) if number.is_f64() => 1 << 1,
            Value::Number(_) => 0b110,
            Value::Bool(_) => 1 << 3,
            Value::Null => 1 << 4,
            Value::Array(_) => 1 << 5,
            Value::Object(_) => 1 << 6,
        };
        let parsed = serde_json::from_str::<Value>(word).ok();
        match parsed {
            // Only a format with JSON values quotes a string.
            Some(Value::String(_)) if self.0 & STRING == 0 => json.push_str(word),
            Some(value) if type_of(&value) & self.0 != 0 || self.0 & STRING == 0 && type_of(&value) != 0 => {
                json.push_str(word);
            }
            _ => quote(text, json),
        }
    }
}

/// The types that `schema`, a part of `root`, allows.
fn of(root: &Value, schema: &Value, depth: usize) -> u8 {
    if depth > MAX_DEPTH {
        return ALL;
    }
    let named = |name: &Value| NAMES.iter().position(|known| name == known).map_or(0, |at| 1 << at);
    let alternatives = |list: &Value| {
        let found = list.as_array().map(|list| list.iter().map(|one| of(root, one, depth + 1)));
        found.map(|types| types.fold(0, |all, one| all | one))
    };
    let declared = match &schema["type"] {
        Value::Array(names) => Some(names.iter().map(named).fold(0, |all, one| all | one)),
        name @ Value::String(_) => Some(named(name)),
        _ => None,
    };
    let value = |value: &Value| match value {
        Value::String(_) => STRING,
        Value::Number(_) => 0b110,
        Value::Bool(_) => 1 << 3,
        Value::Null => 1 << 4,
        Value::Array(_) => 1 << 5,
        Value::Object(_) => 1 << 6,
    };
    let pointer = || schema["$ref"].as_str().and_then(|path| root.pointer(path.strip_prefix('#')?));
    let types = declared
        .or_else(|| alternatives(&schema["anyOf"]))
        .or_else(|| alternatives(&schema["oneOf"]))
        .or_else(|| schema["enum"].as_array().map(|values| values.iter().map(value).fold(0, |all, one| all | one)))
        .or_else(|| schema.get("const").map(value))
        .or_else(|| pointer().map(|target| of(root, target, depth + 1)));
    types.filter(|types| *types != 0).unwrap_or(ALL)
}

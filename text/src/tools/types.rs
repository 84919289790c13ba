//! The JSON types that a schema allows, for formats that do not write the type of a value.

use std::collections::HashSet;

use serde_json::Value;

use super::written::quote;

/// A set of JSON types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Types(u8);

const NAMES: [&str; 7] = ["string", "number", "integer", "boolean", "null", "array", "object"];
const STRING: u8 = 1;
const ALL: u8 = 0x7f;

/// Greatest number of references that are followed; where there are more, every type is allowed.
const MAX_REFERENCES: usize = 64;

impl Types {
    /// Strings only.
    pub const TEXT: Types = Types(STRING);

    /// Anything but strings.
    pub const OTHER: Types = Types(ALL & !STRING);

    /// Types of an argument of a function with this schema.
    pub fn of_property(schema: Option<&Value>, name: &str) -> Types {
        let Some(schema) = schema else { return Types(ALL) };
        schema["properties"].get(name).map_or(Types(ALL), |property| {
            let types = of(schema, property, &mut HashSet::new());
            Types(if types == 0 { ALL } else { types })
        })
    }

    /// Whether every value is a string.
    pub fn are_text(self) -> bool {
        self.0 == STRING
    }

    /// Whether a value may be a string.
    pub fn have_text(self) -> bool {
        self.0 & STRING != 0
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
        let parsed = serde_json::from_str::<Value>(word).ok();
        match parsed {
            // Only a format with JSON values quotes a string.
            Some(Value::String(_)) if !self.have_text() => json.push_str(word),
            Some(Value::String(_)) => quote(text, json),
            Some(value) if type_of(&value) & self.0 != 0 || !self.have_text() => json.push_str(word),
            _ => quote(text, json),
        }
    }
}

fn type_of(value: &Value) -> u8 {
    match value {
        Value::String(_) => STRING,
        Value::Number(number) if number.is_f64() => 1 << 1,
        Value::Number(_) => 0b110,
        Value::Bool(_) => 1 << 3,
        Value::Null => 1 << 4,
        Value::Array(_) => 1 << 5,
        Value::Object(_) => 1 << 6,
    }
}

/// The types that `schema`, a part of `root`, allows; 0 for a reference that was followed before.
fn of<'a>(root: &'a Value, schema: &'a Value, seen: &mut HashSet<&'a str>) -> u8 {
    let union = |values: &[Value]| values.iter().map(type_of).fold(0, |all, one| all | one);
    let named = |name: &Value| NAMES.iter().position(|known| name == known).map_or(0, |at| 1 << at);
    let has = |key: &str| schema.get(key).is_some();
    if let Value::Array(names) = &schema["type"] {
        return names.iter().map(named).fold(0, |all, one| all | one);
    }
    if schema["type"].is_string() {
        return named(&schema["type"]);
    }
    if let Some(options) = schema["anyOf"].as_array().or(schema["oneOf"].as_array()) {
        return options.iter().fold(0, |all, one| all | of(root, one, seen));
    }
    if let Some(values) = schema["enum"].as_array() {
        return union(values);
    }
    if let Some(value) = schema.get("const") {
        return type_of(value);
    }
    if let Some(path) = schema["$ref"].as_str() {
        let target = path.strip_prefix('#').and_then(|path| root.pointer(path));
        return match target {
            Some(_) if seen.contains(path) => 0,
            Some(target) if seen.len() < MAX_REFERENCES => {
                seen.insert(path);
                of(root, target, seen)
            }
            _ => ALL,
        };
    }
    if has("properties") {
        1 << 6
    } else if has("items") {
        1 << 5
    } else {
        ALL
    }
}

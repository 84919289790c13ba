//! A setting that is a JSON object, read key by key. An error is one line: the key, what was found, what is expected.

use std::fmt::Display;

use serde_json::{Map, Value};

/// The keys of a JSON object. Each is read once; what is left at the end is unknown.
pub(crate) struct Keys {
    values: Map<String, Value>,
    known: Vec<&'static str>,
}

impl Keys {
    pub fn new(values: Map<String, Value>) -> Keys {
        Keys { values, known: Vec::new() }
    }

    /// Parses an object such as `example`.
    pub fn parse(text: &str, example: &str) -> Result<Keys, String> {
        match serde_json::from_str(text) {
            Ok(Value::Object(values)) => Ok(Keys::new(values)),
            Ok(_) => Err(format!("expected a JSON object such as {example}")),
            Err(error) => Err(format!("not valid JSON ({error}), expected a JSON object such as {example}")),
        }
    }

    /// Reads a key. `None` if it is null or missing.
    pub fn read<T>(
        &mut self,
        key: &'static str,
        expected: impl Display,
        parse: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        self.known.push(key);
        let Some(value) = self.values.remove(key).filter(|value| !value.is_null()) else { return Ok(None) };
        parse(&value).map(Some).ok_or_else(|| format!("{key}: found {value}, expected {expected}"))
    }

    /// Reads a text that is not empty.
    pub fn text(&mut self, key: &'static str, expected: &str) -> Result<Option<String>, String> {
        self.read(key, expected, |value| value.as_str().filter(|text| !text.is_empty()).map(str::to_string))
    }

    /// Refuses keys that were not read.
    pub fn end(self) -> Result<(), String> {
        match self.values.keys().next() {
            None => Ok(()),
            Some(key) => Err(format!("unknown key {key:?}, expected one of {}", self.known.join(", "))),
        }
    }
}

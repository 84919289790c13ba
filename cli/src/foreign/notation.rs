//! The notation of flags: names with dots and short names, and values of JSON flags.

use std::ffi::OsStr;

use serde_json::{Map, Value};

use super::Dialect;
use server::values::human;

/// A word that is a flag.
pub struct Spelled {
    /// The name without dashes at its beginning, with `-` between words.
    pub name: String,
    /// The keys after the first dot.
    pub path: Option<String>,
    /// The value after `=`.
    pub value: Option<String>,
}

impl Spelled {
    /// Reads a word. `None`: it is no flag, or a short name that the dialect does not have.
    pub fn read(dialect: &Dialect, word: &str) -> Option<Spelled> {
        let (text, value) = word.split_once('=').map_or((word, None), |(text, value)| (text, Some(value.to_string())));
        let (text, path) = text.split_once('.').map_or((text, None), |(text, path)| (text, Some(path.to_string())));
        if let Some(name) = text.strip_prefix("--").filter(|name| !name.is_empty()) {
            return Some(Spelled { name: name.replace('_', "-"), path, value });
        }
        let letters = text.strip_prefix('-')?;
        if let Some(flag) = dialect.short(letters) {
            return Some(Spelled { name: flag.name.to_string(), path, value });
        }
        // `-O3`
        let level = letters.strip_prefix('O').filter(|level| level.parse::<u8>().is_ok() && value.is_none())?;
        let flag = dialect.short("O")?;
        Some(Spelled { name: flag.name.to_string(), path, value: Some(level.to_string()) })
    }
}

/// Whether a word is a flag and no value. A negative number is a value.
pub fn is_flag(word: &OsStr) -> bool {
    let bytes = word.as_encoded_bytes();
    bytes.first() == Some(&b'-') && bytes.get(1).is_some_and(|next| !next.is_ascii_digit() && *next != b'.')
}

/// A value as a JSON flag takes it: JSON, or a number that ends in a letter, or text.
pub fn parse_value(text: &str) -> Value {
    if text == "None" {
        return Value::Null;
    }
    let number = || human(text).filter(|number| number.fract() == 0.0).map(|number| Value::from(number as u64));
    serde_json::from_str(text).ok().or_else(number).unwrap_or_else(|| Value::from(text))
}

/// An object with the value at the end of a path of keys: `a.b` is `{"a": {"b": value}}`, and `a+` a list to append.
pub fn nested(path: &str, value: &str) -> Option<Value> {
    let mut keys: Vec<&str> = path.split('.').collect();
    let appends = keys.last()?.ends_with('+');
    if let Some(last) = keys.last_mut() {
        *last = last.trim_end_matches('+');
    }
    if keys.iter().any(|key| key.is_empty()) || keys.len() > 16 {
        return None;
    }
    let value = match appends {
        true => Value::Array(value.split(',').map(parse_value).collect()),
        false => parse_value(value),
    };
    Some(keys.iter().rev().fold(value, |value, key| Value::Object(Map::from_iter([(key.to_string(), value)]))))
}

/// Puts the keys of an object into another. Lists are appended.
pub fn merge(into: &mut Value, update: Value) {
    match (into, update) {
        (Value::Object(into), Value::Object(update)) => {
            for (key, value) in update {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(update)) => into.extend(update),
        (into, update) => *into = update,
    }
}

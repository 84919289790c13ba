//! Typed access to a JSON object whose keys may be absent or `null`. Errors name the file, the key, the value and what was expected.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::rc::Rc;

use serde_json::{Map, Value};

use crate::checkpoint::error::{LoadError, one_line};

/// A JSON object of `file`. An absent key and `null` both read as `None`.
pub(crate) struct Fields<'a> {
    file: String,
    prefix: String,
    map: &'a Map<String, Value>,
    /// Keys that were asked for, with their prefixes; shared with the objects inside.
    read: Rc<RefCell<BTreeSet<String>>>,
}

impl<'a> Fields<'a> {
    /// `prefix` comes before the keys in messages.
    pub fn new(file: String, prefix: String, map: &'a Map<String, Value>) -> Self {
        Fields { file, prefix, map, read: Rc::default() }
    }

    /// The file, for messages.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Keys of this object that nobody has asked for.
    pub fn unread(&self) -> impl Iterator<Item = &str> {
        let read = self.read.borrow().clone();
        self.map.keys().map(String::as_str).filter(move |key| !read.contains(&format!("{}{key}", self.prefix)))
    }

    pub fn object(&self, key: &str) -> Result<Option<Fields<'a>>, LoadError> {
        self.read(key, "an object", |value| {
            let map = value.as_object()?;
            let prefix = format!("{}{key}.", self.prefix);
            Some(Fields { file: self.file.clone(), prefix, map, read: Rc::clone(&self.read) })
        })
    }

    /// The keys.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.map.keys().map(String::as_str)
    }

    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Whether the key does not exist, not even as `null`.
    pub fn is_absent(&self, key: &str) -> bool {
        !self.map.contains_key(key)
    }

    /// The value under `key`, unless `null`.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.read.borrow_mut().insert(format!("{}{key}", self.prefix));
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub fn integer(&self, key: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, LoadError> {
        let expected = format!("an integer, {} to {}", range.start(), range.end());
        self.read(key, &expected, |value| value.as_u64().filter(|number| range.contains(number)))
    }

    pub fn boolean(&self, key: &str) -> Result<Option<bool>, LoadError> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub fn string(&self, key: &str) -> Result<Option<&'a str>, LoadError> {
        self.read(key, "a string", Value::as_str)
    }

    /// A finite number for which `in_range` holds.
    pub fn float(&self, key: &str, expected: &str, in_range: impl Fn(f64) -> bool) -> Result<Option<f64>, LoadError> {
        self.read(key, expected, |value| value.as_f64().filter(|number| number.is_finite() && in_range(*number)))
    }

    /// A token id, a list of them, or nothing.
    pub fn token_ids(&self, key: &str) -> Result<Vec<u32>, LoadError> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = self.read(key, "a token id or a list of token ids", |value| match value {
            Value::Array(ids) => ids.iter().map(id).collect(),
            single => id(single).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// The error for an unacceptable value of `key`.
    pub fn wrong(&self, key: &str, expected: impl Into<String>) -> LoadError {
        let found = self.map.get(key).map_or("missing".to_string(), |value| shorten(&one_line(value)));
        LoadError::Setting {
            file: self.file.clone(),
            key: one_line(format!("{}{key}", self.prefix)),
            found,
            expected: expected.into(),
        }
    }

    /// Parses the value under `key`; `parse` returns `None` for a value that is not `expected`.
    pub fn read<T>(
        &self,
        key: &str,
        expected: &str,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => parse(value).map(Some).ok_or_else(|| self.wrong(key, expected)),
        }
    }
}

fn shorten(text: &str) -> String {
    const LONGEST: usize = 80;
    match text.char_indices().nth(LONGEST) {
        None => text.to_string(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

//! JSON with parts that are already text, which everything that repeats them shares.

use std::sync::Arc;

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

/// A JSON value.
#[derive(Clone, Debug)]
pub enum Json {
    /// A tree.
    Value(Value),
    /// JSON text.
    Text(Arc<RawValue>),
    /// An object.
    Object(Vec<(String, Json)>),
    /// A list.
    List(Vec<Json>),
}

impl Json {
    /// JSON text, which must be valid.
    pub fn text(text: String) -> Json {
        match RawValue::from_string(text) {
            Ok(raw) => Json::Text(Arc::from(raw)),
            Err(error) => {
                debug_assert!(false, "{error}");
                Json::Value(Value::Null)
            }
        }
    }

    /// Sets or replaces a field of an object.
    pub fn set(&mut self, name: &str, value: impl Into<Json>) {
        if let Json::Object(fields) = self {
            let value = value.into();
            match fields.iter_mut().find(|(found, _)| found == name) {
                Some((_, old)) => *old = value,
                None => fields.push((name.to_string(), value)),
            }
        }
    }
}

impl From<Value> for Json {
    fn from(value: Value) -> Json {
        match value {
            Value::Object(fields) => {
                Json::Object(fields.into_iter().map(|(name, value)| (name, value.into())).collect())
            }
            value => Json::Value(value),
        }
    }
}

impl From<Vec<Json>> for Json {
    fn from(items: Vec<Json>) -> Json {
        Json::List(items)
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Json::Value(value) => value.serialize(serializer),
            Json::Text(text) => text.serialize(serializer),
            Json::List(items) => serializer.collect_seq(items),
            Json::Object(fields) => {
                let mut map = serializer.serialize_map(Some(fields.len()))?;
                fields.iter().try_for_each(|(name, value)| map.serialize_entry(name, value))?;
                map.end()
            }
        }
    }
}

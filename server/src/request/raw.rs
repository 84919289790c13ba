//! Parsers that avoid building values: names of an object's fields, token ids, and sizes of JSON texts.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::fmt;

use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

/// A field of the body.
#[derive(Debug)]
pub struct RawField<'a> {
    pub name: Cow<'a, str>,
    pub raw: &'a RawValue,
    pub value: OnceCell<Value>,
}

/// Maximum number of fields of a body, known or unknown.
pub const MAX_FIELDS: usize = 1024;

/// Values with more bytes of JSON than this are shown in errors by their size alone.
const SHOWN_BYTES: usize = 4096;

/// Maximum nesting depth of lists and objects, the same as serde_json's.
pub const MAX_DEPTH: usize = 127;

/// Visitor for an object: the names of its fields and the texts of their values.
pub struct Names;

/// A name, which is borrowed from the body unless it has escapes.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de> Visitor<'de> for Names {
    type Value = Vec<RawField<'de>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<RawField<'de>>, A::Error> {
        let mut given = Vec::new();
        while let Some(Name(name)) = map.next_key()? {
            if given.len() == MAX_FIELDS {
                return Err(serde::de::Error::custom(format_args!("found more than {MAX_FIELDS} fields; send fewer")));
            }
            given.push(RawField { name, raw: map.next_value()?, value: OnceCell::new() });
        }
        Ok(given)
    }
}

/// A token id. Some clients write integers with a point: 2.0 is 2.
#[derive(Deserialize)]
#[serde(try_from = "f64")]
struct TokenId(u32);

impl TryFrom<f64> for TokenId {
    type Error = &'static str;

    fn try_from(id: f64) -> Result<TokenId, &'static str> {
        let is_id = id.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&id);
        is_id.then_some(TokenId(id as u32)).ok_or("not a token id")
    }
}

/// A list of token ids below `vocab`; `None` for anything else. Takes four bytes for each.
pub fn token_ids(text: &str, vocab: usize) -> Option<Vec<u32>> {
    let ids: Vec<TokenId> = serde_json::from_str(text).ok()?;
    ids.iter().all(|id| (id.0 as usize) < vocab).then(|| ids.into_iter().map(|id| id.0).collect())
}

/// Number of items of a JSON list; `None` for other values. Takes no memory per item.
pub fn items(raw: &RawValue) -> Option<usize> {
    if !raw.get().starts_with('[') {
        return None;
    }
    serde_json::from_str::<Vec<IgnoredAny>>(raw.get()).ok().map(|items| items.len())
}

/// Number of values and names in a JSON text, and their nesting depth. Does not parse: O(n) time, O(1) memory.
pub fn measure(text: &str) -> (usize, usize) {
    let (mut count, mut in_string, mut escaped) = (1, false, false);
    let (mut open, mut deepest) = (0_usize, 0);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' | b':' if !in_string => count += 1,
            b'[' | b'{' if !in_string => {
                (count, open) = (count + 1, open + 1);
                deepest = deepest.max(open);
            }
            b']' | b'}' if !in_string => open = open.saturating_sub(1),
            _ => {}
        }
    }
    (count, deepest)
}

/// A value as errors show it: as JSON, or by its size if it is long.
pub fn excerpt(raw: &RawValue) -> String {
    match serde_json::from_str(raw.get()) {
        Ok(value) if raw.get().len() <= SHOWN_BYTES => crate::http::excerpt(&value),
        _ => match items(raw) {
            Some(items) => format!("a list of {items} items"),
            None => format!("{} of {} bytes", kind(raw), raw.get().len()),
        },
    }
}

/// A 64-bit integer. Some clients write integers with a point: 2.0 is 2.
pub fn integer(value: &Value) -> Option<i64> {
    /// Up to this number a double represents every integer.
    const EXACT: f64 = (1_u64 << 53) as f64;
    let from_float = || value.as_f64().filter(|x| x.fract() == 0.0 && x.abs() <= EXACT).map(|x| x as i64);
    if value.is_f64() { from_float() } else { value.as_i64() }
}

/// Type of a JSON value, with its article.
pub fn kind(raw: &RawValue) -> &'static str {
    match raw.get().as_bytes().first() {
        Some(b'{') => "an object",
        Some(b'[') => "a list",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => "a number",
    }
}

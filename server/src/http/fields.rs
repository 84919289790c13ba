//! The fields of a JSON body, read one by one: each reader checks type and range and its error names the field.
//!
//! `null` means "not given" and unknown fields are nobody's business here, both as in the OpenAI API.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;

/// A JSON object whose fields are read with checks.
#[derive(Debug)]
pub struct Fields(Map<String, Value>);

impl Fields {
    /// Wraps a parsed body, which must be an object.
    pub fn new(body: Value) -> Result<Fields, ApiError> {
        match body {
            Value::Object(map) => Ok(Fields(map)),
            other => Err(ApiError::body(format!("the body must be a JSON object, found {}", kind(&other)))),
        }
    }

    /// The value of a field that is there and not `null`.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// `true` or `false`.
    pub fn bool(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    /// Any text.
    pub fn str(&self, name: &str) -> Result<Option<&str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    /// A JSON object.
    pub fn object(&self, name: &str) -> Result<Option<&Map<String, Value>>, ApiError> {
        self.read(name, "an object", Value::as_object)
    }

    /// A JSON list.
    pub fn list(&self, name: &str) -> Result<Option<&Vec<Value>>, ApiError> {
        self.read(name, "a list", Value::as_array)
    }

    /// A whole number within `range`.
    pub fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let expected = match (*range.start(), *range.end()) {
            (i64::MIN, i64::MAX) => "a whole number of 64 bits".to_string(),
            (low, i64::MAX) => format!("a whole number of at least {low}"),
            (low, high) => format!("a whole number from {low} to {high}"),
        };
        self.read(name, expected, |value| whole(value).filter(|n| range.contains(n)))
    }

    /// A count: a whole number from `low` to `high`.
    pub fn count(&self, name: &str, low: usize, high: usize) -> Result<Option<usize>, ApiError> {
        let clamp = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let found = self.integer(name, clamp(low)..=clamp(high))?;
        Ok(found.and_then(|n| usize::try_from(n).ok()))
    }

    /// A number that `allowed` accepts after it has become single precision; `expected` says in words what that is.
    pub fn number(&self, name: &str, expected: &str, allowed: impl Fn(f32) -> bool) -> Result<Option<f32>, ApiError> {
        self.read(name, expected, |value| value.as_f64().map(|n| n as f32).filter(|&n| n.is_finite() && allowed(n)))
    }

    /// One string or a list of at most `most` strings, none of them empty.
    pub fn strings(&self, name: &str, most: usize) -> Result<Vec<String>, ApiError> {
        let text = |value: &Value| value.as_str().filter(|s| !s.is_empty()).map(str::to_string);
        let found =
            self.read(name, format!("a string or up to {most} strings, none of them empty"), |value| match value {
                Value::Array(items) if items.len() <= most => items.iter().map(text).collect(),
                other => text(other).map(|one| vec![one]),
            })?;
        Ok(found.unwrap_or_default())
    }

    /// A list of token ids, each less than `vocab`.
    pub fn token_ids(&self, name: &str, vocab: usize) -> Result<Option<Vec<u32>>, ApiError> {
        self.read(name, format!("a list of token ids from 0 to {}", vocab.saturating_sub(1)), |value| {
            value.as_array()?.iter().map(|item| token_id(item, vocab)).collect()
        })
    }

    /// Answers 400 if the field is there and asks for something (`null`, `false`, `""`, `[]` and `{}` do not).
    pub fn refuse(&self, name: &str, advice: &str) -> Result<(), ApiError> {
        let asks = match self.get(name) {
            None | Some(Value::Bool(false)) => false,
            Some(Value::String(text)) => !text.is_empty(),
            Some(Value::Array(items)) => !items.is_empty(),
            Some(Value::Object(fields)) => !fields.is_empty(),
            Some(_) => true,
        };
        if asks { Err(ApiError::unsupported(name, advice)) } else { Ok(()) }
    }

    fn read<'a, T>(
        &'a self,
        name: &str,
        expected: impl std::fmt::Display,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => parse(value).map(Some).ok_or_else(|| ApiError::wrong(name, value, expected)),
        }
    }
}

/// A token id of a vocabulary of `vocab` rows.
pub fn token_id(value: &Value, vocab: usize) -> Option<u32> {
    whole(value).and_then(|id| u32::try_from(id).ok()).filter(|&id| (id as usize) < vocab)
}

/// A whole number of 64 bits. JSON has one kind of number, and some clients write all of theirs with a point: 2.0 is 2.
fn whole(value: &Value) -> Option<i64> {
    /// Up to here a double holds every whole number.
    const EXACT: f64 = (1_u64 << 53) as f64;
    let from_float = || value.as_f64().filter(|x| x.fract() == 0.0 && x.abs() <= EXACT).map(|x| x as i64);
    if value.is_f64() { from_float() } else { value.as_i64() }
}

/// What a JSON value is, in a word.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn fields(body: Value) -> Fields {
        Fields::new(body).unwrap()
    }

    #[test]
    fn null_is_the_same_as_absent() {
        let f = fields(json!({"n": null}));
        assert_eq!(f.count("n", 1, 8), Ok(None));
        assert_eq!(f.bool("stream"), Ok(None));
        assert_eq!(f.refuse("n", "no"), Ok(()));
    }

    #[test]
    fn numbers_out_of_range_or_of_another_type_are_refused_by_name() {
        for bad in [json!(0), json!(9), json!(1.5), json!("2"), json!([1]), json!(true), json!(1u64 << 63)] {
            let error = fields(json!({"n": bad})).count("n", 1, 8).unwrap_err().to_json();
            assert_eq!(error["error"]["param"], "n");
        }
        for good in [json!(8), json!(8.0), json!(0.8e1)] {
            assert_eq!(fields(json!({"n": good})).count("n", 1, 8), Ok(Some(8)));
        }
        assert_eq!(fields(json!({"n": -0.0})).count("n", 0, 8), Ok(Some(0)));
        assert!(fields(json!({"n": 1e19})).integer("n", i64::MIN..=i64::MAX).is_err(), "not exact, not guessed");
    }

    #[test]
    fn a_number_is_checked_in_single_precision() {
        // 1e308 is a double but no float; 1e-320 is above 0 as a double and 0 as a float.
        for bad in [json!(1e308), json!(1e-320), json!(-1)] {
            assert!(fields(json!({"x": bad})).number("x", "a number above 0", |x| x > 0.0).is_err());
        }
    }

    #[test]
    fn stop_takes_one_string_or_a_short_list() {
        assert_eq!(fields(json!({"stop": "a"})).strings("stop", 2), Ok(vec!["a".to_string()]));
        assert_eq!(fields(json!({"stop": []})).strings("stop", 2), Ok(vec![]));
        for bad in [json!(""), json!(["a", ""]), json!(["a", "b", "c"]), json!(5), json!({"a": 1})] {
            assert!(fields(json!({"stop": bad})).strings("stop", 2).is_err());
        }
    }

    #[test]
    fn token_ids_stay_inside_the_vocabulary() {
        assert_eq!(fields(json!({"t": [0, 9.0]})).token_ids("t", 10), Ok(Some(vec![0, 9])));
        for bad in [json!([10]), json!([-1]), json!(["a"]), json!([1.5]), json!(3)] {
            assert!(fields(json!({"t": bad})).token_ids("t", 10).is_err());
        }
    }
}

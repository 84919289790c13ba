//! Fields of a JSON body. One call reads a field: it checks the value, words the error and describes the field in
//! `/openapi.json`, so that a field's name, type, range, default and description are written once.
//!
//! A body stays text until a field is read. At most [`Limits::max_json_values`] of its values then become [`Value`]s,
//! which bounds memory by a small multiple of the body's bytes. As in the OpenAI API, `null` means "not given". As in
//! vLLM, unknown fields are ignored, except those that would change the answer ([`super::unsupported`]).

use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::{Bound, RangeBounds};

use serde::de::Deserializer;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::raw::{MAX_DEPTH, Names, RawField, excerpt, integer, items, kind, measure, token_ids};
use crate::http::ApiError;
use crate::settings::Limits;

/// A JSON object with checked readers; or, without a body, a recorder of what the readers would accept.
#[derive(Debug)]
pub struct Fields<'a> {
    given: Vec<RawField<'a>>,
    values_left: Cell<usize>,
    max_values: usize,
    described: Option<RefCell<Description>>,
}

/// The parts of an object's JSON schema.
#[derive(Debug, Default)]
struct Description {
    properties: Map<String, Value>,
    required: Vec<Value>,
}

impl<'a> Fields<'a> {
    /// Reads the names of a body's fields. Their values stay text.
    ///
    /// # Errors
    /// If the body is not a JSON object, has too many fields or nests values too deeply.
    pub fn parse(body: &'a [u8], limits: &Limits) -> Result<Fields<'a>, ApiError> {
        // RFC 8259 lets a parser ignore a byte order mark, which some editors write.
        let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
        let invalid = |error: &dyn fmt::Display| {
            ApiError::bad_request(format!("the request body is not valid JSON: {error}; expected one JSON object"))
        };
        let text = std::str::from_utf8(body).map_err(|error| invalid(&error))?;
        let whole: &RawValue = serde_json::from_str(text).map_err(|error| invalid(&error))?;
        if !whole.get().starts_with('{') {
            let problem = format!("the request body is {}, expected one JSON object", kind(whole));
            return Err(ApiError::bad_request(problem));
        }
        let (_, depth) = measure(whole.get());
        if depth > MAX_DEPTH {
            let problem = format!(
                "the request body nests values {depth} levels deep, expected at most {MAX_DEPTH}; send flatter JSON"
            );
            return Err(ApiError::bad_request(problem));
        }
        let mut deserializer = serde_json::Deserializer::from_str(whole.get());
        let given = deserializer.deserialize_map(Names).map_err(|error| invalid(&error))?;
        let max_values = limits.max_json_values;
        Ok(Fields { given, values_left: Cell::new(max_values), max_values, described: None })
    }

    /// A recorder: its readers describe their fields and return defaults.
    pub fn describing() -> Fields<'a> {
        let described = Some(RefCell::default());
        Fields { given: Vec::new(), values_left: Cell::new(0), max_values: 0, described }
    }

    /// Whether this is a recorder.
    pub fn is_describing(&self) -> bool {
        self.described.is_some()
    }

    /// JSON schemas of the fields read since [`Fields::describing`], by name.
    pub fn properties(self) -> Map<String, Value> {
        self.described.map(RefCell::into_inner).unwrap_or_default().properties
    }

    /// Records a field that is read as one of another route, with the schema that it has there.
    pub fn describe_as(&self, name: &str, schema: &Value) {
        if let Some(described) = &self.described {
            described.borrow_mut().properties.insert(name.to_string(), schema.clone());
        }
    }

    /// JSON schema of the fields read since [`Fields::describing`].
    pub fn schema(self, description: &str) -> Value {
        let Description { properties, required } = self.described.map(RefCell::into_inner).unwrap_or_default();
        json!({"type": "object", "description": description, "properties": properties, "required": required})
    }

    fn given(&self, name: &str) -> Option<&RawField<'a>> {
        // The last one of equal names counts, as in most JSON parsers.
        self.given.iter().rev().find(|given| given.name == name).filter(|given| given.raw.get() != "null")
    }

    /// JSON text of a field that is present and not `null`.
    pub fn raw(&self, name: &str) -> Option<&'a RawValue> {
        self.given(name).map(|given| given.raw)
    }

    /// The whole body, as JSON text.
    pub fn text(&self) -> String {
        let fields: Vec<String> =
            self.given.iter().map(|field| format!("{}:{}", Value::from(&*field.name), field.raw.get())).collect();
        format!("{{{}}}", fields.join(","))
    }

    /// Value of a field. The caller describes it separately.
    pub fn get(&self, name: &str) -> Result<Option<&Value>, ApiError> {
        let Some(given) = self.given(name) else { return Ok(None) };
        if let Some(value) = given.value.get() {
            return Ok(Some(value));
        }
        let ((found, _), left) = (measure(given.raw.get()), self.values_left.get());
        if found > left {
            let advice = "send fewer or raise --max-json-values";
            return Err(ApiError::over(name, found, self.max_values, "JSON values per request", advice));
        }
        self.values_left.set(left - found);
        let value = serde_json::from_str(given.raw.get())
            .map_err(|error| ApiError::invalid(name, format_args!("not valid JSON: {error}; send valid JSON")))?;
        Ok(Some(given.value.get_or_init(|| value)))
    }

    /// Records a field in the schema. `schema` lacks the description and `null`, which every optional field accepts.
    pub fn describe(&self, name: &str, description: &str, schema: impl FnOnce() -> Value) {
        let Some(described) = &self.described else { return };
        let mut schema = schema();
        if let Some(kind @ Value::String(_)) = schema.get("type").cloned() {
            schema["type"] = json!([kind, "null"]);
            if let Some(Value::Array(words)) = schema.get_mut("enum") {
                words.push(Value::Null);
            }
        } else if let Some(Value::Array(forms)) = schema.get_mut("anyOf") {
            forms.push(json!({"type": "null"}));
        }
        schema["description"] = description.into();
        described.borrow_mut().properties.insert(name.to_string(), schema);
    }

    /// Returns `found`, or an error that the field is missing. Marks the described field as required.
    pub fn required<T: Default>(&self, name: &str, found: Option<T>, expected: &str) -> Result<T, ApiError> {
        if let Some(described) = &self.described {
            let mut described = described.borrow_mut();
            described.required.push(name.into());
            match described.properties.get_mut(name) {
                Some(Value::Object(schema)) => {
                    if let Some(Value::Array(kinds)) = schema.get_mut("type") {
                        kinds.retain(|kind| kind != "null");
                    }
                    if let Some(Value::Array(forms)) = schema.get_mut("anyOf") {
                        forms.retain(|form| form["type"] != "null");
                    }
                }
                _ => debug_assert!(false, "{name} is required but not described"),
            }
            return Ok(T::default());
        }
        found.ok_or_else(|| ApiError::wrong(name, &Value::Null, expected))
    }

    /// Reads a boolean.
    pub fn bool(&self, name: &str, description: &str) -> Result<Option<bool>, ApiError> {
        self.describe(name, description, || json!({"type": "boolean"}));
        self.read(name, "true or false", Value::as_bool)
    }

    /// Reads a boolean with a default.
    pub fn flag(&self, name: &str, default: bool, description: &str) -> Result<bool, ApiError> {
        self.describe(name, description, || json!({"type": "boolean", "default": default}));
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// Reads a string of at most `most` bytes.
    pub fn str(&self, name: &str, most: usize, description: &str) -> Result<Option<&str>, ApiError> {
        self.describe(name, description, || match most {
            usize::MAX => json!({"type": "string"}),
            most => json!({"type": "string", "maxLength": most}),
        });
        let found = self.read(name, "a string", Value::as_str)?;
        match found.filter(|text| text.len() > most) {
            Some(text) => Err(ApiError::over(name, text.len(), most, "bytes", "send a shorter string")),
            None => Ok(found),
        }
    }

    /// Reads one of the strings `words`.
    pub fn word(
        &self,
        name: &str,
        words: &[&'static str],
        description: &str,
    ) -> Result<Option<&'static str>, ApiError> {
        self.describe(name, description, || json!({"type": "string", "enum": words}));
        self.read(name, format_args!("one of {}", words.join(", ")), |value| {
            let found = value.as_str()?;
            words.iter().copied().find(|word| *word == found)
        })
    }

    /// Reads an object.
    pub fn object(&self, name: &str, description: &str) -> Result<Option<&Map<String, Value>>, ApiError> {
        self.describe(name, description, || json!({"type": "object"}));
        self.read(name, "an object", Value::as_object)
    }

    /// Reads a list of at most `most` items. `items` is their schema; the caller checks them. `flag` sets the limit.
    pub fn list(
        &self,
        name: &str,
        most: usize,
        flag: &str,
        items: &Value,
        description: &str,
    ) -> Result<Option<&Vec<Value>>, ApiError> {
        self.describe(name, description, || json!({"type": "array", "maxItems": most, "items": items}));
        self.check_items(name, most, flag)?;
        self.read(name, "a list", Value::as_array)
    }

    /// Reads a value of any type. The caller checks it against `schema`.
    pub fn any(&self, name: &str, schema: &Value, description: &str) -> Result<Option<&Value>, ApiError> {
        self.describe(name, description, || schema.clone());
        self.get(name)
    }

    /// Reads an integer in a closed interval; `i64::MIN` and `i64::MAX` mean no bound.
    pub fn integer(&self, name: &str, (low, high): (i64, i64), description: &str) -> Result<Option<i64>, ApiError> {
        self.describe(name, description, || {
            let mut schema = json!({"type": "integer"});
            if low > i64::MIN {
                schema["minimum"] = low.into();
            }
            if high < i64::MAX {
                schema["maximum"] = high.into();
            }
            schema
        });
        let expected = match (low, high) {
            (i64::MIN, i64::MAX) => "a 64-bit integer".to_string(),
            (low, i64::MAX) => format!("an integer of at least {low}"),
            (low, high) => format!("an integer from {low} to {high}"),
        };
        self.read(name, expected, |value| integer(value).filter(|n| (low..=high).contains(n)))
    }

    /// Reads an unsigned integer in a closed interval.
    pub fn count(&self, name: &str, (low, high): (usize, usize), description: &str) -> Result<Option<usize>, ApiError> {
        let clamp = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let found = self.integer(name, (clamp(low), clamp(high)), description)?;
        Ok(found.and_then(|n| usize::try_from(n).ok()))
    }

    /// Reads a finite number in an interval, rounded to single precision.
    pub fn number(&self, name: &str, range: impl RangeBounds<f32>, description: &str) -> Result<Option<f32>, ApiError> {
        let mut schema = json!({"type": "number"});
        let low = match range.start_bound() {
            Bound::Unbounded => String::new(),
            Bound::Included(low) => {
                schema["minimum"] = (*low).into();
                format!(" from {low}")
            }
            Bound::Excluded(low) => {
                schema["exclusiveMinimum"] = (*low).into();
                format!(" above {low}")
            }
        };
        let high = match (range.end_bound(), range.start_bound()) {
            (Bound::Unbounded, _) => String::new(),
            (Bound::Included(high) | Bound::Excluded(high), start) => {
                schema["maximum"] = (*high).into();
                if matches!(start, Bound::Excluded(_)) { format!(" and at most {high}") } else { format!(" to {high}") }
            }
        };
        self.describe(name, description, || schema);
        let number = |value: &Value| value.as_f64().map(|n| n as f32).filter(|n| n.is_finite() && range.contains(n));
        self.read(name, format_args!("a number{low}{high}"), number)
    }

    /// Reads one string or a list of at most `most` strings, each non-empty and at most `most_bytes` bytes long.
    pub fn strings(
        &self,
        name: &str,
        (most, most_bytes): (usize, usize),
        description: &str,
    ) -> Result<Vec<String>, ApiError> {
        let text = json!({"type": "string", "minLength": 1, "maxLength": most_bytes});
        self.describe(
            name,
            description,
            || json!({"anyOf": [text, {"type": "array", "maxItems": most, "items": text}]}),
        );
        let expected =
            format!("a string or a list of up to {most} strings, each non-empty and at most {most_bytes} bytes long");
        if let Some(found) = self.raw(name).and_then(items).filter(|found| *found > most) {
            return Err(ApiError::found(name, &format!("a list of {found} items"), expected));
        }
        let one = |value: &Value| value.as_str().filter(|s| !s.is_empty()).map(str::to_string);
        let found = self.read(name, expected, |value| match value {
            Value::Array(items) => items.iter().map(one).collect::<Option<Vec<String>>>(),
            other => one(other).map(|one| vec![one]),
        })?;
        let found = found.unwrap_or_default();
        match found.iter().map(String::len).find(|len| *len > most_bytes) {
            Some(len) => Err(ApiError::over(name, len, most_bytes, "bytes in a string", "send a shorter string")),
            None => Ok(found),
        }
    }

    /// Reads a list of `least` to `most` token ids below `vocab`. `flag` sets the limit `most`.
    pub fn token_ids(
        &self,
        name: &str,
        (least, most): (usize, usize),
        flag: &str,
        vocab: usize,
        description: &str,
    ) -> Result<Option<Vec<u32>>, ApiError> {
        let last = vocab.saturating_sub(1);
        self.describe(name, description, || {
            let items = json!({"type": "integer", "minimum": 0, "maximum": last});
            json!({"type": "array", "minItems": least, "maxItems": most, "items": items})
        });
        let Some(raw) = self.raw(name) else { return Ok(None) };
        self.check_items(name, most, flag)?;
        match token_ids(raw.get(), vocab).filter(|ids| ids.len() >= least) {
            Some(ids) => Ok(Some(ids)),
            None => {
                let few = if least > 0 { format!("a list of at least {least}") } else { "a list of".to_string() };
                Err(ApiError::found(name, &excerpt(raw), format_args!("{few} token ids from 0 to {last}")))
            }
        }
    }

    /// Fails if a list has more than `most` items, before it is parsed. `flag` sets the limit.
    pub fn check_items(&self, name: &str, most: usize, flag: &str) -> Result<(), ApiError> {
        match self.raw(name).and_then(items).filter(|found| *found > most) {
            Some(found) => Err(ApiError::over(name, found, most, "items", &format!("send fewer or raise {flag}"))),
            None => Ok(()),
        }
    }

    /// Fails if a field's JSON has more than `most` bytes, before it is parsed. `shown` is its name in errors.
    pub fn check_bytes(&self, name: &str, shown: &str, most: usize, flag: &str) -> Result<(), ApiError> {
        match self.raw(name).map(|raw| raw.get().len()).filter(|found| *found > most) {
            Some(found) => {
                Err(ApiError::over(shown, found, most, "bytes of JSON", &format!("send less or raise {flag}")))
            }
            None => Ok(()),
        }
    }

    /// Fails if an unsupported field is present with a value other than `null` and those of `neutral`, a list as JSON.
    pub fn refuse(&self, name: &str, neutral: &str, advice: &str) -> Result<(), ApiError> {
        let Some(found) = self.get(name)? else { return Ok(()) };
        let neutral: Vec<Value> = serde_json::from_str(neutral).unwrap_or_default();
        // 0 is 0.0.
        let is_same = |value: &Value| value == found || value.is_number() && value.as_f64() == found.as_f64();
        if neutral.iter().any(is_same) { Ok(()) } else { Err(ApiError::unsupported(name, advice)) }
    }

    fn read<'b, T>(
        &'b self,
        name: &str,
        expected: impl fmt::Display,
        parse: impl FnOnce(&'b Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        match self.get(name)? {
            None => Ok(None),
            Some(value) => parse(value).map(Some).ok_or_else(|| ApiError::wrong(name, value, expected)),
        }
    }
}

//! The fields of a JSON body. Each reader takes a field's name, type, range, default and description in one place: it checks
//! the value that was sent, words the error, and describes the field in `/openapi.json`.
//!
//! A body is kept as text until a field is read, and then at most [`Limits::max_json_values`] of its values become
//! [`Value`]s, so that parsing takes no more than a few times the bytes of the body. `null` means "not given", and unknown
//! fields are ignored, both as in the OpenAI API.

mod parse;

use std::cell::{Cell, RefCell};
use std::fmt;

use serde::de::Deserializer;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::settings::Limits;
use parse::{Given, MAX_DEPTH, Names, kind, measure, whole};
pub use parse::{Id, Ids, excerpt, items};

/// A JSON object whose fields are read with checks, or the recorder of what would be read.
#[derive(Debug)]
pub struct Fields<'a> {
    given: Vec<Given<'a>>,
    values_left: Cell<usize>,
    max_values: usize,
    described: Option<RefCell<Description>>,
}

/// What the readers have said of a request.
#[derive(Debug, Default)]
struct Description {
    properties: Map<String, Value>,
    required: Vec<Value>,
}

/// Which numbers a field takes.
#[derive(Clone, Copy, Debug)]
pub enum Range {
    /// Any finite number.
    Any,
    /// From one to another, both included.
    Within(f32, f32),
    /// Above a number.
    Above(f32),
    /// Above a number and at most another.
    AboveUpTo(f32, f32),
}

impl Range {
    fn holds(self, x: f32) -> bool {
        match self {
            Range::Any => x.is_finite(),
            Range::Within(low, high) => (low..=high).contains(&x),
            Range::Above(low) => x > low && x.is_finite(),
            Range::AboveUpTo(low, high) => x > low && x <= high,
        }
    }

    fn in_words(self) -> String {
        match self {
            Range::Any => "a number".to_string(),
            Range::Within(low, high) => format!("a number from {low} to {high}"),
            Range::Above(low) => format!("a number above {low}"),
            Range::AboveUpTo(low, high) => format!("a number above {low}, at most {high}"),
        }
    }

    fn schema(self) -> Value {
        match self {
            Range::Any => json!({"type": "number"}),
            Range::Within(low, high) => json!({"type": "number", "minimum": low, "maximum": high}),
            Range::Above(low) => json!({"type": "number", "exclusiveMinimum": low}),
            Range::AboveUpTo(low, high) => json!({"type": "number", "exclusiveMinimum": low, "maximum": high}),
        }
    }
}

impl<'a> Fields<'a> {
    /// The fields of a body, of which nothing but the names is parsed yet.
    ///
    /// # Errors
    /// For a body that is no JSON object, or has far too many fields.
    pub fn parse(body: &'a [u8], limits: &Limits) -> Result<Fields<'a>, ApiError> {
        // RFC 8259 lets a reader ignore a byte order mark, and some editors write one.
        let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
        let invalid =
            |error: &dyn fmt::Display| ApiError::body(format!("the body is not valid JSON: {error}; send one object"));
        let text = std::str::from_utf8(body).map_err(|error| invalid(&error))?;
        let whole: &RawValue = serde_json::from_str(text).map_err(|error| invalid(&error))?;
        if !whole.get().starts_with('{') {
            return Err(ApiError::body(format!("the body must be a JSON object, found {}", kind(whole))));
        }
        let (_, depth) = measure(whole.get());
        if depth > MAX_DEPTH {
            let problem = format!("found values nested {depth} deep, expected at most {MAX_DEPTH}; send flatter JSON");
            return Err(ApiError::body(problem));
        }
        let mut deserializer = serde_json::Deserializer::from_str(whole.get());
        let given = deserializer.deserialize_map(Names).map_err(|error| invalid(&error))?;
        let max_values = limits.max_json_values;
        Ok(Fields { given, values_left: Cell::new(max_values), max_values, described: None })
    }

    /// No body: readers record what they would read, and give defaults.
    pub fn describing() -> Fields<'a> {
        let described = Some(RefCell::default());
        Fields { given: Vec::new(), values_left: Cell::new(0), max_values: 0, described }
    }

    /// The JSON schema of what was read since [`Fields::describing`].
    pub fn schema(self, description: &str) -> Value {
        let Description { properties, required } = self.described.map(RefCell::into_inner).unwrap_or_default();
        json!({"type": "object", "description": description, "properties": properties, "required": required})
    }

    fn given(&self, name: &str) -> Option<&Given<'a>> {
        // Of a name that comes twice the last counts, as nearly everywhere.
        self.given.iter().rev().find(|given| given.name == name).filter(|given| given.raw.get() != "null")
    }

    /// The JSON text of a field that was sent and is not `null`.
    pub fn raw(&self, name: &str) -> Option<&'a RawValue> {
        self.given(name).map(|given| given.raw)
    }

    /// The value of a field that another reader describes.
    pub fn get(&self, name: &str) -> Result<Option<&Value>, ApiError> {
        let Some(given) = self.given(name) else { return Ok(None) };
        if let Some(value) = given.value.get() {
            return Ok(Some(value));
        }
        let ((found, _), left) = (measure(given.raw.get()), self.values_left.get());
        if found > left {
            let most = self.max_values;
            return Err(ApiError::invalid(
                name,
                format_args!(
                    "found {found} JSON values, expected at most {most} in a request (--max-json-values); send fewer"
                ),
            ));
        }
        self.values_left.set(left - found);
        let value = serde_json::from_str(given.raw.get())
            .map_err(|error| ApiError::invalid(name, format_args!("not valid JSON: {error}")))?;
        Ok(Some(given.value.get_or_init(|| value)))
    }

    /// Records a field: `schema` without the description, which may also be `null` unless the field is required.
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

    /// Marks a described field as required: `found`, or the error that it is missing.
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
                _ => debug_assert!(false, "{name} is required and not described"),
            }
            return Ok(T::default());
        }
        found.ok_or_else(|| ApiError::wrong(name, &Value::Null, expected))
    }

    /// `true` or `false`.
    pub fn bool(&self, name: &str, description: &str) -> Result<Option<bool>, ApiError> {
        self.describe(name, description, || json!({"type": "boolean"}));
        self.read(name, "true or false", Value::as_bool)
    }

    /// `true` or `false`, and what it is where it was not sent.
    pub fn flag(&self, name: &str, default: bool, description: &str) -> Result<bool, ApiError> {
        self.describe(name, description, || json!({"type": "boolean", "default": default}));
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// Text of at most `most` bytes.
    pub fn str(&self, name: &str, most: usize, description: &str) -> Result<Option<&str>, ApiError> {
        self.describe(name, description, || match most {
            usize::MAX => json!({"type": "string"}),
            most => json!({"type": "string", "maxLength": most}),
        });
        let found = self.read(name, "a string", Value::as_str)?;
        match found.filter(|text| text.len() > most) {
            Some(text) => Err(ApiError::over(name, text.len(), most, "bytes", "send a shorter text")),
            None => Ok(found),
        }
    }

    /// One of several words.
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

    /// A JSON object.
    pub fn object(&self, name: &str, description: &str) -> Result<Option<&Map<String, Value>>, ApiError> {
        self.describe(name, description, || json!({"type": "object"}));
        self.read(name, "an object", Value::as_object)
    }

    /// A JSON list of at most `most` items, which `items` describes; what is in them is checked by the caller.
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

    /// A value of several types, as `schema` describes it.
    pub fn any(&self, name: &str, schema: &Value, description: &str) -> Result<Option<&Value>, ApiError> {
        self.describe(name, description, || schema.clone());
        self.get(name)
    }

    /// A whole number from `low` to `high`; the greatest and the least number of 64 bits mean no bound.
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
            (i64::MIN, i64::MAX) => "a whole number of 64 bits".to_string(),
            (low, i64::MAX) => format!("a whole number of at least {low}"),
            (low, high) => format!("a whole number from {low} to {high}"),
        };
        self.read(name, expected, |value| whole(value).filter(|n| (low..=high).contains(n)))
    }

    /// A count: a whole number from `low` to `high`.
    pub fn count(&self, name: &str, (low, high): (usize, usize), description: &str) -> Result<Option<usize>, ApiError> {
        let clamp = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let found = self.integer(name, (clamp(low), clamp(high)), description)?;
        Ok(found.and_then(|n| usize::try_from(n).ok()))
    }

    /// A number of single precision.
    pub fn number(&self, name: &str, range: Range, description: &str) -> Result<Option<f32>, ApiError> {
        self.describe(name, description, || range.schema());
        self.read(name, range.in_words(), |value| value.as_f64().map(|n| n as f32).filter(|&n| range.holds(n)))
    }

    /// One string or a list of at most `most` strings of at most `most_bytes` bytes each, none of them empty.
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
            || format!("a string or up to {most} strings of at most {most_bytes} bytes each, none of them empty");
        if let Some(found) = self.raw(name).and_then(items).filter(|found| *found > most) {
            return Err(ApiError::invalid(
                name,
                format_args!("found a list of {found} items, expected {}", expected()),
            ));
        }
        let one = |value: &Value| value.as_str().filter(|s| !s.is_empty()).map(str::to_string);
        let found = self.read(name, expected(), |value| match value {
            Value::Array(items) => items.iter().map(one).collect::<Option<Vec<String>>>(),
            other => one(other).map(|one| vec![one]),
        })?;
        let found = found.unwrap_or_default();
        match found.iter().map(String::len).find(|len| *len > most_bytes) {
            Some(len) => Err(ApiError::over(name, len, most_bytes, "bytes in a string", "send shorter strings")),
            None => Ok(found),
        }
    }

    /// A list of `least` to `most` token ids, each less than `vocab`. `flag` is the flag of the limit.
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
        let found = serde_json::Deserializer::from_str(raw.get()).deserialize_seq(Ids { vocab }).ok();
        match found.filter(|ids| ids.len() >= least) {
            Some(ids) => Ok(Some(ids)),
            None => {
                let few = if least > 0 { format!("a list of at least {least}") } else { "a list of".to_string() };
                Err(ApiError::found(name, &excerpt(raw), format_args!("{few} token ids from 0 to {last}")))
            }
        }
    }

    /// Refuses a list of more than `most` items before it is parsed.
    pub fn check_items(&self, name: &str, most: usize, flag: &str) -> Result<(), ApiError> {
        match self.raw(name).and_then(items).filter(|found| *found > most) {
            Some(found) => Err(ApiError::over(name, found, most, "items", &format!("send fewer ({flag})"))),
            None => Ok(()),
        }
    }

    /// Refuses a field of more than `most` bytes of JSON before it is parsed. `shown` is its name in the error.
    pub fn check_bytes(&self, name: &str, shown: &str, most: usize, flag: &str) -> Result<(), ApiError> {
        match self.raw(name).map(|raw| raw.get().len()).filter(|found| *found > most) {
            Some(found) => Err(ApiError::over(shown, found, most, "bytes of JSON", &format!("send less ({flag})"))),
            None => Ok(()),
        }
    }

    /// Answers 400 if the field was sent and asks for something (`null`, `false`, `""`, `[]` and `{}` do not).
    pub fn refuse(&self, name: &str, advice: &str) -> Result<(), ApiError> {
        match self.raw(name).map(RawValue::get) {
            None | Some("false" | "\"\"" | "[]" | "{}") => Ok(()),
            Some(_) => Err(ApiError::unsupported(name, advice)),
        }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::parse::MAX_FIELDS;
    use super::*;

    fn with<T>(body: Value, read: impl FnOnce(&Fields<'_>) -> T) -> T {
        let body = body.to_string();
        read(&Fields::parse(body.as_bytes(), &Limits::default()).unwrap())
    }

    #[test]
    fn null_is_the_same_as_absent() {
        with(json!({"a": null}), |f| {
            assert!(f.get("a").unwrap().is_none() && f.get("b").unwrap().is_none());
            assert_eq!(f.bool("a", ""), Ok(None));
            assert_eq!(f.flag("a", true, ""), Ok(true));
            assert_eq!(f.token_ids("a", (1, 9), "", 10, ""), Ok(None));
        });
    }

    #[test]
    fn of_a_name_that_comes_twice_the_last_counts_and_a_mark_in_front_is_ignored() {
        let body = b"\xef\xbb\xbf{\"a\": 1, \"\\u0061\": true}";
        let fields = Fields::parse(body, &Limits::default()).unwrap();
        assert_eq!(fields.bool("a", ""), Ok(Some(true)));
    }

    #[test]
    fn what_is_not_a_json_object_is_refused() {
        let many = format!("{{{}\"z\": 1}}", "\"a\": 1,".repeat(MAX_FIELDS));
        let deep = format!("{{\"a\": {}{}}}", "[".repeat(MAX_DEPTH), "]".repeat(MAX_DEPTH));
        for bad in [
            deep.as_bytes(),
            b"",
            b"{",
            b"[]",
            b"null",
            b"42",
            b"{\"a\": NaN}",
            b"{\"a\": \"\xff\"}",
            b"{\"a\":1,}",
            many.as_bytes(),
        ] {
            assert!(Fields::parse(bad, &Limits::default()).is_err(), "{}", String::from_utf8_lossy(bad));
        }
    }

    #[test]
    fn whole_numbers_may_be_written_with_a_point() {
        with(json!({"n": 2.0, "big": 1e300, "half": 0.5, "t": [0, 9.0]}), |f| {
            assert_eq!(f.count("n", (1, 4), ""), Ok(Some(2)));
            assert!(f.count("big", (1, 4), "").is_err() && f.count("half", (0, 4), "").is_err());
            assert_eq!(f.token_ids("t", (1, 2), "", 10, ""), Ok(Some(vec![0, 9])));
        });
    }

    #[test]
    fn a_string_may_stand_for_a_list_of_one() {
        assert_eq!(with(json!({"stop": "a"}), |f| f.strings("stop", (2, 4), "")), Ok(vec!["a".to_string()]));
        assert_eq!(with(json!({"stop": []}), |f| f.strings("stop", (2, 4), "")), Ok(vec![]));
        for bad in [json!(""), json!(["a", ""]), json!(["a", "b", "c"]), json!("abcde"), json!(5), json!({"a": 1})] {
            assert!(with(json!({"stop": bad}), |f| f.strings("stop", (2, 4), "")).is_err(), "{bad}");
        }
    }

    #[test]
    fn token_ids_stay_inside_the_vocabulary_and_their_number() {
        for bad in [json!([10]), json!([-1]), json!(["a"]), json!([1.5]), json!(3), json!([]), json!([1, 2, 3])] {
            let error = with(json!({"t": bad}), |f| f.token_ids("t", (1, 2), "--max-ids", 10, "")).unwrap_err();
            assert_eq!(error.to_json()["error"]["param"], "t");
        }
    }

    #[test]
    fn values_are_counted_before_they_are_parsed() {
        for (text, count) in [("1", 1), ("\"a,b:[\\\"{\"", 1), ("[1,2,3]", 4), ("{\"a\":[{},{}]}", 6)] {
            assert!((count..=count + 1).contains(&measure(text).0), "{text}");
        }
        let body = json!({"a": [1, 2, 3], "b": [4, 5, 6]}).to_string();
        let limits = Limits { max_json_values: 6, ..Limits::default() };
        let fields = Fields::parse(body.as_bytes(), &limits).unwrap();
        assert!(fields.get("a").is_ok() && fields.get("a").is_ok(), "a field is counted once");
        let error = fields.get("b").unwrap_err().to_json();
        assert!(error["error"]["message"].as_str().unwrap().starts_with("b: found 4 JSON values"), "{error}");
    }

    #[test]
    fn a_reader_describes_what_it_checks() {
        let f = Fields::describing();
        assert_eq!(f.number("x", Range::AboveUpTo(0.0, 1.0), "An x."), Ok(None));
        assert_eq!(f.flag("y", true, "A y."), Ok(true));
        let found = f.token_ids("z", (1, 5), "", 10, "Zs.").unwrap();
        assert_eq!(f.required("z", found, "ids"), Ok(Vec::<u32>::new()));
        let ids = json!({"type": "integer", "minimum": 0, "maximum": 9});
        assert_eq!(
            f.schema("All."),
            json!({"type": "object", "description": "All.", "required": ["z"], "properties": {
                "x": {"type": ["number", "null"], "exclusiveMinimum": 0.0, "maximum": 1.0, "description": "An x."},
                "y": {"type": ["boolean", "null"], "default": true, "description": "A y."},
                "z": {"type": ["array"], "minItems": 1, "maxItems": 5, "items": ids, "description": "Zs."},
            }})
        );
    }
}

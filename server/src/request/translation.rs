//! Requests of another API, as a request of one of our routes.
//!
//! The fields of the other API become the body of the route, whose reader then reads them. So a field has one type, range, default
//! and check, and `/openapi.json` describes it under both names.

use serde::Serialize;
use serde_json::{Map, Value};

use super::fields::Fields;
use super::work::Work;
use crate::http::ApiError;
use crate::http::json::put;

/// Reader of the body of a route.
pub type Reader<T> = fn(&Work, &Fields<'_>) -> Result<T, ApiError>;

/// Sampling parameters that other APIs do not have.
pub const SAMPLING: [&str; 6] =
    ["min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"];

/// Further fields that other APIs do not have, and that are of use there too.
pub const EXTENSIONS: [&str; 10] = [
    "thinking_token_budget",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
    "cache_salt",
    "priority",
    "speculative",
];

/// The `repetition_penalty` of another API's penalty, which counts the last tokens of a window, by default 64. Ours counts all, so the
/// window must be -1, or the penalty must have no effect. `names` are those of the two.
pub fn repeat_penalty<'v>(
    penalty: Option<&'v Value>,
    window: Option<i64>,
    names: [&str; 2],
) -> Result<Option<&'v Value>, ApiError> {
    let Some(penalty) = penalty.filter(|_| window != Some(0)) else { return Ok(None) };
    if penalty.as_f64().is_some_and(|penalty| [0.0, 1.0].contains(&penalty)) {
        return Ok(None);
    }
    match window {
        Some(-1) => Ok(Some(penalty)),
        _ => {
            let expected = format!("1; other penalties need {}: -1, because they count all tokens here", names[1]);
            Err(ApiError::wrong(names[0], penalty, expected))
        }
    }
}

/// The body of a route while it is made.
pub struct Translation<'f, 'a, T> {
    fields: &'f Fields<'a>,
    read: Reader<T>,
    /// The JSON so far, without the brace at its end.
    body: Vec<u8>,
    /// The schemas of the route's fields, if the fields of the other API are described.
    described: Map<String, Value>,
}

impl<'f, 'a, T> Translation<'f, 'a, T> {
    /// An empty body of the route that `read` reads.
    pub fn new(work: &Work, fields: &'f Fields<'a>, read: Reader<T>) -> Translation<'f, 'a, T> {
        let mut described = Map::new();
        if fields.is_describing() {
            let target = Fields::describing();
            // As in `openapi`: readers of an empty request may fail, but not before they have read all fields.
            let _ = read(work, &target);
            described = target.properties();
        }
        Translation { fields, read, body: Vec::new(), described }
    }

    /// Copies the field `theirs`, which is the field `ours` of the route.
    pub fn copy(&mut self, theirs: &str, ours: &str) {
        self.describe(theirs, ours);
        if let Some(raw) = self.fields.raw(theirs) {
            self.begin(ours);
            self.body.extend_from_slice(raw.get().as_bytes());
        }
    }

    /// Copies fields that have the same name.
    pub fn copy_all(&mut self, names: &[&str]) {
        names.iter().for_each(|name| self.copy(name, name));
    }

    /// Sets the field `ours` of the route.
    pub fn set(&mut self, ours: &str, value: &(impl Serialize + ?Sized)) {
        self.begin(ours);
        put(&mut self.body, value);
    }

    /// Describes the field `theirs` as the field `ours` of the route.
    pub fn describe(&self, theirs: &str, ours: &str) {
        if let Some(schema) = self.described.get(ours) {
            self.fields.describe_as(theirs, schema);
        }
    }

    fn begin(&mut self, name: &str) {
        self.body.push(if self.body.is_empty() { b'{' } else { b',' });
        put(&mut self.body, name);
        self.body.push(b':');
    }

    /// Reads the body as the route does.
    pub fn read(mut self, work: &Work) -> Result<T, ApiError> {
        if self.body.is_empty() {
            self.body.push(b'{');
        }
        self.body.push(b'}');
        let fields = Fields::parse(&self.body, &work.options.limits)?;
        (self.read)(work, &fields)
    }
}

//! Parameters of a URL, and lists in pages.

use axum::http::Uri;
use serde_json::{Value, json};

use crate::http::ApiError;

/// Number of items of a page without `limit`.
const LIMIT: usize = 20;

/// The parameters of a URL. Unknown ones are ignored, as in vLLM.
pub struct Query<'a>(&'a str);

impl<'a> Query<'a> {
    /// The parameters of this URL.
    pub fn of(uri: &'a Uri) -> Query<'a> {
        Query(uri.query().unwrap_or_default())
    }

    /// A parameter, as it was sent.
    pub fn get(&self, name: &str) -> Option<&'a str> {
        let pairs = self.0.split('&').filter_map(|pair| pair.split_once('='));
        pairs.filter(|(found, _)| *found == name).map(|(_, value)| value).next_back().filter(|value| !value.is_empty())
    }

    /// A parameter that is true or false.
    pub fn flag(&self, name: &str) -> Result<bool, ApiError> {
        match self.get(name).unwrap_or("false").to_ascii_lowercase().as_str() {
            "true" | "1" => Ok(true),
            "false" | "0" => Ok(false),
            other => Err(ApiError::wrong(name, &other.into(), "true or false")),
        }
    }

    /// A parameter that is a whole number.
    pub fn number(&self, name: &str, (low, high): (u64, u64)) -> Result<Option<u64>, ApiError> {
        let Some(text) = self.get(name) else { return Ok(None) };
        let number = text.parse().ok().filter(|number| (low..=high).contains(number));
        let expected = || ApiError::wrong(name, &text.into(), format_args!("a whole number from {low} to {high}"));
        number.map(Some).ok_or_else(expected)
    }

    /// `limit`, up to `most`.
    pub fn limit(&self, most: usize) -> Result<usize, ApiError> {
        Ok(self.number("limit", (1, most as u64))?.map_or(LIMIT.min(most), |limit| limit as usize))
    }

    /// `order`: whether the newest come first.
    pub fn newest_first(&self) -> Result<bool, ApiError> {
        match self.get("order") {
            None | Some("desc") => Ok(true),
            Some("asc") => Ok(false),
            Some(other) => Err(ApiError::wrong("order", &other.into(), "asc or desc")),
        }
    }
}

/// A page as JSON.
pub fn page_json(data: Vec<Value>, has_more: bool) -> Value {
    let id = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    json!({"object": "list", "first_id": id(data.first()), "last_id": id(data.last()), "has_more": has_more, "data": data})
}

//! What is kept of a response, and the items that a request continues.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use store::Kind;

use super::output::response_of;
use crate::app::App;
use crate::http::{ApiError, call};
use crate::openai::conversations;
use crate::request::{Fields, Work};
use crate::stored::Owner;

/// Version of [`Kept`] in the store.
const VERSION: u8 = 1;

/// What is kept of a response.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Kept {
    /// Body of the request, until the work has ended.
    pub body: String,
    /// Items before those of the request, as a list; until the work has ended.
    pub earlier: String,
    /// Items of the request, as a list.
    pub input: String,
    /// The response that it continues.
    pub previous: Option<String>,
    /// The conversation that it continues, and the number of the last item that this has of it.
    pub conversation: Option<(String, u64)>,
    /// Whether it runs in the background.
    pub background: bool,
    /// Whether its events are kept.
    pub streams: bool,
    /// Which model computes it.
    pub computed_by: ComputedBy,
    /// Digest of what the engine is asked.
    pub asked: String,
    /// The response, as JSON.
    pub response: String,
}

/// Which model computes something, and in which family of bits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputedBy {
    fingerprint: u64,
    arithmetic: String,
}

impl ComputedBy {
    /// The model of this server.
    pub fn of(app: &App) -> ComputedBy {
        let info = app.engine.info();
        ComputedBy { fingerprint: info.fingerprint, arithmetic: info.arithmetic.clone() }
    }

    /// Why this server cannot continue what another began; `None` if it can.
    pub fn refuses(&self, app: &App) -> Option<String> {
        let own = ComputedBy::of(app);
        if own.fingerprint != self.fingerprint {
            let (found, expected) = (self.fingerprint, own.fingerprint);
            return Some(format!(
                "it was begun with another model ({found:016x}, and this server has {expected:016x})"
            ));
        }
        let differs = own.arithmetic != self.arithmetic;
        differs.then(|| {
            format!(
                "it was begun in another family of bits ({}, and this server computes in {})",
                self.arithmetic, own.arithmetic
            )
        })
    }
}

/// Takes up the work of a record after a start with `begin`, if this server can continue what was begun. Returns why it is left.
pub fn take_up(app: &App, begun_by: Result<ComputedBy, ApiError>, begin: impl FnOnce()) -> Option<String> {
    let reason = match begun_by {
        Err(error) => Some(error.message().to_string()),
        Ok(begun_by) => begun_by.refuses(app),
    };
    if reason.is_none() {
        begin();
    }
    reason
}

impl Kept {
    /// Its form in the store.
    pub fn encode(&self) -> Vec<u8> {
        // Strings, numbers and lists of them always have a form.
        postcard::to_extend(self, vec![VERSION]).unwrap_or_default()
    }

    /// Reads its form in the store.
    pub fn decode(id: &str, bytes: &[u8]) -> Result<Kept, ApiError> {
        let kept = bytes.split_first().filter(|(version, _)| **version == VERSION);
        let kept = kept.and_then(|(_, bytes)| postcard::from_bytes(bytes).ok());
        kept.ok_or_else(|| ApiError::internal(format!("{id} was stored by another version of Quire; delete it")))
    }

    /// The response as JSON.
    pub fn response(&self) -> Value {
        serde_json::from_str(&self.response).unwrap_or_default()
    }
}

/// What a request says about being kept.
#[derive(Clone, Debug, Default)]
pub struct Keep {
    /// Keep the response.
    pub store: bool,
    /// Run it in the background.
    pub background: bool,
    /// The response that it continues.
    pub previous: Option<String>,
    /// The conversation that it continues.
    pub conversation: Option<String>,
    /// Items before those of the request.
    pub earlier: Vec<Value>,
    /// Items that those of the request refer to by their ids.
    pub referred: Vec<Value>,
    /// The request's own items.
    pub input: Vec<Value>,
    /// The whole body, of a background request.
    pub body: String,
}

/// Where the items come from that a request continues or refers to.
pub enum Earlier<'a> {
    /// From the records of its owner.
    Of(&'a Owner),
    /// They were found when it was accepted: those that it continues, and its own.
    Found(Vec<Value>, Vec<Value>),
}

impl Keep {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>, earlier: Earlier<'_>) -> Result<Keep, ApiError> {
        let store = fields.flag("store", true, "Keep the response, so that it can be read and continued.")?;
        let description =
            "Answer at once and compute the response in the background, also over a restart; requires store.";
        let background = fields.flag("background", false, description)?;
        if background && !store {
            return Err(ApiError::conflict("background", "store: false"));
        }
        let description = "Id of a response that this one continues. Its instructions are not taken over.";
        let previous = fields.str("previous_response_id", usize::MAX, description)?.map(str::to_string);
        let conversation = conversation(fields)?;
        if previous.is_some() && conversation.is_some() {
            return Err(ApiError::conflict("previous_response_id", "conversation"));
        }
        let mut keep = Keep { store, background, previous, conversation, ..Keep::default() };
        let owner = if let Earlier::Of(owner) = earlier { Some(owner) } else { None };
        match (earlier, &keep.previous, &keep.conversation) {
            (Earlier::Found(items, own), ..) => (keep.earlier, keep.referred) = (items, own),
            (Earlier::Of(owner), Some(id), _) => {
                let most = work.options.limits.max_messages;
                keep.earlier = items_until(work, id, owner, most).map_err(|error| {
                    let code = "previous_response_not_found";
                    if error.status() == 404 { error.with_code(code).with_param("previous_response_id") } else { error }
                })?;
            }
            (Earlier::Of(owner), None, Some(id)) => {
                keep.earlier = conversations::items(work, id, owner, u64::MAX)
                    .map_err(|error| if error.status() == 404 { error.with_param("conversation") } else { error })?;
            }
            (Earlier::Of(_), None, None) => {}
        }
        if let (Some(owner), Some(Value::Array(items))) = (owner, fields.get("input")?) {
            keep.referred = referred(work, items, &keep.earlier, owner)?;
        }
        if background {
            keep.body = fields.text();
        }
        Ok(keep)
    }
}

/// Reads `conversation`: an id, or an object with one.
fn conversation(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let schema = json!({"anyOf": [{"type": "string"}, {"type": "object", "properties": {"id": {"type": "string"}}}]});
    let description =
        "Conversation whose items precede the input, and which gets the items of this request and its response.";
    let Some(found) = fields.any("conversation", &schema, description)? else { return Ok(None) };
    let id = found.as_str().or_else(|| found["id"].as_str());
    id.map(|id| Some(id.to_string()))
        .ok_or_else(|| ApiError::wrong("conversation", found, "an id or an object with id"))
}

/// All items up to the end of a response: those that it continued, its own and its output.
pub fn items_until(app: &App, id: &str, owner: &Owner, most: usize) -> Result<Vec<Value>, ApiError> {
    let mut lists = Vec::new();
    let (mut next, mut count) = (Some(id.to_string()), 0);
    while let Some(id) = next {
        let record = app.stored()?.find(Kind::Response, &id, owner)?;
        let kept = Kept::decode(&id, &record.body)?;
        let mut response = kept.response();
        if record.is_open || !["completed", "incomplete"].iter().any(|status| response["status"] == *status) {
            let status = if record.is_open { "in_progress".into() } else { response["status"].clone() };
            let expected = format!("a response that is completed or incomplete, but {id} is {status}");
            return Err(ApiError::invalid("previous_response_id", format_args!("expected {expected}")));
        }
        let mut items = list(&kept.input);
        if let Value::Array(output) = response["output"].take() {
            items.extend(output);
        }
        if let Some((conversation, last)) = &kept.conversation {
            items = conversations::items(app, conversation, owner, *last)?;
        }
        count += items.len();
        if count > most {
            let advice = "begin a new conversation, or raise --max-messages";
            return Err(ApiError::over("previous_response_id", count, most, "items or more with those before", advice));
        }
        lists.push(items);
        next = kept.previous;
    }
    Ok(lists.into_iter().rev().flatten().collect())
}

/// The id that an item refers to, if it is a reference.
pub fn reference(item: &Value) -> Option<&str> {
    item["id"].as_str().filter(|_| item["type"] == "item_reference")
}

/// The items of kept responses that references are about, except for those that are among the items before. What is not found is
/// left out.
fn referred(app: &App, items: &[Value], earlier: &[Value], owner: &Owner) -> Result<Vec<Value>, ApiError> {
    let wanted: HashSet<&str> = items.iter().filter_map(reference).collect();
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let known: HashSet<&str> = earlier.iter().filter_map(|item| item["id"].as_str()).collect();
    let responses: HashSet<String> = wanted.difference(&known).filter_map(|id| response_of(id)).collect();
    let mut found = Vec::new();
    for response in responses {
        match app.stored()?.find(Kind::Response, &response, owner) {
            Ok(record) => {
                let mut kept = Kept::decode(&response, &record.body)?.response();
                if let Value::Array(output) = kept["output"].take() {
                    let is_wanted = |item: &Value| item["id"].as_str().is_some_and(|id| wanted.contains(id));
                    found.extend(output.into_iter().filter(is_wanted));
                }
            }
            Err(error) if error.status() == 404 => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// A list of items.
pub fn list(text: &str) -> Vec<Value> {
    serde_json::from_str(text).unwrap_or_default()
}

/// The items of an input, with those that references are about in place of them.
pub fn own_items(input: Option<&Value>, referred: &[Value]) -> Vec<Value> {
    match input {
        Some(Value::String(text)) => {
            let content = json!([{"type": "input_text", "text": text}]);
            vec![json!({"type": "message", "role": "user", "content": content})]
        }
        Some(Value::Array(items)) => {
            let known: HashMap<&str, &Value> =
                referred.iter().filter_map(|item| Some((item["id"].as_str()?, item))).collect();
            let whole = |item| reference(item).and_then(|id| known.get(id).copied()).unwrap_or(item).clone();
            items.iter().map(whole).collect()
        }
        _ => Vec::new(),
    }
}

/// Items with ids that are their own or follow from that of their owner, as a list.
pub fn identified(items: Vec<Value>, of: &str) -> Vec<Value> {
    items.into_iter().zip(0..).map(|(item, number)| with_id(item, of, number)).collect()
}

/// An item with an id, which is its own or follows from that of its owner.
fn with_id(mut item: Value, of: &str, number: u64) -> Value {
    if let Value::Object(fields) = &mut item {
        if !fields.contains_key("type") {
            fields.insert("type".into(), "message".into());
        }
        if !fields.get("id").is_some_and(Value::is_string) {
            let prefix = match fields["type"].as_str() {
                Some("function_call") => "fc",
                Some("function_call_output") => "fco",
                Some("reasoning") => "rs",
                _ => "msg",
            };
            let id = format!("{prefix}_{}", call::derived_id(&format!("{of} input"), number));
            fields.insert("id".into(), id.into());
        }
    }
    item
}

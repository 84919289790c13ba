//! The settings, with the keys and defaults of vLLM's `--kv-events-config`.

use std::str::FromStr;

use serde_json::{Map, Value};

use crate::endpoint::Endpoint;

/// Encoding of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// A map with the key `"type"`, as in vLLM since 0.24.
    #[default]
    Map,
    /// An array whose first element is the type, as in vLLM before 0.24.
    Array,
}

/// Where and how events are published. Parsed from the JSON object of `--kv-events-config`.
///
/// ```
/// let config: kvevents::KvEventsConfig = r#"{"enable_kv_cache_events": true, "topic": "kv@pod-1@llama"}"#.parse()?;
/// assert_eq!((config.enabled, config.endpoint.as_str()), (true, "tcp://*:5557"));
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// `enable_kv_cache_events`: whether events are published. Also off with the publisher `"null"`.
    pub enabled: bool,
    /// Address of the PUB socket.
    pub endpoint: String,
    /// Address of the replay socket; `None`: no replay.
    pub replay_endpoint: Option<String>,
    /// Greatest number of messages kept for replay.
    pub buffer_steps: usize,
    /// Greatest number of unsent messages per subscriber. Later ones are dropped for that subscriber.
    pub hwm: usize,
    /// Greatest number of steps that wait for the publisher thread.
    pub max_queue_size: usize,
    /// First frame of every message.
    pub topic: String,
    /// Encoding of an event. Not a key of vLLM.
    pub format: Format,
}

impl Default for KvEventsConfig {
    fn default() -> Self {
        KvEventsConfig {
            enabled: false,
            endpoint: "tcp://*:5557".to_string(),
            replay_endpoint: None,
            buffer_steps: 10_000,
            hwm: 100_000,
            max_queue_size: 100_000,
            topic: String::new(),
            format: Format::Map,
        }
    }
}

/// All keys.
const KEYS: [&str; 9] = [
    "enable_kv_cache_events",
    "publisher",
    "endpoint",
    "replay_endpoint",
    "buffer_steps",
    "hwm",
    "max_queue_size",
    "topic",
    "format",
];

/// Greatest value of a number.
const MOST: u64 = 1_000_000_000;

struct Keys(Map<String, Value>);

impl Keys {
    fn read<T>(
        &self,
        key: &'static str,
        expected: &str,
        parse: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        parse(value).map(Some).ok_or_else(|| format!("{key}: found {value}, expected {expected}"))
    }

    fn count(&self, key: &'static str, to: &mut usize) -> Result<(), String> {
        let parse = |value: &Value| value.as_u64().filter(|n| (1..=MOST).contains(n)).map(|n| n as usize);
        *to = self.read(key, &format!("a whole number from 1 to {MOST}"), parse)?.unwrap_or(*to);
        Ok(())
    }

    fn text(&self, key: &'static str, expected: &str) -> Result<Option<String>, String> {
        self.read(key, expected, |value| value.as_str().map(str::to_string))
    }

    fn endpoint(&self, key: &'static str) -> Result<Option<String>, String> {
        if self.0.get(key).is_some_and(Value::is_null) && key == "replay_endpoint" {
            return Ok(None);
        }
        let Some(text) = self.text(key, "an address such as \"tcp://*:5557\"")? else { return Ok(None) };
        text.parse::<Endpoint>().map_err(|error| format!("{key}: {error}"))?;
        Ok(Some(text))
    }
}

impl FromStr for KvEventsConfig {
    type Err = String;

    /// # Errors
    /// One line that says what was found and what is allowed.
    fn from_str(text: &str) -> Result<KvEventsConfig, String> {
        let expected = r#"expected a JSON object such as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}"#;
        let values = match serde_json::from_str(text) {
            Ok(Value::Object(values)) => values,
            Ok(_) => return Err(expected.to_string()),
            Err(error) => return Err(format!("not valid JSON ({error}), {expected}")),
        };
        if let Some(key) = values.keys().find(|key| !KEYS.contains(&key.as_str())) {
            let near = KEYS.iter().min_by_key(|known| strsim::levenshtein(known, key));
            let guess = near.filter(|known| strsim::levenshtein(known, key) <= key.len() / 3);
            let guess = guess.map_or(String::new(), |known| format!("; did you mean {known:?}?"));
            return Err(format!("unknown key {key:?}, expected one of {}{guess}", KEYS.join(", ")));
        }
        let keys = Keys(values);
        let enabled = keys.read("enable_kv_cache_events", "true or false", Value::as_bool)?.unwrap_or(false);
        let mut config = KvEventsConfig { enabled, ..KvEventsConfig::default() };
        let publisher = |value: &Value| match value {
            Value::Null => Some(true),
            Value::String(name) => ["null", "zmq"].contains(&name.as_str()).then(|| name == "zmq"),
            _ => None,
        };
        config.enabled &= keys.read("publisher", "\"zmq\" or \"null\"", publisher)?.unwrap_or(true);
        config.endpoint = keys.endpoint("endpoint")?.unwrap_or(config.endpoint);
        config.replay_endpoint = keys.endpoint("replay_endpoint")?;
        keys.count("buffer_steps", &mut config.buffer_steps)?;
        keys.count("hwm", &mut config.hwm)?;
        keys.count("max_queue_size", &mut config.max_queue_size)?;
        config.topic = keys.text("topic", "a text, such as \"kv@POD@MODEL\"")?.unwrap_or_default();
        let format = |value: &Value| match value.as_str()? {
            "map" => Some(Format::Map),
            "array" => Some(Format::Array),
            _ => None,
        };
        config.format = keys.read("format", "\"map\" or \"array\"", format)?.unwrap_or_default();
        Ok(config)
    }
}

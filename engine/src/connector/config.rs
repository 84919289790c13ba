//! The settings, with the keys of vLLM's `--kv-transfer-config`.

use std::path::PathBuf;
use std::str::FromStr;

use serde_json::{Map, Value};

/// What a replica does with the connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvRole {
    /// Stores blocks.
    Producer,
    /// Loads blocks.
    Consumer,
    /// Both.
    Both,
}

impl KvRole {
    /// Whether blocks are stored.
    pub fn stores(self) -> bool {
        self != KvRole::Consumer
    }

    /// Whether blocks are loaded.
    pub fn loads(self) -> bool {
        self != KvRole::Producer
    }
}

/// Where and how blocks are exchanged with other replicas. Parsed from the JSON object of `--kv-transfer-config`.
///
/// ```
/// let text = r#"{"kv_connector": "SharedFolder", "kv_role": "kv_both",
///     "kv_connector_extra_config": {"shared_storage_path": "/mnt/blocks"}}"#;
/// let config: engine::KvTransferConfig = text.parse()?;
/// assert_eq!((config.role, config.wait_seconds), (engine::KvRole::Both, 10.0));
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct KvTransferConfig {
    /// `kv_role`: what this replica does.
    pub role: KvRole,
    /// `engine_id`: name of this replica in answers; `None` chooses one.
    pub engine_id: Option<String>,
    /// `shared_storage_path`: the folder.
    pub path: PathBuf,
    /// `max_bytes`: size below which the folder is kept.
    pub max_bytes: u64,
    /// `wait_seconds`: how long a request waits for blocks that another replica has promised.
    pub wait_seconds: f64,
    /// `always`: exchange the blocks of all requests, also of those that do not ask for it. They do not wait.
    pub always: bool,
}

const KEYS: [&str; 4] = ["kv_connector", "kv_role", "engine_id", "kv_connector_extra_config"];
const EXTRA_KEYS: [&str; 4] = ["shared_storage_path", "max_bytes", "wait_seconds", "always"];

fn check(values: &Map<String, Value>, keys: &[&str]) -> Result<(), String> {
    match values.keys().find(|key| !keys.contains(&key.as_str())) {
        Some(key) => Err(format!("unknown key {key:?}, expected one of {}", keys.join(", "))),
        None => Ok(()),
    }
}

fn read<T>(
    values: &Map<String, Value>,
    key: &str,
    expected: &str,
    parse: impl FnOnce(&Value) -> Option<T>,
) -> Result<Option<T>, String> {
    let Some(value) = values.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
    parse(value).map(Some).ok_or_else(|| format!("{key}: found {value}, expected {expected}"))
}

impl FromStr for KvTransferConfig {
    type Err = String;

    /// # Errors
    /// One line that says what was found and what is allowed.
    fn from_str(text: &str) -> Result<KvTransferConfig, String> {
        let expected = r#"expected a JSON object such as {"kv_connector": "SharedFolder", "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": "/mnt/blocks"}}"#;
        let values = match serde_json::from_str(text) {
            Ok(Value::Object(values)) => values,
            Ok(_) => return Err(expected.to_string()),
            Err(error) => return Err(format!("not valid JSON ({error}), {expected}")),
        };
        check(&values, &KEYS)?;
        let string = |value: &Value| value.as_str().map(str::to_string).filter(|text| !text.is_empty());
        let connector =
            read(&values, "kv_connector", "\"SharedFolder\"", |value| (value == "SharedFolder").then_some(()))?;
        connector.ok_or("kv_connector: not found, expected \"SharedFolder\"")?;
        let role = |value: &Value| match value.as_str()? {
            "kv_producer" => Some(KvRole::Producer),
            "kv_consumer" => Some(KvRole::Consumer),
            "kv_both" => Some(KvRole::Both),
            _ => None,
        };
        let roles = "\"kv_producer\", \"kv_consumer\" or \"kv_both\"";
        let role = read(&values, "kv_role", roles, role)?.ok_or(format!("kv_role: not found, expected {roles}"))?;
        let engine_id = read(&values, "engine_id", "a text", string)?;
        let object = |value: &Value| value.as_object().cloned();
        let extra = read(&values, "kv_connector_extra_config", "an object", object)?.unwrap_or_default();
        check(&extra, &EXTRA_KEYS).map_err(|error| format!("kv_connector_extra_config: {error}"))?;
        let path = read(&extra, "shared_storage_path", "a folder", string)?;
        let path = path.ok_or("shared_storage_path: not found, expected a folder that all replicas share")?;
        let bytes = |value: &Value| value.as_u64().filter(|bytes| *bytes > 0);
        let seconds = |value: &Value| value.as_f64().filter(|seconds| (0.0..=3600.0).contains(seconds));
        Ok(KvTransferConfig {
            role,
            engine_id,
            path: path.into(),
            max_bytes: read(&extra, "max_bytes", "a number of bytes above 0", bytes)?.unwrap_or(16 << 30),
            wait_seconds: read(&extra, "wait_seconds", "0 to 3600 seconds", seconds)?.unwrap_or(10.0),
            always: read(&extra, "always", "true or false", Value::as_bool)?.unwrap_or(false),
        })
    }
}

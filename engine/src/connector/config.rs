//! The settings, with the keys of vLLM's `--kv-transfer-config`.

use std::path::PathBuf;
use std::str::FromStr;

use serde_json::Value;

use crate::keys::Keys;

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

impl FromStr for KvTransferConfig {
    type Err = String;

    /// # Errors
    /// One line that says what was found and what is allowed.
    fn from_str(text: &str) -> Result<KvTransferConfig, String> {
        let example = r#"{"kv_connector": "SharedFolder", "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": "/mnt/blocks"}}"#;
        let mut keys = Keys::parse(text, example)?;
        let only = "\"SharedFolder\"";
        let connector = keys.read("kv_connector", only, |value| (value == "SharedFolder").then_some(()))?;
        let role = |value: &Value| match value.as_str()? {
            "kv_producer" => Some(KvRole::Producer),
            "kv_consumer" => Some(KvRole::Consumer),
            "kv_both" => Some(KvRole::Both),
            _ => None,
        };
        let roles = "\"kv_producer\", \"kv_consumer\" or \"kv_both\"";
        let role = keys.read("kv_role", roles, role)?;
        let engine_id = keys.text("engine_id", "a text")?;
        let extra = keys.read("kv_connector_extra_config", "an object", |value| value.as_object().cloned())?;
        keys.end()?;
        connector.ok_or_else(|| format!("kv_connector: not found, expected {only}"))?;
        let role = role.ok_or_else(|| format!("kv_role: not found, expected {roles}"))?;
        let mut extra = Keys::new(extra.unwrap_or_default());
        let path = extra.text("shared_storage_path", "a folder")?;
        let bytes = |value: &Value| value.as_u64().filter(|bytes| *bytes > 0);
        let seconds = |value: &Value| value.as_f64().filter(|seconds| (0.0..=3600.0).contains(seconds));
        let max_bytes = extra.read("max_bytes", "a number of bytes above 0", bytes)?.unwrap_or(16 << 30);
        let wait_seconds = extra.read("wait_seconds", "0 to 3600 seconds", seconds)?.unwrap_or(10.0);
        let always = extra.read("always", "true or false", Value::as_bool)?.unwrap_or(false);
        extra.end().map_err(|error| format!("kv_connector_extra_config: {error}"))?;
        let path = path.ok_or("shared_storage_path: not found, expected a folder that all replicas share")?.into();
        Ok(KvTransferConfig { role, engine_id, path, max_bytes, wait_seconds, always })
    }
}

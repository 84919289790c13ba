//! `1_Pooling/config.json` (Sentence Transformers): how a checkpoint for embeddings pools the hidden states of a text. Checkpoints for
//! generation have no such file.

use serde_json::{Map, Value};

use crate::checkpoint::error::LoadError;
use crate::checkpoint::files::ModelFiles;

const FILE: &str = "1_Pooling/config.json";

/// How the hidden states after the final norm become the embedding of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Pooling {
    /// The hidden state of the last token, which attends to all others.
    #[default]
    Last,
    /// The mean over all tokens.
    Mean,
}

impl Pooling {
    /// The checkpoint's pooling: [`Pooling::Last`] without a file, `None` for a mode that is not supported.
    ///
    /// # Errors
    /// The file is broken.
    pub fn load(files: &ModelFiles) -> Result<Option<Pooling>, LoadError> {
        let map: Map<String, Value> = files.read_optional_json(FILE)?;
        if map.is_empty() {
            return Ok(Some(Pooling::default()));
        }
        let mut modes =
            map.iter().filter(|(key, value)| key.starts_with("pooling_mode_") && **value == Value::Bool(true));
        let mode = modes.next().map(|(key, _)| key.as_str());
        // Several modes together mean concatenation, which is not supported.
        Ok(match (mode, modes.next()) {
            (Some("pooling_mode_lasttoken"), None) => Some(Pooling::Last),
            (Some("pooling_mode_mean_tokens"), None) => Some(Pooling::Mean),
            _ => None,
        })
    }
}

impl std::str::FromStr for Pooling {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Pooling, &'static str> {
        match name {
            "last" => Ok(Pooling::Last),
            "mean" => Ok(Pooling::Mean),
            _ => Err("expected last or mean"),
        }
    }
}

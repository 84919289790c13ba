//! `1_Pooling/config.json`: how a checkpoint made for embeddings wants the hidden states of a text to become one vector.
//!
//! The file is that of Sentence Transformers. Checkpoints made for generation have none.

use serde_json::{Map, Value};

use crate::checkpoint::error::LoadError;
use crate::checkpoint::files::ModelFiles;

const FILE: &str = "1_Pooling/config.json";

/// Which hidden states, behind the final norm, make the embedding of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Pooling {
    /// That of the last token, which has seen all others.
    #[default]
    Last,
    /// The mean over all tokens.
    Mean,
}

impl Pooling {
    /// As the checkpoint says; the last token's where it says nothing, `None` where it asks for what is not built.
    ///
    /// # Errors
    /// When the file is broken.
    pub fn load(files: &ModelFiles) -> Result<Option<Pooling>, LoadError> {
        let map: Map<String, Value> = files.read_optional_json(FILE)?;
        if map.is_empty() {
            return Ok(Some(Pooling::default()));
        }
        let mut modes =
            map.iter().filter(|(key, value)| key.starts_with("pooling_mode_") && **value == Value::Bool(true));
        let mode = modes.next().map(|(key, _)| key.as_str());
        // Several modes at once are laid side by side there.
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_checkpoint_decides_and_the_last_token_is_the_default() {
        let folder = tempfile::tempdir().unwrap();
        let files = ModelFiles::open(folder.path()).unwrap();
        assert_eq!(Pooling::load(&files).unwrap(), Some(Pooling::Last));
        std::fs::create_dir(folder.path().join("1_Pooling")).unwrap();
        for (text, expected) in [
            (r#"{"word_embedding_dimension": 8, "pooling_mode_lasttoken": true}"#, Some(Pooling::Last)),
            (r#"{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}"#, Some(Pooling::Mean)),
            (r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}"#, None),
            (r#"{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": true}"#, None),
        ] {
            std::fs::write(folder.path().join(FILE), text).unwrap();
            assert_eq!(Pooling::load(&files).unwrap(), expected, "{text}");
        }
        std::fs::write(folder.path().join(FILE), "{").unwrap();
        assert!(Pooling::load(&files).is_err());
    }
}

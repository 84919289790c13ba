//! Where the sampling defaults of a model come from: `generation_config.json`, and settings in its place.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

use models::{GenerationDefaults, LoadError, ModelFiles};

use crate::keys::Keys;

const EXAMPLE: &str = r#"{"temperature": 0.6, "top_p": 0.95}"#;

/// Where the sampling defaults of a model come from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// The file.
    pub source: GenerationSource,
    /// Values in place of those of the file.
    pub overrides: GenerationOverrides,
}

/// The file of sampling defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GenerationSource {
    /// That of the checkpoint.
    #[default]
    Checkpoint,
    /// None: defaults are neutral. Only the tokens that end a sequence are those of the checkpoint.
    Neutral,
    /// That of another folder.
    Folder(PathBuf),
}

impl FromStr for GenerationSource {
    type Err = Infallible;

    /// `auto`, `vllm` or a folder.
    fn from_str(text: &str) -> Result<GenerationSource, Infallible> {
        Ok(match text {
            "auto" => GenerationSource::Checkpoint,
            "vllm" => GenerationSource::Neutral,
            folder => GenerationSource::Folder(folder.into()),
        })
    }
}

/// Sampling defaults in place of those of a checkpoint; `None` keeps the checkpoint's.
///
/// ```
/// use engine::GenerationOverrides;
/// let overrides: GenerationOverrides = r#"{"temperature": 0.6, "top_k": -1}"#.parse().unwrap();
/// assert_eq!((overrides.0.temperature, overrides.0.top_k), (Some(0.6), Some(0)));
/// assert!(r#"{"top_p": 2}"#.parse::<GenerationOverrides>().unwrap_err().starts_with("top_p: found 2"));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationOverrides(pub GenerationDefaults);

impl FromStr for GenerationOverrides {
    type Err = String;

    /// # Errors
    /// One line that says what was found and what is allowed.
    fn from_str(text: &str) -> Result<GenerationOverrides, String> {
        let mut keys = Keys::parse(text, EXAMPLE)?;
        let overrides = GenerationDefaults::read(|key, expected, of| keys.read(key, expected, of))?;
        keys.end()?;
        Ok(GenerationOverrides(overrides))
    }
}

impl GenerationConfig {
    /// The sampling defaults of a checkpoint, whose `config.json` has these tokens that end a sequence.
    ///
    /// # Errors
    /// A file is broken, or the folder does not exist.
    pub(crate) fn load(&self, files: &ModelFiles, eos_token_ids: &[u32]) -> Result<GenerationDefaults, LoadError> {
        let of_checkpoint = GenerationDefaults::load(files, eos_token_ids)?;
        let defaults = match &self.source {
            GenerationSource::Checkpoint => of_checkpoint,
            GenerationSource::Neutral => {
                GenerationDefaults { eos_token_ids: of_checkpoint.eos_token_ids, ..GenerationDefaults::default() }
            }
            GenerationSource::Folder(path) => {
                GenerationDefaults::load(&ModelFiles::open(path)?, &of_checkpoint.eos_token_ids)?
            }
        };
        Ok(self.overrides.0.over(defaults))
    }
}

//! The files of a checkpoint: in a folder, memory-mapped, in a GGUF file, or embedded in the binary.
//!
//! Nothing is copied: a mapped file only takes address space until its pages are read. Every error names the file with its folder.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::DeserializeOwned;

use crate::checkpoint::bytes::FileBytes;
use crate::checkpoint::error::{LoadError, one_line};
use crate::checkpoint::gguf::{GgufModel, VOCABULARY_FILE};
use crate::checkpoint::python;

/// Greatest size of a file that is not weights, several times that of the largest published `tokenizer.json`.
const MAX_SETTINGS: usize = 256 << 20;

/// The files of one checkpoint.
#[derive(Clone, Debug)]
pub enum ModelFiles {
    /// A folder in Hugging Face layout.
    Folder(PathBuf),
    /// A GGUF file, which is a whole checkpoint. Nothing beside it is read.
    Gguf {
        /// Its path.
        path: PathBuf,
        /// Its contents.
        model: Arc<GgufModel>,
    },
    /// Files embedded in the binary.
    Embedded {
        /// Name in place of the folder's.
        name: &'static str,
        /// File names and contents.
        files: &'static [(&'static str, &'static [u8])],
    },
}

impl ModelFiles {
    /// The checkpoint in the folder or the GGUF file `path`. Of a split checkpoint, any of its files stands for all.
    ///
    /// # Errors
    /// `path` is not a folder, or a GGUF file that cannot be used. A path that looks like a hub id (`org/name`) gets an error of its own.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let given = one_line(path.display());
        if path.is_dir() {
            Ok(ModelFiles::Folder(path.to_path_buf()))
        } else if path.is_file() && path.extension().is_some_and(|extension| extension == "gguf") {
            Ok(ModelFiles::Gguf { path: path.to_path_buf(), model: Arc::new(GgufModel::open(path)?) })
        } else if path.exists() {
            Err(LoadError::NotAFolder { path: given })
        } else if looks_like_hub_id(&given) {
            Err(LoadError::HubId { id: given })
        } else {
            Err(LoadError::NoSuchFolder { path: given })
        }
    }

    /// Name of the folder, or of the GGUF file without its extension, which `/v1/models` shows by default. A snapshot in the cache of
    /// the Hugging Face hub has the name of its repository.
    pub fn name(&self) -> String {
        match self {
            // `.` and `..` have no name until they are resolved.
            ModelFiles::Folder(path) => path
                .canonicalize()
                .ok()
                .and_then(|full| {
                    hub_id(&full).or_else(|| full.file_name().map(|name| name.to_string_lossy().into_owned()))
                })
                .unwrap_or_else(|| path.display().to_string()),
            ModelFiles::Gguf { path, .. } => {
                path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
            }
            ModelFiles::Embedded { name, .. } => (*name).to_string(),
        }
    }

    /// Whether the checkpoint has `file`.
    pub fn exists(&self, file: &str) -> bool {
        match self {
            ModelFiles::Folder(folder) => folder.join(file).is_file(),
            ModelFiles::Gguf { model, .. } => model.file(file).is_some(),
            ModelFiles::Embedded { .. } => self.embedded(file).is_some(),
        }
    }

    /// The contents of `file`.
    ///
    /// # Errors
    /// It is missing or cannot be opened.
    pub fn bytes(&self, file: &str) -> Result<FileBytes, LoadError> {
        let found = match self {
            ModelFiles::Folder(folder) if self.exists(file) => Some(
                FileBytes::map(&folder.join(file))
                    .map_err(|source| LoadError::Io { file: self.locate(file), source })?,
            ),
            ModelFiles::Folder(_) => None,
            ModelFiles::Gguf { model, .. } => model.file(file),
            ModelFiles::Embedded { .. } => self.embedded(file).map(FileBytes::Embedded),
        };
        found.ok_or_else(|| self.missing(file, "a checkpoint folder in Hugging Face layout, which holds this file"))
    }

    /// The contents of a file that is not weights.
    ///
    /// # Errors
    /// It is missing, cannot be opened, or is larger than any such file.
    pub(crate) fn settings(&self, file: &str) -> Result<FileBytes, LoadError> {
        let bytes = self.bytes(file)?;
        match bytes.len() > MAX_SETTINGS {
            false if file == "config.json" => Ok(python::standard_json(bytes)),
            false => Ok(bytes),
            true => Err(LoadError::Setting {
                file: self.locate(file),
                key: "size".to_string(),
                found: format!("{} bytes", bytes.len()),
                expected: format!("at most {MAX_SETTINGS}, for a file that is not weights"),
            }),
        }
    }

    /// The contents of a file that is not weights; `None` if it is missing.
    ///
    /// # Errors
    /// It cannot be opened or is larger than any such file; or it is the vocabulary of a GGUF file that has none.
    pub fn find(&self, file: &str) -> Result<Option<FileBytes>, LoadError> {
        match (self.settings(file), self) {
            (Err(LoadError::MissingFile { .. }), ModelFiles::Gguf { .. }) if file == VOCABULARY_FILE => Err(self
                .missing(
                    "tokenizer.json",
                    "a GGUF file with a vocabulary (tokenizer.ggml.model): use another conversion",
                )),
            (Err(LoadError::MissingFile { .. }), _) => Ok(None),
            (other, _) => other.map(Some),
        }
    }

    /// `file` parsed as JSON.
    ///
    /// # Errors
    /// It is missing, too large, not JSON or does not have `T`'s structure.
    pub fn read_json<T: DeserializeOwned>(&self, file: &str) -> Result<T, LoadError> {
        serde_json::from_slice(&self.settings(file)?)
            .map_err(|error| LoadError::Json { file: self.locate(file), problem: one_line(error) })
    }

    /// [`read_json`](Self::read_json) of an optional file.
    pub(crate) fn read_optional_json<T: DeserializeOwned + Default>(&self, file: &str) -> Result<T, LoadError> {
        if self.exists(file) { self.read_json(file) } else { Ok(T::default()) }
    }

    /// `file` with its folder, for messages.
    pub fn locate(&self, file: &str) -> String {
        match self {
            ModelFiles::Folder(folder) => one_line(folder.join(file).display()),
            ModelFiles::Gguf { path, .. } => format!("{} (as {file})", one_line(path.display())),
            ModelFiles::Embedded { name, .. } => format!("{name}/{file}"),
        }
    }

    pub(crate) fn missing(&self, file: &str, expected: &str) -> LoadError {
        LoadError::MissingFile { file: self.locate(file), expected: expected.to_string() }
    }

    fn embedded(&self, wanted: &str) -> Option<&'static [u8]> {
        match self {
            ModelFiles::Folder(_) | ModelFiles::Gguf { .. } => None,
            ModelFiles::Embedded { files, .. } => {
                files.iter().find(|(file, _)| *file == wanted).map(|(_, bytes)| *bytes)
            }
        }
    }
}

/// The id `ORG/NAME` of a snapshot, which the hub's cache keeps in `models--ORG--NAME/snapshots/COMMIT`.
fn hub_id(folder: &Path) -> Option<String> {
    let snapshots = folder.parent().filter(|parent| parent.ends_with("snapshots"))?;
    let repo = snapshots.parent()?.file_name()?.to_str()?.strip_prefix("models--")?;
    Some(repo.replacen("--", "/", 1))
}

/// Whether a path has the form `org/name` with plain characters, not absolute and not starting with dots.
fn looks_like_hub_id(path: &str) -> bool {
    let part = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    path.split_once('/').is_some_and(|(organisation, name)| part(organisation) && part(name))
}

//! Where the files of a checkpoint come from: a folder, memory-mapped, or the binary itself.
//!
//! Nothing is copied: a mapped file costs address space until its pages are read. Every error names the file with its folder.

use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde::de::DeserializeOwned;

use crate::checkpoint::error::{LoadError, one_line};

/// The files of one checkpoint.
#[derive(Clone, Debug)]
pub enum ModelFiles {
    /// A folder in Hugging Face layout.
    Folder(PathBuf),
    /// Files inside the binary.
    Embedded {
        /// Stands for the folder's name.
        name: &'static str,
        /// File names and contents.
        files: &'static [(&'static str, &'static [u8])],
    },
}

/// The contents of one file.
pub enum FileBytes {
    /// Pages of a file, read when touched.
    Mapped(Mmap),
    /// Part of the binary.
    Embedded(&'static [u8]),
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            FileBytes::Mapped(map) => map,
            FileBytes::Embedded(bytes) => bytes,
        }
    }
}

impl FileBytes {
    /// Gives back the memory of a part that will not be read again soon. If it is read, it comes from the file once more.
    pub(crate) fn release(&self, part: &[u8]) {
        #[cfg(unix)]
        if let FileBytes::Mapped(map) = self
            && let Some(offset) = (part.as_ptr() as usize).checked_sub(map.as_ptr() as usize)
            && offset + part.len() <= map.len()
        {
            // SAFETY: the map is of a file and read-only: what is dropped is the copy in memory. It is a hint; that the
            // system does not take it is no error.
            let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, offset, part.len()) };
        }
    }
}

impl ModelFiles {
    /// The checkpoint in the folder `path`.
    ///
    /// # Errors
    /// When `path` is not a folder; a path that reads like a hub id (`org/name`) is told so.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let given = one_line(path.display());
        if path.is_dir() {
            Ok(ModelFiles::Folder(path.to_path_buf()))
        } else if path.exists() {
            Err(LoadError::NotAFolder { path: given })
        } else if looks_like_hub_id(&given) {
            Err(LoadError::HubId { id: given })
        } else {
            Err(LoadError::NoSuchFolder { path: given })
        }
    }

    /// The folder's own name, as `/v1/models` may show it.
    pub fn name(&self) -> String {
        match self {
            // `.` and `..` have no name of their own until they are resolved.
            ModelFiles::Folder(path) => path
                .canonicalize()
                .ok()
                .and_then(|full| full.file_name().map(|name| name.to_string_lossy().into_owned()))
                .unwrap_or_else(|| path.display().to_string()),
            ModelFiles::Embedded { name, .. } => (*name).to_string(),
        }
    }

    /// Whether the checkpoint has `file`.
    pub fn exists(&self, file: &str) -> bool {
        match self {
            ModelFiles::Folder(folder) => folder.join(file).is_file(),
            ModelFiles::Embedded { .. } => self.embedded(file).is_some(),
        }
    }

    /// The contents of `file`.
    ///
    /// # Errors
    /// When it is missing or can not be opened.
    pub fn bytes(&self, file: &str) -> Result<FileBytes, LoadError> {
        if !self.exists(file) {
            return Err(self.missing(file, "a checkpoint folder in Hugging Face layout, which holds this file"));
        }
        match self {
            ModelFiles::Folder(folder) => map(&folder.join(file))
                .map(FileBytes::Mapped)
                .map_err(|source| LoadError::Io { file: self.locate(file), source }),
            ModelFiles::Embedded { .. } => Ok(FileBytes::Embedded(self.embedded(file).unwrap_or_default())),
        }
    }

    /// `file` parsed as JSON.
    ///
    /// # Errors
    /// When it is missing, not JSON or not of `T`'s structure.
    pub fn read_json<T: DeserializeOwned>(&self, file: &str) -> Result<T, LoadError> {
        serde_json::from_slice(&self.bytes(file)?)
            .map_err(|error| LoadError::Json { file: self.locate(file), problem: one_line(error) })
    }

    /// [`read_json`](Self::read_json) of a file that a checkpoint may lack.
    pub(crate) fn read_optional_json<T: DeserializeOwned + Default>(&self, file: &str) -> Result<T, LoadError> {
        if self.exists(file) { self.read_json(file) } else { Ok(T::default()) }
    }

    /// `file` with its folder, for messages.
    pub(crate) fn locate(&self, file: &str) -> String {
        match self {
            ModelFiles::Folder(folder) => one_line(folder.join(file).display()),
            ModelFiles::Embedded { name, .. } => format!("{name}/{file}"),
        }
    }

    /// The error for a file that is not there.
    pub(crate) fn missing(&self, file: &str, expected: &str) -> LoadError {
        LoadError::MissingFile { file: self.locate(file), expected: expected.to_string() }
    }

    fn embedded(&self, wanted: &str) -> Option<&'static [u8]> {
        match self {
            ModelFiles::Folder(_) => None,
            ModelFiles::Embedded { files, .. } => {
                files.iter().find(|(file, _)| *file == wanted).map(|(_, bytes)| *bytes)
            }
        }
    }
}

fn map(path: &Path) -> std::io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: the map is read-only and private to this process. Someone who truncates a weight file while it is served can make
    // a read fault; every engine that maps weights accepts that, and nothing is written through the map.
    unsafe { Mmap::map(&file) }
}

/// `org/name` of plain characters: neither rooted nor relative by dots.
fn looks_like_hub_id(path: &str) -> bool {
    let part = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    path.split_once('/').is_some_and(|(organisation, name)| part(organisation) && part(name))
}

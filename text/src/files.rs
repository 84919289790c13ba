//! The files of a checkpoint, as their reader hands them over.

use std::borrow::Cow;
use std::io::ErrorKind;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{LoadError, one_line};

/// Greatest size of a file, several times that of the largest published `tokenizer.json`.
const MAX_BYTES: u64 = 256 << 20;

/// The files of one checkpoint, by name.
pub trait Files {
    /// Returns the contents of a file; `None` if it does not exist.
    ///
    /// # Errors
    /// One line that names the file and says why it cannot be read.
    fn read(&self, name: &str) -> Result<Option<Cow<'_, [u8]>>, String>;

    /// Returns the name of a file with that of the checkpoint, for messages.
    fn locate(&self, name: &str) -> String;
}

/// A folder in Hugging Face layout.
impl Files for Path {
    fn read(&self, name: &str) -> Result<Option<Cow<'_, [u8]>>, String> {
        let path = self.join(name);
        let size = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
        if size > MAX_BYTES {
            let file = self.locate(name);
            return Err(format!("{file}: found a file of {size} bytes; expected at most {MAX_BYTES}"));
        }
        match std::fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes.into())),
            Err(error) if error.kind() == ErrorKind::NotFound || path.is_dir() => Ok(None),
            Err(error) => Err(format!("{}: cannot be read: {error}", self.locate(name))),
        }
    }

    fn locate(&self, name: &str) -> String {
        one_line(self.join(name).display())
    }
}

/// The contents of a file; `None` if it does not exist.
pub(crate) fn read<'a>(files: &'a (impl Files + ?Sized), name: &str) -> Result<Option<Cow<'a, [u8]>>, LoadError> {
    files.read(name).map_err(LoadError::Unread)
}

/// A file parsed as a JSON object; empty if the file does not exist.
pub(crate) fn object(files: &(impl Files + ?Sized), name: &str) -> Result<Map<String, Value>, LoadError> {
    let Some(bytes) = read(files, name)? else { return Ok(Map::new()) };
    serde_json::from_slice(&bytes).map_err(|error| LoadError::json(files.locate(name), error))
}

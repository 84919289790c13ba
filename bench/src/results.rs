//! The file that figures are written to.
//!
//! It is opened before anything is measured, so that an hour of measurement does not end at a folder that does not exist. Its old
//! contents stay until the first write.

use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::Error;

/// A file named by a flag; `-` is standard output.
pub struct Results {
    flag: &'static str,
    path: PathBuf,
    /// `None` is standard output.
    file: Option<File>,
    /// Whether the old contents have been removed.
    begun: bool,
}

impl Results {
    /// Opens the file, if the flag is given.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn open(flag: &'static str, path: Option<&Path>) -> Result<Option<Results>, Error> {
        let Some(path) = path else { return Ok(None) };
        let mut results = Results { flag, path: path.into(), file: None, begun: false };
        if path.as_os_str() != "-" {
            let opened = OpenOptions::new().create(true).truncate(false).write(true).open(path);
            results.file = Some(opened.map_err(|error| results.failed(&error))?);
        }
        Ok(Some(results))
    }

    /// Opens a file whose contents stay.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append(flag: &'static str, path: &Path) -> Result<Results, Error> {
        let mut results = Results { flag, path: path.into(), file: None, begun: true };
        let opened = OpenOptions::new().append(true).open(path);
        results.file = Some(opened.map_err(|error| results.failed(&error))?);
        Ok(results)
    }

    /// Whether the figures go to standard output, so that tables must not.
    pub fn is_standard_output(&self) -> bool {
        self.file.is_none()
    }

    /// Appends text; the first call replaces the old contents of the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&mut self, text: impl Display) -> Result<(), Error> {
        let Some(file) = &mut self.file else { return Ok(write!(io::stdout(), "{text}")?) };
        let emptied = if self.begun { Ok(()) } else { file.set_len(0) };
        self.begun = true;
        let written = emptied.and_then(|()| write!(file, "{text}"));
        written.map_err(|error| self.failed(&error))
    }

    /// Appends a JSON value: indented in a file, on one line on standard output.
    ///
    /// # Errors
    /// See [`write`](Results::write).
    pub fn value(&mut self, value: &Value) -> Result<(), Error> {
        if self.is_standard_output() {
            self.write(format_args!("{value}\n"))
        } else {
            self.write(format_args!("{value:#}\n"))
        }
    }

    fn failed(&self, error: &io::Error) -> Error {
        Error::Failed(format!("{} {}: {error}; expected a file that can be written", self.flag, self.path.display()))
    }
}

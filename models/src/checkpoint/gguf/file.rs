//! A GGUF checkpoint: one file, or the files of a split one.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::cursor::Fault;
use super::part::{Header, Tensor};
use super::value::{Stored, Value};
use crate::checkpoint::bytes::FileBytes;
use crate::checkpoint::error::{LoadError, one_line};

const SPLIT_COUNT: &str = "split.count";
const SPLIT_NO: &str = "split.no";
const SPLIT_TENSORS: &str = "split.tensors.count";
/// Length of `-00001-of-00003.gguf`.
const SPLIT_SUFFIX: usize = 20;

/// The keys and tensors of a GGUF checkpoint.
pub struct Gguf {
    /// Names and contents of the files.
    parts: Vec<(String, FileBytes)>,
    /// The metadata, all in the first file.
    keys: BTreeMap<String, Stored>,
    tensors: BTreeMap<String, Tensor>,
}

impl std::fmt::Debug for Gguf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gguf({:?}, {} tensors)", self.file(0), self.tensors.len())
    }
}

impl Gguf {
    /// Maps a file and checks it; of a split checkpoint, any of its files opens all.
    ///
    /// # Errors
    /// A file is missing, cannot be read, or contradicts itself.
    pub fn open(path: &Path) -> Result<Gguf, LoadError> {
        let split = split_name(path);
        let count = split.as_ref().map_or(1, |(_, count)| *count);
        let mut gguf = Gguf { parts: Vec::new(), keys: BTreeMap::new(), tensors: BTreeMap::new() };
        for part in 0..count {
            let path = split.as_ref().map_or(path.to_path_buf(), |(stem, _)| part_path(stem, part, count));
            let file = one_line(path.display());
            if !path.is_file() {
                let expected = format!("part {} of a checkpoint of {count} files: download it", part + 1);
                return Err(LoadError::MissingFile { file, expected });
            }
            let bytes = FileBytes::map(&path).map_err(|source| LoadError::Io { file: file.clone(), source })?;
            gguf.add(file, bytes, count)?;
        }
        gguf.check_total()?;
        Ok(gguf)
    }

    /// Checks a file in memory. `file` is its name in messages.
    ///
    /// # Errors
    /// The file contradicts itself, or is a part of a split checkpoint.
    pub fn from_bytes(file: &str, bytes: Arc<[u8]>) -> Result<Gguf, LoadError> {
        let mut gguf = Gguf { parts: Vec::new(), keys: BTreeMap::new(), tensors: BTreeMap::new() };
        gguf.add(one_line(file), FileBytes::Memory(bytes), 1)?;
        gguf.check_total()?;
        Ok(gguf)
    }

    /// Adds the next of `count` files.
    fn add(&mut self, file: String, bytes: FileBytes, count: usize) -> Result<(), LoadError> {
        let number = self.parts.len();
        let header = Header::read(&bytes, number).map_err(damaged(&file))?;
        let stated = |key: &str| header.value(key, &bytes);
        for (key, expected, default) in [(SPLIT_COUNT, count, 1), (SPLIT_NO, number, 0)] {
            let found = stated(key);
            if found.map_or(Some(default), |value| value.unsigned()) != Some(expected as u64)
                // Tools write 0 for files that are not split.
                && !(count == 1 && found.and_then(|value| value.unsigned()) == Some(0))
            {
                let found = found.map_or(format!("no {key}"), |value| format!("{key} {value}"));
                let expected = format!("{expected}, part {} of {count} according to the name of the file", number + 1);
                return Err(LoadError::Gguf { file, found, expected });
            }
        }
        for (name, tensor) in header.tensors {
            if self.tensors.contains_key(&name) {
                let found = format!("tensor {name:?}, which another file has too");
                return Err(LoadError::Gguf { file, found, expected: "each tensor once".into() });
            }
            self.tensors.insert(name, tensor);
        }
        if number == 0 {
            self.keys = header.keys;
        }
        self.parts.push((file, bytes));
        Ok(())
    }

    /// Checks the number of tensors that a split checkpoint states.
    fn check_total(&self) -> Result<(), LoadError> {
        let Some(stated) = self.value(SPLIT_TENSORS).filter(|_| self.parts.len() > 1) else { return Ok(()) };
        match stated.unsigned() == Some(self.tensors.len() as u64) {
            true => Ok(()),
            false => Err(LoadError::Gguf {
                file: self.file(0).to_string(),
                found: format!("{SPLIT_TENSORS} {stated}"),
                expected: format!("{}, the tensors of all files", self.tensors.len()),
            }),
        }
    }

    /// The name of file number `part`, for messages.
    pub fn file(&self, part: usize) -> &str {
        self.parts.get(part).map_or("", |(file, _)| file)
    }

    /// Names and contents of the files.
    pub(super) fn parts(&self) -> impl Iterator<Item = (&str, FileBytes)> {
        self.parts.iter().map(|(file, bytes)| (file.as_str(), bytes.clone()))
    }

    /// The value of a key of the metadata.
    pub fn value(&self, key: &str) -> Option<Value<'_>> {
        let (_, bytes) = self.parts.first()?;
        self.keys.get(key).map(|stored| stored.value(bytes))
    }

    /// Where in the first file the numbers of an array of float32 are.
    pub(super) fn floats(&self, key: &str) -> Option<Range<usize>> {
        self.keys.get(key).and_then(Stored::floats)
    }

    /// The keys of the metadata, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.keys.keys().map(String::as_str)
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }

    /// The bytes of a tensor of this checkpoint.
    pub fn data(&self, tensor: &Tensor) -> &[u8] {
        self.parts.get(tensor.part).and_then(|(_, bytes)| bytes.get(tensor.data.clone())).unwrap_or_default()
    }
}

fn damaged(file: &str) -> impl Fn(Fault) -> LoadError {
    |Fault { found, expected, .. }| LoadError::Gguf {
        file: file.to_string(),
        found: one_line(found),
        expected: one_line(expected),
    }
}

/// The stem and the number of files of a split checkpoint, if the name of the file is that of one.
fn split_name(path: &Path) -> Option<(PathBuf, usize)> {
    let name = path.file_name()?.to_str()?;
    let (stem, suffix) = name.split_at_checked(name.len().checked_sub(SPLIT_SUFFIX)?)?;
    let (number, count) = suffix.strip_prefix('-')?.strip_suffix(".gguf")?.split_once("-of-")?;
    let read = |digits: &str| (digits.len() == 5).then(|| digits.parse::<usize>().ok())?;
    let (number, count) = (read(number)?, read(count)?);
    (1..=count).contains(&number).then(|| (path.with_file_name(stem), count))
}

/// The path of file number `part` of a split checkpoint.
fn part_path(stem: &Path, part: usize, count: usize) -> PathBuf {
    let mut name = stem.file_name().unwrap_or_default().to_os_string();
    name.push(format!("-{:05}-of-{count:05}.gguf", part + 1));
    stem.with_file_name(name)
}

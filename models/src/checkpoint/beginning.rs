//! What of a file of weights is needed before any weight is: its header, and the few numbers that belong to the configuration.

use std::ops::Range;

use crate::checkpoint::error::{LoadError, one_line};
use crate::checkpoint::gguf;

/// Size of the little-endian length of a header at the start of a safetensors file.
pub(crate) const LENGTH_BYTES: usize = 8;
/// Greatest size of a header, which is also that of the library's own reader.
const MAX_HEADER: u64 = 100_000_000;

/// What of a file of weights is needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Needed {
    /// More of its beginning than is here.
    More,
    /// These bytes, from the beginning to the end of the header, and others.
    Ranges(Vec<Range<u64>>),
}

/// Says what is needed of a file of `size` bytes whose beginning is here.
///
/// # Errors
/// The header is damaged.
pub fn needed(file: &str, beginning: &[u8], size: u64) -> Result<Needed, LoadError> {
    let file = one_line(file);
    if file.ends_with(".gguf") {
        let ranges = gguf::needed(beginning, size);
        return match ranges {
            Ok(Some(ranges)) => Ok(Needed::Ranges(ranges)),
            Ok(None) => Ok(Needed::More),
            Err((found, expected)) => Err(LoadError::Gguf { file, found, expected }),
        };
    }
    match header_end(beginning, size) {
        Ok(Some(end)) => Ok(Needed::Ranges(std::iter::once(0..end).collect())),
        Ok(None) => Ok(Needed::More),
        Err((found, expected)) => Err(LoadError::DamagedWeights { file, found, expected }),
    }
}

/// The end of the header of a safetensors file of `size` bytes; `None` if there are too few of them here. An error is what was found
/// and what was expected.
pub(crate) fn header_end(bytes: &[u8], size: u64) -> Result<Option<u64>, (String, String)> {
    let Some(length) = bytes.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    if let Some((found, expected)) = pointer(length) {
        return Err((found.to_string(), expected.to_string()));
    }
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        return Err((format!("a header of {length} bytes"), format!("at most {MAX_HEADER}")));
    }
    let end = LENGTH_BYTES as u64 + length;
    if end > size {
        return Err((format!("{size} bytes"), format!("a header of {length} bytes and the tensors")));
    }
    Ok(Some(end))
}

/// What was found and what was expected, if a file of weights begins like a pointer of Git LFS, which a clone without it has.
pub(crate) fn pointer(beginning: &[u8]) -> Option<(&'static str, &'static str)> {
    beginning
        .starts_with(b"vers")
        .then_some(("a pointer of Git LFS", "the weights themselves (`git lfs pull` fetches them)"))
}

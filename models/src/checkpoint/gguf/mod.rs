//! GGUF files: a reader that trusts nothing in them, and the values of every element type.
//!
//! [`Gguf::open`] maps a file, or all files of a split checkpoint (`NAME-00001-of-00003.gguf`), and checks their headers to the end.
//! The cost is linear in the headers. After that every range is inside of its file, tensors do not overlap, and no access fails.
//!
//! [`GgufModel`] gives such a file the form of a folder in Hugging Face layout: the keys of `config.json` that its family reads,
//! `tokenizer_config.json` with the chat templates, `generation_config.json`, and tensors under their names there, with the changes of
//! conversion undone. So each family is declared in one place, for both formats. In the place of `tokenizer.json` is the vocabulary,
//! as [`VOCABULARY_FILE`]. To add an architecture, add an entry to `architectures.rs` or a file beside it.
//!
//! The file is the whole checkpoint: files that lie beside it are never read, so they cannot contradict it.

mod architectures;
mod codebook;
mod config;
mod cursor;
mod encoding;
mod file;
mod metadata;
mod model;
mod names;
mod part;
mod texts;
mod types;
mod value;
mod vocabulary;

use std::ops::Range;

pub use architectures::{Supported, supported};
pub(crate) use encoding::Encoding;
pub use file::Gguf;
pub use model::{GgufModel, VOCABULARY_FILE};
pub(crate) use names::Named;
pub use part::Tensor;
pub(crate) use types::E2M1_DOUBLED;
pub use types::{ElementType, TYPES};
pub use value::{Array, Value};

/// What is needed of a file of `size` bytes before any weight is: its header, and tensors that become part of the configuration.
/// `None`: its beginning does not have the whole header. An error is what was found and what was expected.
pub(crate) fn needed(beginning: &[u8], size: u64) -> Result<Option<Vec<Range<u64>>>, (String, String)> {
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    match part::Header::read_beginning(beginning, size, 0) {
        Ok((header, end)) => {
            let factors = architectures::ROPE_FACTORS.iter().filter_map(|name| header.tensors.get(*name));
            let factors = factors.map(|tensor| tensor.data.start as u64..tensor.data.end as u64);
            Ok(Some(std::iter::once(0..end as u64).chain(factors).collect()))
        }
        Err(fault) if fault.is_cut => Ok(None),
        Err(fault) => Err((fault.found, fault.expected)),
    }
}

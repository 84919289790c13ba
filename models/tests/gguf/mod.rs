//! GGUF files: the reader and the element types.

mod bounds;
mod classifiers;
mod conversion;
mod converted;
mod converted_cases;
mod converted_plain;
mod fuzzed;
mod made;
pub mod made_vocabulary;
mod properties;
mod reading;
mod reference;
mod types;
mod vocabularies;
mod words;

//! A GGUF file as a checkpoint: its configuration and its tensors in Hugging Face layout.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value as Json;

use super::architectures::{Architecture, KEY_HEADS, VALUES};
use super::config;
use super::file::Gguf;
use super::metadata::Metadata;
use super::names::{self, Counts, Named};
use super::texts;
use super::vocabulary::Vocabulary;
use crate::checkpoint::bytes::FileBytes;
use crate::checkpoint::error::LoadError;

/// Name under which [`ModelFiles`](crate::ModelFiles) has the vocabulary of a GGUF file, as JSON.
pub const VOCABULARY_FILE: &str = "tokenizer.ggml.json";

/// A GGUF checkpoint of a supported architecture.
#[derive(Debug)]
pub struct GgufModel {
    gguf: Gguf,
    architecture: &'static Architecture,
    /// Names and contents of the files of a folder that the metadata stand for.
    files: Vec<(&'static str, Arc<[u8]>)>,
    counts: Counts,
}

impl GgufModel {
    /// Opens a file, or all files of a split checkpoint, and reads its configuration.
    ///
    /// # Errors
    /// The errors of [`Gguf::open`]; an architecture or vocabulary that is not supported; a key that cannot be used.
    pub fn open(path: &Path) -> Result<GgufModel, LoadError> {
        GgufModel::new(Gguf::open(path)?)
    }

    /// Reads the configuration of a file.
    ///
    /// # Errors
    /// An unsupported architecture or vocabulary, or an unusable key.
    pub fn new(gguf: Gguf) -> Result<GgufModel, LoadError> {
        let architecture = config::architecture(&gguf)?;
        let vocabulary = Vocabulary::read(&gguf)?;
        let end_tokens = vocabulary.as_ref().map_or(&[][..], |vocabulary| &vocabulary.end_tokens);
        let map = config::config(&gguf, architecture, end_tokens)?;
        names::check_scales(&gguf)?;
        let key = |key: &str| gguf.value(&format!("{}.{key}", architecture.name)).and_then(|value| value.unsigned());
        let number = |key: &str| map.get(key).and_then(Json::as_u64).unwrap_or(0) as usize;
        let (heads, head_dim) = (key("attention.head_count").unwrap_or(0), number("head_dim"));
        let counts = Counts {
            head_dim,
            heads: heads as usize,
            key_heads: key(KEY_HEADS).unwrap_or(heads) as usize,
            value_dim: key(VALUES).map_or(head_dim, |dim| dim as usize),
            layers: key("block_count").unwrap_or(0),
            last: Metadata { gguf: &gguf, architecture }.layers()?,
            experts: key("expert_count").unwrap_or(0),
            tiled: architecture.tiled.then(|| names::tiled(&map)).flatten(),
        };
        let mut maps =
            vec![("config.json", map), ("generation_config.json", texts::generation_config(&gguf, end_tokens))];
        if let Some(vocabulary) = &vocabulary {
            maps.push(("tokenizer_config.json", texts::tokenizer_config(&gguf, vocabulary)));
        }
        let pooling = texts::pooling(&gguf, architecture)?;
        let files = maps.into_iter().map(|(name, map)| (name, Json::Object(map))).chain(pooling);
        let files = files.map(|(name, json)| (name, json.to_string().into_bytes().into())).collect();
        drop(vocabulary);
        Ok(GgufModel { gguf, architecture, files, counts })
    }

    /// A file of the folder that it stands for, or its vocabulary, which is written when it is asked for.
    pub(crate) fn file(&self, name: &str) -> Option<FileBytes> {
        let bytes = match name {
            VOCABULARY_FILE => serde_json::to_vec(&Vocabulary::read(&self.gguf).ok()??).ok()?.into(),
            _ => Arc::clone(&self.files.iter().find(|(known, _)| *known == name)?.1),
        };
        Some(FileBytes::Memory(bytes))
    }

    /// The form of its weights by number, if it says so.
    pub(crate) fn file_type(&self) -> Option<u64> {
        self.gguf.value("general.file_type").and_then(|value| value.unsigned())
    }

    /// Names and contents of its files.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&str, FileBytes)> {
        self.gguf.parts()
    }

    /// Its tensors.
    pub(crate) fn tensors(&self) -> Vec<Named> {
        names::named(&self.gguf, self.architecture, self.counts)
    }
}

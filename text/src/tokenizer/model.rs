//! The model of a tokenizer: one of the library's, or one that it does not have.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer};
use tokenizers::models::TrainerWrapper;
use tokenizers::{
    DecoderWrapper, Model, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Result, Token,
    TokenizerImpl,
};

use super::scored::Scored;

/// The library's tokenizer with any model.
pub(super) type Pipeline =
    TokenizerImpl<AnyModel, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// A model of the library, or a [`Scored`] vocabulary.
pub(super) enum AnyModel {
    Library(ModelWrapper),
    Scored(Scored),
}

impl<'de> Deserialize<'de> for AnyModel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<AnyModel, D::Error> {
        ModelWrapper::deserialize(deserializer).map(AnyModel::Library)
    }
}

impl Model for AnyModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, text: &str) -> Result<Vec<Token>> {
        match self {
            AnyModel::Library(model) => model.tokenize(text),
            AnyModel::Scored(model) => Ok(model.tokenize(text)),
        }
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        match self {
            AnyModel::Library(model) => model.token_to_id(token),
            AnyModel::Scored(model) => model.id(token),
        }
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        match self {
            AnyModel::Library(model) => model.id_to_token(id),
            AnyModel::Scored(model) => model.text(id).map(str::to_string),
        }
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        match self {
            AnyModel::Library(model) => model.get_vocab(),
            AnyModel::Scored(model) => model.ids().clone(),
        }
    }

    fn get_vocab_size(&self) -> usize {
        match self {
            AnyModel::Library(model) => model.get_vocab_size(),
            AnyModel::Scored(model) => model.ids().len(),
        }
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> Result<Vec<PathBuf>> {
        match self {
            AnyModel::Library(model) => model.save(folder, prefix),
            AnyModel::Scored(_) => Err("a vocabulary with scores is not saved".into()),
        }
    }

    fn get_trainer(&self) -> TrainerWrapper {
        match self {
            AnyModel::Library(model) => model.get_trainer(),
            // No model is trained here; the interface asks for a trainer of some kind.
            AnyModel::Scored(_) => tokenizers::models::bpe::BpeTrainer::default().into(),
        }
    }
}

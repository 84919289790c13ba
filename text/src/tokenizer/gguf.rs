//! The tokenizer of a GGUF file: the steps of the `tokenizer.json` from which its vocabulary was converted. The crate `models` reads
//! and checks the vocabulary, and serialises it.

use serde::Deserialize;
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::models::wordpiece::WordPiece;

use super::model::{AnyModel, Pipeline};
use super::rules::{CharacterMap, Rules};
use super::scored::{Entry, Missing, SPACE, Scored};
use super::splits::{self, PreTokenizer};
use super::steps::{self, Parts, Steps};
use super::wordpiece;
use crate::error::{LoadError, one_line};

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Role {
    /// Text.
    Normal,
    /// A special token: found in texts before anything else, and left out of decoded texts.
    Special,
    /// Text that is one token wherever it occurs.
    UserDefined,
    /// A row of the embedding without a token.
    Unused,
}

/// The model that splits pieces of text into tokens.
#[derive(Deserialize)]
enum Kind {
    /// Byte-level BPE.
    ByteLevel {
        /// Name of the [`PreTokenizer`].
        pre_tokenizer: String,
        /// Pairs of tokens to join, most important first.
        merges: Vec<(String, String)>,
    },
    /// BPE of characters, whose spaces are those of SentencePiece.
    Characters {
        /// Pairs of tokens to join, most important first.
        merges: Vec<(String, String)>,
    },
    /// WordPiece.
    WordPiece {
        /// Whether texts are lowered, and lose their accents.
        lowercase: bool,
    },
    /// SentencePiece unigram.
    Unigram {
        /// A finite number per token.
        scores: Vec<f32>,
        /// Whether a space is put before texts.
        space_prefix: bool,
        /// Whether several spaces become one.
        collapses: bool,
        /// The map of characters; empty for none.
        map: Vec<u8>,
    },
    /// SentencePiece BPE.
    SentencePiece {
        /// A finite number per token; of two possible joins, that with the higher score comes first.
        scores: Vec<f32>,
        /// Whether a space is put before texts, at the start and after special tokens.
        space_prefix: bool,
        /// Whether white space after a special token belongs to it.
        strip_after_special: bool,
    },
}

/// The vocabulary of a GGUF file, as `models` serialises it.
#[derive(Deserialize)]
pub(super) struct Vocabulary {
    /// The file, for messages.
    pub file: String,
    kind: Kind,
    /// Texts by id: different from each other and not empty.
    texts: Vec<String>,
    roles: Vec<Role>,
    /// Special tokens, each an id of the vocabulary.
    bos: Option<u32>,
    eos: Option<u32>,
    unknown: Option<u32>,
    /// Whether texts begin with `bos`, if the file says so.
    add_bos: Option<bool>,
    /// Whether texts end with `eos`.
    add_eos: bool,
    /// Whether two texts are an encoder's input, with special tokens between them.
    pairs: bool,
}

impl Vocabulary {
    /// A special token and its text.
    fn token(&self, id: Option<u32>) -> Option<(u32, &str)> {
        let id = id?;
        Some((id, self.texts.get(id as usize)?))
    }

    /// Texts and roles of the tokens that are found in texts before anything else.
    fn added(&self) -> impl Iterator<Item = (&str, Role)> {
        let tokens = self.texts.iter().map(String::as_str).zip(self.roles.iter().copied());
        tokens.filter(|(_, role)| matches!(role, Role::Special | Role::UserDefined))
    }
}

/// Builds the tokenizer of a vocabulary.
///
/// # Errors
/// The pre-tokenizer is unknown, or a merge names a token that the vocabulary does not have.
pub(super) fn build(vocabulary: Vocabulary) -> Result<Pipeline, LoadError> {
    let wrong = |key: &str, found: String, expected: &str| {
        LoadError::file(vocabulary.file.clone(), format!("`tokenizer.ggml.{key}` is {found}"), expected)
    };
    let pre_tokenizer = match &vocabulary.kind {
        Kind::ByteLevel { pre_tokenizer: name, .. } => {
            let known = splits::find(name);
            Some(known.ok_or_else(|| wrong("pre", format!("{name:?}"), &format!("one of {}", splits::names())))?)
        }
        _ => None,
    };
    let map = match &vocabulary.kind {
        Kind::Unigram { map, .. } if !map.is_empty() => {
            let expected = "a map of characters as SentencePiece has it: use another conversion of the model";
            let map = CharacterMap::read(map);
            Some(map.ok_or_else(|| wrong("precompiled_charsmap", "broken".to_string(), expected))?)
        }
        _ => None,
    };
    let unusable = "merges of tokens of its vocabulary: use another conversion of the model";
    assemble(&vocabulary, pre_tokenizer, map)
        .map_err(|error| wrong("merges", format!("not usable ({})", one_line(error)), unusable))
}

fn assemble(
    vocabulary: &Vocabulary,
    known: Option<&PreTokenizer>,
    map: Option<CharacterMap>,
) -> Result<Pipeline, tokenizers::Error> {
    let tokens = vocabulary.texts.iter().zip(&vocabulary.roles);
    let texts = tokens.map(|(text, role)| (*role != Role::Unused).then(|| text.clone()));
    let PreTokenizer { splits, nfc, ignore_merges, add_bos, .. } = known.unwrap_or(&splits::BASE);
    let (model, steps, strip, add_bos) = match &vocabulary.kind {
        Kind::ByteLevel { merges, .. } => {
            let vocab: Vocab = texts.zip(0..).filter_map(|(text, id)| Some((text?, id))).collect();
            let model = BPE::builder().vocab_and_merges(vocab, merges.clone()).ignore_merges(*ignore_merges);
            (AnyModel::Library(model.build()?.into()), steps::byte_level(splits, *nfc), false, *add_bos)
        }
        Kind::Characters { merges } => {
            let vocab: Vocab = texts.zip(0..).filter_map(|(text, id)| Some((text?, id))).collect();
            let model = BPE::builder().vocab_and_merges(vocab, merges.clone()).byte_fallback(true).fuse_unk(true);
            let model = match vocabulary.token(vocabulary.unknown) {
                Some((_, unknown)) => model.unk_token(unknown.to_string()),
                None => model,
            };
            (AnyModel::Library(model.build()?.into()), steps::sentence_piece(Some(false), true), false, true)
        }
        Kind::WordPiece { lowercase } => {
            let vocab: Vocab = texts.zip(0..).filter_map(|(text, id)| Some((text?, id))).collect();
            let unknown = vocabulary.token(vocabulary.unknown).map_or("[UNK]", |(_, text)| text);
            let model = WordPiece::builder().vocab(vocab).unk_token(unknown.to_string()).build()?;
            (AnyModel::Library(model.into()), wordpiece::steps(*lowercase, true, None), false, true)
        }
        Kind::Unigram { scores, space_prefix, collapses, .. } => {
            let entry = |role: Role, score: f32| match role {
                Role::UserDefined => Entry::Whole,
                Role::Special | Role::Unused => Entry::Named,
                Role::Normal => Entry::Scored(score),
            };
            let tokens = texts.zip(&vocabulary.roles).zip(scores);
            let tokens = tokens.map(|((text, role), score)| Some((text?, entry(*role, *score))));
            let rules = Rules { adds_space: *space_prefix, at_end: false, collapses: *collapses, escapes: true, map };
            let missing = Missing::Unknown(vocabulary.unknown.unwrap_or(0));
            let model = Scored::unigram(tokens.collect(), missing, Some(rules));
            let steps = Steps { decoder: steps::text_decoder(true, false, *space_prefix), ..Steps::default() };
            (AnyModel::Scored(model), steps, false, true)
        }
        Kind::SentencePiece { scores, space_prefix, strip_after_special } => {
            // Tokens of several spaces are taken first, the longest one at each place, and join with nothing.
            let is_run = |text: &str| text.chars().count() > 1 && text.chars().all(|c| c == SPACE);
            let entry = |text: String, role: Role, score: f32| {
                let is_whole = matches!(role, Role::Special | Role::UserDefined) && is_run(&text);
                (text, if is_whole { Entry::Whole } else { Entry::Scored(score) })
            };
            let tokens = texts.zip(&vocabulary.roles).zip(scores);
            let tokens = tokens.map(|((text, role), score)| Some(entry(text?, *role, *score)));
            let model = Scored::bpe(tokens.collect(), Missing::Bytes(vocabulary.unknown), None);
            let steps = steps::sentence_piece(Some(*space_prefix), true);
            (AnyModel::Scored(model), steps, *strip_after_special, true)
        }
    };
    let token = |id: Option<u32>, added: bool| {
        let token = vocabulary.token(id).filter(|_| added);
        token.map(|(id, text)| (id, text.to_string())).into_iter().collect::<Vec<_>>()
    };
    let (add_bos, add_eos) = (vocabulary.add_bos.unwrap_or(add_bos), vocabulary.add_eos);
    let (before, after) = (token(vocabulary.bos, add_bos), token(vocabulary.eos, add_eos));
    let around = match &vocabulary.kind {
        _ if !vocabulary.pairs => steps::around(&before, &after),
        // As RoBERTa: `<s> a </s></s> b </s>`.
        Kind::Unigram { .. } => steps::around_pairs(&before, &[&after[..], &after].concat(), &after, 0),
        Kind::WordPiece { .. } => steps::around_pairs(&before, &after, &after, 1),
        _ => steps::around_pairs(&before, &after, &after, 0),
    };
    let added = vocabulary.added().map(|(text, role)| {
        let strips = strip && !["<unk>", "<s>", "<|endoftext|>"].contains(&text);
        AddedToken::from(text, role == Role::Special).normalized(false).rstrip(strips)
    });
    Parts { model, steps, added: added.collect(), around }.build()
}

#[cfg(test)]
#[path = "tests/gguf.rs"]
mod tests;

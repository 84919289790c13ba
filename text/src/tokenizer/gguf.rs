//! The tokenizer of a GGUF file: the steps of the `tokenizer.json` from which its vocabulary was converted. The crate `models` reads
//! and checks the vocabulary, and serialises it.

use serde::Deserialize;
use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
};

use super::model::{AnyModel, Pipeline};
use super::parse;
use super::sentencepiece::{SPACE, SentencePiece};
use super::splits::{self, PreTokenizer, Split};
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

/// The steps around the model, as `tokenizer.json` has them.
struct Steps {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
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
        Kind::SentencePiece { .. } => None,
    };
    let unusable = "merges of tokens of its vocabulary: use another conversion of the model";
    assemble(&vocabulary, pre_tokenizer)
        .map_err(|error| wrong("merges", format!("not usable ({})", one_line(error)), unusable))
}

fn assemble(vocabulary: &Vocabulary, known: Option<&PreTokenizer>) -> Result<Pipeline, tokenizers::Error> {
    let tokens = vocabulary.texts.iter().zip(&vocabulary.roles);
    let texts = tokens.map(|(text, role)| (*role != Role::Unused).then(|| text.clone()));
    let PreTokenizer { splits, nfc, ignore_merges, add_bos, .. } = known.unwrap_or(&splits::BASE);
    let (model, steps, strip, add_bos) = match &vocabulary.kind {
        Kind::ByteLevel { merges, .. } => {
            let vocab: Vocab = texts.zip(0..).filter_map(|(text, id)| Some((text?, id))).collect();
            let model = BPE::builder().vocab_and_merges(vocab, merges.clone()).ignore_merges(*ignore_merges);
            (AnyModel::Library(model.build()?.into()), byte_level(splits, *nfc), false, *add_bos)
        }
        Kind::SentencePiece { scores, space_prefix, strip_after_special } => {
            let is_run = |text: &str| text.chars().count() > 1 && text.chars().all(|c| c == SPACE);
            let runs = vocabulary.added().map(|(text, _)| text).filter(|text| is_run(text)).map(str::len).collect();
            let model = SentencePiece::new(texts.collect(), scores.clone(), vocabulary.unknown, runs);
            (AnyModel::SentencePiece(model), sentence_piece(*space_prefix), *strip_after_special, true)
        }
    };
    let mut tokenizer: Pipeline = TokenizerImpl::new(model);
    tokenizer.with_normalizer(parse::<Option<NormalizerWrapper>>(&steps.normalizer)?)?;
    tokenizer.with_pre_tokenizer(parse::<Option<PreTokenizerWrapper>>(&steps.pre_tokenizer)?);
    tokenizer.with_decoder(parse::<Option<DecoderWrapper>>(&steps.decoder)?);
    let token = |id: Option<u32>, added: bool| vocabulary.token(id).filter(|_| added);
    let (add_bos, add_eos) = (vocabulary.add_bos.unwrap_or(add_bos), vocabulary.add_eos);
    let around = around(token(vocabulary.bos, add_bos), token(vocabulary.eos, add_eos));
    tokenizer.with_post_processor(parse::<Option<PostProcessorWrapper>>(&around)?);
    let added = vocabulary.added().map(|(text, role)| {
        let strips = strip && !["<unk>", "<s>", "<|endoftext|>"].contains(&text);
        AddedToken::from(text, role == Role::Special).normalized(false).rstrip(strips)
    });
    tokenizer.add_tokens(added)?;
    Ok(tokenizer)
}

fn byte_level(splits: &[Split], nfc: bool) -> Steps {
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let split = |split: &Split| match split {
        Split::Regex(regex) => {
            json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
        }
        Split::Digits => json!({"type": "Digits", "individual_digits": true}),
    };
    let steps: Vec<Value> = splits.iter().map(split).chain([level.clone()]).collect();
    Steps {
        normalizer: if nfc { json!({"type": "NFC"}) } else { Value::Null },
        pre_tokenizer: json!({"type": "Sequence", "pretokenizers": steps}),
        decoder: level,
    }
}

fn sentence_piece(space_prefix: bool) -> Steps {
    let mut normalizers = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if space_prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Steps {
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: Value::Null,
        decoder: json!({"type": "Sequence", "decoders": decoders}),
    }
}

/// The step that puts these special tokens around every text.
pub(super) fn around(before: Option<(u32, &str)>, after: Option<(u32, &str)>) -> Value {
    let special = |(_, text): (u32, &str)| json!({"SpecialToken": {"id": text, "type_id": 0}});
    let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let template = |sequences: &[&str]| {
        let texts = sequences.iter().map(|id| sequence(id));
        before.map(special).into_iter().chain(texts).chain(after.map(special)).collect::<Vec<_>>()
    };
    let tokens = before.iter().chain(&after);
    let tokens = tokens.map(|(id, text)| (text.to_string(), json!({"id": text, "ids": [id], "tokens": [text]})));
    json!({
        "type": "TemplateProcessing",
        "single": template(&["A"]),
        "pair": template(&["A", "B"]),
        "special_tokens": tokens.collect::<serde_json::Map<_, _>>(),
    })
}

#[cfg(test)]
#[path = "tests/gguf.rs"]
mod tests;

//! The steps around a model as JSON of the `tokenizers` library, whose fields are private.

use serde_json::{Value, json};
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
};

use super::model::{AnyModel, Pipeline};
use super::parse;
use super::scored::SPACE;
use super::splits::Split;

/// The steps before and after the model, as `tokenizer.json` has them.
#[derive(Default)]
pub(super) struct Steps {
    pub normalizer: Value,
    pub pre_tokenizer: Value,
    pub decoder: Value,
}

/// All parts of a tokenizer.
pub(super) struct Parts {
    pub model: AnyModel,
    pub steps: Steps,
    /// Tokens that are found in texts before anything else.
    pub added: Vec<AddedToken>,
    /// See [`around`].
    pub around: Value,
}

impl Parts {
    /// Builds the tokenizer.
    pub fn build(self) -> Result<Pipeline, tokenizers::Error> {
        let mut tokenizer: Pipeline = TokenizerImpl::new(self.model);
        tokenizer.with_normalizer(parse::<Option<NormalizerWrapper>>(&self.steps.normalizer)?)?;
        tokenizer.with_pre_tokenizer(parse::<Option<PreTokenizerWrapper>>(&self.steps.pre_tokenizer)?);
        tokenizer.with_decoder(parse::<Option<DecoderWrapper>>(&self.steps.decoder)?);
        tokenizer.with_post_processor(parse::<Option<PostProcessorWrapper>>(&self.around)?);
        tokenizer.add_tokens(self.added)?;
        Ok(tokenizer)
    }
}

/// Byte-level BPE, whose texts are split first.
pub(super) fn byte_level<T: AsRef<str>>(splits: &[Split<T>], nfc: bool) -> Steps {
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let split = |split: &Split<T>| match split {
        Split::Regex(regex) => {
            json!({"type": "Split", "pattern": {"Regex": regex.as_ref()}, "behavior": "Isolated", "invert": false})
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

/// SentencePiece. `spaced`: whether a space is put before texts; `None` if the model normalises them.
pub(super) fn sentence_piece(spaced: Option<bool>, byte_fallback: bool) -> Steps {
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let prepend = json!({"type": "Prepend", "prepend": SPACE});
    let normalizers: Vec<Value> = (spaced == Some(true)).then_some(prepend).into_iter().chain([replace]).collect();
    Steps {
        normalizer: match spaced {
            Some(_) => json!({"type": "Sequence", "normalizers": normalizers}),
            None => Value::Null,
        },
        pre_tokenizer: Value::Null,
        decoder: text_decoder(true, byte_fallback, spaced == Some(true)),
    }
}

/// The step that puts a space before texts, but not behind special tokens, and replaces spaces.
pub(super) fn first_space() -> Value {
    json!({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": false})
}

/// The decoder of a vocabulary of texts. `spaced`: the space at the beginning is removed.
pub(super) fn text_decoder(escapes: bool, byte_fallback: bool, spaced: bool) -> Value {
    let replace = json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "});
    let steps = [
        escapes.then_some(replace),
        byte_fallback.then(|| json!({"type": "ByteFallback"})),
        Some(json!({"type": "Fuse"})),
        spaced.then(|| json!({"type": "Strip", "content": " ", "start": 1, "stop": 0})),
    ];
    json!({"type": "Sequence", "decoders": steps.into_iter().flatten().collect::<Vec<_>>()})
}

/// The step that puts these special tokens, with their ids, around every text.
pub(super) fn around(before: &[(u32, String)], after: &[(u32, String)]) -> Value {
    around_pairs(before, &[], after, 0)
}

/// The same, with special tokens between two texts. `second`: the type of the tokens from the second text on.
pub(super) fn around_pairs(
    before: &[(u32, String)],
    between: &[(u32, String)],
    after: &[(u32, String)],
    second: u32,
) -> Value {
    let special = |tokens: &[(u32, String)], kind: u32| {
        let one = |(_, text): &(u32, String)| json!({"SpecialToken": {"id": text, "type_id": kind}});
        tokens.iter().map(one).collect::<Vec<_>>()
    };
    let sequence = |id: &str, kind: u32| vec![json!({"Sequence": {"id": id, "type_id": kind}})];
    let first = [special(before, 0), sequence("A", 0)].concat();
    let rest = [special(between, 0), sequence("B", second), special(after, second)].concat();
    let tokens = before.iter().chain(between).chain(after);
    let tokens = tokens.map(|(id, text)| (text.clone(), json!({"id": text, "ids": [id], "tokens": [text]})));
    let single = [&first[..], &special(after, 0)].concat();
    let pair = [first, rest].concat();
    json!({
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": tokens.collect::<serde_json::Map<_, _>>(),
    })
}

//! The reader of SentencePiece's `tokenizer.model`, a protobuf message.
//!
//! The file has pieces with scores and rules of normalisation. What is around texts, and whether a text that spells a control piece
//! becomes it, is not in the file: `tokenizer_config.json` says it, and control pieces are special tokens.

use super::model::AnyModel;
use super::rules::{CharacterMap, Rules};
use super::scored::{Entry, Missing, Scored};
use super::stated::{Around, Stated, Table};
use super::steps::{self, Parts};
use crate::error::LoadError;

/// Greatest absolute score: sums over long texts must stay finite.
const GREATEST_SCORE: f32 = 1e9;

/// The value of a field.
#[derive(Clone, Copy)]
enum Value<'a> {
    Number(u64),
    Float(f32),
    Bytes(&'a [u8]),
    /// A fixed 64-bit value, which no field here uses.
    Other,
}

/// Takes the fields of a message, with their numbers.
struct Message<'a>(&'a [u8]);

impl<'a> Message<'a> {
    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for place in 0..10 {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            number |= u64::from(byte & 0x7F).checked_shl(7 * place)?;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    fn take(&mut self, length: u64) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(usize::try_from(length).ok()?)?;
        self.0 = rest;
        Some(bytes)
    }

    fn field(&mut self) -> Option<(u64, Value<'a>)> {
        let key = self.number()?;
        let value = match key & 7 {
            0 => Value::Number(self.number()?),
            1 => self.take(8).map(|_| Value::Other)?,
            2 => {
                let length = self.number()?;
                Value::Bytes(self.take(length)?)
            }
            5 => Value::Float(f32::from_le_bytes(self.take(4)?.try_into().ok()?)),
            _ => return None,
        };
        Some((key >> 3, value))
    }

    /// Calls `found` with each field; `None` if the message is cut or broken, or `found` returned that.
    fn each(mut self, mut found: impl FnMut(u64, Value<'a>) -> Option<()>) -> Option<()> {
        while !self.0.is_empty() {
            let (number, value) = self.field()?;
            found(number, value)?;
        }
        Some(())
    }
}

/// What the file says, beside its pieces.
struct Settings {
    is_unigram: bool,
    byte_fallback: bool,
    unknown: u32,
    bos: u32,
    eos: u32,
    rules: Rules,
}

/// Builds the tokenizer of a file.
///
/// # Errors
/// The file is broken, or its model is neither BPE nor unigram.
pub(super) fn read(file: &str, bytes: &[u8], stated: &Stated) -> Result<Parts, LoadError> {
    let wrong = |found: String, expected: &str| LoadError::file(file.to_string(), format!("found {found}"), expected);
    let broken = || wrong("a broken message".to_string(), "a SentencePiece model as published: download it again");
    let mut pieces = Vec::new();
    let (mut trainer, mut normaliser) = (&[][..], &[][..]);
    let read = Message(bytes).each(|number, value| {
        match (number, value) {
            (1, Value::Bytes(piece)) => pieces.push(piece),
            (2, Value::Bytes(message)) => trainer = message,
            (3, Value::Bytes(message)) => normaliser = message,
            _ => {}
        }
        Some(())
    });
    read.ok_or_else(broken)?;
    let settings = settings(trainer, normaliser).ok_or_else(broken)?;
    let settings = settings.ok_or_else(|| {
        wrong("a model of words or characters".to_string(), "a SentencePiece model of type BPE or unigram")
    })?;
    let mut table = Table::new(file);
    for piece in pieces {
        let (text, score, kind) = piece_of(piece).ok_or_else(broken)?;
        if score.is_nan() || score.abs() > GREATEST_SCORE {
            return Err(wrong(format!("the score {score} of the piece {text:?}"), "a number between -1e9 and 1e9"));
        }
        let entry = match kind {
            1 => Entry::Scored(score),
            4 => Entry::Whole,
            5 => Entry::Unused(score),
            2 | 3 | 6 => Entry::Named,
            _ => return Err(broken()),
        };
        table.push(text, entry, matches!(kind, 2 | 3))?;
    }
    table.extend(stated)?;
    let Settings { is_unigram, byte_fallback, unknown, bos, eos, rules } = settings;
    if byte_fallback && !(0..=u8::MAX).all(|byte| table.id(&format!("<0x{byte:02X}>")).is_some()) {
        return Err(wrong("byte fallback without 256 pieces of bytes".to_string(), "the piece <0x00> and so on"));
    }
    let is_t5 = stated.class.starts_with("T5");
    let around = Around {
        before: &[table.text(bos).unwrap_or_default()],
        after: table.text(eos).unwrap_or_default(),
        adds: (!is_t5, is_t5),
    };
    let around = table.around(stated, around)?;
    let is_spaced = rules.adds_space && !rules.at_end;
    let spaces = rules.escapes;
    // The library's steps say the same, and texts of theirs can be cut anywhere.
    let is_plain = rules == Rules { adds_space: rules.adds_space, escapes: true, ..Rules::default() } && !is_unigram;
    let mut steps = steps::sentence_piece(is_plain.then_some(is_spaced && !stated.is_first_only), byte_fallback);
    if is_plain && is_spaced && stated.is_first_only {
        (steps.normalizer, steps.pre_tokenizer) = (serde_json::Value::Null, steps::first_space());
    }
    steps.decoder = steps::text_decoder(spaces, byte_fallback, is_spaced);
    let missing = if byte_fallback { Missing::Bytes(None) } else { Missing::Unknown(unknown) };
    let (tokens, added) = table.finish();
    let rules = (!is_plain).then_some(rules);
    let model = if is_unigram { Scored::unigram(tokens, missing, rules) } else { Scored::bpe(tokens, missing, rules) };
    Ok(Parts { model: AnyModel::Scored(model), steps, added, around })
}

/// Text, score and type of a piece.
fn piece_of(message: &[u8]) -> Option<(&str, f32, u64)> {
    let (mut text, mut score, mut kind) = (None, 0.0, 1);
    Message(message).each(|number, value| {
        match (number, value) {
            (1, Value::Bytes(bytes)) => text = Some(std::str::from_utf8(bytes).ok()?),
            (2, Value::Float(number)) => score = number,
            (3, Value::Number(number)) => kind = number,
            _ => {}
        }
        Some(())
    })?;
    Some((text?, score, kind))
}

/// `None` if a message is broken, `Some(None)` if the model is of another type.
fn settings(trainer: &[u8], normaliser: &[u8]) -> Option<Option<Settings>> {
    let (mut kind, mut byte_fallback, mut at_end) = (1, false, false);
    let [mut unknown, mut bos, mut eos] = [0, 1, 2];
    Message(trainer).each(|number, value| {
        if let Value::Number(value) = value {
            // Absent tokens are -1, so that no piece has their id.
            let id = u32::try_from(value).unwrap_or(u32::MAX);
            match number {
                3 => kind = value,
                24 => at_end = value != 0,
                35 => byte_fallback = value != 0,
                40 => unknown = id,
                41 => bos = id,
                42 => eos = id,
                _ => {}
            }
        }
        Some(())
    })?;
    let mut rules = Rules { adds_space: true, at_end, collapses: true, escapes: true, map: None };
    Message(normaliser).each(|number, value| {
        match (number, value) {
            (2, Value::Bytes(map)) if !map.is_empty() => rules.map = Some(CharacterMap::read(map)?),
            (3, Value::Number(value)) => rules.adds_space = value != 0,
            (4, Value::Number(value)) => rules.collapses = value != 0,
            (5, Value::Number(value)) => rules.escapes = value != 0,
            _ => {}
        }
        Some(())
    })?;
    let settings = Settings { is_unigram: kind == 1, byte_fallback, unknown, bos, eos, rules };
    Some(matches!(kind, 1 | 2).then_some(settings))
}

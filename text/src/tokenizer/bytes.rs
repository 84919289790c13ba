//! The spelling of bytes in a vocabulary, derived from the tokenizer's decoder.
//!
//! - Byte-level (GPT-2 and its successors): every byte is one printable character; 0x20 is `Ġ`.
//! - Byte fallback (SentencePiece): `<0x0A>` is a byte; other tokens are text in which U+2581 is a space.

use std::collections::HashSet;

use serde::Serialize;
use serde_json::Value;
use tokenizers::{DecoderWrapper, ModelWrapper};

use super::model::{AnyModel, Pipeline};

/// How the tokens of a vocabulary are converted to bytes.
#[derive(Debug, PartialEq)]
pub(super) enum TokenSpelling {
    /// One character per byte.
    ByteLevel,
    /// Text with these replacements applied in order; with `byte_fallback`, `<0xNN>` is a byte.
    Text { byte_fallback: bool, replacements: Vec<(String, String)> },
    /// Words, and parts of words that begin with this text.
    WordPiece(String),
}

impl TokenSpelling {
    /// The spelling that a decoder reverses, or a message about a step that is not supported: texts would be wrong without it.
    pub fn of(decoder: Option<&DecoderWrapper>) -> Result<Self, String> {
        let steps = steps(decoder);
        if let [step] = &steps[..]
            && step["type"] == "WordPiece"
        {
            return Ok(TokenSpelling::WordPiece(step["prefix"].as_str().unwrap_or_default().to_string()));
        }
        let mut byte_level = false;
        let mut byte_fallback = false;
        let mut replacements = Vec::new();
        let mut replace = |from: &Value, to: &str| {
            replacements.push((from.as_str()?.to_string(), to.to_string()));
            Some(())
        };
        for step in &steps {
            let supported = match step["type"].as_str().unwrap_or_default() {
                "ByteLevel" => {
                    byte_level = true;
                    Some(())
                }
                "ByteFallback" => {
                    byte_fallback = true;
                    Some(())
                }
                "Metaspace" => replace(&step["replacement"], " "),
                "Replace" => step["content"].as_str().and_then(|to| replace(&step["pattern"]["String"], to)),
                "BPEDecoder" => replace(&step["suffix"], " "),
                // Bytes of tokens are always joined.
                "Fuse" => Some(()),
                // Stripping at the start of a text is left to the library.
                "Strip" => (step["stop"] == 0).then_some(()),
                _ => None,
            };
            supported.ok_or_else(|| unsupported(step))?;
        }
        if !byte_level {
            return Ok(TokenSpelling::Text { byte_fallback, replacements });
        }
        // Every character is a byte, so no other step can change the text before the bytes are joined.
        let is_plain = |step: &&Value| step["type"] == "ByteLevel" || step["type"] == "Fuse";
        match steps.iter().find(|step| !is_plain(step)) {
            Some(other) => Err(format!("{} together with ByteLevel", unsupported(other))),
            None => Ok(TokenSpelling::ByteLevel),
        }
    }

    /// The bytes that `token` represents.
    pub fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            // A token with a character outside the alphabet represents itself, as in the library's decoder.
            TokenSpelling::ByteLevel => {
                token.chars().map(byte_of).collect::<Option<_>>().unwrap_or_else(|| token.as_bytes().to_vec())
            }
            TokenSpelling::WordPiece(prefix) => match token.strip_prefix(prefix.as_str()) {
                Some(rest) => rest.as_bytes().to_vec(),
                None => format!(" {token}").into_bytes(),
            },
            TokenSpelling::Text { byte_fallback, replacements } => {
                if let Some(byte) = fallback_byte(token).filter(|_| *byte_fallback) {
                    return vec![byte];
                }
                let replace = |text: String, (from, to): &(String, String)| text.replace(from, to);
                replacements.iter().fold(token.to_string(), replace).into_bytes()
            }
        }
    }
}

fn unsupported(step: &Value) -> String {
    const LONGEST: usize = 200;
    let step: String = step.to_string().chars().take(LONGEST).collect();
    format!("its decoder has the step {step}, which is not supported")
}

/// Greatest number of bytes of text that one token represents. `None` if there is no bound: a step before the vocabulary may drop
/// text, or a run of unknown text becomes one token.
pub(super) fn per_token(tokenizer: &Pipeline) -> Option<usize> {
    let (normalizer, pre_tokenizer) = (steps(tokenizer.get_normalizer()), steps(tokenizer.get_pre_tokenizer()));
    let shrinks = normalizer.iter().chain(&pre_tokenizer).map(shrinking).product::<Option<usize>>()?;
    let vocab = tokenizer.get_vocab(true);
    // Whether every character becomes some token, known or not.
    let whole = match tokenizer.get_model() {
        AnyModel::Scored(model) => model.is_complete(),
        AnyModel::Library(ModelWrapper::BPE(model)) => match &model.unk_token {
            Some(_) => !model.fuse_unk || model.byte_fallback,
            None => {
                let bytes = || vocab.keys().filter_map(|token| single(token)).collect::<HashSet<u8>>();
                model.byte_fallback || bytes().len() == 256
            }
        },
        AnyModel::Library(_) => false,
    };
    let strips = tokenizer.get_added_tokens_decoder().values().any(|token| token.lstrip || token.rstrip);
    // A token's spelling has at least as many bytes as it represents; an unknown character has up to four.
    let longest = vocab.keys().map(String::len).max()?.max(4);
    (whole && !strips).then_some(longest * shrinks)
}

/// The byte that a token of one character of the byte-level alphabet represents.
fn single(token: &str) -> Option<u8> {
    let mut characters = token.chars();
    let byte = characters.next().and_then(byte_of);
    byte.filter(|_| characters.next().is_none())
}

/// Greatest factor by which a step before the vocabulary may shrink a text; `None` if there is no bound.
fn shrinking(step: &Value) -> Option<usize> {
    match step["type"].as_str() {
        Some("ByteLevel" | "Metaspace" | "Digits" | "Prepend") => Some(1),
        // Four characters of two bytes become one of three.
        Some("NFC") => Some(3),
        Some("Split") if step["behavior"] != "Removed" => Some(1),
        Some("Replace") => {
            let (from, to) = (step["pattern"]["String"].as_str()?, step["content"].as_str()?);
            (to.len() >= from.len()).then_some(1)
        }
        _ => None,
    }
}

/// The steps of a decoder, normalizer or pre-tokenizer in execution order, as JSON: the library's fields are private, but their
/// JSON representation is public.
pub(super) fn steps<T: Serialize>(component: Option<&T>) -> Vec<Value> {
    fn flatten(step: Value, steps: &mut Vec<Value>) {
        let inner = ["decoders", "normalizers", "pretokenizers"].iter().find_map(|name| step[name].as_array());
        match inner {
            Some(inner) => inner.iter().for_each(|step| flatten(step.clone(), steps)),
            None => steps.push(step),
        }
    }
    let mut steps = Vec::new();
    if let Some(json) = component.and_then(|component| serde_json::to_value(component).ok()) {
        flatten(json, &mut steps);
    }
    steps
}

/// `<0xNN>` with exactly two hexadecimal digits.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// Whether a byte represents itself in the byte-level alphabet.
fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The byte-level alphabet: printable Latin-1 characters represent themselves; the 68 other bytes are U+0100 onwards, in order.
fn byte_of(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ 0..=0xFF => Some(code as u8).filter(|byte| is_printable(*byte)),
        code => (0..=0xFF).filter(|byte| !is_printable(*byte)).nth(code as usize - 0x100),
    }
}

/// The character of a byte in the byte-level alphabet.
pub(super) fn char_of(byte: u8) -> char {
    let place = || (0..byte).filter(|before| !is_printable(*before)).count() as u32;
    if is_printable(byte) { char::from(byte) } else { char::from_u32(0x100 + place()).unwrap_or_default() }
}

//! How a vocabulary spells bytes, read off the tokenizer's decoder.
//!
//! - Byte-level (GPT-2 and its heirs): every byte is one printable character, 0x20 is `Ġ`.
//! - Byte fallback (SentencePiece): `<0x0A>` is a byte, other tokens are text in which U+2581 stands for a space.

use serde_json::Value;
use tokenizers::DecoderWrapper;

/// The inverse of the spelling of one vocabulary.
#[derive(Debug, PartialEq)]
pub(super) enum TokenSpelling {
    /// One character per byte.
    ByteLevel,
    /// Text after these replacements, in order; with `byte_fallback`, `<0xNN>` is a byte.
    Text { byte_fallback: bool, replacements: Vec<(String, String)> },
}

impl TokenSpelling {
    pub fn of(decoder: Option<&DecoderWrapper>) -> Self {
        // The library keeps the fields of its decoders private; their JSON form is public.
        let json = decoder.and_then(|decoder| serde_json::to_value(decoder).ok()).unwrap_or_default();
        let mut steps = Vec::new();
        flatten(&json, &mut steps);
        let is = |step: &&Value, kind: &str| step["type"] == kind;
        if steps.iter().any(|step| is(step, "ByteLevel")) {
            return TokenSpelling::ByteLevel;
        }
        let replacements = steps.iter().filter_map(|step| {
            let (from, to) = match step["type"].as_str()? {
                "Metaspace" => (step["replacement"].as_str()?, " "),
                "Replace" => (step["pattern"]["String"].as_str()?, step["content"].as_str()?),
                _ => return None,
            };
            Some((from.to_string(), to.to_string()))
        });
        TokenSpelling::Text {
            replacements: replacements.collect(),
            byte_fallback: steps.iter().any(|step| is(step, "ByteFallback")),
        }
    }

    /// The bytes that `token` stands for.
    pub fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            // A token with a character outside the alphabet stands for itself, as in the library's decoder.
            TokenSpelling::ByteLevel => {
                token.chars().map(byte_of).collect::<Option<_>>().unwrap_or_else(|| token.as_bytes().to_vec())
            }
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

/// The decoders of nested sequences, in the order in which they run.
fn flatten<'a>(decoder: &'a Value, steps: &mut Vec<&'a Value>) {
    match decoder["decoders"].as_array() {
        Some(inner) => inner.iter().for_each(|decoder| flatten(decoder, steps)),
        None => steps.push(decoder),
    }
}

/// `<0xNN>` with exactly two hexadecimal digits.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// The byte-level alphabet: printable Latin-1 stands for itself, the 68 other bytes are U+0100 and on, in order.
fn byte_of(character: char) -> Option<u8> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u32::from(character) {
        code @ 0..=0xFF => Some(code as u8).filter(printable),
        code => (0..=0xFF).filter(|byte| !printable(byte)).nth(code as usize - 0x100),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_level_alphabet_names_every_byte_once() {
        let mut bytes: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=0xFF).collect::<Vec<u8>>());
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
        assert_eq!(byte_of(' '), None);
        assert_eq!(byte_of('世'), None);
    }

    #[test]
    fn a_byte_fallback_token_has_exactly_two_digits() {
        assert_eq!(fallback_byte("<0x0A>"), Some(b'\n'));
        assert_eq!(fallback_byte("<0xff>"), Some(0xFF));
        for other in ["<0x>", "<0x0>", "<0x00A>", "<0xGG>", "0x0A", "<0xé>"] {
            assert_eq!(fallback_byte(other), None, "{other}");
        }
    }
}

//! Tokenization of long texts in pieces. The library needs hundreds of bytes of memory per byte of text and cannot be interrupted.
//!
//! ```text
//!   text    … the quick brown fox jumps over the la|zy dog …
//!                                         ▲         └ end of the piece: words near it may differ in the whole text
//!                                         └ the next piece begins at the start of a word
//! ```
//!
//! The result equals that of the whole text if words are found by one regular expression that looks ahead by at most one
//! character and never back: then a search from the start of a word finds the same words. Other tokenizers, and texts that
//! the normalizer changes, are tokenized whole.

use super::bytes::{self, TokenSpelling};
use super::error::TokenizeError;
use super::model::Pipeline;
use crate::checkpoint::error::one_line;
use serde_json::Value;

const PIECE_BYTES: usize = 32 << 10;

/// Bytes before the end of a piece, in addition to the longest added token, in which word boundaries are not trusted.
const MARGIN: usize = 64;

/// Settings for a tokenizer whose texts can be split.
pub(super) struct Pieces {
    margin: usize,
}

impl Pieces {
    /// `None` for a tokenizer whose texts cannot be split.
    pub fn of(tokenizer: &Pipeline, spelling: &TokenSpelling) -> Option<Pieces> {
        let steps = bytes::steps(tokenizer.get_pre_tokenizer());
        let unchanged = bytes::steps(tokenizer.get_normalizer()).iter().all(|step| step["type"] == "NFC");
        let searches = |step: &&Value| step["type"] == "Split" || step["use_regex"] == true;
        let known = steps.iter().all(|step| match step["type"].as_str() {
            Some("ByteLevel") => step["add_prefix_space"] == false,
            Some("Digits") => true,
            Some("Split") => step["behavior"] == "Isolated" && step["pattern"]["Regex"].as_str().is_some_and(is_local),
            _ => false,
        });
        let one_search = steps.iter().filter(searches).count() == 1;
        let longest = tokenizer.get_added_tokens_decoder().values().map(|token| token.content.len()).max();
        let is_byte_level = *spelling == TokenSpelling::ByteLevel;
        (unchanged && known && one_search && is_byte_level).then(|| Pieces { margin: MARGIN + longest.unwrap_or(0) })
    }

    /// Tokenizes the beginning of `text`, appends its ids to `ids`, and returns the rest of the text. `None` if the text is short
    /// or no place to split it was found.
    pub fn encode_next<'a>(
        &self,
        tokenizer: &Pipeline,
        spelling: &TokenSpelling,
        text: &'a str,
        ids: &mut Vec<u32>,
    ) -> Result<Option<&'a str>, TokenizeError> {
        if text.len() <= PIECE_BYTES {
            return Ok(None);
        }
        let end = (0..=PIECE_BYTES).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        let encoding = tokenizer.encode(&text[..end], false).map_err(|error| TokenizeError::Encode(one_line(error)))?;
        let (found, words) = (encoding.get_ids(), encoding.get_word_ids());
        // The last two word starts, as offsets in tokens and in bytes.
        let (mut last, mut next, mut at) = (None, None, 0);
        for (i, &id) in found.iter().enumerate() {
            if at + self.margin > end {
                break;
            }
            if i > 0 && words.get(i) != words.get(i - 1) && text.is_char_boundary(at) {
                (last, next) = (next, Some((i, at)));
            }
            let bytes = tokenizer.id_to_token(id).map(|token| spelling.bytes(&token)).unwrap_or_default();
            if bytes.is_empty() || !text.as_bytes()[at..].starts_with(&bytes) {
                break;
            }
            at += bytes.len();
        }
        Ok(last.map(|(tokens, bytes)| {
            ids.extend_from_slice(&found[..tokens]);
            &text[bytes..]
        }))
    }
}

/// Whether a search from the start of a match finds the same matches as a search from further ahead: the expression never looks
/// back, and looks ahead only for the end of white space.
fn is_local(expression: &str) -> bool {
    let rest = expression.replace("(?!\\S)", "");
    let looks = ["(?<", "(?=", "(?!", "(?>", "\\b", "\\B", "\\A", "\\G", "\\z", "\\Z", "$"];
    let begins = rest.char_indices().any(|(i, c)| c == '^' && !rest[..i].ends_with('['));
    !begins && !looks.iter().any(|look| rest.contains(look))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_that_look_around_are_recognised() {
        assert!(is_local(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s*[\r\n]+|\s+(?!\S)|\s+"));
        for looks in [r"(?<=a)b", r"a(?=b)", r"a(?!b)", r"\bword", r"^a", r"a$"] {
            assert!(!is_local(looks), "{looks}");
        }
    }
}

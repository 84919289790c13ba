//! Incremental detokenisation: ids in, whole characters out.
//!
//! It works on the bytes of each token and never decodes a window again. Whether the tokenizer removes a leading space from the text
//! is found by decoding the first token.

use std::sync::Arc;

use crate::Tokenizer;
use crate::utf8::{Replacement, Utf8Decoder};

/// Number of bytes at the end of the prompt that contain any unfinished character.
const TAIL_BYTES: usize = 4;

/// Decodes the ids of one sequence to text, token by token.
///
/// The deltas add up to `decode(prompt + output)` without its prefix `decode(prompt)`, wherever that is valid UTF-8. Elsewhere
/// they may differ, because a character is never taken back: the decoder of a byte-fallback vocabulary replaces all characters
/// of a run of bytes if one of its bytes is invalid.
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    decoder: Utf8Decoder,
    /// Neither prompt nor output has any text yet, so the tokenizer may remove a leading space.
    at_start: bool,
}

impl Detokenizer {
    /// Creates a detokenizer for the output after `prompt`. Special tokens of both are left out if `skip_special`.
    ///
    /// Reads the prompt from its end, until it has found a few bytes of text.
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[u32], skip_special: bool) -> Self {
        let mut pieces = Vec::new();
        let mut length = 0;
        for &id in prompt.iter().rev() {
            let piece = visible_bytes(&tokenizer, id, skip_special);
            length += piece.len();
            pieces.push(piece);
            if length >= TAIL_BYTES {
                break;
            }
        }
        pieces.reverse();
        // The decoder of a byte-fallback vocabulary replaces each byte.
        let by_byte = tokenizer.has_byte_fallback();
        let replacement = if by_byte { Replacement::PerByte } else { Replacement::PerSubpart };
        let decoder = Utf8Decoder::after(&pieces.concat(), replacement);
        Detokenizer { tokenizer, skip_special, decoder, at_start: length == 0 }
    }

    /// Returns the text that token `id` completes, which is empty while a character is unfinished.
    pub fn push(&mut self, id: u32) -> String {
        let bytes = visible_bytes(&self.tokenizer, id, self.skip_special);
        let mut written = bytes.as_slice();
        if self.at_start && !bytes.is_empty() {
            self.at_start = false;
            written = &bytes[self.stripped(id, &bytes)..];
        }
        self.decoder.push(written)
    }

    /// Returns U+FFFD for a character that was never finished, otherwise an empty string.
    pub fn finish(&mut self) -> String {
        self.decoder.finish()
    }

    /// Returns how many leading spaces the tokenizer removes from a text that begins with `id`.
    fn stripped(&self, id: u32, bytes: &[u8]) -> usize {
        let spaces = leading_spaces(bytes);
        if spaces == 0 {
            return 0;
        }
        let decoded = self.tokenizer.decode(&[id], self.skip_special).unwrap_or_default();
        spaces.saturating_sub(leading_spaces(decoded.as_bytes()))
    }
}

fn visible_bytes(tokenizer: &Tokenizer, id: u32, skip_special: bool) -> Vec<u8> {
    if skip_special && tokenizer.is_special(id) { Vec::new() } else { tokenizer.token_bytes(id) }
}

fn leading_spaces(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|&&byte| byte == b' ').count()
}

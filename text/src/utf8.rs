//! Incremental decoding of UTF-8: an unfinished character is held back, and invalid bytes become U+FFFD.

use std::str::from_utf8;

/// How many U+FFFD replace invalid bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Replacement {
    /// One for each maximal subpart, as Unicode recommends and `String::from_utf8_lossy` does (byte-level vocabularies).
    PerSubpart,
    /// One for each byte (vocabularies with byte fallback).
    PerByte,
}

/// An incremental lossy UTF-8 decoder.
#[derive(Clone, Debug)]
pub(super) struct Utf8Decoder {
    replacement: Replacement,
    /// The beginning of a character, at most three bytes.
    held: Vec<u8>,
    /// Number of bytes in `held` that belong to the text before.
    foreign: usize,
}

impl Utf8Decoder {
    /// Creates a decoder for the text after `before`. If `before` ends within a character, the whole character is returned once it
    /// is complete; if it never is, only bytes after `before` are replaced.
    pub(super) fn after(before: &[u8], replacement: Replacement) -> Self {
        let mut decoder = Utf8Decoder { replacement, held: Vec::new(), foreign: 0 };
        decoder.push(before);
        decoder.foreign = decoder.held.len();
        decoder
    }

    /// Returns the characters that `bytes` complete.
    pub(super) fn push(&mut self, bytes: &[u8]) -> String {
        if let (true, Ok(text)) = (self.held.is_empty(), from_utf8(bytes)) {
            return text.to_owned();
        }
        let mut input = std::mem::take(&mut self.held);
        input.extend_from_slice(bytes);
        let mut text = String::with_capacity(input.len());
        let mut end = 0;
        for chunk in input.utf8_chunks() {
            text.push_str(chunk.valid());
            let broken = chunk.invalid();
            end += chunk.valid().len() + broken.len();
            if !chunk.valid().is_empty() {
                self.foreign = 0;
            }
            if end == input.len() && is_beginning(broken) {
                self.held = broken.to_vec();
            } else {
                self.replace(broken.len(), &mut text);
            }
        }
        text
    }

    /// Returns the replacement of a character that was never completed.
    pub(super) fn finish(&mut self) -> String {
        let mut text = String::new();
        let broken = std::mem::take(&mut self.held).len();
        self.replace(broken, &mut text);
        text
    }

    fn replace(&mut self, broken: usize, text: &mut String) {
        let foreign = std::mem::take(&mut self.foreign);
        let count = match self.replacement {
            Replacement::PerByte => broken - foreign,
            Replacement::PerSubpart => usize::from(broken > 0 && foreign == 0),
        };
        text.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, count));
    }
}

/// Whether more bytes could complete a character.
fn is_beginning(bytes: &[u8]) -> bool {
    from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

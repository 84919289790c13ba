//! Bytes to characters, piece by piece: an unfinished character waits, broken bytes become U+FFFD.

use std::str::from_utf8;

/// How many U+FFFD stand for bytes that are no character.
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
    /// The beginning of a character: at most three bytes.
    held: Vec<u8>,
    /// How many of `held` came before the text whose characters are asked for.
    foreign: usize,
}

impl Utf8Decoder {
    /// A decoder that has already seen `before`. If that ends inside a character, the character is given whole once the rest
    /// of it comes; if the rest never comes, the bytes of `before` are not replaced, since they are somebody else's text.
    pub(super) fn after(before: &[u8], replacement: Replacement) -> Self {
        let mut decoder = Utf8Decoder { replacement, held: Vec::new(), foreign: 0 };
        decoder.push(before);
        decoder.foreign = decoder.held.len();
        decoder
    }

    /// The characters that `bytes` complete.
    pub(super) fn push(&mut self, bytes: &[u8]) -> String {
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

    /// What stands for the character that never became whole.
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

/// Whether more bytes could make a character of these.
fn is_beginning(bytes: &[u8]) -> bool {
    from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(pieces: &[&[u8]], replacement: Replacement) -> Vec<String> {
        let mut decoder = Utf8Decoder::after(&[], replacement);
        let mut texts: Vec<String> = pieces.iter().map(|piece| decoder.push(piece)).collect();
        texts.push(decoder.finish());
        texts
    }

    #[test]
    fn a_character_comes_whole_with_its_last_byte() {
        let texts = decode(&[b"a\xF0", b"\x9F\x99", b"", b"\x82b"], Replacement::PerSubpart);
        assert_eq!(texts, ["a", "", "", "🙂b", ""]);
    }

    #[test]
    fn broken_bytes_are_replaced_as_soon_as_they_can_not_become_a_character() {
        let pieces: [&[u8]; 3] = [b"\xF0\x9F", b"x\xFF\xE4", b"\xBD"];
        assert_eq!(decode(&pieces, Replacement::PerSubpart), ["", "\u{FFFD}x\u{FFFD}", "", "\u{FFFD}"]);
        assert_eq!(decode(&pieces, Replacement::PerByte), ["", "\u{FFFD}\u{FFFD}x\u{FFFD}", "", "\u{FFFD}\u{FFFD}"]);
    }

    #[test]
    fn a_character_begun_before_is_given_whole_or_not_at_all() {
        for (replacement, cut) in [(Replacement::PerSubpart, ""), (Replacement::PerByte, "\u{FFFD}")] {
            let after = || Utf8Decoder::after(b"\xA0ab\xF0\x9F", replacement);
            assert_eq!(after().push(b"\x99\x82"), "🙂");
            assert_eq!(after().push(b"x\xFF"), "x\u{FFFD}");
            assert_eq!(after().push(b"\x99x"), format!("{cut}x"));
            let mut unfinished = after();
            assert_eq!(unfinished.push(b"\x99"), "");
            assert_eq!(unfinished.finish(), cut);
        }
    }

    /// Bytes of characters and stray ones, so that both whole and broken sequences are frequent.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            prop::sample::select(vec!["a", "é", "世", "🙂", "\u{FFFD}"]).prop_map(|text| text.as_bytes().to_vec()),
            prop::sample::select(vec![0x80, 0xBF, 0xC2, 0xE4, 0xED, 0xF0, 0xF4, 0xFF]).prop_map(|byte| vec![byte]),
        ];
        prop::collection::vec(piece, 0..20).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn every_split_gives_what_the_whole_gives(bytes in bytes(), cuts in prop::collection::vec(0usize..80, 0..9)) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).chain([0, bytes.len()]).collect();
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]).collect();
            let texts = decode(&pieces, Replacement::PerSubpart);
            prop_assert_eq!(texts.concat(), String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn never_more_than_three_bytes_are_held(bytes in bytes()) {
            let mut decoder = Utf8Decoder::after(&[], Replacement::PerByte);
            for &byte in &bytes {
                decoder.push(&[byte]);
                prop_assert!(decoder.held.len() <= 3);
            }
        }
    }
}

//! Texts in pieces.
#![cfg(test)]

use super::*;
use tokenizers::normalizers::NFD;
use tokenizers::{NormalizedString, Normalizer};

#[test]
fn expressions_that_look_around_are_recognised() {
    for local in [r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s*[\r\n]+|\s+(?!\S)|\s+", r"[\p{P}$+<=>^~|]+", r"\$[a\]^]"] {
        assert!(is_local(local), "{local}");
    }
    for looks in [r"(?<=a)b", r"a(?=b)", r"a(?!b)", r"\bword", r"^a", r"a$"] {
        assert!(!is_local(looks), "{looks}");
    }
}

#[test]
fn nothing_composes_or_reorders_before_a_character_that_starts_anew() {
    let decomposed = |text: &str| {
        let mut text = NormalizedString::from(text);
        NFD.normalize(&mut text).unwrap();
        text.get().to_string()
    };
    let mut tried = 0;
    for character in '\u{80}'..=char::MAX {
        // What characters are composed of: only the first may start anew.
        let parts = decomposed(&character.to_string());
        assert!(!parts.chars().skip(1).any(starts_anew), "{character:?} is {parts:?}");
        if starts_anew(character) {
            // U+0345 is reordered behind every mark.
            let marked = format!("a\u{345}{character}");
            assert!(decomposed(&marked).starts_with("a\u{345}"), "{character:?}");
            tried += 1;
        }
    }
    assert!(tried > 100_000, "{tried}");
}

//! SentencePiece's normaliser: a map of characters, and rules for white space.

use super::scored::SPACE;

/// The rules of a file.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Rules {
    /// A space is added to texts.
    pub adds_space: bool,
    /// At their end, not at their beginning.
    pub at_end: bool,
    /// Spaces at the ends are removed, and several become one.
    pub collapses: bool,
    /// Spaces become U+2581.
    pub escapes: bool,
    pub map: Option<CharacterMap>,
}

/// Replacements of texts, of which the longest one that matches is taken.
#[derive(Debug, PartialEq)]
pub(super) struct CharacterMap {
    /// A double array: states and values of a trie over bytes.
    trie: Vec<u32>,
    /// Replacements, each of which ends with a zero byte.
    texts: String,
}

impl Rules {
    /// Whether the words of a text are normalised one by one, so that a part that begins with a space may be a text of its own.
    pub fn keep_words(&self) -> bool {
        self.escapes && !self.at_end && (self.collapses || !self.adds_space)
    }

    /// Normalises a text. `whole` returns the length of a text that is kept as it is.
    pub fn apply(&self, text: &str, whole: impl Fn(&str) -> Option<usize>) -> String {
        let mut out = String::with_capacity(text.len() + SPACE.len_utf8());
        if text.is_empty() {
            return out;
        }
        let space = if self.escapes { SPACE } else { ' ' };
        let mut rest = text;
        let mut after_space = self.collapses;
        let mut is_empty = true;
        while let Some(character) = rest.chars().next() {
            let length = whole(rest);
            let mapped = length.is_none().then(|| self.map.as_ref()?.longest(rest)).flatten();
            let (mut part, length) = match (mapped, length) {
                (Some(found), _) => found,
                (None, Some(length)) => (&rest[..length], length),
                (None, None) => (&rest[..character.len_utf8()], character.len_utf8()),
            };
            rest = &rest[length..];
            // Spaces in front of the text do not keep it from being empty.
            if is_empty && self.collapses && part == " " {
                continue;
            }
            if std::mem::take(&mut is_empty) && self.adds_space && !self.at_end {
                out.push(space);
            }
            if after_space {
                part = part.trim_start_matches(' ');
            }
            out.extend(part.chars().map(|c| if c == ' ' { space } else { c }));
            after_space = self.collapses && if part.is_empty() { after_space } else { part.ends_with(' ') };
        }
        if self.collapses {
            out.truncate(out.trim_end_matches(space).len());
        }
        if !is_empty && self.adds_space && self.at_end {
            out.push(space);
        }
        out
    }
}

impl CharacterMap {
    /// Reads `precompiled_charsmap`: the size of the trie, the trie, and the replacements.
    pub fn read(bytes: &[u8]) -> Option<CharacterMap> {
        let (size, rest) = bytes.split_first_chunk()?;
        let size = usize::try_from(u32::from_le_bytes(*size)).ok()?;
        let (trie, texts) = rest.split_at_checked(size)?;
        let (words, extra) = trie.as_chunks();
        let trie = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let texts = String::from_utf8(texts.to_vec()).ok()?;
        extra.is_empty().then_some(CharacterMap { trie, texts })
    }

    /// The replacement of the longest text that `text` begins with, and its length.
    fn longest(&self, text: &str) -> Option<(&str, usize)> {
        let offset = |unit: u32| (unit >> 10) << ((unit & (1 << 9)) >> 6);
        let unit = |at: u32| self.trie.get(at as usize).copied();
        let mut at = offset(unit(0)?);
        let mut found = None;
        for (index, byte) in text.bytes().enumerate() {
            at ^= u32::from(byte);
            let Some(state) = unit(at).filter(|state| state & (1 << 31 | 0xFF) == u32::from(byte)) else { break };
            at ^= offset(state);
            if state & (1 << 8) != 0 {
                found = unit(at).map(|value| (value & !(1 << 31), index + 1));
            }
        }
        let (start, length) = found.filter(|(_, length)| text.is_char_boundary(*length))?;
        let replacement = self.texts.get(start as usize..)?.split('\0').next()?;
        Some((replacement, length))
    }
}

//! Cuts of long texts at white space, for tokenizers that look at words one by one: Unigram with Metaspace, WordPiece, and others.
//!
//! The ids of a text are those of its words, and a word depends on no other. A cut lies in front of white space, behind a character
//! that no supported normaliser drops, turns to white space, or joins with what follows. So all white space between two words is on
//! one side. If ideographs are words of their own, a cut may also lie between two of them.

use serde_json::Value;
use tokenizers::AddedToken;

use super::bytes;
use super::model::{AnyModel, Pipeline};

/// See the [module](self).
pub(super) struct Spaces {
    /// Words end at line breaks and tabs too, not only at spaces.
    lines: bool,
    /// Ideographs are words.
    ideographs: bool,
    /// Last characters of added tokens that take the white space behind them.
    edges: Vec<char>,
}

impl Spaces {
    /// `None` for a tokenizer that does not split texts at spaces, or of which a step may reach across a cut.
    pub fn of(tokenizer: &Pipeline) -> Option<Spaces> {
        let normalizers = bytes::steps(tokenizer.get_normalizer());
        let steps = bytes::steps(tokenizer.get_pre_tokenizer());
        let is = |step: &Value, kinds: &[&str]| kinds.iter().any(|kind| step["type"] == *kind);
        let lines = steps.iter().any(|step| is(step, &["WhitespaceSplit", "Whitespace", "BertPreTokenizer"]));
        let is_split = |step: &Value| is(step, &["Metaspace"]) && step["split"] != false;
        let others = ["WhitespaceSplit", "Whitespace", "BertPreTokenizer", "Punctuation", "Digits"];
        let by_model = matches!(tokenizer.get_model(), AnyModel::Scored(model) if model.splits_at_spaces());
        let splits = (lines || by_model || steps.iter().any(is_split))
            && steps.iter().all(|step| is_split(step) || is(step, &others));
        // What is removed from the start of a piece is a space that separates words anyway.
        let strips = |step: &Value| is(step, &["Strip"]) && (lines || step["strip_left"] == false);
        let kinds = ["NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Lowercase", "StripAccents", "BertNormalizer"];
        if !splits || !normalizers.iter().all(|step| is(step, &kinds) || strips(step) || replaces_within_words(step)) {
            return None;
        }
        let mut edges = Vec::new();
        for AddedToken { content, lstrip, rstrip, normalized, .. } in tokenizer.get_added_tokens_decoder().values() {
            if content.chars().any(char::is_whitespace) || (*lstrip || *rstrip) && *normalized {
                return None;
            }
            edges.extend(content.chars().last().filter(|_| *rstrip));
        }
        let handles = |step: &Value| is(step, &["BertNormalizer"]) && step["handle_chinese_chars"] == true;
        let ideographs = lines && normalizers.iter().any(handles);
        Some(Spaces { lines, ideographs, edges })
    }

    /// The last place for a cut at least at `least`. `starts_anew` is false for characters that may join what precedes them.
    pub fn place(&self, text: &str, least: usize, starts_anew: impl Fn(char) -> bool) -> Option<usize> {
        let is_plain = |c: char| {
            let is_shown = c.is_ascii_graphic() || starts_anew(c) && !c.is_ascii() && !c.is_whitespace();
            (is_shown || is_letter(c)) && !self.edges.contains(&c)
        };
        let is_space = |c: char| c == ' ' || self.lines && matches!(c, '\n' | '\t');
        let is_ideograph = |c: char| ('\u{4e00}'..='\u{9fff}').contains(&c) && is_plain(c);
        let places = text.char_indices().map(|(at, _)| at).rev().take_while(|at| *at > 0 && *at >= least);
        let mut places = places.filter(|at| {
            let (before, after) = (text[..*at].chars().next_back(), text[*at..].chars().next());
            before.zip(after).is_some_and(|(before, after)| {
                let is_within = self.ideographs && is_ideograph(before) && is_ideograph(after);
                is_space(after) && is_plain(before) || is_within
            })
        });
        places.next()
    }
}

/// Whether a step replaces only what has no white space in it, single spaces, or runs of spaces.
fn replaces_within_words(step: &Value) -> bool {
    let pattern = &step["pattern"];
    let is_word = |text: &str| text == " " || !text.contains(char::is_whitespace);
    step["type"] == "Replace" && (pattern["String"].as_str().is_some_and(is_word) || pattern["Regex"] == " {2,}")
}

/// Whether a character is a letter whose normal forms are letters, and which joins no space.
fn is_letter(character: char) -> bool {
    character.is_alphabetic()
        && matches!(u32::from(character), 0xC0..=0x24F | 0x386..=0x3CE | 0x400..=0x52F | 0x531..=0x586 | 0x5D0..=0x5EA
            | 0x620..=0x64A | 0x904..=0x939)
}

#[cfg(test)]
#[path = "tests/spaces.rs"]
mod tests;

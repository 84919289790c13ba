//! Tokenization of long texts in pieces. The library needs hundreds of bytes of memory per byte of text and cannot be interrupted.
//!
//! ```text
//!   text    … the quick brown fox jumps over the la|zy dog …
//!                                         ▲         └ end of the window: words near it may differ in the whole text
//!                                         └ the next piece begins where the whole text is certainly cut too
//! ```
//!
//! The ids of the pieces are those of the whole text. Where a text may be cut depends on the tokenizer:
//!
//! - [`Cuts::Words`]: regular expressions find words. A cut is an edge of a word that no earlier expression matched across, and the
//!   expressions so far look ahead by at most one character and never back: then a search from the cut finds the same words.
//! - [`Cuts::Pairs`]: BPE joins the characters of a whole text. A cut lies between two characters that are neighbours in no token, since
//!   every join makes a token. What a tokenizer puts before a text is put before a [`Marker`] instead, whose tokens are dropped.
//! - [`Cuts::Spaces`]: words at white space are tokenized one by one.
//!
//! A text that is composed first (NFC) is cut only before characters that nothing composes with what precedes them. Texts of other
//! tokenizers are tokenized whole.

use fancy_regex::Regex;
use serde_json::Value;
use tokenizers::{ModelWrapper, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper};

use super::bytes;
use super::error::TokenizeError;
use super::model::{AnyModel, Pipeline};
use super::scored::SPACE;
use super::spaces::Spaces;
use crate::error::one_line;

/// First size of a window. It is doubled as long as it has no place for a cut in its last three quarters. Tests cut often.
const WINDOW: usize = if cfg!(test) { 1 << 10 } else { 32 << 10 };

/// Bytes before the end of a window, in addition to the longest added token, in which nothing is cut.
const MARGIN: usize = 64;

/// How the texts of a tokenizer are cut.
pub(super) struct Pieces {
    margin: usize,
    /// Texts are composed first.
    composes: bool,
    /// Some added tokens are not found inside of words, so words are not cut.
    keeps_words: bool,
    cuts: Cuts,
}

enum Cuts {
    /// At the edges of words. Words begin with a space if `spaced`.
    Words { steps: Vec<Step>, spaced: bool },
    /// Between characters.
    Pairs(Pairs),
    /// At white space.
    Spaces(Spaces),
}

/// A step of a pre-tokenizer.
struct Step {
    split: PreTokenizerWrapper,
    /// What it searches for; `None` if it does not split.
    search: Option<Search>,
}

struct Search {
    expression: Regex,
    /// Whether a search from the start of a match finds the same matches as a search from further ahead.
    is_local: bool,
    /// Whether what lies between matches is kept as it is.
    has_gaps: bool,
}

/// What is known of the characters of a vocabulary.
struct Pairs {
    /// Neighbours in some token, sorted.
    neighbours: Vec<(char, char)>,
    /// Characters that are tokens, sorted.
    single: Vec<char>,
    /// Whether every other character is a sequence of bytes.
    falls_back: bool,
    /// Added tokens are found in texts as they are, so that a piece may begin with one.
    raw_tokens: bool,
    marker: Marker,
}

/// A character before a piece that begins within a text, and the tokens that it becomes.
struct Marker {
    character: char,
    ids: Vec<u32>,
}

/// The rest of a text.
#[derive(Clone, Copy)]
pub(super) struct Rest<'a> {
    pub text: &'a str,
    /// Whether it begins after the start of what the tokenizer takes as one text.
    within: bool,
}

impl<'a> Rest<'a> {
    pub fn new(text: &'a str) -> Rest<'a> {
        Rest { text, within: false }
    }
}

impl Pieces {
    /// `None` for a tokenizer whose texts cannot be cut.
    pub fn of(tokenizer: &Pipeline) -> Option<Pieces> {
        let normalizers = bytes::steps(tokenizer.get_normalizer());
        let steps = bytes::steps(tokenizer.get_pre_tokenizer());
        let added = tokenizer.get_added_tokens_decoder();
        let longest = added.values().map(|token| token.content.len()).max().unwrap_or(0);
        let of_kind = |kinds: &[&str]| normalizers.iter().all(|step| kinds.iter().any(|kind| step["type"] == *kind));
        let composes = normalizers.iter().any(|step| step["type"] == "NFC");
        let pieces = |cuts| Pieces {
            margin: MARGIN + longest,
            composes,
            keeps_words: added.values().any(|t| t.single_word),
            cuts,
        };
        if of_kind(&["NFC"])
            && let Some(steps) = steps.iter().map(Step::of).collect::<Option<Vec<Step>>>()
            && steps.iter().any(|step| step.search.is_some())
        {
            let is_spaced = |step: &Value| step["add_prefix_space"] == true;
            let spaced = bytes::steps(tokenizer.get_pre_tokenizer()).iter().any(is_spaced);
            return Some(pieces(Cuts::Words { steps, spaced }));
        }
        let replaces = |step: &Value| {
            step["pattern"]["String"] == " " && step["content"] == SPACE.to_string()
                || step["type"] == "Metaspace" && step["replacement"] == SPACE.to_string()
        };
        let spaces = normalizers.iter().chain(&steps).any(&replaces);
        let joins = normalizers.iter().all(|step| replaces(step) || step["type"] == "NFC" || step["type"] == "Prepend")
            // A search for spaces finds none after their replacement.
            && steps.iter().all(|step| replaces(step) || step["type"] == "Split" && step["pattern"]["String"] == " ");
        let pairs = if spaces && joins { Pairs::of(tokenizer).map(Cuts::Pairs) } else { None };
        pairs.or_else(|| Spaces::of(tokenizer).map(Cuts::Spaces)).map(pieces)
    }

    /// Tokenizes the beginning of the text, appends its ids to `ids`, and returns the rest. `None` if the text is short or has no
    /// place for a cut in its first `most` bytes.
    pub fn encode_next<'a>(
        &self,
        tokenizer: &Pipeline,
        rest: Rest<'a>,
        most: usize,
        ids: &mut Vec<u32>,
    ) -> Result<Option<Rest<'a>>, TokenizeError> {
        let mut window = WINDOW;
        while rest.text.len() > window {
            let text = &rest.text[..floor(rest.text, window)];
            let is_last = window >= most;
            // A cut further ahead would make the cost of many windows more than linear.
            let least = if is_last { 1 } else { window / 4 };
            let at = match &self.cuts {
                Cuts::Words { steps, spaced } => self.cut_words(tokenizer, steps, *spaced, text, least, ids)?,
                Cuts::Pairs(pairs) => self.cut_pairs(tokenizer, pairs, text, least),
                Cuts::Spaces(spaces) => spaces.place(text, least, starts_anew).map(|at| (at, false)),
            };
            if let Some((at, within)) = at {
                if let Cuts::Pairs(_) | Cuts::Spaces(_) = self.cuts {
                    ids.extend(self.encode_rest(tokenizer, Rest { text: &text[..at], ..rest })?);
                }
                return Ok(Some(Rest { text: &rest.text[at..], within }));
            }
            if is_last {
                break;
            }
            window = window.saturating_mul(2).min(most);
        }
        Ok(None)
    }

    /// The ids of a rest.
    pub fn encode_rest(&self, tokenizer: &Pipeline, rest: Rest<'_>) -> Result<Vec<u32>, TokenizeError> {
        let encode = |text: &str| {
            let encoding =
                tokenizer.encode_fast(text, false).map_err(|error| TokenizeError::Encode(one_line(error)))?;
            Ok(encoding.get_ids().to_vec())
        };
        match &self.cuts {
            Cuts::Pairs(Pairs { marker, .. }) if rest.within => {
                let mut ids: Vec<u32> = encode(&format!("{}{}", marker.character, rest.text))?;
                ids.drain(..marker.ids.len().min(ids.len()));
                Ok(ids)
            }
            _ => encode(rest.text),
        }
    }

    /// Whether a text may be cut between these characters, whatever the tokenizer.
    fn may_part(&self, before: char, after: char) -> bool {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        (!self.composes || starts_anew(after)) && !(self.keeps_words && is_word(before))
    }

    /// The last place for a cut at least at `least`; appends the ids before it.
    fn cut_words(
        &self,
        tokenizer: &Pipeline,
        steps: &[Step],
        spaced: bool,
        text: &str,
        least: usize,
        ids: &mut Vec<u32>,
    ) -> Result<Option<(usize, bool)>, TokenizeError> {
        let failed = |error: tokenizers::Error| TokenizeError::Encode(one_line(error));
        let mut parts = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
        // Places that an expression matched across.
        let mut inside = vec![false; text.len() + 1];
        let sections: Vec<usize> = spans(&parts).map(|(_, (start, _), _)| start).collect();
        for (_, (start, end), is_token) in spans(&parts) {
            if is_token {
                inside[end.min(start + 1)..end].fill(true);
            }
        }
        let limit = text.len().saturating_sub(self.margin);
        let (mut place, mut is_local) = (None, true);
        for Step { split, search } in steps {
            split.pre_tokenize(&mut parts).map_err(failed)?;
            let Some(search) = search.as_ref().filter(|_| place.is_none()) else { continue };
            is_local &= search.is_local;
            if !is_local {
                continue;
            }
            let is_place = |at: usize| {
                let (before, after) = (text[..at].chars().next_back(), text[at..].chars().next());
                let parts = || before.zip(after).is_some_and(|(before, after)| self.may_part(before, after));
                !inside[at] && (sections.binary_search(&at).is_ok() || parts() && (!spaced || after == Some(' ')))
            };
            let starts = spans(&parts).map(|(_, (start, _), _)| start);
            let places = starts.take_while(|start| *start <= limit).filter(|at| *at > 0 && is_place(*at));
            // The last word may end elsewhere in the whole text, so the start of the one before it is taken.
            let (last, _) = places.fold((None, None), |(_, last), at| (last, Some(at)));
            place = last.filter(|at| *at >= least);
            for (word, (start, end), is_token) in spans(&parts) {
                let is_gap = || search.has_gaps && matches!(search.expression.is_match(word), Ok(false));
                if !is_token && !is_gap() {
                    inside[end.min(start + 1)..end].fill(true);
                }
            }
        }
        let Some(place) = place else { return Ok(None) };
        let words = spans(&parts).take_while(|(_, (start, _), _)| *start < place).count();
        parts.tokenize(|word| tokenizers::Model::tokenize(tokenizer.get_model(), word.get())).map_err(failed)?;
        let splits = parts.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let tokens = splits.into_iter().take(words).filter_map(|(.., tokens)| tokens.as_ref()).flatten();
        ids.extend(tokens.map(|token| token.id));
        Ok(Some((place, false)))
    }

    /// The last place for a cut at least at `least`, and whether the rest begins within a text.
    fn cut_pairs(&self, tokenizer: &Pipeline, pairs: &Pairs, text: &str, least: usize) -> Option<(usize, bool)> {
        let parts = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
        let limit = text.len().saturating_sub(self.margin);
        let spans: Vec<_> = spans(&parts).map(|(_, span, is_token)| (span, is_token)).collect();
        spans.into_iter().rev().find_map(|((start, end), is_token)| {
            if is_token {
                return Some((start, false)).filter(|_| pairs.raw_tokens && (least..=limit).contains(&start));
            }
            let places = text[start..end].char_indices().rev().map(|(at, after)| (start + at, after));
            let places = places.take_while(|(at, _)| *at > start && *at >= least).filter(|(at, _)| *at <= limit);
            let mut places = places.filter(|(at, after)| {
                let before = text[..*at].chars().next_back();
                before.is_some_and(|before| self.may_part(before, *after) && pairs.may_part(before, *after))
            });
            places.next().map(|(at, _)| (at, true))
        })
    }
}

impl Step {
    /// A step of a pre-tokenizer; `None` if it is of another kind.
    fn of(step: &Value) -> Option<Step> {
        let search = |expression: &str, has_gaps: bool| {
            let expression = (Regex::new(expression).ok()?, is_local(expression));
            Some(Some(Search { expression: expression.0, is_local: expression.1, has_gaps }))
        };
        let (behavior, invert) = (step["behavior"].as_str(), step["invert"] == true);
        let search = match step["type"].as_str()? {
            "ByteLevel" if step["use_regex"] == false => None,
            // It matches every text.
            "ByteLevel" => search(".", false)?,
            "Digits" => search(r"[\p{Nd}\p{Nl}\p{No}]", true)?,
            "Punctuation" if matches!(behavior, Some("Isolated" | "Contiguous")) => search(r"[\p{P}$+<=>^`|~]", true)?,
            "Split" => {
                let expression = step["pattern"]["Regex"].as_str()?;
                match (behavior?, invert) {
                    ("Isolated", false) => search(expression, true)?,
                    // Only matches are kept.
                    ("Removed", true) => search(expression, false)?,
                    _ => return None,
                }
            }
            _ => return None,
        };
        Some(Step { split: super::parse(step).ok()?, search })
    }
}

impl Pairs {
    /// `None` for a model that does not join characters to tokens.
    fn of(tokenizer: &Pipeline) -> Option<Pairs> {
        let mut falls_back = match tokenizer.get_model() {
            AnyModel::Scored(model) if model.joins_neighbours() => true,
            AnyModel::Scored(_) => return None,
            AnyModel::Library(ModelWrapper::BPE(model)) => {
                let joins = !model.ignore_merges
                    && model.dropout.is_none_or(|dropout| dropout == 0.0)
                    && [&model.continuing_subword_prefix, &model.end_of_word_suffix].into_iter().all(Option::is_none);
                if !joins {
                    return None;
                }
                model.byte_fallback
            }
            AnyModel::Library(_) => return None,
        };
        let vocab = tokenizer.get_vocab(true);
        falls_back &= (0..=u8::MAX).all(|byte| vocab.contains_key(&format!("<0x{byte:02X}>")));
        let (mut neighbours, mut single) = (Vec::new(), Vec::new());
        for token in vocab.keys() {
            let mut before = None;
            for character in token.chars().map(spelled) {
                neighbours.extend(before.replace(character).map(|before| (before, character)));
            }
            single.extend(before.filter(|character| character.len_utf8() == token.len()));
        }
        neighbours.sort_unstable();
        neighbours.dedup();
        neighbours.shrink_to_fit();
        single.sort_unstable();
        // A character that no text joins with another.
        let is_free = |c: &char| neighbours.iter().all(|(before, after)| before != c && after != c);
        let character = ('\u{1}'..='\u{8}').chain(['\n']).find(is_free)?;
        let encoding = tokenizer.encode_fast(character.to_string(), false).ok()?;
        let marker = Marker { character, ids: encoding.get_ids().to_vec() };
        let raw_tokens = tokenizer.get_added_tokens_decoder().values().all(|token| !token.normalized);
        Some(Pairs { neighbours, single, falls_back, raw_tokens, marker })
    }

    /// Whether no token has these neighbours, and unknown characters before the second one are complete.
    fn may_part(&self, before: char, after: char) -> bool {
        let pair = (spelled(before), spelled(after));
        self.neighbours.binary_search(&pair).is_err() && (self.falls_back || self.single.binary_search(&pair.1).is_ok())
    }
}

/// A character as the vocabulary has it.
fn spelled(character: char) -> char {
    if character == ' ' { SPACE } else { character }
}

/// Texts, places in the original and whether they are added tokens.
fn spans(parts: &PreTokenizedString) -> impl Iterator<Item = (&str, (usize, usize), bool)> {
    let splits = parts.get_splits(OffsetReferential::Original, OffsetType::Byte);
    splits.into_iter().map(|(text, span, tokens)| (text, span, tokens.is_some()))
}

/// The greatest boundary of a character up to `at`.
fn floor(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// Whether a search from the start of a match finds the same matches as a search from further ahead: the expression never looks
/// back, and looks ahead only for the end of white space.
fn is_local(expression: &str) -> bool {
    // What stands between brackets is a set of characters, in which no sign looks anywhere.
    let (mut rest, mut depth) = (String::new(), 0);
    let mut characters = expression.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => {
                let escaped = characters.next().filter(|c| depth == 0 && c.is_alphanumeric());
                rest.extend(escaped.into_iter().flat_map(|escaped| ['\\', escaped]));
            }
            '[' => depth += 1,
            ']' if depth > 0 => depth -= 1,
            other if depth == 0 => rest.push(other),
            _ => {}
        }
    }
    let rest = rest.replace("(?!\\S)", "").replace("\\s++$", "");
    let looks = ["(?<", "(?=", "(?!", "(?>", "\\b", "\\B", "\\A", "\\G", "\\z", "\\Z", "$", "^"];
    !looks.iter().any(|look| rest.contains(look))
}

/// Whether no normalisation joins or reorders a character with what precedes it: ASCII, and the scripts that are written without
/// spaces. Others are cut at their spaces.
pub(super) fn starts_anew(character: char) -> bool {
    matches!(u32::from(character),
        0..=0x7F | 0xE01..=0xE30 | 0x3000..=0x3029 | 0x3041..=0x3096 | 0x30A1..=0x30FA
        | 0x3400..=0x4DBF | 0x4E00..=0x9FFF | 0xAC00..=0xD7A3 | 0xFF01..=0xFF9D | 0x1F300..=0x1FAFF | 0x20000..=0x2FA1F)
}

#[cfg(test)]
#[path = "tests/pieces.rs"]
mod tests;

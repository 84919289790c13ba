//! Vocabularies whose tokens have scores: those of SentencePiece and of tiktoken.
//!
//! ```text
//! text ─▶ Rules (normaliser, if it is not the library's) ─▶ Bpe or Unigram ─▶ ids; what has no token becomes bytes or unknown
//! ```
//!
//! The library has neither: its BPE ranks pairs instead of unions, so it cannot express equal scores, and its unigram adds in another
//! precision and has no tokens that are taken whole.

use std::collections::HashMap;
use std::ops::Range;

use tokenizers::Token;

use super::bpe::Bpe;
use super::rules::Rules;
use super::unigram::Unigram;

/// The space in SentencePiece's vocabularies.
pub(super) const SPACE: char = '\u{2581}';

/// How texts become a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Entry {
    /// By its score.
    Scored(f32),
    /// By its score. It is then replaced by the tokens that it was joined of.
    Unused(f32),
    /// Wherever its text occurs.
    Whole,
    /// Not at all: an added token, or the token of a byte.
    Named,
}

/// The algorithm that chooses tokens by their scores.
#[derive(Debug)]
enum Algorithm {
    Bpe(Bpe),
    Unigram(Unigram),
}

/// What becomes of characters without tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Missing {
    /// Each of their bytes becomes its token `<0xNN>`. Without that it becomes the unknown token, or is dropped.
    Bytes(Option<u32>),
    /// A run of them becomes this token.
    Unknown(u32),
}

/// Texts and entries by id.
#[derive(Debug)]
pub(super) struct Tokens {
    ids: HashMap<String, u32>,
    /// `None` where there is no token.
    by_id: Vec<Option<(String, Entry)>>,
    /// Lengths of [`Entry::Whole`] tokens by their first character, longest first.
    whole: HashMap<char, Vec<usize>>,
    /// Bytes of the longest token.
    pub longest: usize,
}

/// A vocabulary with scores.
#[derive(Debug)]
pub(super) struct Scored {
    tokens: Tokens,
    algorithm: Algorithm,
    missing: Missing,
    /// The token of each byte.
    bytes: Vec<Option<u32>>,
    rules: Option<Rules>,
}

impl Tokens {
    /// Texts differ, and scores are finite.
    pub fn new(by_id: Vec<Option<(String, Entry)>>) -> Tokens {
        let named = (0..).zip(&by_id).filter_map(|(id, token)| Some((token.as_ref()?.0.clone(), id)));
        let ids: HashMap<String, u32> = named.collect();
        let mut whole: HashMap<char, Vec<usize>> = HashMap::new();
        for (text, _) in by_id.iter().flatten().filter(|(_, entry)| *entry == Entry::Whole) {
            let lengths = whole.entry(text.chars().next().unwrap_or_default()).or_default();
            lengths.push(text.len());
        }
        for lengths in whole.values_mut() {
            lengths.sort_unstable_by(|a, b| b.cmp(a));
            lengths.dedup();
        }
        let longest = ids.keys().map(String::len).max().unwrap_or(0);
        Tokens { ids, by_id, whole, longest }
    }

    pub fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    pub fn text(&self, id: u32) -> Option<&str> {
        Some(&self.get(id)?.0)
    }

    fn get(&self, id: u32) -> Option<&(String, Entry)> {
        self.by_id.get(id as usize)?.as_ref()
    }

    pub fn entry(&self, id: u32) -> Entry {
        self.get(id).map_or(Entry::Named, |(_, entry)| *entry)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &str, Entry)> {
        let tokens = (0..).zip(&self.by_id);
        tokens.filter_map(|(id, token)| token.as_ref().map(|(text, entry)| (id, text.as_str(), *entry)))
    }

    /// Bytes of the longest [`Entry::Whole`] token that `text` begins with.
    pub fn whole(&self, text: &str) -> Option<usize> {
        let mut lengths = self.whole.get(&text.chars().next()?)?.iter().copied();
        let is_whole = |text: &str| self.id(text).is_some_and(|id| self.entry(id) == Entry::Whole);
        lengths.find(|length| text.get(..*length).is_some_and(is_whole))
    }
}

impl Scored {
    /// BPE: see [`Bpe`].
    pub fn bpe(by_id: Vec<Option<(String, Entry)>>, missing: Missing, rules: Option<Rules>) -> Scored {
        Scored::new(by_id, missing, rules, |tokens| Algorithm::Bpe(Bpe::new(tokens)))
    }

    /// Unigram: see [`Unigram`].
    pub fn unigram(by_id: Vec<Option<(String, Entry)>>, missing: Missing, rules: Option<Rules>) -> Scored {
        Scored::new(by_id, missing, rules, |tokens| Algorithm::Unigram(Unigram::new(tokens)))
    }

    fn new(
        by_id: Vec<Option<(String, Entry)>>,
        missing: Missing,
        rules: Option<Rules>,
        algorithm: impl FnOnce(&Tokens) -> Algorithm,
    ) -> Scored {
        let tokens = Tokens::new(by_id);
        let bytes = (0..=u8::MAX).map(|byte| tokens.id(&format!("<0x{byte:02X}>"))).collect();
        Scored { algorithm: algorithm(&tokens), tokens, missing, bytes, rules }
    }

    /// Takes texts that are tokens as they are, without joining.
    pub fn with_whole_texts(mut self) -> Scored {
        if let Algorithm::Bpe(bpe) = &mut self.algorithm {
            bpe.takes_whole_texts = true;
        }
        self
    }

    pub fn id(&self, text: &str) -> Option<u32> {
        self.tokens.id(text)
    }

    pub fn text(&self, id: u32) -> Option<&str> {
        self.tokens.text(id)
    }

    pub fn ids(&self) -> &HashMap<String, u32> {
        &self.tokens.ids
    }

    /// Whether every text has tokens, none of which stands for a run of unknown characters, and nothing is dropped.
    pub fn is_complete(&self) -> bool {
        let has_tokens = match self.missing {
            Missing::Bytes(unknown) => unknown.is_some() || self.bytes.iter().all(Option::is_some),
            Missing::Unknown(_) => false,
        };
        has_tokens && self.rules.is_none()
    }

    /// Whether a text can be cut between any two characters that are neighbours in no token.
    pub fn joins_neighbours(&self) -> bool {
        matches!(self.algorithm, Algorithm::Bpe(_)) && self.rules.is_none()
    }

    /// Whether a text can be cut in front of a space: words are normalised and chosen one by one.
    pub fn splits_at_spaces(&self) -> bool {
        let Some(rules) = self.rules.as_ref().filter(|rules| rules.keep_words()) else { return false };
        let is_word = |text: &str| !text.chars().skip(1).any(|c| c == SPACE || c == ' ' && rules.map.is_some());
        self.tokens.iter().all(|(_, text, _)| is_word(text))
    }

    /// The tokens of a text.
    pub fn tokenize(&self, text: &str) -> Vec<Token> {
        let normalised = self.rules.as_ref().map(|rules| rules.apply(text, |rest| self.tokens.whole(rest)));
        let text = normalised.as_deref().unwrap_or(text);
        let parts = match &self.algorithm {
            Algorithm::Bpe(bpe) => bpe.split(&self.tokens, text),
            Algorithm::Unigram(unigram) => unigram.split(&self.tokens, text),
        };
        let mut tokens: Vec<Token> = Vec::with_capacity(parts.len());
        let mut push = |id: u32, at: &Range<usize>| {
            let text = self.text(id).unwrap_or_default().to_string();
            tokens.push(Token::new(id, text, (at.start, at.end)));
        };
        let mut in_run = false;
        for (at, id) in parts {
            let begins_run = id.is_none() && !in_run;
            in_run = id.is_none();
            match (id, self.missing) {
                (Some(id), _) => push(id, &at),
                (None, Missing::Bytes(unknown)) => {
                    let bytes = text[at.clone()].bytes().filter_map(|byte| self.bytes[usize::from(byte)].or(unknown));
                    bytes.for_each(|id| push(id, &at));
                }
                (None, Missing::Unknown(id)) if begins_run => push(id, &at),
                (None, Missing::Unknown(_)) => {}
            }
        }
        tokens
    }
}

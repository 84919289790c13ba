//! SentencePiece's BPE: of all neighbours whose union is a token, those with the highest score are joined first, and of equal ones
//! the leftmost. The library's BPE ranks pairs instead of unions, so it cannot express equal scores. Tokens of several spaces are taken
//! first, the longest one at each place, and join with nothing.
//!
//! Tokenizing costs `O(n log n)` time and about 100 bytes of memory per character.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;

use tokenizers::Token;

/// The space in its vocabularies.
pub(super) const SPACE: char = '\u{2581}';

/// A vocabulary with scores.
#[derive(Debug)]
pub(super) struct SentencePiece {
    ids: HashMap<String, u32>,
    /// Texts by id; `None` where there is no token.
    texts: Vec<Option<String>>,
    scores: Vec<f32>,
    /// The token of each byte, for characters that are no tokens.
    bytes: Vec<Option<u32>>,
    unknown: Option<u32>,
    longest: usize,
    /// Bytes of the tokens of several spaces, longest first.
    runs: Vec<usize>,
}

/// A part of the text: a linked list, whose joined elements become empty.
struct Symbol {
    at: Range<usize>,
    previous: Option<usize>,
    next: Option<usize>,
    /// It joins with nothing.
    is_run: bool,
}

/// Two neighbours that can be joined.
struct Join {
    score: f32,
    left: usize,
    right: usize,
    /// The union when the join was found: if it has changed, the join is void.
    at: Range<usize>,
}

impl SentencePiece {
    /// `texts` and `scores` are by id. Scores are finite. `runs` are the tokens of several spaces.
    pub fn new(
        texts: Vec<Option<String>>,
        scores: Vec<f32>,
        unknown: Option<u32>,
        mut runs: Vec<usize>,
    ) -> SentencePiece {
        runs.sort_unstable_by(|a, b| b.cmp(a));
        let named = (0..).zip(&texts).filter_map(|(id, text)| Some((text.clone()?, id)));
        let ids: HashMap<String, u32> = named.collect();
        let bytes = (0..=u8::MAX).map(|byte| ids.get(&format!("<0x{byte:02X}>")).copied()).collect();
        let longest = ids.keys().map(String::len).max().unwrap_or(0);
        SentencePiece { ids, texts, scores, bytes, unknown, longest, runs }
    }

    pub fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    pub fn text(&self, id: u32) -> Option<&str> {
        self.texts.get(id as usize)?.as_deref()
    }

    pub fn ids(&self) -> &HashMap<String, u32> {
        &self.ids
    }

    /// Whether every text has tokens, none of which stands for a run of unknown characters.
    pub fn is_complete(&self) -> bool {
        self.unknown.is_some() || self.bytes.iter().all(Option::is_some)
    }

    /// The tokens of a text. Characters without tokens become bytes, and bytes without tokens the unknown token; without one
    /// they are dropped.
    pub fn tokenize(&self, text: &str) -> Vec<Token> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        let most_spaces = self.runs.first().map_or(0, |bytes| bytes / SPACE.len_utf8());
        let mut start = 0;
        while let Some(character) = text[start..].chars().next() {
            let index = symbols.len();
            let spaces = text[start..].chars().take(most_spaces).take_while(|c| *c == SPACE).count() * SPACE.len_utf8();
            let run = self.runs.iter().find(|run| **run <= spaces);
            let end = start + run.copied().unwrap_or(character.len_utf8());
            let previous = index.checked_sub(1);
            symbols.push(Symbol { at: start..end, previous, next: Some(index + 1), is_run: run.is_some() });
            start = end;
        }
        if let Some(last) = symbols.last_mut() {
            last.next = None;
        }
        let mut joins = BinaryHeap::new();
        for right in 1..symbols.len() {
            joins.extend(self.join(text, &symbols, right - 1, right));
        }
        while let Some(Join { left, right, at, .. }) = joins.pop() {
            let is_whole = symbols[left].at.start == at.start
                && symbols[left].at.end == symbols[right].at.start
                && symbols[right].at.end == at.end
                && !symbols[left].at.is_empty()
                && !symbols[right].at.is_empty();
            if !is_whole {
                continue;
            }
            let next = symbols[right].next;
            symbols[right].at = at.end..at.end;
            symbols[left].at = at;
            symbols[left].next = next;
            if let Some(next) = next {
                symbols[next].previous = Some(left);
                joins.extend(self.join(text, &symbols, left, next));
            }
            if let Some(previous) = symbols[left].previous {
                joins.extend(self.join(text, &symbols, previous, left));
            }
        }
        let mut tokens = Vec::new();
        for Symbol { at, .. } in symbols.into_iter().filter(|symbol| !symbol.at.is_empty()) {
            let mut push = |id: u32| {
                let text = self.text(id).unwrap_or_default().to_string();
                tokens.push(Token::new(id, text, (at.start, at.end)));
            };
            match self.id(&text[at.clone()]) {
                Some(id) => push(id),
                None => text[at.clone()]
                    .bytes()
                    .filter_map(|byte| self.bytes[usize::from(byte)].or(self.unknown))
                    .for_each(&mut push),
            }
        }
        tokens
    }

    fn join(&self, text: &str, symbols: &[Symbol], left: usize, right: usize) -> Option<Join> {
        let at = symbols[left].at.start..symbols[right].at.end;
        if at.len() > self.longest || symbols[left].is_run || symbols[right].is_run {
            return None;
        }
        let id = self.id(&text[at.clone()])?;
        let score = self.scores.get(id as usize).copied()?;
        Some(Join { score, left, right, at })
    }
}

impl Ord for Join {
    fn cmp(&self, other: &Join) -> Ordering {
        // 0.0 and -0.0 are equal scores.
        let scores = self.score.partial_cmp(&other.score).unwrap_or(Ordering::Equal);
        scores.then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Join {
    fn partial_cmp(&self, other: &Join) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Join {
    fn eq(&self, other: &Join) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Join {}

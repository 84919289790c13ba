//! BPE by the scores of unions: of all neighbours whose union is a token, those with the highest score are joined first, and of equal
//! ones the leftmost. Tokens that are taken whole join with nothing.
//!
//! Tokenizing costs `O(n log n)` time and about 100 bytes of memory per character.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;

use super::scored::{Entry, Tokens};

/// A part of a text, and its token.
pub(super) type Part = (Range<usize>, Option<u32>);

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Bpe {
    /// Whether there are [`Entry::Unused`] tokens.
    has_unused: bool,
    /// A text that is a token is not joined of parts.
    pub takes_whole_texts: bool,
}

/// A part of the text: a linked list, whose joined elements become empty.
struct Symbol {
    at: Range<usize>,
    previous: Option<usize>,
    next: Option<usize>,
    /// It joins with nothing.
    is_whole: bool,
}

/// Two neighbours that can be joined.
struct Join {
    score: f32,
    left: usize,
    right: usize,
    /// The union when the join was found: if it has changed, the join is void.
    at: Range<usize>,
    /// The union is an [`Entry::Unused`] token.
    is_unused: bool,
}

impl Bpe {
    pub fn new(tokens: &Tokens) -> Bpe {
        let has_unused = tokens.iter().any(|(.., entry)| matches!(entry, Entry::Unused(_)));
        Bpe { has_unused, takes_whole_texts: false }
    }

    /// The parts of a text.
    pub fn split(&self, tokens: &Tokens, text: &str) -> Vec<Part> {
        if self.takes_whole_texts
            && let Some(id) = tokens.id(text).filter(|id| matches!(tokens.entry(*id), Entry::Scored(_)))
        {
            return vec![(0..text.len(), Some(id))];
        }
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        let mut start = 0;
        while let Some(character) = text[start..].chars().next() {
            let index = symbols.len();
            let whole = tokens.whole(&text[start..]);
            let end = start + whole.unwrap_or(character.len_utf8());
            let previous = index.checked_sub(1);
            symbols.push(Symbol { at: start..end, previous, next: Some(index + 1), is_whole: whole.is_some() });
            start = end;
        }
        if let Some(last) = symbols.last_mut() {
            last.next = None;
        }
        let mut joins = BinaryHeap::new();
        // What unused tokens were joined of: the length of the left part.
        let mut unused: HashMap<&str, usize> = HashMap::new();
        let mut find = |symbols: &[Symbol], left: usize, right: usize, joins: &mut BinaryHeap<Join>| {
            if let Some(join) = Join::of(tokens, text, symbols, left, right) {
                if join.is_unused {
                    unused.insert(&text[join.at.clone()], symbols[left].at.len());
                }
                joins.push(join);
            }
        };
        for right in 1..symbols.len() {
            find(&symbols, right - 1, right, &mut joins);
        }
        while let Some(Join { left, right, at, .. }) = joins.pop() {
            let is_current = symbols[left].at.start == at.start
                && symbols[left].at.end == symbols[right].at.start
                && symbols[right].at.end == at.end
                && !symbols[left].at.is_empty()
                && !symbols[right].at.is_empty();
            if !is_current {
                continue;
            }
            let next = symbols[right].next;
            symbols[right].at = at.end..at.end;
            symbols[left].at = at;
            symbols[left].next = next;
            if let Some(previous) = symbols[left].previous {
                find(&symbols, previous, left, &mut joins);
            }
            if let Some(next) = next {
                symbols[next].previous = Some(left);
                find(&symbols, left, next, &mut joins);
            }
        }
        let mut parts = Vec::new();
        for Symbol { at, .. } in symbols.into_iter().filter(|symbol| !symbol.at.is_empty()) {
            let mut pending = vec![at];
            while let Some(at) = pending.pop() {
                match unused.get(&text[at.clone()]).filter(|_| self.has_unused) {
                    Some(length) => {
                        let middle = at.start + length;
                        pending.extend([middle..at.end, at.start..middle]);
                    }
                    None => parts.push((at.clone(), tokens.id(&text[at]))),
                }
            }
        }
        parts
    }
}

impl Join {
    fn of(tokens: &Tokens, text: &str, symbols: &[Symbol], left: usize, right: usize) -> Option<Join> {
        let at = symbols[left].at.start..symbols[right].at.end;
        if at.len() > tokens.longest || symbols[left].is_whole || symbols[right].is_whole {
            return None;
        }
        let (score, is_unused) = match tokens.entry(tokens.id(&text[at.clone()])?) {
            Entry::Scored(score) => (score, false),
            Entry::Unused(score) => (score, true),
            Entry::Whole | Entry::Named => return None,
        };
        Some(Join { score, left, right, at, is_unused })
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

//! Constraints: the tokens that a grammar allows next.
//!
//! A constraint is one sequence's state in a grammar: a JSON schema, a regular expression, a list of choices. It does
//! not see logits: the sampler bans all tokens outside its mask. The engine decides which ids end a sequence, so a
//! constraint only reports whether the text may end.

use std::fmt;

/// A set of token ids below a fixed bound.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(from = "Words"))]
pub struct TokenSet {
    words: Vec<u32>,
    size: usize,
}

/// A [`TokenSet`] before its sizes have been checked.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
struct Words {
    words: Vec<u32>,
    size: usize,
}

#[cfg(feature = "serde")]
impl From<Words> for TokenSet {
    fn from(Words { words, size }: Words) -> TokenSet {
        // The words bound the size, so that a wrong number cannot cause a large allocation.
        let size = size.min(32 * words.len());
        TokenSet::from_words(words, size)
    }
}

impl TokenSet {
    /// Creates an empty set of ids below `size`, which is capped at 2³² because ids have 32 bits.
    ///
    /// ```
    /// let mut set = sampling::TokenSet::new(40);
    /// set.insert(33);
    /// set.insert(40); // not below 40: ignored
    /// assert_eq!(set.iter().collect::<Vec<_>>(), [33]);
    /// ```
    pub fn new(size: usize) -> TokenSet {
        let size = size.min(1 << 32);
        TokenSet { words: vec![0; size.div_ceil(32)], size }
    }

    /// Creates a set from a bit mask: bit `j` of word `i` is id `32 i + j`. Words and bits behind `size` are ignored,
    /// missing words are empty.
    pub fn from_words(mut words: Vec<u32>, size: usize) -> TokenSet {
        let size = size.min(1 << 32);
        words.resize(size.div_ceil(32), 0);
        let mut set = TokenSet { words, size };
        if let (Some(last), rest @ 1..) = (set.words.last_mut(), set.size % 32) {
            *last &= (1 << rest) - 1;
        }
        set
    }

    /// The bound: all ids of the set are below it.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Adds an id. Ignores an id that is not below the size.
    pub fn insert(&mut self, token: u32) {
        if (token as usize) < self.size {
            self.words[token as usize / 32] |= 1 << (token % 32);
        }
    }

    /// Returns whether the id is in the set.
    pub fn contains(&self, token: u32) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// The bit mask, see [`TokenSet::from_words`].
    pub(crate) fn words(&self) -> &[u32] {
        &self.words
    }

    /// Returns the ids in ascending order. An empty word costs one comparison.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.words.iter().zip(0..).flat_map(|(&word, at)| {
            let rest = |&word: &u32| (word & (word - 1) != 0).then(|| word & (word - 1));
            let words = std::iter::successors((word != 0).then_some(word), rest);
            words.map(move |word| 32 * at + word.trailing_zeros())
        })
    }
}

/// The continuations that a grammar allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    /// Tokens that may continue the text.
    pub tokens: TokenSet,
    /// Whether the text may end here. If it may not and `tokens` is empty, the grammar is at a dead end.
    pub may_end: bool,
}

/// A constraint cannot continue: its grammar is too complex at this point, or it was given a token that it does not
/// allow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConstraintError(pub String);

impl fmt::Display for ConstraintError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConstraintError {}

/// One sequence's state in a grammar. It depends only on the tokens accepted, so a preemption does not affect it.
pub trait Constraint: Send {
    /// Computes what is allowed next. May be slow (it walks the vocabulary), so it is not called on the engine's
    /// thread.
    ///
    /// # Errors
    /// If the grammar is too complex at this point.
    fn mask(&mut self) -> Result<Mask, ConstraintError>;

    /// Advances by the token that was drawn, which must not be one that ends the text. Fast.
    ///
    /// # Errors
    /// If the token was not in the mask.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintError>;

    /// Returns whether the text may end and nothing can follow.
    fn is_complete(&self) -> bool;

    /// Copies the state for another sequence.
    fn fork(&self) -> Box<dyn Constraint>;
}

//! Constraints: which tokens may come next, decided by what a sequence holds so far.
//!
//! A constraint is one sequence's state in a grammar, whatever that is (a JSON schema, a regular expression, a list of
//! choices). It knows nothing of logits: the sampler bans all that is not in the set which it fills. Which ids end a
//! sequence is the engine's business, so a constraint only says whether the text may end.

use std::fmt;

/// A set of token ids below a fixed number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(from = "Words"))]
pub struct TokenSet {
    words: Vec<u32>,
    size: usize,
}

/// A [`TokenSet`] as it comes from a file or a peer.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
struct Words {
    words: Vec<u32>,
    size: usize,
}

#[cfg(feature = "serde")]
impl From<Words> for TokenSet {
    fn from(Words { words, size }: Words) -> TokenSet {
        // No larger than what has come, whatever the number says.
        TokenSet::from_words(&words, size.min(32 * words.len()))
    }
}

impl TokenSet {
    /// The empty set of ids below `size`, which is at most 2³²: ids have 32 bits.
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

    /// The set whose member `32 i + j` is bit `j` of word `i`; words and bits behind `size` are ignored, missing words are
    /// empty.
    pub fn from_words(words: &[u32], size: usize) -> TokenSet {
        let mut set = TokenSet::new(size);
        for (to, from) in set.words.iter_mut().zip(words) {
            *to = *from;
        }
        if let (Some(last), rest @ 1..) = (set.words.last_mut(), set.size % 32) {
            *last &= (1 << rest) - 1;
        }
        set
    }

    /// Ids of the set are below this.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Adds an id; one that is not below the size is ignored.
    pub fn insert(&mut self, token: u32) {
        if (token as usize) < self.size {
            self.words[token as usize / 32] |= 1 << (token % 32);
        }
    }

    /// Whether the id is in the set.
    pub fn contains(&self, token: u32) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Whether no id is in the set.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// The set as [`TokenSet::from_words`] takes it.
    pub(crate) fn words(&self) -> &[u32] {
        &self.words
    }

    /// The ids, ascending. A word without any costs one comparison.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.words.iter().zip(0..).flat_map(|(&word, at)| {
            let rest = |&word: &u32| (word & (word - 1) != 0).then(|| word & (word - 1));
            let words = std::iter::successors((word != 0).then_some(word), rest);
            words.map(move |word| 32 * at + word.trailing_zeros())
        })
    }
}

/// What may come next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    /// Tokens that may continue the text.
    pub tokens: TokenSet,
    /// Whether the text may end here. Where it may not and `tokens` is empty, the grammar has led into a dead end.
    pub may_end: bool,
}

/// A constraint can not go on: its grammar is too complex in this place, or a token came that it does not allow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConstraintError(pub String);

impl fmt::Display for ConstraintError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConstraintError {}

/// One sequence's state in a grammar. It depends on the tokens accepted and on nothing else, so a preemption in between
/// changes nothing.
pub trait Constraint: Send {
    /// What may come next. May take long (a walk through the vocabulary), so it is called off the engine's thread.
    ///
    /// # Errors
    /// When the grammar is too complex here.
    fn mask(&mut self) -> Result<Mask, ConstraintError>;

    /// Takes the token that was drawn; none that ends the text. Fast.
    ///
    /// # Errors
    /// When the token was not in the mask.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintError>;

    /// Whether the text may end and nothing can follow: there is no choice left.
    fn is_complete(&self) -> bool;

    /// The same state, for another sequence.
    fn fork(&self) -> Box<dyn Constraint>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_what_was_put_in_and_nothing_behind_its_size() {
        for size in [0, 1, 31, 32, 33, 64, 100] {
            let mut set = TokenSet::new(size);
            assert!(set.is_empty());
            (0..200).step_by(3).for_each(|token| set.insert(token));
            let wanted: Vec<u32> = (0..size as u32).step_by(3).collect();
            assert_eq!(set.iter().collect::<Vec<_>>(), wanted);
            assert!((0..200).all(|token| set.contains(token) == wanted.contains(&token)));
            let full = TokenSet::from_words(&[u32::MAX; 9], size);
            assert_eq!(full.iter().collect::<Vec<_>>(), (0..size as u32).collect::<Vec<_>>());
        }
    }
}

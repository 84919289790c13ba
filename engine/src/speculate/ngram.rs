//! Prompt lookup: what followed the last tokens when they occurred before in the same request.
//!
//! For each length n from `min` to `max`, an index maps a hash of every n tokens to the position behind their first occurrence. The
//! longest n whose last tokens are found wins; of its occurrences the earliest, which has most tokens behind it. These are vLLM's
//! rules. Tokens are compared, so a collision of hashes costs a proposal and nothing else.
//!
//! A prompt is indexed once for all sequences of its request. A token costs one index entry for each n, about 20 bytes, and constant time. A proposal takes one lookup for each n.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use sched::SeqId;

use super::prompts::Prompts;
use super::proposer::{DraftScope, Proposal, ProposeError, Proposer};

/// Prompt lookup: proposes what followed the last tokens where they first occurred in the same request.
pub struct Ngram {
    min: usize,
    max: usize,
    prompts: Prompts<Index>,
    sequences: HashMap<SeqId, IndexedSequence>,
}

/// Tokens, and where each n-gram first occurred that something follows.
#[derive(Default)]
struct Index {
    tokens: Vec<u32>,
    /// Position behind the first occurrence, by hash.
    first: HashMap<u64, u32>,
}

/// A sequence: its prompt, and what follows it.
struct IndexedSequence {
    prompt: Arc<Index>,
    own: Index,
}

impl Ngram {
    /// Looks for the last `min` to `max` tokens, both at least 1.
    pub fn new(min: usize, max: usize) -> Ngram {
        Ngram { min: min.max(1), max, prompts: Prompts::new(), sequences: HashMap::new() }
    }
}

impl IndexedSequence {
    fn new(prompt: Arc<Index>) -> IndexedSequence {
        IndexedSequence { prompt, own: Index::default() }
    }

    fn len(&self) -> usize {
        self.prompt.tokens.len() + self.own.tokens.len()
    }

    /// The tokens from a position on.
    fn tail(&self, at: usize) -> impl Iterator<Item = u32> + '_ {
        let prompt = &self.prompt.tokens;
        let own = &self.own.tokens[at.saturating_sub(prompt.len())..];
        prompt[at.min(prompt.len())..].iter().chain(own).copied()
    }

    /// The `n` tokens in front of a position.
    fn before(&self, end: usize, n: usize) -> impl Iterator<Item = u32> + '_ {
        self.tail(end - n).take(n)
    }

    fn push(&mut self, token: u32, lengths: RangeInclusive<usize>) {
        let end = self.len();
        for n in lengths.take_while(|n| *n <= end) {
            let hash = hash(n, self.before(end, n));
            if !self.prompt.first.contains_key(&hash) {
                self.own.first.entry(hash).or_insert(end as u32);
            }
        }
        self.own.tokens.push(token);
    }

    /// Position behind the first occurrence of the last `n` tokens.
    fn find(&self, n: usize) -> Option<usize> {
        let start = self.len().checked_sub(n)?;
        let hash = hash(n, self.tail(start));
        let end = *self.prompt.first.get(&hash).or_else(|| self.own.first.get(&hash))? as usize;
        self.before(end, n).eq(self.tail(start)).then_some(end)
    }
}

fn hash(n: usize, tokens: impl Iterator<Item = u32>) -> u64 {
    let mix = |hash: u64, token: u32| (hash.rotate_left(23) ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    tokens.fold(n as u64, mix)
}

impl Proposer for Ngram {
    fn begin(&mut self, seq: SeqId, _: &DraftScope, prompt: &[u32]) {
        let lengths = self.min..=self.max;
        let prompt = self.prompts.begin(seq, || {
            let mut text = IndexedSequence::new(Arc::default());
            prompt.iter().for_each(|token| text.push(*token, lengths.clone()));
            text.own
        });
        self.sequences.insert(seq, IndexedSequence::new(prompt));
    }

    fn extend(&mut self, seq: SeqId, token: u32) {
        if let Some(text) = self.sequences.get_mut(&seq) {
            text.push(token, self.min..=self.max);
        }
    }

    fn end(&mut self, seq: SeqId) {
        if let Some(text) = self.sequences.remove(&seq) {
            self.prompts.end(seq, text.prompt);
        }
    }

    fn propose(&mut self, wanted: &mut [Proposal]) -> Result<(), ProposeError> {
        for Proposal { seq, most, drafts } in wanted {
            let Some(text) = self.sequences.get(seq) else { continue };
            if let Some(at) = (self.min..=self.max).rev().find_map(|n| text.find(n)) {
                drafts.extend(text.tail(at).take(*most));
            }
        }
        Ok(())
    }
}

//! Prompt lookup: what followed the last tokens when they occurred before in the same request.
//!
//! For each length n from `min` to `max`, an index maps a hash of every n tokens to the position behind their first occurrence. The
//! longest n whose last tokens are found wins; of its occurrences the earliest, which has most tokens behind it. These are vLLM's
//! rules. Tokens are compared, so a collision of hashes costs a proposal and nothing else.
//!
//! A token costs one index entry for each n, about 20 bytes, and constant time. A proposal takes one lookup for each n.

use std::collections::HashMap;

use sched::SeqId;

use super::proposer::{Proposal, ProposeError, Proposer, Source};

/// Prompt lookup: proposes what followed the last tokens where they first occurred in the same request.
pub struct Ngram {
    min: usize,
    max: usize,
    sequences: HashMap<SeqId, Index>,
}

/// The tokens of a sequence, and where each n-gram first occurred.
#[derive(Default)]
struct Index {
    tokens: Vec<u32>,
    /// Position behind the first occurrence, by hash. N-grams at the very end are missing, because nothing follows them yet.
    first: HashMap<u64, u32>,
}

impl Ngram {
    /// Looks for the last `min` to `max` tokens, both at least 1.
    pub fn new(min: usize, max: usize) -> Ngram {
        Ngram { min: min.max(1), max, sequences: HashMap::new() }
    }
}

impl Index {
    fn push(&mut self, token: u32, lengths: std::ops::RangeInclusive<usize>) {
        let end = self.tokens.len();
        for n in lengths.take_while(|n| *n <= end) {
            self.first.entry(hash(&self.tokens[end - n..])).or_insert(end as u32);
        }
        self.tokens.push(token);
    }

    /// Position behind the first occurrence of the last `n` tokens.
    fn find(&self, n: usize) -> Option<usize> {
        let last = &self.tokens[self.tokens.len().checked_sub(n)?..];
        let end = *self.first.get(&hash(last))? as usize;
        (self.tokens[end - n..end] == *last).then_some(end)
    }
}

fn hash(tokens: &[u32]) -> u64 {
    let mix = |hash: u64, token: &u32| (hash.rotate_left(23) ^ u64::from(*token)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    tokens.iter().fold(tokens.len() as u64, mix)
}

impl Proposer for Ngram {
    fn begin(&mut self, seq: SeqId, _: &Source, prompt: &[u32]) {
        let index = self.sequences.entry(seq).or_default();
        prompt.iter().for_each(|token| index.push(*token, self.min..=self.max));
    }

    fn extend(&mut self, seq: SeqId, token: u32) {
        if let Some(index) = self.sequences.get_mut(&seq) {
            index.push(token, self.min..=self.max);
        }
    }

    fn end(&mut self, seq: SeqId) {
        self.sequences.remove(&seq);
    }

    fn propose(&mut self, wanted: &mut [Proposal]) -> Result<(), ProposeError> {
        for Proposal { seq, most, drafts } in wanted {
            let Some(index) = self.sequences.get(seq) else { continue };
            if let Some(at) = (self.min..=self.max).rev().find_map(|n| index.find(n)) {
                drafts.extend_from_slice(&index.tokens[at..(at + *most).min(index.tokens.len())]);
            }
        }
        Ok(())
    }
}

//! SentencePiece's unigram: the tokens of a text are those with the greatest sum of scores.
//!
//! Sums are those of SentencePiece to the bit: each is rounded to float32, and a later path must be better to replace an earlier one.
//! The cost is linear in the text, times the length of the longest token that it begins with at each place.

use std::cmp::Ordering;

use super::bpe::Part;
use super::scored::{Entry, Tokens};

/// Score of an unknown character below that of the least likely token.
const UNKNOWN_PENALTY: f32 = 10.0;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Unigram {
    /// Tokens that texts become, in the order of their bytes.
    sorted: Vec<u32>,
    unknown: f32,
    greatest: f32,
}

/// The best way to the end of a token.
#[derive(Clone, Copy)]
struct Best {
    sum: f32,
    start: usize,
    id: Option<u32>,
}

impl Unigram {
    pub fn new(tokens: &Tokens) -> Unigram {
        let used = |entry| matches!(entry, Entry::Scored(_) | Entry::Whole);
        let mut sorted: Vec<(&str, u32)> =
            tokens.iter().filter(|(.., entry)| used(*entry)).map(|(id, text, _)| (text, id)).collect();
        sorted.sort_unstable();
        let scores = tokens.iter().filter_map(|(.., entry)| match entry {
            Entry::Scored(score) => Some(score),
            _ => None,
        });
        // SentencePiece begins with the least positive number.
        let (least, greatest) = scores
            .fold((f32::MAX, f32::MIN_POSITIVE), |(least, greatest), score| (least.min(score), greatest.max(score)));
        let sorted = sorted.into_iter().map(|(_, id)| id).collect();
        Unigram { sorted, unknown: least - UNKNOWN_PENALTY, greatest }
    }

    /// The parts of a text.
    pub fn split(&self, tokens: &Tokens, text: &str) -> Vec<Part> {
        let mut best: Vec<Option<Best>> = vec![None; text.len() + 1];
        for (start, character) in text.char_indices() {
            let here = best[start].map_or(0.0, |best| best.sum);
            let mut improve = |length: usize, score: f64, id: Option<u32>| {
                let sum = score + f64::from(here);
                let best = &mut best[start + length];
                if best.is_none_or(|best| sum > f64::from(best.sum)) {
                    *best = Some(Best { sum: sum as f32, start, id });
                }
            };
            let mut is_known = false;
            self.prefixes(tokens, &text.as_bytes()[start..], |id, length| {
                is_known |= length == character.len_utf8();
                let score = match tokens.entry(id) {
                    Entry::Scored(score) => f64::from(score),
                    // It is chosen whatever the others are.
                    _ => f64::from(length as f32 * self.greatest) - 0.1,
                };
                improve(length, score, Some(id));
            });
            if !is_known {
                improve(character.len_utf8(), f64::from(self.unknown), None);
            }
        }
        let mut parts = Vec::new();
        let mut end = text.len();
        while let Some(Best { start, id, .. }) = best[end].filter(|best| best.start < end) {
            parts.push((start..end, id));
            end = start;
        }
        parts.reverse();
        parts
    }

    /// Calls `found` with each token that a text begins with, and its length, the shortest first.
    fn prefixes(&self, tokens: &Tokens, text: &[u8], mut found: impl FnMut(u32, usize)) {
        let bytes = |id: u32| tokens.text(id).unwrap_or_default().as_bytes();
        let mut candidates = &self.sorted[..];
        for (depth, byte) in text.iter().enumerate() {
            let order = |id: u32| bytes(id).get(depth).map_or(Ordering::Less, |other| other.cmp(byte));
            let from = candidates.partition_point(|id| order(*id) == Ordering::Less);
            let to = candidates.partition_point(|id| order(*id) != Ordering::Greater);
            candidates = &candidates[from..to];
            match candidates.first() {
                None => return,
                Some(id) if bytes(*id).len() == depth + 1 => found(*id, depth + 1),
                Some(_) => {}
            }
        }
    }
}

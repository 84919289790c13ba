//! Suffix decoding: what most often followed the last tokens, in the same request and in earlier outputs (arXiv 2411.04975).
//!
//! The last p tokens have occurred before at some places. The tokens behind these places form a tree; a draft follows the most
//! frequent child from its root, and the product of the shares on its way estimates how likely it is right. A draft of a match of p
//! tokens has at most `p × max_spec_factor` tokens and ends below `min_token_prob`. The score of a draft is the sum of its
//! probabilities. The best score wins; equal ones go to the longer match, and to the request's own text.
//!
//! The trees are never built. A [`Corpus`] keeps texts and, for each position, the distance to the last earlier position with the
//! same two tokens, as compressors do. A proposal walks this chain from the end of the sequence, at most [`LOOKED_AT`] places, and
//! compares the tokens in front of each, at most `max_tree_depth`. So counts are those of the most recent places, and a match has
//! at least two tokens. A token costs about 50 bytes and constant time, where a tree of depth 24 would need 24 nodes for it.
//!
//! **Bounds.** A request keeps its own text, the prompt once for all of its sequences. Earlier outputs are kept for each [`DraftScope`] apart, so text of one cache salt or adapter
//! is never proposed to another. The oldest are dropped above `max_cached_requests` outputs, or above [`MAX_CACHED_TOKENS`] tokens,
//! which is about 50 MB.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use sched::SeqId;

use super::prompts::Prompts;
use super::proposer::{DraftScope, Proposal, ProposeError, Proposer};

/// Greatest number of tokens of earlier outputs, of all scopes together.
pub const MAX_CACHED_TOKENS: usize = 1 << 20;

/// Greatest number of earlier places that a proposal compares, in each corpus.
const LOOKED_AT: usize = 64;

/// Stands between two texts. No vocabulary has this id.
const BORDER: u32 = u32::MAX;

/// Limits of suffix decoding, with the names and defaults of vLLM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SuffixLimits {
    /// Greatest length of a match in tokens.
    pub max_tree_depth: usize,
    /// Greatest number of earlier outputs that are kept; 0: only the request's own text is used.
    pub max_cached_requests: usize,
    /// Greatest number of drafts for each token of the match.
    pub max_spec_factor: f64,
    /// Least estimated probability of a draft.
    pub min_token_prob: f64,
}

impl Default for SuffixLimits {
    fn default() -> Self {
        SuffixLimits { max_tree_depth: 24, max_cached_requests: 10_000, max_spec_factor: 1.0, min_token_prob: 0.1 }
    }
}

/// Texts in the order of their arrival, and where two tokens last occurred together.
#[derive(Default)]
struct Corpus {
    /// What stands in front of the tokens and never changes: the prompt of a sequence, which other sequences share.
    base: Option<Arc<Corpus>>,
    tokens: VecDeque<u32>,
    /// For each token the distance to the last earlier position with the same token behind the same one; 0: none.
    distances: VecDeque<u32>,
    /// Position, counted from the first token ever, at which two tokens last ended.
    last: HashMap<(u32, u32), u64>,
    /// Number of tokens dropped from the front.
    dropped: u64,
}

impl Corpus {
    fn base_len(&self) -> usize {
        self.base.as_ref().map_or(0, |base| base.tokens.len())
    }

    fn len(&self) -> usize {
        self.base_len() + self.tokens.len()
    }

    /// The token with this index, and its distance.
    fn get(&self, at: usize) -> Option<(u32, u32)> {
        match at.checked_sub(self.base_len()) {
            Some(at) => Some((*self.tokens.get(at)?, *self.distances.get(at)?)),
            None => self.base.as_ref()?.get(at),
        }
    }

    fn token(&self, at: usize) -> Option<u32> {
        self.get(at).map(|(token, _)| token)
    }

    /// Position at which two tokens last ended.
    fn last(&self, pair: (u32, u32)) -> Option<u64> {
        self.last.get(&pair).copied().or_else(|| self.base.as_ref()?.last(pair))
    }

    fn push(&mut self, token: u32) {
        let len = self.len();
        let position = self.dropped + len as u64;
        let before = len.checked_sub(1).and_then(|at| self.token(at));
        let last = before.filter(|before| *before != BORDER && token != BORDER).and_then(|before| {
            let last = self.last((before, token));
            self.last.insert((before, token), position);
            last
        });
        self.distances.push_back(last.map_or(0, |last| u32::try_from(position - last).unwrap_or(0)));
        self.tokens.push_back(token);
    }

    /// Drops the oldest `count` tokens.
    fn drop_front(&mut self, count: usize) {
        for _ in 0..count.min(self.tokens.len()) {
            self.distances.pop_front();
            let Some(token) = self.tokens.pop_front() else { return };
            self.dropped += 1;
            // The pair that ends with the token now in front can no longer be compared.
            if let Some(next) = self.tokens.front()
                && self.last.get(&(token, *next)) == Some(&self.dropped)
            {
                self.last.remove(&(token, *next));
            }
        }
    }

    /// Indices of the tokens behind earlier occurrences of the end of `context`, latest first, with the lengths of the matches.
    fn matches(&self, context: &Corpus, depth: usize) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        let len = context.len();
        let pair = len.checked_sub(2).and_then(|at| Some((context.token(at)?, context.token(at + 1)?)));
        let last = pair.and_then(|pair| self.last(pair));
        let mut next = last.and_then(|position| usize::try_from(position - self.dropped).ok());
        for _ in 0..=LOOKED_AT {
            let Some(at) = next.filter(|at| *at > 0) else { break };
            // The end of the context itself has nothing behind it.
            if at + 1 < self.len() && found.len() < LOOKED_AT {
                let most = depth.min(len).min(at + 1);
                let length =
                    (2..most).find(|back| self.token(at - back) != context.token(len - 1 - back)).unwrap_or(most);
                found.push((at + 1, length));
            }
            let distance = self.get(at).map_or(0, |(_, distance)| distance as usize);
            next = at.checked_sub(distance).filter(|_| distance > 0);
        }
        found
    }

    /// The draft with the best score for the end of `context`.
    fn draft(&self, context: &Corpus, most: usize, limits: &SuffixLimits) -> Draft {
        let found = self.matches(context, limits.max_tree_depth);
        let mut lengths: Vec<usize> = found.iter().map(|(_, length)| *length).collect();
        lengths.sort_unstable();
        lengths.dedup();
        let mut best = Draft::default();
        // Between two lengths the places are the same, and the longer match allows more drafts.
        for length in lengths {
            let allowed = most.min((length as f64 * limits.max_spec_factor) as usize);
            let places = found.iter().filter(|(_, other)| *other >= length).map(|(at, _)| *at).collect();
            let draft = self.follow(places, allowed, limits.min_token_prob);
            if draft.score >= best.score {
                best = draft;
            }
        }
        best
    }

    /// Extends the draft with the token that most often follows the matches; the latest match breaks ties. Matches are ordered latest first.
    fn follow(&self, mut places: Vec<usize>, allowed: usize, min_token_prob: f64) -> Draft {
        let (mut draft, mut probability) = (Draft::default(), 1.0);
        while draft.tokens.len() < allowed {
            let mut counts: Vec<(u32, usize)> = Vec::new();
            for token in places.iter().filter_map(|at| self.token(*at)).filter(|token| *token != BORDER) {
                match counts.iter_mut().find(|(other, _)| *other == token) {
                    Some((_, count)) => *count += 1,
                    None => counts.push((token, 1)),
                }
            }
            let Some((token, count)) = counts.into_iter().rev().max_by_key(|(_, count)| *count) else { break };
            probability *= count as f64 / places.len() as f64;
            if probability < min_token_prob {
                break;
            }
            draft.score += probability;
            draft.tokens.push(token);
            places.retain(|at| self.token(*at) == Some(token));
            places.iter_mut().for_each(|at| *at += 1);
        }
        draft
    }
}

#[derive(Default)]
struct Draft {
    tokens: Vec<u32>,
    /// Expected number of right tokens.
    score: f64,
}

/// The text of a live sequence.
struct LiveSequence {
    /// The prompt is its base.
    corpus: Corpus,
    scope: DraftScope,
}

/// Suffix decoding: proposes what most often followed the last tokens in the same request and in earlier outputs.
pub struct Suffix {
    limits: SuffixLimits,
    prompts: Prompts<Corpus>,
    live: HashMap<SeqId, LiveSequence>,
    /// Earlier outputs.
    earlier: HashMap<DraftScope, Corpus>,
    /// Scopes of the outputs and their numbers of tokens, borders included, oldest first.
    order: VecDeque<(DraftScope, usize)>,
    num_tokens: usize,
}

impl Suffix {
    /// Creates the proposer without any text.
    pub fn new(limits: SuffixLimits) -> Suffix {
        Suffix {
            limits,
            prompts: Prompts::new(),
            live: HashMap::new(),
            earlier: HashMap::new(),
            order: VecDeque::new(),
            num_tokens: 0,
        }
    }

    fn drop_oldest(&mut self) {
        let Some((scope, count)) = self.order.pop_front() else { return };
        self.num_tokens -= count;
        if let Some(corpus) = self.earlier.get_mut(&scope) {
            corpus.drop_front(count);
            if corpus.tokens.is_empty() {
                self.earlier.remove(&scope);
            }
        }
    }
}

impl Proposer for Suffix {
    fn begin(&mut self, seq: SeqId, scope: &DraftScope, prompt: &[u32]) {
        let base = self.prompts.begin(seq, || {
            let mut corpus = Corpus::default();
            prompt.iter().for_each(|token| corpus.push(*token));
            corpus
        });
        let corpus = Corpus { base: Some(base), ..Corpus::default() };
        self.live.insert(seq, LiveSequence { corpus, scope: scope.clone() });
    }

    fn extend(&mut self, seq: SeqId, token: u32) {
        if let Some(text) = self.live.get_mut(&seq) {
            text.corpus.push(token);
        }
    }

    fn end(&mut self, seq: SeqId) {
        let Some(LiveSequence { corpus: Corpus { base, tokens, .. }, scope }) = self.live.remove(&seq) else { return };
        base.into_iter().for_each(|base| self.prompts.end(seq, base));
        let count = tokens.len() + 1;
        if self.limits.max_cached_requests == 0 || count > MAX_CACHED_TOKENS {
            return;
        }
        while self.order.len() >= self.limits.max_cached_requests || self.num_tokens + count > MAX_CACHED_TOKENS {
            self.drop_oldest();
        }
        let kept = self.earlier.entry(scope.clone()).or_default();
        tokens.iter().for_each(|token| kept.push(*token));
        kept.push(BORDER);
        self.order.push_back((scope, count));
        self.num_tokens += count;
    }

    fn propose(&mut self, wanted: &mut [Proposal]) -> Result<(), ProposeError> {
        for Proposal { seq, most, drafts } in wanted {
            let Some(LiveSequence { corpus, scope, .. }) = self.live.get(seq) else { continue };
            let own = corpus.draft(corpus, *most, &self.limits);
            let earlier = self.earlier.get(scope).map(|earlier| earlier.draft(corpus, *most, &self.limits));
            let best = earlier.filter(|earlier| earlier.score > own.score).unwrap_or(own);
            drafts.extend(best.tokens);
        }
        Ok(())
    }
}

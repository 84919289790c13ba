//! The host's sampler: runs the steps in order and owns their buffers.

use crate::adjust::Adjuster;
use crate::argmax::{argmax, max};
use crate::context::{Context, Likely, Sampled};
use crate::draw::{Coordinates, draw};
use crate::filter::{self, Candidate};
use crate::logprobs::{Distribution, TokenLogprobs, token_logprobs};
use crate::params::{SamplingParams, is_greedy};

/// Draws tokens. It contains only buffers, so every sampler returns the same token for the same arguments, and one per
/// thread is enough.
///
/// Plain greedy sampling is one pass over the logits and uses no buffer; everything else is linear in the vocabulary.
/// Once the buffers have grown to the vocabulary, only the lists in [`TokenLogprobs::top`] are allocated.
#[derive(Default)]
pub struct Sampler {
    adjuster: Adjuster,
    kept: Vec<Candidate>,
}

/// A row after all steps before the draw.
enum Filtered {
    /// The token is certain.
    Certain(u32),
    /// The token is one of `Sampler::kept`, which is not empty.
    Candidates,
}

impl Sampler {
    /// Creates a sampler with empty buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Draws the next token from `logits`, which has one element per token of the vocabulary.
    ///
    /// Of equal logits the lowest id is the likeliest. NaN and −∞ mark impossible tokens; +∞ counts as the largest
    /// finite number. If only stop ids are allowed, `min_tokens` does not hold them back. If the parameters leave no
    /// possible token, they are ignored and the result is the likeliest token of the raw row within
    /// [`Context::allowed`], or the lowest allowed token if all of those are impossible too.
    pub fn sample(&mut self, logits: &[f32], params: &SamplingParams, context: &Context<'_>) -> Sampled {
        let filtered = self.filter(logits, params, context);
        self.finish(&filtered, logits, params, context)
    }

    /// Draws one token for each of `sequences` from the same row, as [`Sampler::sample`] would for each. The row is
    /// adjusted and filtered once. Intended for the first token of the `n` sequences of a prompt. Ignores
    /// [`Context::sequence`].
    pub fn sample_each(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        context: &Context<'_>,
        sequences: impl IntoIterator<Item = u32>,
    ) -> impl Iterator<Item = Sampled> {
        let filtered = self.filter(logits, params, context);
        sequences
            .into_iter()
            .map(move |sequence| self.finish(&filtered, logits, params, &Context { sequence, ..*context }))
    }

    /// Returns the `k` likeliest tokens, descending, ties by id: the candidates with which a beam search extends a
    /// hypothesis. Returns fewer if fewer are possible, but at least one if `k` is not 0.
    ///
    /// The order is that of the adjusted row: allowed ids, bad words, `min_tokens`, bias and penalties apply;
    /// temperature, min_p, top_k, top_p, typical_p and the seed do not. If no token is left, the result is the token
    /// that [`Sampler::sample`] falls back to, with the raw row's log-probability.
    ///
    /// Takes three passes over the row; with log-probabilities three more and one per token.
    pub fn likeliest(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        context: &Context<'_>,
        k: usize,
    ) -> Vec<Likely> {
        let mut best = Distribution::new(self.adjuster.adjust(logits, params, context)).top(k);
        if best.is_empty() && k > 0 {
            let token = fallback(logits, context);
            best.push((token, Distribution::new(logits).of(token).0));
        }
        let raw = params.logprobs.map(|alternatives| {
            let raw = Distribution::new(logits);
            let top = raw.top(alternatives);
            (raw, top)
        });
        let logprobs_of = |token| {
            let (raw, top) = raw.as_ref()?;
            let (logprob, rank) = raw.of(token);
            Some(TokenLogprobs { logprob, rank, top: top.clone() })
        };
        let likely = |(token, logprob)| Likely { sampled: Sampled { token, logprob: logprobs_of(token) }, logprob };
        best.into_iter().map(likely).collect()
    }

    /// Returns the probability with which [`Sampler::sample`] draws each token: 0 for tokens that are not kept, and a
    /// single 1 if the choice is certain.
    pub fn probabilities(&mut self, logits: &[f32], params: &SamplingParams, context: &Context<'_>) -> Vec<f32> {
        let mut probabilities = vec![0.0; logits.len()];
        match self.filter(logits, params, context) {
            Filtered::Certain(token) => {
                if let Some(certain) = probabilities.get_mut(token as usize) {
                    *certain = 1.0;
                }
            }
            Filtered::Candidates => {
                let largest = filter::largest(&self.kept);
                let weight = |candidate: &Candidate| f64::from(candidate.logit - largest).exp();
                let mass: f64 = self.kept.iter().map(weight).sum();
                for candidate in &self.kept {
                    probabilities[candidate.token as usize] = (weight(candidate) / mass) as f32;
                }
            }
        }
        probabilities
    }

    fn filter(&mut self, logits: &[f32], params: &SamplingParams, context: &Context<'_>) -> Filtered {
        let row = self.adjuster.adjust(logits, params, context);
        if is_greedy(params) {
            return Filtered::Certain(argmax(row).unwrap_or_else(|| fallback(logits, context)));
        }
        // Adding 0 turns −0 into 0, so that equal logits have equal bits.
        let scaled = |logit: f32| (logit / params.temperature).min(f32::MAX) + 0.0;
        // min_p: p ≥ min_p · p_max is a threshold on the logits. ln 0 = −∞ keeps every finite logit.
        let least = (scaled(max(row)) + params.min_p.ln()).max(f32::MIN);
        self.kept.clear();
        self.kept.extend(row.iter().enumerate().filter_map(|(token, &raw)| {
            let logit = scaled(raw);
            (logit >= least && !raw.is_nan()).then_some(Candidate { token: token as u32, logit })
        }));
        filter::top_k(&mut self.kept, params.top_k as usize);
        filter::top_p(&mut self.kept, params.top_p);
        filter::typical_p(&mut self.kept, params.typical_p.unwrap_or(1.0));
        if self.kept.is_empty() { Filtered::Certain(fallback(logits, context)) } else { Filtered::Candidates }
    }

    fn finish(&self, filtered: &Filtered, logits: &[f32], params: &SamplingParams, context: &Context<'_>) -> Sampled {
        let coordinates =
            Coordinates { seed: context.seed, output_index: context.output.len() as u32, sequence: context.sequence };
        let token = match *filtered {
            Filtered::Certain(token) => token,
            Filtered::Candidates => draw(&self.kept, coordinates).unwrap_or_else(|| fallback(logits, context)),
        };
        Sampled { token, logprob: params.logprobs.map(|k| token_logprobs(logits, token, k)) }
    }
}

/// The token where the parameters leave none.
fn fallback(logits: &[f32], context: &Context<'_>) -> u32 {
    let Some(allowed) = context.allowed else { return argmax(logits).unwrap_or(0) };
    let logit = |&token: &u32| logits.get(token as usize).copied().filter(|logit| !logit.is_nan());
    // `max_by` returns the last of equal maxima, so the lowest id must come last.
    let mut ids: Vec<u32> = allowed.iter().take_while(|&id| (id as usize) < logits.len()).collect();
    ids.reverse();
    let key = |token: &u32| logit(token).unwrap_or(f32::NEG_INFINITY) + 0.0;
    ids.into_iter().max_by(|a, b| key(a).total_cmp(&key(b))).unwrap_or(0)
}

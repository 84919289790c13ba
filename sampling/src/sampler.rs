//! The sampler: runs the steps in order and owns the buffers they need.

use crate::adjust::Adjuster;
use crate::argmax::{argmax, max};
use crate::context::{Context, Likely, Sampled};
use crate::draw::{Coordinates, draw};
use crate::filter::{self, Candidate};
use crate::logprobs::{Distribution, TokenLogprobs, token_logprobs};
use crate::params::{SamplingParams, is_greedy};

/// Draws tokens. It holds buffers and nothing else, so any sampler gives the same token for the same arguments, and one per
/// thread is enough.
///
/// Costs for a vocabulary of V: plain greedy is one pass over the logits and touches no buffer; everything else is linear in
/// V. Once the buffers have grown to V nothing is allocated, save the lists that [`TokenLogprobs::top`] returns.
#[derive(Default)]
pub struct Sampler {
    adjuster: Adjuster,
    kept: Vec<Candidate>,
}

/// A row after every step but the draw.
enum Shaped {
    /// One token is certain.
    Certain(u32),
    /// `Sampler::kept` holds at least one candidate.
    Open,
}

impl Sampler {
    /// A sampler with empty buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// The next token after `logits` (one per token of the vocabulary).
    ///
    /// Where only stop ids are allowed, `min_tokens` does not hold them back. Equal logits: the lowest id. NaN and −∞ are
    /// impossible tokens; +∞ counts as the largest finite number. If the parameters leave nothing possible, they are set
    /// aside and the likeliest token of the raw row (within [`Context::allowed`]) is taken; if that has none either, the
    /// lowest that is allowed.
    pub fn sample(&mut self, logits: &[f32], params: &SamplingParams, context: &Context<'_>) -> Sampled {
        let shaped = self.shape(logits, params, context);
        self.finish(&shaped, logits, params, context)
    }

    /// One token for each of `sequences` from the same row, as [`Sampler::sample`] would give for each; the shaping of the
    /// row is done once. For the first token of the `n` sequences of a prompt: [`Context::sequence`] is not looked at.
    pub fn sample_each(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        context: &Context<'_>,
        sequences: impl IntoIterator<Item = u32>,
    ) -> impl Iterator<Item = Sampled> {
        let shaped = self.shape(logits, params, context);
        sequences
            .into_iter()
            .map(move |sequence| self.finish(&shaped, logits, params, &Context { sequence, ..*context }))
    }

    /// The `k` likeliest tokens after `logits`, descending, equal ones by id: what a beam search extends its hypotheses
    /// with. Fewer, where fewer are possible, but at least one if `k` is.
    ///
    /// Likely by the adjusted row: allowed ids, bad words, `min_tokens`, bias and penalties count; temperature, min_p,
    /// top_k, top_p, typical_p and the seed do not. Where nothing is left the choice is that of [`Sampler::sample`], with
    /// the raw row's log-probability.
    ///
    /// Costs three passes over the row, and three more and one per token where log-probabilities are asked for.
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
        let reported = |token| {
            let (raw, top) = raw.as_ref()?;
            let (logprob, rank) = raw.of(token);
            Some(TokenLogprobs { logprob, rank, top: top.clone() })
        };
        let likely = |(token, logprob)| Likely { sampled: Sampled { token, logprob: reported(token) }, logprob };
        best.into_iter().map(likely).collect()
    }

    /// The probability of every token, as [`Sampler::sample`] draws: length of `logits`, 0 for what is not kept, and a single
    /// 1 where the choice is certain.
    pub fn probabilities(&mut self, logits: &[f32], params: &SamplingParams, context: &Context<'_>) -> Vec<f32> {
        let mut probabilities = vec![0.0; logits.len()];
        match self.shape(logits, params, context) {
            Shaped::Certain(token) => {
                if let Some(certain) = probabilities.get_mut(token as usize) {
                    *certain = 1.0;
                }
            }
            Shaped::Open => {
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

    fn shape(&mut self, logits: &[f32], params: &SamplingParams, context: &Context<'_>) -> Shaped {
        let row = self.adjuster.adjust(logits, params, context);
        if is_greedy(params) {
            return Shaped::Certain(argmax(row).unwrap_or_else(|| fallback(logits, context)));
        }
        // The sum makes −0 a 0: equal logits are equal.
        let scaled = |logit: f32| (logit / params.temperature).min(f32::MAX) + 0.0;
        // min_p: p ≥ min_p · p_max is a threshold on the logits; ln 0 = −∞ lets all pass that are finite.
        let floor = (scaled(max(row)) + params.min_p.ln()).max(f32::MIN);
        self.kept.clear();
        self.kept.extend(row.iter().enumerate().filter_map(|(token, &raw)| {
            let logit = scaled(raw);
            (logit >= floor && !raw.is_nan()).then_some(Candidate { token: token as u32, logit })
        }));
        filter::top_k(&mut self.kept, params.top_k as usize);
        filter::top_p(&mut self.kept, params.top_p);
        filter::typical_p(&mut self.kept, params.typical_p.unwrap_or(1.0));
        if self.kept.is_empty() { Shaped::Certain(fallback(logits, context)) } else { Shaped::Open }
    }

    fn finish(&self, shaped: &Shaped, logits: &[f32], params: &SamplingParams, context: &Context<'_>) -> Sampled {
        let coordinates =
            Coordinates { seed: context.seed, output_index: context.output.len() as u32, sequence: context.sequence };
        let token = match *shaped {
            Shaped::Certain(token) => token,
            Shaped::Open => draw(&self.kept, coordinates).unwrap_or_else(|| fallback(logits, context)),
        };
        Sampled { token, logprob: params.logprobs.map(|k| token_logprobs(logits, token, k)) }
    }
}

/// The choice where the parameters leave none.
fn fallback(logits: &[f32], context: &Context<'_>) -> u32 {
    let Some(allowed) = context.allowed else { return argmax(logits).unwrap_or(0) };
    let logit = |&token: &u32| logits.get(token as usize).copied().filter(|logit| !logit.is_nan());
    // The last of equal maxima wins, so the lowest id comes last.
    let mut ids: Vec<u32> = allowed.iter().take_while(|&id| (id as usize) < logits.len()).collect();
    ids.reverse();
    let key = |token: &u32| logit(token).unwrap_or(f32::NEG_INFINITY) + 0.0;
    ids.into_iter().max_by(|a, b| key(a).total_cmp(&key(b))).unwrap_or(0)
}

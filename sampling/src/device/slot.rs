//! A request's wishes as a slot holds them.

use super::layout::{RowParams, flag};
use super::limits::{Limits, SampleError, at_most};
use crate::params::is_greedy;
use crate::{Context, SamplingParams, TokenSet};

/// What the host knows of a slot.
#[derive(Clone, Copy, Default)]
pub(super) struct Slot {
    /// `None`: nobody's.
    pub params: Option<RowParams>,
    /// Number of the last call that staged a row of it.
    pub staged: u64,
}

/// What a request brings to its slot beside the history.
pub(super) struct Wishes {
    pub params: RowParams,
    /// The slot's list.
    pub list: Vec<u32>,
    /// Of allowed_token_ids.
    pub allowed: Option<TokenSet>,
}

impl Wishes {
    pub fn of(limits: &Limits, params: &SamplingParams, context: &Context<'_>) -> Result<Wishes, SampleError> {
        let logprobs = params.logprobs.unwrap_or(0);
        at_most("alternatives of a token", logprobs, limits.max_logprobs)?;
        // Those of one token stay in their order: sums of floats depend on it.
        let mut biases = params.logit_bias.clone();
        biases.sort_by_key(|&(token, _)| token);
        let mut stops = context.stop_ids.to_vec();
        stops.sort_unstable();
        stops.dedup();
        let mut list: Vec<u32> = biases.iter().flat_map(|&(token, bias)| [token, bias.to_bits()]).collect();
        list.extend(&stops);
        let bad_words = list.len();
        for word in params.bad_words.iter().filter(|word| !word.is_empty()) {
            at_most("tokens of a bad word before its last", word.len() - 1, limits.bad_word_tokens)?;
            list.push(word.len() as u32);
            list.extend(word);
        }
        at_most("words of biases, stop ids and bad words", list.len(), limits.list_words)?;

        let allowed = params.allowed_token_ids.as_ref().map(|ids| {
            let mut set = TokenSet::new(limits.vocab);
            ids.iter().for_each(|&id| set.insert(id));
            set
        });
        let penalised =
            params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0;
        let flags = [
            (is_greedy(params), flag::GREEDY),
            (context.allowed.is_some(), flag::CONSTRAINED),
            (allowed.is_some(), flag::ALLOWED),
            (penalised, flag::PENALISED),
            (params.logprobs.is_some(), flag::LOGPROBS),
        ];
        let params = RowParams {
            flags: flags.into_iter().filter(|(is, _)| *is).map(|(_, flag)| flag).sum(),
            temperature: params.temperature,
            top_p: params.top_p,
            typical_p: params.typical_p.unwrap_or(1.0),
            ln_min_p: params.min_p.ln(),
            top_k: params.top_k,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            min_tokens: u32::try_from(params.min_tokens).unwrap_or(u32::MAX),
            num_biases: biases.len() as u32,
            num_stops: stops.len() as u32,
            bad_words: (list.len() - bad_words) as u32,
            num_top: logprobs as u32,
            seed: context.seed,
            sequence: context.sequence,
        };
        Ok(Wishes { params, list, allowed })
    }
}

impl Limits {
    /// Whether a slot has room for what a request asks for.
    ///
    /// # Errors
    /// [`SampleError::TooMany`]: draw for it on the host.
    pub fn check_request(&self, params: &SamplingParams, stop_ids: &[u32]) -> Result<(), SampleError> {
        let context = Context { prompt: &[], output: &[], stop_ids, allowed: None, seed: 0, sequence: 0 };
        Wishes::of(self, params, &context).map(drop)
    }
}

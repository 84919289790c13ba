//! A request as a slot holds it.

use super::args::{RowParams, flag};
use super::limits::{Limits, SampleError, at_most};
use crate::params::is_greedy;
use crate::{Context, SamplingParams, TokenSet};

/// The host's copy of a slot.
#[derive(Clone, Copy, Default)]
pub(super) struct Slot {
    /// `None` while the slot is free.
    pub params: Option<RowParams>,
    /// Number of the last [`stage`](super::DeviceSampler::stage) call that named the slot.
    pub staged: u64,
}

/// A request in the form that its slot stores, without the history.
pub(super) struct EncodedRequest {
    pub params: RowParams,
    /// Biases, stop ids and bad words, as `RowParams` in `csrc/args.cuh` documents them.
    pub list: Vec<u32>,
    /// Mask of `allowed_token_ids`.
    pub allowed: Option<TokenSet>,
}

impl EncodedRequest {
    pub fn new(limits: &Limits, params: &SamplingParams, context: &Context<'_>) -> Result<EncodedRequest, SampleError> {
        let logprobs = params.logprobs.unwrap_or(0);
        at_most("alternatives of a token", logprobs, limits.max_logprobs)?;
        // A stable sort: the biases of one token are added in the request's order, which the rounding depends on.
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
        let is_penalised =
            params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0;
        let flags = [
            (is_greedy(params), flag::GREEDY),
            (context.allowed.is_some(), flag::CONSTRAINED),
            (allowed.is_some(), flag::ALLOWED),
            (is_penalised, flag::PENALISED),
            (params.logprobs.is_some(), flag::LOGPROBS),
        ];
        let params = RowParams {
            flags: flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).sum(),
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
            seed: [context.seed as u32, (context.seed >> 32) as u32],
            sequence: context.sequence,
            padding: [0; 3],
        };
        Ok(EncodedRequest { params, list, allowed })
    }
}

impl Limits {
    /// Checks whether a request fits a slot.
    ///
    /// # Errors
    /// [`SampleError::TooMany`] if it does not; sample it on the host.
    pub fn check_request(&self, params: &SamplingParams, stop_ids: &[u32]) -> Result<(), SampleError> {
        let context = Context { prompt: &[], output: &[], stop_ids, allowed: None, seed: 0, sequence: 0 };
        EncodedRequest::new(self, params, &context).map(drop)
    }
}

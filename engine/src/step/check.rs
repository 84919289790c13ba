//! Checks of a request before it is queued.

use std::collections::HashSet;

use sched::Refusal;

use crate::api::{GenerationParams, GenerationRequest};
use crate::error::SubmitError;

/// Most bytes of a request as other ranks and recordings get it. So the size of a step is bounded: by this for each of its new requests.
const MOST_BYTES: usize = 32 << 20;

/// Most sequences of a request. Those that do not run at once wait, and each takes memory.
pub(crate) const MOST_SEQUENCES: usize = 16 << 10;

/// Upper bound of the encoded size of a request: at most 5 bytes for a token id or a length, and 4 more for a bias.
fn most_bytes(request: &GenerationRequest) -> usize {
    let GenerationParams { sampling, stop_token_ids, .. } = &request.params;
    let words: usize = sampling.bad_words.iter().map(|word| word.len() + 1).sum();
    let allowed = sampling.allowed_token_ids.as_ref().map_or(0, |ids| ids.len());
    5 * (request.prompt.len() + stop_token_ids.len() + words + allowed) + 9 * sampling.logit_bias.len()
}

/// Refuses a request that no step could compute: fields out of range, lists that leave no token, and a prompt that fills the context.
pub(crate) fn check(
    request: &GenerationRequest,
    vocab_size: usize,
    (max_model_len, generates): (usize, bool),
    eos_token_ids: &[u32],
) -> Result<(), SubmitError> {
    let params = &request.params;
    let invalid = |param, problem: String| Err(SubmitError::invalid(param, problem));
    params.sampling.validate().map_err(|e| SubmitError::Invalid { param: e.param, message: e.message })?;
    if request.prompt.is_empty() {
        let message = "the prompt is empty: at least one token is needed".to_string();
        return Err(SubmitError::Invalid { param: "prompt", message });
    }
    let found = most_bytes(request);
    if found > MOST_BYTES {
        return Err(SubmitError::NeverFits(format!(
            "the token ids of prompt, stop_token_ids, logit_bias, allowed_token_ids and bad_words take up to {found} bytes, expected at \
             most {MOST_BYTES}: shorten the prompt or these lists"
        )));
    }
    let sampling = &params.sampling;
    let of = |param| move |id: u32| (param, id);
    let prompt = request.prompt.iter().copied().map(of("prompt"));
    let mut ids = prompt
        .chain(params.stop_token_ids.iter().copied().map(of("stop_token_ids")))
        .chain(sampling.logit_bias.iter().map(|bias| bias.0).map(of("logit_bias")))
        .chain(sampling.allowed_token_ids.iter().flat_map(|ids| ids.iter().copied()).map(of("allowed_token_ids")))
        .chain(sampling.bad_words.iter().flatten().copied().map(of("bad_words")));
    if let Some((param, id)) = ids.find(|(_, id)| *id as usize >= vocab_size) {
        return invalid(param, format!("token id {id} is outside of the vocabulary of {vocab_size}"));
    }
    check_lists(params, vocab_size, eos_token_ids)?;
    let (prompt, context) = (request.prompt.len(), max_model_len);
    if prompt >= context && !generates {
        return Err(SubmitError::NeverFits(format!(
            "the prompt has {prompt} tokens, the model takes at most {} (--max-model-len): shorten the prompt",
            context - 1
        )));
    }
    if prompt >= context {
        return Err(SubmitError::NeverFits(format!(
            "the prompt has {prompt} tokens, the context holds {context} (--max-model-len) and needs room for one more: shorten the prompt"
        )));
    }
    if params.stop.iter().any(String::is_empty) {
        return invalid("stop", "an empty string would end every text at once".to_string());
    }
    for (name, asked) in [("prompt_logprobs", params.prompt_logprobs), ("logprobs", sampling.logprobs)] {
        if let Some(found) = asked.filter(|&count| count > vocab_size) {
            let problem = format!("found {found}, expected at most the {vocab_size} tokens of the vocabulary");
            return invalid(name, problem);
        }
    }
    if params.pooling.is_some() && (params.n != 1 || params.max_tokens != Some(0)) {
        let problem = "an embedding is made of the prompt alone: n must be 1, max_tokens 0";
        return invalid("pooling", problem.to_string());
    }
    check_search(params)
}

/// Checks that one allowed token ends no bad word, so that a token is left whatever comes before; and, with `min_tokens`, that such a
/// token does not end the sequence.
fn check_lists(params: &GenerationParams, vocab_size: usize, eos_token_ids: &[u32]) -> Result<(), SubmitError> {
    let sampling = &params.sampling;
    let mut excluded: HashSet<u32> = sampling.bad_words.iter().filter_map(|word| word.last()).copied().collect();
    let is_one_left = |excluded: &HashSet<u32>| match &sampling.allowed_token_ids {
        Some(ids) => ids.iter().any(|id| !excluded.contains(id)),
        None => excluded.len() < vocab_size,
    };
    if !is_one_left(&excluded) {
        let problem = "found words that end with each of the tokens that may be generated, expected a token that none ends with; \
                       remove words or extend allowed_token_ids";
        return Err(SubmitError::invalid("bad_words", problem));
    }
    if sampling.min_tokens > 0 {
        excluded.extend(eos_token_ids.iter().chain(&params.stop_token_ids));
        if !is_one_left(&excluded) {
            let problem = "found a minimum, but each of the tokens that may be generated ends the text or a bad word; lower it to 0 or \
                           extend allowed_token_ids";
            return Err(SubmitError::invalid("min_tokens", problem));
        }
    }
    Ok(())
}

/// Checks `n`, `best_of` and the parameters of a beam search against each other.
fn check_search(params: &GenerationParams) -> Result<(), SubmitError> {
    let invalid = |param, problem: String| Err(SubmitError::invalid(param, problem));
    let n = params.n;
    if n == 0 {
        return invalid("n", "found 0, expected at least 1".to_string());
    }
    for (param, found) in [("n", n), ("best_of", params.best_of.unwrap_or(n))] {
        if found > MOST_SEQUENCES {
            return invalid(param, format!("found {found}, expected at most {MOST_SEQUENCES}"));
        }
    }
    let Some(beam) = params.beam else {
        return match params.best_of {
            Some(found) if found < n => invalid("best_of", format!("found {found}, expected at least n, which is {n}")),
            _ => Ok(()),
        };
    };
    if let Some(wanted) = &params.structured_outputs {
        return invalid(
            wanted.param,
            "cannot be combined with a beam search: sample instead (best_of returns the likeliest)".into(),
        );
    }
    if params.best_of.is_some() {
        return invalid("best_of", "cannot be combined with a beam search, which returns the n best".to_string());
    }
    if beam.width < n {
        return invalid("beam_width", format!("found {}, expected at least n, which is {n}", beam.width));
    }
    if !beam.length_penalty.is_finite() {
        return invalid("length_penalty", format!("found {}, expected a finite number", beam.length_penalty));
    }
    if !params.stop.is_empty() {
        return invalid("stop", "a beam search ends at tokens, not at texts: use stop_token_ids".to_string());
    }
    Ok(())
}

/// Translates the scheduler's refusal into the request's own fields.
pub(crate) fn refused(params: &GenerationParams, refusal: &Refusal) -> SubmitError {
    match refusal {
        Refusal::TooManySequences { n, max_num_seqs, .. } => {
            let param = match (params.beam, params.best_of) {
                (Some(_), _) => "beam_width",
                (None, Some(_)) => "best_of",
                (None, None) => "n",
            };
            let message = format!("{param} is {n}, but at most {max_num_seqs} sequences run at once (--max-num-seqs)");
            SubmitError::Invalid { param, message }
        }
        other => SubmitError::NeverFits(other.to_string()),
    }
}

//! The steps that change or ban single logits, before the temperature: constraint, allowed ids, bad words, min_tokens,
//! logit_bias, penalties.
//!
//! They copy the row once and then change only the tokens concerned. Penalties count the tokens of prompt and output in
//! each call. No counts are kept per request, so a preemption or a fork has nothing to undo.

use crate::{Context, SamplingParams, TokenSet};

/// Logit of a banned token.
const BANNED: f32 = f32::NEG_INFINITY;

/// Buffers for a row.
#[derive(Default)]
pub(crate) struct Adjuster {
    row: Vec<f32>,
    /// Occurrences by token id. All zero between calls: each user clears what it counted.
    counts: Vec<u32>,
}

impl Adjuster {
    /// Returns the adjusted row: `logits` themselves if no step applies, else a changed copy.
    pub(crate) fn adjust<'a>(
        &'a mut self,
        logits: &'a [f32],
        params: &SamplingParams,
        context: &Context<'_>,
    ) -> &'a [f32] {
        let held_back = if context.output.len() < params.min_tokens { context.stop_ids } else { &[] };
        let repetition = params.repetition_penalty != 1.0;
        let additive = params.frequency_penalty != 0.0 || params.presence_penalty != 0.0;
        let has_lists = context.allowed.is_some()
            || params.allowed_token_ids.is_some()
            || !params.bad_words.is_empty()
            || !params.logit_bias.is_empty();
        if !has_lists && held_back.is_empty() && !repetition && !additive {
            return logits;
        }

        self.ban(logits, params, context, held_back);
        if !held_back.is_empty() && self.row.iter().all(|&logit| logit == BANNED) {
            // Only stop ids are allowed. Ending early is better than a token that is not allowed.
            self.ban(logits, params, context, &[]);
        }
        for &(token, bias) in &params.logit_bias {
            change(&mut self.row, token, |logit| logit + bias);
        }
        self.counts.resize(logits.len(), 0);
        if repetition {
            self.penalise_repetition(context.prompt, params.repetition_penalty);
            self.penalise_repetition(context.output, params.repetition_penalty);
            self.clear_counts(context.prompt);
            self.clear_counts(context.output);
        }
        if additive {
            self.penalise_output(context.output, params.frequency_penalty, params.presence_penalty);
        }
        &self.row
    }

    /// Fills the row, then bans bad words and the stop ids held back.
    fn ban(&mut self, logits: &[f32], params: &SamplingParams, context: &Context<'_>, held_back: &[u32]) {
        self.copy(logits, context.allowed, params.allowed_token_ids.as_deref());
        for token in banned_words(&params.bad_words, context.output).chain(held_back.iter().copied()) {
            change(&mut self.row, token, |_| BANNED);
        }
    }

    /// Fills the row with `logits`, except that tokens excluded by either list are banned.
    fn copy(&mut self, logits: &[f32], constraint: Option<&TokenSet>, allowed: Option<&[u32]>) {
        self.row.clear();
        if constraint.is_none() && allowed.is_none() {
            self.row.extend_from_slice(logits);
            return;
        }
        self.row.resize(logits.len(), BANNED);
        let mut allow = |token: u32| {
            if let Some(&logit) = logits.get(token as usize) {
                self.row[token as usize] = logit;
            }
        };
        match (constraint, allowed) {
            (Some(set), None) => set.iter().for_each(allow),
            (Some(set), Some(ids)) => ids.iter().filter(|&&id| set.contains(id)).for_each(|&id| allow(id)),
            (None, ids) => ids.into_iter().flatten().for_each(|&id| allow(id)),
        }
    }

    /// Penalises each token once, however often it occurs. `counts` stays marked, so that a call for the output does
    /// not penalise again the tokens of the prompt.
    fn penalise_repetition(&mut self, tokens: &[u32], penalty: f32) {
        for &token in tokens {
            let Some(count) = self.counts.get_mut(token as usize) else {
                continue;
            };
            if *count == 0 {
                *count = 1;
                change(&mut self.row, token, |logit| if logit > 0.0 { logit / penalty } else { logit * penalty });
            }
        }
    }

    fn clear_counts(&mut self, tokens: &[u32]) {
        for &token in tokens {
            if let Some(count) = self.counts.get_mut(token as usize) {
                *count = 0;
            }
        }
    }

    fn penalise_output(&mut self, output: &[u32], frequency: f32, presence: f32) {
        for &token in output {
            if let Some(count) = self.counts.get_mut(token as usize) {
                *count += 1;
            }
        }
        for &token in output {
            // The first occurrence takes the count, so that the others find zero.
            let count = self.counts.get_mut(token as usize).map_or(0, std::mem::take);
            if count > 0 {
                change(&mut self.row, token, |logit| logit - frequency * count as f32 - presence);
            }
        }
    }
}

/// Returns the last token of every bad word whose other tokens end the output.
pub fn banned_words(bad_words: &[Vec<u32>], output: &[u32]) -> impl Iterator<Item = u32> {
    bad_words.iter().filter_map(|word| {
        let (&last, before) = word.split_last()?;
        output.ends_with(before).then_some(last)
    })
}

/// Replaces a token's logit. Ignores a token outside the row.
fn change(row: &mut [f32], token: u32, to: impl FnOnce(f32) -> f32) {
    if let Some(logit) = row.get_mut(token as usize) {
        *logit = to(*logit);
    }
}

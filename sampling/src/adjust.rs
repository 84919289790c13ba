//! Steps that change or ban single logits, before temperature: constraint, allowed ids, bad words, min_tokens, logit_bias, penalties.
//!
//! Costs: one copy of the row, and then only the tokens named are touched. Penalties walk prompt and output, since a
//! request keeps no counts of its own: nothing has to be undone when a sequence is preempted or forked.

use crate::{Context, SamplingParams, TokenSet};

/// What a banned token's logit becomes.
const BANNED: f32 = f32::NEG_INFINITY;

/// Buffers for one row at a time.
#[derive(Default)]
pub(crate) struct Adjuster {
    row: Vec<f32>,
    /// Occurrences by token id. All zero between calls: whoever counts, clears what was counted.
    counts: Vec<u32>,
}

impl Adjuster {
    /// The row after steps 1 to 6: `logits` themselves where no step does anything, else a changed copy.
    pub(crate) fn adjust<'a>(
        &'a mut self,
        logits: &'a [f32],
        params: &SamplingParams,
        context: &Context<'_>,
    ) -> &'a [f32] {
        let held_back = if context.output.len() < params.min_tokens { context.stop_ids } else { &[] };
        let repetition = params.repetition_penalty != 1.0;
        let additive = params.frequency_penalty != 0.0 || params.presence_penalty != 0.0;
        let named = context.allowed.is_some()
            || params.allowed_token_ids.is_some()
            || !params.bad_words.is_empty()
            || !params.logit_bias.is_empty();
        if !named && held_back.is_empty() && !repetition && !additive {
            return logits;
        }

        self.ban(logits, params, context, held_back);
        if !held_back.is_empty() && self.row.iter().all(|&logit| logit == BANNED) {
            // Better to end early than to leave the allowed tokens.
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

    /// Fills the row and bans bad words and what is held back.
    fn ban(&mut self, logits: &[f32], params: &SamplingParams, context: &Context<'_>, held_back: &[u32]) {
        self.copy(logits, context.allowed, params.allowed_token_ids.as_deref());
        for token in banned_words(&params.bad_words, context.output).chain(held_back.iter().copied()) {
            change(&mut self.row, token, |_| BANNED);
        }
    }

    /// Fills the row: with all logits, or with those of the tokens that are allowed both ways and the others banned.
    fn copy(&mut self, logits: &[f32], constraint: Option<&TokenSet>, allowed: Option<&[u32]>) {
        self.row.clear();
        if constraint.is_none() && allowed.is_none() {
            self.row.extend_from_slice(logits);
            return;
        }
        self.row.resize(logits.len(), BANNED);
        let mut open = |token: u32| {
            if let Some(&logit) = logits.get(token as usize) {
                self.row[token as usize] = logit;
            }
        };
        match (constraint, allowed) {
            (Some(set), None) => set.iter().for_each(open),
            (Some(set), Some(ids)) => ids.iter().filter(|&&id| set.contains(id)).for_each(|&id| open(id)),
            (None, ids) => ids.into_iter().flatten().for_each(|&id| open(id)),
        }
    }

    /// Once per token, however often it occurs. Leaves `counts` marked, so that the output does not penalise again what the
    /// prompt did.
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
            // The first occurrence takes the whole count and leaves zero for the others.
            let count = self.counts.get_mut(token as usize).map_or(0, std::mem::take);
            if count > 0 {
                change(&mut self.row, token, |logit| logit - frequency * count as f32 - presence);
            }
        }
    }
}

/// The last token of every bad word whose other tokens are what the output ends with.
fn banned_words(bad_words: &[Vec<u32>], output: &[u32]) -> impl Iterator<Item = u32> {
    bad_words.iter().filter_map(|word| {
        let (&last, before) = word.split_last()?;
        output.ends_with(before).then_some(last)
    })
}

/// Replaces a token's logit; a token outside the row is ignored.
fn change(row: &mut [f32], token: u32, to: impl FnOnce(f32) -> f32) {
    if let Some(logit) = row.get_mut(token as usize) {
        *logit = to(*logit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adjusted(params: &SamplingParams, prompt: &[u32], output: &[u32], stop_ids: &[u32]) -> Vec<f32> {
        let logits = [1.0, -2.0, 3.0, 4.0];
        let context = Context { prompt, output, stop_ids, allowed: None, seed: 0, sequence: 0 };
        Adjuster::default().adjust(&logits, params, &context).to_vec()
    }

    #[test]
    fn a_bad_word_is_banned_only_where_its_beginning_just_came() {
        let params = SamplingParams { bad_words: [vec![7, 8, 2], vec![0]].into(), ..Default::default() };
        let open = f32::NEG_INFINITY;
        assert_eq!(adjusted(&params, &[7, 8], &[], &[]), [open, -2.0, 3.0, 4.0]);
        assert_eq!(adjusted(&params, &[], &[7, 8], &[]), [open, -2.0, open, 4.0]);
        assert_eq!(adjusted(&params, &[], &[7, 8, 1], &[]), [open, -2.0, 3.0, 4.0]);
    }

    #[test]
    fn stop_ids_are_held_back_until_min_tokens() {
        let params = SamplingParams { min_tokens: 2, ..Default::default() };
        assert_eq!(adjusted(&params, &[], &[1], &[3, 9]), [1.0, -2.0, 3.0, f32::NEG_INFINITY]);
        assert_eq!(adjusted(&params, &[], &[1, 1], &[3, 9]), [1.0, -2.0, 3.0, 4.0]);
    }

    #[test]
    fn stop_ids_are_not_held_back_where_nothing_else_is_allowed() {
        let open = f32::NEG_INFINITY;
        let params = SamplingParams { min_tokens: 2, allowed_token_ids: Some([1, 3].into()), ..Default::default() };
        assert_eq!(adjusted(&params, &[], &[], &[3]), [open, -2.0, open, open]);
        assert_eq!(adjusted(&params, &[], &[], &[1, 3]), [open, -2.0, open, 4.0]);
    }

    #[test]
    fn a_constraint_and_allowed_ids_both_ban_and_a_constraint_is_never_left() {
        let open = f32::NEG_INFINITY;
        let mut set = TokenSet::new(4);
        [1, 3, 9].into_iter().for_each(|token| set.insert(token));
        let logits = [1.0, -2.0, 3.0, 4.0];
        let context = Context { prompt: &[], output: &[], stop_ids: &[], allowed: Some(&set), seed: 0, sequence: 0 };
        let params = SamplingParams::default();
        assert_eq!(Adjuster::default().adjust(&logits, &params, &context), [open, -2.0, open, 4.0]);
        let params = SamplingParams { allowed_token_ids: Some([2, 1].into()), ..params };
        assert_eq!(Adjuster::default().adjust(&logits, &params, &context), [open, -2.0, open, open]);
        // Wishes that contradict it are set aside; so is a row without a number.
        for (logits, token) in [([1.0, -2.0, 3.0, 4.0], 3), ([f32::NAN; 4], 1), ([5.0, 1.0, 0.0, 1.0], 1)] {
            let params =
                SamplingParams { allowed_token_ids: Some([0, 2].into()), temperature: 1.0, ..Default::default() };
            assert_eq!(crate::Sampler::new().sample(&logits, &params, &context).token, token);
        }
    }

    #[test]
    fn the_prompt_counts_for_repetition_and_not_for_frequency_or_presence() {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            ..Default::default()
        };
        assert_eq!(adjusted(&params, &[0, 1, 0, 99], &[3, 1, 3, 99], &[]), [0.5, -4.75, 3.0, 0.75]);
    }

    #[test]
    fn counts_of_one_row_do_not_leak_into_the_next() {
        let params = SamplingParams { frequency_penalty: 1.0, repetition_penalty: 2.0, ..Default::default() };
        let mut adjuster = Adjuster::default();
        for _ in 0..3 {
            let context = Context { prompt: &[0], output: &[2, 2], stop_ids: &[], allowed: None, seed: 0, sequence: 0 };
            assert_eq!(adjuster.adjust(&[1.0, 1.0, 1.0], &params, &context), [0.5, 1.0, -1.5]);
        }
    }
}

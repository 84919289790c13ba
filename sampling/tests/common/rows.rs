//! Random rows with random parameters.

use proptest::prelude::*;
use sampling::{Context, SamplingParams};

#[derive(Clone, Debug)]
pub struct Row {
    pub logits: Vec<f32>,
    pub prompt: Vec<u32>,
    pub output: Vec<u32>,
    pub stop_ids: Vec<u32>,
    pub params: SamplingParams,
}

impl Row {
    pub fn context(&self, seed: u64) -> Context<'_> {
        Context {
            prompt: &self.prompt,
            output: &self.output,
            stop_ids: &self.stop_ids,
            allowed: None,
            seed,
            sequence: 0,
        }
    }
}

/// Disabled in half of the rows.
fn sometimes<T: Clone + std::fmt::Debug + 'static>(off: T, on: impl Strategy<Value = T> + 'static) -> BoxedStrategy<T> {
    prop_oneof![Just(off), on].boxed()
}

pub fn rows() -> impl Strategy<Value = Row> {
    (2usize..300).prop_flat_map(rows_of)
}

/// Rows of one length.
pub fn rows_of(vocab: usize) -> impl Strategy<Value = Row> {
    // Coarse logits cause many ties. Some ids are deliberately outside the vocabulary.
    let id = 0..vocab as u32 + 3;
    let ids = |most| prop::collection::vec(id.clone(), 0..most);
    let logit = prop_oneof![8 => (-40..40i32).prop_map(|x| x as f32 * 0.25), 1 => Just(f32::NEG_INFINITY)];
    let filters = (
        sometimes(1.0, prop::sample::select(vec![0.0f32, 0.3, 0.7, 1.5, 4.0])),
        sometimes(0, 1..50u32),
        sometimes(1.0, 0.01f32..1.0),
        sometimes(0.0, 0.001f32..1.0),
        sometimes(None, (0.05f32..1.0).prop_map(Some)),
    );
    let adjustments = (
        sometimes(1.0, 0.5f32..2.0),
        sometimes(0.0, -2.0f32..2.0),
        sometimes(0.0, -2.0f32..2.0),
        0..8usize,
        sometimes(vec![], prop::collection::vec((id.clone(), -5.0f32..5.0), 1..5)),
        sometimes(None, prop::collection::vec(id.clone(), 1..20).prop_map(Some)),
        sometimes(vec![], prop::collection::vec(prop::collection::vec(id.clone(), 1..3), 1..5)),
    );
    let ids = (ids(20), ids(20), ids(4));
    (prop::collection::vec(logit, vocab), ids, filters, adjustments).prop_map(
        |(logits, (prompt, output, stop_ids), (temperature, top_k, top_p, min_p, typical_p), adjustments)| {
            let (repetition_penalty, presence_penalty, frequency_penalty, ..) = adjustments;
            let (.., min_tokens, logit_bias, allowed_token_ids, bad_words) = adjustments;
            let params = SamplingParams {
                temperature,
                top_k,
                top_p,
                min_p,
                typical_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
                min_tokens,
                logit_bias,
                allowed_token_ids: allowed_token_ids.map(Into::into),
                bad_words: bad_words.into(),
                ..SamplingParams::default()
            };
            Row { logits, prompt, output, stop_ids, params }
        },
    )
}

//! The steps that change or ban single logits, observed through [`Sampler::likeliest`].

use sampling::{Context, Sampler, SamplingParams, TokenSet, token_logprobs};

const BANNED: f32 = f32::NEG_INFINITY;

fn context<'a>(prompt: &'a [u32], output: &'a [u32], stop_ids: &'a [u32]) -> Context<'a> {
    Context { prompt, output, stop_ids, allowed: None, seed: 0, sequence: 0 }
}

/// Asserts that the adjusted row of these logits has exactly the log-probabilities of `row`.
#[track_caller]
fn assert_adjusted(sampler: &mut Sampler, logits: &[f32], params: &SamplingParams, context: &Context<'_>, row: &[f32]) {
    let likeliest = sampler.likeliest(logits, params, context, row.len());
    let found: Vec<(u32, f32)> = likeliest.iter().map(|likely| (likely.sampled.token, likely.logprob)).collect();
    assert_eq!(found, token_logprobs(row, 0, row.len()).top);
}

#[track_caller]
fn adjusted(params: &SamplingParams, context: &Context<'_>, row: [f32; 4]) {
    assert_adjusted(&mut Sampler::new(), &[1.0, -2.0, 3.0, 4.0], params, context, &row);
}

#[test]
fn a_bad_word_is_banned_only_if_the_output_ends_with_its_beginning() {
    let params = SamplingParams { bad_words: [vec![7, 8, 2], vec![0]].into(), ..Default::default() };
    adjusted(&params, &context(&[7, 8], &[], &[]), [BANNED, -2.0, 3.0, 4.0]);
    adjusted(&params, &context(&[], &[7, 8], &[]), [BANNED, -2.0, BANNED, 4.0]);
    adjusted(&params, &context(&[], &[7, 8, 1], &[]), [BANNED, -2.0, 3.0, 4.0]);
}

#[test]
fn stop_ids_are_held_back_until_min_tokens() {
    let params = SamplingParams { min_tokens: 2, ..Default::default() };
    adjusted(&params, &context(&[], &[1], &[3, 9]), [1.0, -2.0, 3.0, BANNED]);
    adjusted(&params, &context(&[], &[1, 1], &[3, 9]), [1.0, -2.0, 3.0, 4.0]);
}

#[test]
fn stop_ids_are_not_held_back_if_nothing_else_is_allowed() {
    let params = SamplingParams { min_tokens: 2, allowed_token_ids: Some([1, 3].into()), ..Default::default() };
    adjusted(&params, &context(&[], &[], &[3]), [BANNED, -2.0, BANNED, BANNED]);
    adjusted(&params, &context(&[], &[], &[1, 3]), [BANNED, -2.0, BANNED, 4.0]);
}

#[test]
fn a_constraint_and_allowed_ids_both_ban_and_the_constraint_takes_precedence() {
    let mut set = TokenSet::new(4);
    [1, 3, 9].into_iter().for_each(|token| set.insert(token));
    let context = Context { allowed: Some(&set), ..context(&[], &[], &[]) };
    let params = SamplingParams::default();
    adjusted(&params, &context, [BANNED, -2.0, BANNED, 4.0]);
    let params = SamplingParams { allowed_token_ids: Some([2, 1].into()), ..params };
    adjusted(&params, &context, [BANNED, -2.0, BANNED, BANNED]);
    // Parameters that contradict the constraint are ignored, and so is a row without a possible token.
    for (logits, token) in [([1.0, -2.0, 3.0, 4.0], 3), ([f32::NAN; 4], 1), ([5.0, 1.0, 0.0, 1.0], 1)] {
        let params = SamplingParams { allowed_token_ids: Some([0, 2].into()), ..Default::default() };
        assert_eq!(Sampler::new().sample(&logits, &params, &context).token, token);
    }
}

#[test]
fn the_prompt_counts_for_repetition_but_not_for_frequency_or_presence() {
    let params = SamplingParams {
        repetition_penalty: 2.0,
        frequency_penalty: 0.5,
        presence_penalty: 0.25,
        ..Default::default()
    };
    adjusted(&params, &context(&[0, 1, 0, 99], &[3, 1, 3, 99], &[]), [0.5, -4.75, 3.0, 0.75]);
}

#[test]
fn counts_of_one_row_do_not_affect_the_next() {
    let params = SamplingParams { frequency_penalty: 1.0, repetition_penalty: 2.0, ..Default::default() };
    let mut sampler = Sampler::new();
    for _ in 0..3 {
        let context = context(&[0], &[2, 2], &[]);
        assert_adjusted(&mut sampler, &[1.0, 1.0, 1.0], &params, &context, &[0.5, 1.0, -1.5]);
    }
}

#[test]
fn a_token_set_contains_what_was_inserted_and_nothing_behind_its_size() {
    for size in [0, 1, 31, 32, 33, 64, 100] {
        let mut set = TokenSet::new(size);
        assert!(set.is_empty());
        (0..200).step_by(3).for_each(|token| set.insert(token));
        let wanted: Vec<u32> = (0..size as u32).step_by(3).collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), wanted);
        assert!((0..200).all(|token| set.contains(token) == wanted.contains(&token)));
        let full = TokenSet::from_words(vec![u32::MAX; 9], size);
        assert_eq!(full.iter().collect::<Vec<_>>(), (0..size as u32).collect::<Vec<_>>());
    }
}

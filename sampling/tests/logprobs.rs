//! Log-probabilities of single tokens.

use sampling::{TokenLogprobs, token_logprobs};

#[test]
fn equal_logits_share_a_rank_and_are_listed_by_id() {
    let logits = [1.0, 3.0, 3.0, 0.0];
    assert_eq!(token_logprobs(&logits, 2, 0).rank, 1);
    assert_eq!(token_logprobs(&logits, 0, 0).rank, 3);
    let order: Vec<u32> = token_logprobs(&logits, 0, 9).top.iter().map(|top| top.0).collect();
    assert_eq!(order, [1, 2, 0, 3]);
}

#[test]
fn broken_rows_give_minus_infinity_and_no_nan() {
    let none = [f32::NAN, f32::NEG_INFINITY];
    for token in [0, 1, 2] {
        let logprobs = token_logprobs(&none, token, 2);
        assert_eq!(logprobs, TokenLogprobs { logprob: f32::NEG_INFINITY, rank: 1, top: vec![] });
    }
    let some = token_logprobs(&[f32::NAN, 2.0, f32::INFINITY], 2, 3);
    assert_eq!((some.logprob, some.rank, some.top.len()), (0.0, 1, 2));
}

#[test]
fn the_likeliest_of_a_long_row_are_found_for_every_number_of_alternatives() {
    let logits: Vec<f32> = (0..10_000).map(|i| ((i * 7919) % 10_007) as f32 / 100.0).collect();
    let mut sorted: Vec<u32> = (0..10_000).collect();
    sorted.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    for k in [1, 5, 20, 100, 1000, 10_000, 10_001, usize::MAX] {
        let top: Vec<u32> = token_logprobs(&logits, 0, k).top.iter().map(|top| top.0).collect();
        assert_eq!(top, sorted[..k.min(sorted.len())]);
    }
}

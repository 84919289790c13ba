//! The sampler, checked against transformers' logits processors in vLLM's order.
//!
//! `reference/sampling.json` describes the cases, `reference/sampling.safetensors` holds `<key>.logits` and
//! `<key>.probs`.

use crate::cases::{Case, cases, ids};
use sampling::{Sampler, token_logprobs};

/// Greatest allowed difference of a probability.
const TOLERANCE: f32 = 1e-5;

#[test]
fn probabilities_and_kept_tokens_equal_the_reference() {
    let cases = cases();
    assert_eq!(cases.len(), 111);
    let mut sampler = Sampler::new();
    for case in &cases {
        case.params.validate().unwrap();
        let mut found = sampler.probabilities(&case.logits, &case.params, &case.context());
        let mut wanted = case.probabilities.clone();
        let kept = found.iter().filter(|&&p| p > 0.0).count();
        assert_eq!(kept as u64, case.expected["kept"].as_u64().unwrap(), "{}: number kept", case.key);
        match case.expected["compare"].as_str().unwrap() {
            // The top-p cut is within equal logits, and which of them stay is not defined.
            "sorted" => {
                found.sort_by(f32::total_cmp);
                wanted.sort_by(f32::total_cmp);
            }
            compare => assert_eq!(compare, "exact"),
        }
        assert_eq!(found.len(), wanted.len(), "{}", case.key);
        for (token, (&found, &wanted)) in found.iter().zip(&wanted).enumerate() {
            assert!((found - wanted).abs() <= TOLERANCE, "{} at {token}: {found}, not {wanted}", case.key);
            assert_eq!(found > 0.0, wanted > 0.0, "{} at {token}: kept or not", case.key);
        }
    }
}

#[test]
fn greedy_cases_give_the_reference_token() {
    let mut sampler = Sampler::new();
    let greedy: Vec<Case> = cases().into_iter().filter(|case| case.expected["greedy"].as_bool().unwrap()).collect();
    assert!(!greedy.is_empty());
    for case in greedy {
        let sampled = sampler.sample(&case.logits, &case.params, &case.context());
        assert_eq!(u64::from(sampled.token), case.expected["argmax"].as_u64().unwrap(), "{}", case.key);
    }
}

#[test]
fn every_draw_is_one_of_the_kept_tokens() {
    let mut sampler = Sampler::new();
    for case in cases().iter().filter(|case| case.expected["compare"] == "exact") {
        let sampled: Vec<u32> = sampler
            .sample_each(&case.logits, &case.params, &case.context(), 0..50)
            .map(|sampled| sampled.token)
            .collect();
        for token in sampled {
            assert!(case.probabilities[token as usize] > 0.0, "{} drew {token}", case.key);
        }
    }
}

#[test]
fn log_probabilities_are_those_of_the_raw_logits() {
    for case in cases() {
        let top = &case.expected["raw_top5"];
        let wanted_ids = ids(&top["ids"]);
        let found = token_logprobs(&case.logits, wanted_ids[0], 5);
        assert_eq!(found.rank, 1, "{}", case.key);
        assert_eq!(found.logprob, found.top[0].1, "{}", case.key);
        // Only the reference lists impossible tokens.
        let possible = case.logits.iter().filter(|&&logit| logit > f32::NEG_INFINITY).count();
        assert_eq!(found.top.len(), possible.min(wanted_ids.len()), "{}", case.key);
        assert_eq!(top["logprobs"].as_array().unwrap().len(), wanted_ids.len(), "{}", case.key);
        for (&(id, logprob), (&wanted_id, wanted)) in
            found.top.iter().zip(wanted_ids.iter().zip(top["logprobs"].as_array().unwrap()))
        {
            let wanted = wanted.as_f64().unwrap() as f32;
            assert!((logprob - wanted).abs() < 2e-5, "{}: {logprob}, not {wanted}", case.key);
            // The order of equal logits is not defined in the reference.
            assert_eq!(case.logits[id as usize], case.logits[wanted_id as usize], "{}", case.key);
        }
    }
}

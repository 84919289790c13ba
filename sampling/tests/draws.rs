//! Draws follow the probabilities and depend only on the row and the request.

use crate::distribution::{assert_distribution, chi_square};
use sampling::{Context, Sampler, SamplingParams, gumbel_noise, philox4x32_10};

fn context(output: &[u32], seed: u64, sequence: u32) -> Context<'_> {
    Context { prompt: &[5, 6], output, stop_ids: &[], allowed: None, seed, sequence }
}

/// A row of logits in which neighbours differ, with a range of about 9.
fn row(vocab: usize) -> Vec<f32> {
    (0..vocab).map(|i| ((i * 37 + 11) % 91) as f32 * 0.1).collect()
}

#[test]
fn draws_follow_the_probabilities_over_each_coordinate() {
    const DRAWS: u32 = 100_000;
    let logits = row(60);
    let shapes = [
        SamplingParams::default(),
        SamplingParams { temperature: 0.6, top_k: 20, ..SamplingParams::default() },
        SamplingParams { temperature: 2.0, top_p: 0.8, min_p: 0.02, ..SamplingParams::default() },
    ];
    let mut sampler = Sampler::new();
    for params in &shapes {
        let probabilities = sampler.probabilities(&logits, params, &context(&[], 0, 0));
        // Over sequences of one request.
        let mut counts = vec![0; logits.len()];
        for sampled in sampler.sample_each(&logits, params, &context(&[], 1, 0), 0..DRAWS) {
            counts[sampled.token as usize] += 1;
        }
        assert_distribution(&counts, &probabilities, DRAWS, "sequences");
        // Over consecutive seeds.
        let mut counts = vec![0; logits.len()];
        for seed in 0..u64::from(DRAWS) {
            counts[sampler.sample(&logits, params, &context(&[], seed, 0)).token as usize] += 1;
        }
        assert_distribution(&counts, &probabilities, DRAWS, "seeds");
        // Over the positions of one output.
        let mut counts = vec![0; logits.len()];
        let output = vec![0; DRAWS as usize];
        for at in 0..DRAWS as usize {
            counts[sampler.sample(&logits, params, &context(&output[..at], 1, 0)).token as usize] += 1;
        }
        assert_distribution(&counts, &probabilities, DRAWS, "positions");
    }
}

#[test]
fn the_distribution_test_detects_a_sampler_that_is_five_percent_off() {
    const DRAWS: u32 = 100_000;
    let logits = row(60);
    let warmer = SamplingParams { temperature: 1.05, ..SamplingParams::default() };
    let mut sampler = Sampler::new();
    let probabilities = sampler.probabilities(&logits, &SamplingParams::default(), &context(&[], 0, 0));
    let mut counts = vec![0; logits.len()];
    for sampled in sampler.sample_each(&logits, &warmer, &context(&[], 1, 0), 0..DRAWS) {
        counts[sampled.token as usize] += 1;
    }
    let (statistic, classes) = chi_square(&counts, &probabilities, DRAWS);
    let freedom = (classes - 1) as f64;
    assert!(statistic > freedom + 5.0 * (2.0 * freedom).sqrt(), "chi-square {statistic:.1}");
}

/// Eight requests with different seeds and parameters. Each draws twelve tokens, which become its output.
fn histories(order: impl Fn(usize) -> Vec<usize>, samplers: usize) -> Vec<Vec<u32>> {
    let requests: Vec<SamplingParams> = (0..8u32)
        .map(|i| SamplingParams {
            temperature: 0.5 + 0.2 * i as f32,
            top_k: (i % 3) * 20,
            top_p: if i % 2 == 0 { 1.0 } else { 0.9 },
            frequency_penalty: 0.1 * i as f32,
            ..SamplingParams::default()
        })
        .collect();
    let logits = row(500);
    let mut samplers: Vec<Sampler> = (0..samplers).map(|_| Sampler::new()).collect();
    let mut outputs = vec![vec![]; requests.len()];
    for step in 0..12 {
        for (turn, request) in order(step).into_iter().enumerate() {
            let sampler_at = turn % samplers.len();
            let context = context(&outputs[request], 1000 + request as u64, 0);
            let token = samplers[sampler_at].sample(&logits, &requests[request], &context).token;
            outputs[request].push(token);
        }
    }
    outputs
}

#[test]
fn the_same_seed_draws_the_same_tokens_whatever_the_order_of_rows() {
    let forwards = histories(|_| (0..8).collect(), 1);
    assert_eq!(forwards, histories(|_| (0..8).rev().collect(), 1));
    assert_eq!(forwards, histories(|step| (0..8).map(|i| (i + step) % 8).collect(), 3));
    // Different seeds draw different tokens.
    assert!(forwards.iter().collect::<std::collections::HashSet<_>>().len() > 6);
}

#[test]
fn sequences_that_share_a_row_draw_as_each_would_alone() {
    let logits = row(500);
    let params = SamplingParams { top_p: 0.9, logprobs: Some(2), ..SamplingParams::default() };
    let mut sampler = Sampler::new();
    let together: Vec<_> = sampler.sample_each(&logits, &params, &context(&[], 9, 0), 0..100).collect();
    for (sequence, sampled) in (0..).zip(&together) {
        assert_eq!(*sampled, Sampler::new().sample(&logits, &params, &context(&[], 9, sequence)));
    }
    let different: std::collections::HashSet<u32> = together.iter().map(|sampled| sampled.token).collect();
    assert!(different.len() > 30, "only {} different tokens in 100 draws", different.len());
}

#[test]
fn parameters_that_leave_nothing_fall_back_to_the_likeliest_raw_token() {
    let logits = [0.0, 3.0, f32::NAN, 1.0];
    let nothing = SamplingParams { allowed_token_ids: Some([2, 77].into()), ..SamplingParams::default() };
    let mut sampler = Sampler::new();
    for temperature in [0.0, 1.0] {
        let params = SamplingParams { temperature, ..nothing.clone() };
        assert_eq!(sampler.sample(&logits, &params, &context(&[], 0, 0)).token, 1);
    }
    let none = [f32::NEG_INFINITY, f32::NAN];
    assert_eq!(sampler.sample(&none, &SamplingParams::default(), &context(&[], 0, 0)).token, 0);
}

#[test]
fn the_lowest_of_equal_logits_is_the_likeliest_and_nan_never_is() {
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let likeliest = |logits: &[f32]| Sampler::new().sample(logits, &greedy, &context(&[], 0, 0)).token;
    let mut row = vec![0.0; 5000];
    assert_eq!(likeliest(&row), 0);
    (row[4321], row[1234]) = (2.0, 2.0);
    assert_eq!(likeliest(&row), 1234);
    assert_eq!(likeliest(&[f32::NAN, -3.0, f32::NAN, f32::NEG_INFINITY]), 1);
    assert_eq!(likeliest(&[1.0, f32::INFINITY, f32::INFINITY]), 1);
    assert_eq!(likeliest(&[]), 0);
}

#[test]
fn every_coordinate_changes_the_noise() {
    let base = gumbel_noise(7, 3, 1, 11);
    assert_eq!(base, gumbel_noise(7, 3, 1, 11));
    for other in [
        gumbel_noise(8, 3, 1, 11),
        gumbel_noise(7 | 1 << 40, 3, 1, 11),
        gumbel_noise(7, 4, 1, 11),
        gumbel_noise(7, 3, 2, 11),
        gumbel_noise(7, 3, 1, 12),
    ] {
        assert_ne!(base, other);
    }
}

/// The three vectors for `philox4x32 10` in the `kat_vectors` file of Random123, the authors' library.
#[test]
fn philox_gives_the_published_known_answers() {
    let ones = u32::MAX;
    let known = [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ];
    for (counter, key, words) in known {
        assert_eq!(philox4x32_10(counter, key), words);
    }
}

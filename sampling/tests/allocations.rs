//! A sampler does not allocate once its buffers have grown to the vocabulary.
use crate::counter::allocations;
use sampling::{Context, Sampler, SamplingParams};

#[test]
fn a_step_in_steady_state_does_not_allocate() {
    let everything = SamplingParams {
        temperature: 0.8,
        top_k: 200,
        top_p: 0.9,
        min_p: 0.001,
        typical_p: Some(0.9),
        repetition_penalty: 1.1,
        presence_penalty: 0.1,
        frequency_penalty: 0.1,
        min_tokens: 20,
        logit_bias: vec![(3, 1.0)],
        bad_words: [vec![4], vec![1, 2]].into(),
        ..SamplingParams::default()
    };
    let greedy = SamplingParams { temperature: 0.0, logprobs: Some(0), ..SamplingParams::default() };
    let plain = SamplingParams::default();
    let logits: Vec<f32> = (0..5000).map(|i| ((i * 7919) % 1009) as f32 * 0.02).collect();
    let output: Vec<u32> = (0..40).collect();
    let mut sampler = Sampler::new();
    let mut step = |at: usize| {
        let context =
            Context { prompt: &[1, 2], output: &output[..at], stop_ids: &[7], allowed: None, seed: 1, sequence: 0 };
        for params in [&everything, &greedy, &plain] {
            sampler.sample(&logits, params, &context);
        }
    };
    step(0);
    let before = allocations();
    assert!(before > 0, "the counter works");
    (1..40).for_each(&mut step);
    assert_eq!(allocations() - before, 0);
}

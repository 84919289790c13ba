//! A decode step in steady state: how often the host allocates, copies and waits. The device does nothing, so only the host's
//! work remains.

use std::sync::atomic::Ordering::Relaxed;

use engine::{EngineConfig, GenerationParams, GenerationRequest, LoadOn, Pooling, SamplingParams};

use crate::common::noop::{NoOp, decoding};
use crate::common::{config, engine_on, prompt};
use crate::counter::allocations;

#[test]
fn a_decode_step_in_steady_state_waits_once_and_hardly_allocates() {
    const SEQUENCES: usize = 64;
    let device = NoOp::new();
    let mut engine = decoding(&device, SEQUENCES);
    // By now the lists of a step have reached their final size.
    (0..100).for_each(|_| engine.step(|_, _| {}));
    let (launches, synchronized) = (device.launches.load(Relaxed), device.synchronized.load(Relaxed));
    let mut calls = Vec::new();
    let mut drawn = 0;
    for _ in 0..100 {
        let before = allocations();
        engine.step(|_, _| drawn += 1);
        calls.push(allocations() - before);
    }
    assert_eq!(drawn, 100 * SEQUENCES, "each sequence draws in each step");
    assert_eq!(device.synchronized.load(Relaxed), synchronized, "a step waits for its own draws alone");
    assert_eq!((device.launches.load(Relaxed) - launches) % 100, 0, "every step launches the same");
    calls.sort_unstable();
    assert!(calls[50] < SEQUENCES / 2, "{} allocations: some for each sequence", calls[50]);
    println!("allocations of a step of {SEQUENCES} sequences: median {}, most {}", calls[50], calls[99]);
}

#[test]
fn an_embedding_and_a_request_for_no_token_compute_no_row_of_the_vocabulary() {
    let device = NoOp::new();
    let mut engine = engine_on(&config(64), device.clone());
    let mut which = 0;
    let mut rows = |params: GenerationParams| {
        which += 1;
        let before = device.vocabulary_rows.load(Relaxed);
        engine.submit(GenerationRequest { prompt: prompt(which, 20), params, ..Default::default() }).unwrap();
        let mut events = 0;
        while engine.has_work() {
            engine.step(|_, _| events += 1);
        }
        assert!(events >= 2, "begun and ended");
        device.vocabulary_rows.load(Relaxed) - before
    };
    let no_token = GenerationParams { max_tokens: Some(0), ..Default::default() };
    assert_eq!(rows(GenerationParams::pooled(Pooling::Last)), 0);
    assert_eq!(rows(GenerationParams::pooled(Pooling::Mean)), 0);
    assert_eq!(rows(no_token.clone()), 0);
    assert_eq!(rows(GenerationParams { n: 3, ..no_token.clone() }), 0);
    assert_eq!(rows(GenerationParams { prompt_logprobs: Some(1), ..no_token.clone() }), 19, "each token but the first");
    assert_eq!(rows(GenerationParams { max_tokens: Some(1), ..no_token }), 1, "the row of the token that is drawn");
}

#[test]
fn a_request_that_exceeds_the_sampler_of_the_device_is_counted() {
    let device = NoOp::new();
    let mut engine = engine_on(&config(64), device);
    let mut counted = |sampling: SamplingParams| {
        let params = GenerationParams { sampling, max_tokens: Some(4), ..Default::default() };
        engine.submit(GenerationRequest { prompt: prompt(1, 20), params, ..Default::default() }).unwrap();
        while engine.has_work() {
            engine.step(|_, _| {});
        }
        engine.stats().requests_drawn_on_host
    };
    assert_eq!(counted(SamplingParams { logprobs: Some(20), ..Default::default() }), 0);
    assert_eq!(counted(SamplingParams { logprobs: Some(21), ..Default::default() }), 1);
    let logit_bias = (0..520).map(|token| (token, 1.0)).collect();
    assert_eq!(counted(SamplingParams { logit_bias, ..Default::default() }), 2);
    assert_eq!(counted(SamplingParams::default()), 2);
}

#[test]
fn more_sequences_than_the_device_sampler_supports_are_refused_before_any_weight_is_read() {
    let most = EngineConfig { max_num_seqs: 65_536, max_num_batched_tokens: 70_000, ..config(64) };
    let progress = |_, _| panic!("weights are read");
    let refused = engine::load(&most, LoadOn::Device(NoOp::new()), &progress).err().unwrap().to_string();
    assert!(refused.starts_with("--max-num-seqs: found 65536, expected at most 65535 on cuda-sim"), "{refused}");
}

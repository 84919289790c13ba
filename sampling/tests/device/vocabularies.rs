//! Vocabularies of different sizes in every type, compared with the host.

use device::Dtype;
use sampling::SamplingParams;

use super::KERNELS;
use super::problem::{OnDevice, Sequence, TYPES, generated, limits, rounded, rows_of, sampler, step};

/// Parameters for each path through the kernels.
fn all_params(vocab: u32) -> Vec<SamplingParams> {
    let plain = SamplingParams { logprobs: Some(20), ..SamplingParams::default() };
    let filters = SamplingParams { temperature: 0.7, top_k: 50, top_p: 0.9, min_p: 0.001, ..plain.clone() };
    vec![
        plain.clone(),
        SamplingParams { temperature: 0.0, ..plain.clone() },
        SamplingParams { typical_p: Some(0.4), ..filters.clone() },
        SamplingParams { top_p: 0.999, temperature: 1.7, ..plain.clone() },
        SamplingParams { top_k: vocab / 2 + 1, ..plain.clone() },
        SamplingParams { top_k: vocab / 2 + 1, top_p: 0.97, temperature: 3.0, ..plain.clone() },
        SamplingParams {
            repetition_penalty: 1.3,
            presence_penalty: 0.4,
            frequency_penalty: 0.1,
            logit_bias: vec![(vocab - 1, 9.0), (vocab / 2, -100.0), (0, 5.0)],
            bad_words: [vec![vocab - 1, 0], vec![vocab / 3]].into(),
            ..filters
        },
    ]
}

fn equal_the_host(vocabs: &[usize], dtype: Dtype) {
    for device in KERNELS.devices(1) {
        for &vocab in vocabs {
            let logits = rounded(dtype, &generated(vocab, vocab as u32));
            // Eight equal rows, which begin at different distances from a multiple of 16 bytes.
            let on_device = OnDevice::new(&*device, dtype, [&logits[..]; 8]);
            let mut sequences: Vec<Sequence> =
                all_params(vocab as u32).into_iter().map(|params| Sequence::new(params, 5)).collect();
            let mut sampler = sampler(&device, limits(sequences.len(), vocab));
            for (slot, sequence) in (0..).zip(&mut sequences) {
                sequence.prompt = vec![0, vocab as u32 / 2, vocab as u32 - 1];
                sequence.output = vec![vocab as u32 - 1];
                sampler.set_row(slot, &sequence.params, &sequence.context()).unwrap();
            }
            let rows = rows_of(0..sequences.len() as u32);
            for (sampled, sequence) in step(&mut sampler, &on_device, &rows).iter().zip(&sequences) {
                let wanted = sequence.sampled(&logits);
                assert_eq!(*sampled, wanted, "{vocab} {dtype:?} {}: {:?}", device.name(), sequence.params);
            }
        }
    }
}

#[test]
fn vocabularies_of_every_length_draw_the_hosts_tokens() {
    for dtype in TYPES {
        equal_the_host(&[1, 2, 3, 31, 32, 33, 257, 1000, 4097, 8185, 8191, 8192, 8193, 16_383], dtype);
    }
}

#[test]
fn vocabularies_of_real_models_draw_the_hosts_tokens() {
    equal_the_host(&[50_257, 128_256, 151_936], Dtype::Bf16);
    if testkit::everything() {
        equal_the_host(&[32_000, 50_257, 128_256, 151_936, 262_144], Dtype::F32);
        equal_the_host(&[50_257, 262_144], Dtype::F16);
    }
}

#[test]
fn the_exponential_and_the_logarithm_are_the_hosts_to_the_last_bit() {
    const ROWS: u32 = 200;
    for device in KERNELS.devices(1) {
        // −ln(1 + e^z) resolves e^z where that is small, and the logarithm where it is not.
        let row = |i: u32| [0.0, (i * 10_007 % 300_007) as f32 * -1e-4];
        let mut sampler = sampler(&device, limits(ROWS as usize, 2));
        let params = SamplingParams { temperature: 0.0, logprobs: Some(2), ..SamplingParams::default() };
        let sequence = Sequence::new(params, 0);
        (0..ROWS).for_each(|slot| sampler.set_row(slot, &sequence.params, &sequence.context()).unwrap());
        for round in 0..5 {
            let logits: Vec<[f32; 2]> = (0..ROWS).map(|i| row(round * ROWS + i)).collect();
            let on_device = OnDevice::new(&*device, Dtype::F32, logits.iter().map(|row| &row[..]));
            for (sampled, logits) in step(&mut sampler, &on_device, &rows_of(0..ROWS)).iter().zip(&logits) {
                assert_eq!(*sampled, sequence.sampled(logits), "{logits:?}");
            }
        }
    }
}

#[test]
fn equal_sums_go_to_the_lowest_id_of_all_chunks() {
    for device in KERNELS.devices(1) {
        for first in [2usize, 8195] {
            let mut logits = vec![f32::MIN; 9000];
            (first..9000).step_by(3).for_each(|token| logits[token] = f32::MAX);
            let on_device = OnDevice::new(&*device, Dtype::F32, [&logits[..]]);
            let mut sampler = sampler(&device, limits(1, logits.len()));
            let sequence = Sequence::new(SamplingParams::default(), 1);
            sampler.set_row(0, &sequence.params, &sequence.context()).unwrap();
            let sampled = step(&mut sampler, &on_device, &rows_of([0]));
            assert_eq!(sampled[0], sequence.sampled(&logits));
            assert_eq!(sampled[0].token, first as u32);
        }
    }
}

#[test]
fn stop_ids_are_not_held_back_if_nothing_else_is_left() {
    for device in KERNELS.devices(1) {
        let logits = generated(9000, 2);
        let on_device = OnDevice::new(&*device, Dtype::F32, [&logits[..]]);
        for temperature in [0.0, 0.9] {
            // 7 and 8500 are stop ids, and 9100 is no token. The bias makes 7 likelier than 8.
            for allowed in [vec![7, 8500], vec![7, 8500, 9100], vec![7, 8, 8500]] {
                let params = SamplingParams {
                    temperature,
                    min_tokens: 3,
                    logit_bias: vec![(7, 90.0), (8, 1.0)],
                    allowed_token_ids: Some(allowed.into()),
                    ..SamplingParams::default()
                };
                let sequence = Sequence { stop_ids: vec![8500, 7, 9100], ..Sequence::new(params, 1) };
                let mut sampler = sampler(&device, limits(1, logits.len()));
                sampler.set_row(0, &sequence.params, &sequence.context()).unwrap();
                let sampled = step(&mut sampler, &on_device, &rows_of([0]));
                assert_eq!(sampled[0], sequence.sampled(&logits), "{:?}", sequence.params);
            }
        }
    }
}

#[test]
fn ties_everywhere_are_cut_by_id_as_on_the_host() {
    for device in KERNELS.devices(1) {
        // Five different logits, so every cut goes through ties of two thousand tokens.
        let logits: Vec<f32> = (0..10_000u32).map(|token| ((token * 7919) % 10_007 % 5) as f32).collect();
        let on_device = OnDevice::new(&*device, Dtype::F32, [&logits[..]]);
        let shares = [0.05, 0.3, 0.633, 0.9, 0.999];
        let mut sampler = sampler(&device, limits(shares.len(), logits.len()));
        let sequences = shares.map(|top_p| {
            let params = SamplingParams { top_p, top_k: 6000, logprobs: Some(33), ..SamplingParams::default() };
            Sequence::new(params, 11)
        });
        for (slot, sequence) in (0..).zip(&sequences) {
            sampler.set_row(slot, &sequence.params, &sequence.context()).unwrap();
        }
        let mut rows = rows_of(0..shares.len() as u32);
        rows.iter_mut().for_each(|row| row.logits_row = 0);
        // A draw shows only one of the kept tokens. Many steps reveal a cut at the wrong id.
        for at in 0..12 {
            for (sampled, sequence) in step(&mut sampler, &on_device, &rows).iter().zip(&sequences) {
                let output = vec![0; at];
                let wanted = Sequence { output, ..sequence.clone() }.sampled(&logits);
                assert_eq!(*sampled, wanted, "{}", sequence.params.top_p);
            }
        }
    }
}

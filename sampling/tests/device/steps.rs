//! Steps: uploads, steps in flight, draws.

use device::Dtype;
use sampling::device::{DeviceSampler, Row, TokenCopy};
use sampling::{Sampler, SamplingParams};

use super::KERNELS;
use super::problem::{OnDevice, Sequence, generated, limits, rows_of, sampler, step};
use crate::distribution::assert_distribution;

#[test]
fn draws_on_the_device_follow_the_probabilities_over_sequences_and_positions() {
    const ROWS: u32 = 250;
    const STEPS: usize = 16;
    let Some(device) = KERNELS.one(0) else { return };
    let logits: Vec<f32> = (0..40).map(|i| ((i * 37 + 11) % 91) as f32 * 0.05).collect();
    let params = SamplingParams { temperature: 1.3, top_k: 30, ..SamplingParams::default() };
    let on_device = OnDevice::new(&*device, Dtype::F32, [&logits[..]]);
    let mut sampler = sampler(&device, limits(ROWS as usize, logits.len()));
    let sequence = Sequence::new(params, 4);
    sampler.set_row(0, &sequence.params, &sequence.context()).unwrap();
    (1..ROWS).for_each(|slot| sampler.fork(0, slot, slot).unwrap());
    let rows = rows_of_one(ROWS);
    let mut counts = vec![0; logits.len()];
    for _ in 0..STEPS {
        step(&mut sampler, &on_device, &rows).iter().for_each(|sampled| counts[sampled.token as usize] += 1);
    }
    let probabilities = Sampler::new().probabilities(&logits, &sequence.params, &sequence.context());
    assert_distribution(&counts, &probabilities, ROWS * STEPS as u32, "sequences and positions");
}

#[test]
fn bad_words_are_banned_as_the_output_grows_and_biases_of_one_token_add_up_in_order() {
    for device in KERNELS.devices(1) {
        let logits = [0.3, 0.0, 0.1];
        let on_device = OnDevice::new(&*device, Dtype::F32, [&logits[..]]);
        // The shortest ring of last tokens that these words allow.
        let mut sampler = sampler(&device, sampling::device::Limits { bad_word_tokens: 2, ..limits(8, 3) });
        let params = SamplingParams {
            bad_words: [vec![0, 1], vec![1, 2, 0], vec![2, 2, 2]].into(),
            logit_bias: vec![(1, 0.7), (0, 1e8), (1, 0.1), (0, -1e8)],
            ..SamplingParams::default()
        };
        let mut sequences: Vec<Sequence> = (0..8).map(|seed| Sequence::new(params.clone(), seed)).collect();
        for (slot, sequence) in (0..).zip(&sequences) {
            sampler.set_row(slot, &sequence.params, &sequence.context()).unwrap();
        }
        for _ in 0..12 {
            for (sampled, sequence) in step(&mut sampler, &on_device, &rows_of_one(8)).iter().zip(&mut sequences) {
                assert_eq!(*sampled, sequence.sampled(&logits), "after {:?}", sequence.output);
                sequence.output.push(sampled.token);
            }
        }
    }
}

/// Rows of the first `count` slots, which all draw from one row of logits.
fn rows_of_one(count: u32) -> Vec<Row> {
    (0..count).map(|slot| Row::new(slot, 0)).collect()
}

/// Starts a step of one row.
fn begin(sampler: &mut DeviceSampler, logits: &OnDevice) -> sampling::device::Pending {
    sampler.sample(&logits.logits(), &rows_of([0])).unwrap()
}

#[test]
fn two_steps_can_be_in_flight_before_the_host_knows_the_first_token() {
    for device in KERNELS.devices(1) {
        let logits = generated(300, 1);
        let on_device = OnDevice::new(&*device, Dtype::F32, [&logits[..]]);
        let mut sampler = sampler(&device, limits(2, logits.len()));
        let params = SamplingParams {
            frequency_penalty: 2.0,
            repetition_penalty: 1.5,
            min_tokens: 2,
            logprobs: Some(3),
            ..SamplingParams::default()
        };
        let mut sequence = Sequence { stop_ids: vec![5, 5, 299, 400], ..Sequence::new(params, 8) };
        sampler.set_row(0, &sequence.params, &sequence.context()).unwrap();
        let mut pending = begin(&mut sampler, &on_device);
        for _ in 0..6 {
            let next = begin(&mut sampler, &on_device);
            let sampled = sampler.collect(&pending).unwrap().next().unwrap();
            assert_eq!(sampled, sequence.sampled(&logits));
            sequence.output.push(sampled.token);
            pending = next;
        }
        begin(&mut sampler, &on_device);
        begin(&mut sampler, &on_device);
        let overwritten = sampler.collect(&pending).err().unwrap().to_string();
        assert_eq!(
            overwritten,
            "sampling on the device: the results of step 7 have been overwritten; collect a step before the second one after it"
        );
    }
}

#[test]
fn the_last_token_of_a_slot_is_copied_before_the_host_knows_it() {
    for device in KERNELS.devices(1) {
        let logits: Vec<Vec<f32>> = (0..5).map(|seed| generated(300, seed)).collect();
        let on_device = OnDevice::new(&*device, Dtype::F32, logits.iter().map(|row| &row[..]));
        // A ring of one token, and one that is not full.
        for bad_word_tokens in [0, 31] {
            let limits = sampling::device::Limits { bad_word_tokens, ..limits(6, 300) };
            let mut sampler = sampler(&device, limits);
            for slot in 0..6 {
                let sequence = Sequence::new(SamplingParams::default(), u64::from(slot));
                sampler.set_row(slot, &sequence.params, &sequence.context()).unwrap();
            }
            let mut tokens = device.alloc(9 * 4).unwrap();
            device.upload(&mut tokens, 0, [77u32; 9].map(u32::to_ne_bytes).as_flattened()).unwrap();
            for step in 0..3 {
                let rows = rows_of([4, 0, 2, 1, 3]);
                let pending = sampler.sample(&on_device.logits(), &rows).unwrap();
                // Slot 5 has no output.
                let copies = [(0, 8), (4, 1), (3, 2 + step), (5, 7)].map(|(slot, index)| TokenCopy { slot, index });
                sampler.set_token_copies(&copies).unwrap();
                sampler.stage(&[], 0).unwrap();
                sampler.copy_tokens(&tokens).unwrap();
                let drawn: Vec<u32> = sampler.collect(&pending).unwrap().map(|sampled| sampled.token).collect();
                let mut found = [0; 36];
                device.download(&tokens, 0, &mut found).unwrap();
                let found: Vec<u32> = found.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)).collect();
                assert_eq!([found[8], found[1], found[2 + step as usize]], [drawn[1], drawn[0], drawn[4]]);
                assert_eq!([found[0], found[7]], [77, 77]);
            }
            sampler.set_token_copies(&[TokenCopy { slot: 0, index: 9 }]).unwrap();
            let error = sampler.copy_tokens(&tokens).unwrap_err().to_string();
            let expected = "found token index 9, expected an index below 9, the length of the array";
            assert_eq!(error, format!("sampling on the device: {expected}"));
            sampler.clear_row(0);
            assert!(sampler.set_token_copies(&[TokenCopy { slot: 0, index: 0 }]).is_err());
        }
    }
}

#[test]
fn changes_that_exceed_the_staging_buffer_are_sent_in_parts() {
    for device in KERNELS.devices(1) {
        let logits = generated(64, 3);
        let on_device = OnDevice::new(&*device, Dtype::F32, [&logits[..]]);
        let mut sampler = sampler(&device, limits(2, logits.len()));
        let params = SamplingParams { frequency_penalty: 1.0, ..SamplingParams::default() };
        let mut sequence = Sequence::new(params, 8);
        for i in 0..20 {
            sequence.prompt = vec![i; 200];
            sequence.output = vec![i + 1; 90 - i as usize];
            sampler.set_row(1, &sequence.params, &sequence.context()).unwrap();
        }
        let sampled = step(&mut sampler, &on_device, &rows_of([1]));
        assert_eq!(sampled[0], sequence.sampled(&logits));
    }
}

#[test]
fn the_memory_of_a_sampler_is_known_before_it_is_allocated() {
    let limits = sampling::device::Limits::new(256, 151_936, 32_768);
    // Counts and adjusted logits, two words each.
    let dense = 256 * 151_936 * 8;
    assert!((dense..dense + dense / 12).contains(&limits.device_bytes()), "{}", limits.device_bytes());
    assert!(limits.pinned_bytes() < 30 << 20, "{}", limits.pinned_bytes());
}

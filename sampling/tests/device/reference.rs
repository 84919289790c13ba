//! The 111 reference cases of transformers' logits processors, drawn on the device.

use device::Dtype;
use sampling::TokenLogprobs;
use sampling::device::Row;

use super::KERNELS;
use super::problem::{OnDevice, Sequence, limits, rows_of, sampler, step};
use crate::cases::cases;

/// Number of sequences that draw from one row.
const DRAWS: u32 = 3;

#[test]
fn the_reference_cases_draw_the_hosts_tokens_and_only_tokens_that_the_reference_keeps() {
    for device in KERNELS.devices(1) {
        let cases = cases();
        assert_eq!(cases.len(), 111);
        let mut lengths: Vec<usize> = cases.iter().map(|case| case.logits.len()).collect();
        lengths.sort_unstable();
        lengths.dedup();
        for vocab in lengths {
            let cases: Vec<_> = cases.iter().filter(|case| case.logits.len() == vocab).collect();
            let mut sampler = sampler(&device, limits(cases.len() * DRAWS as usize, vocab));
            let logits = OnDevice::new(&*device, Dtype::F32, cases.iter().map(|case| &case.logits[..]));
            let (mut rows, mut wanted) = (Vec::new(), Vec::new());
            for (logits_row, case) in (0..).zip(&cases) {
                for draw in 0..DRAWS {
                    let slot = rows.len() as u32;
                    let mut sequence = Sequence::new(case.params.clone(), 1);
                    sequence.params.logprobs = (draw == 0).then_some(5);
                    (sequence.prompt, sequence.output) = (case.prompt.clone(), case.output.clone());
                    (sequence.stop_ids, sequence.sequence) = (case.stop_ids.clone(), draw);
                    sampler.set_row(slot, &sequence.params, &sequence.context()).unwrap();
                    rows.push(Row::new(slot, logits_row));
                    wanted.push((case, sequence.sampled(&case.logits)));
                }
            }
            for (sampled, (case, wanted)) in step(&mut sampler, &logits, &rows).iter().zip(&wanted) {
                assert_eq!(sampled, wanted, "{} on {}", case.key, device.name());
                let exact = case.expected["compare"] == "exact";
                assert!(!exact || case.probabilities[sampled.token as usize] > 0.0, "{}", case.key);
                if case.expected["greedy"].as_bool().unwrap() {
                    assert_eq!(u64::from(sampled.token), case.expected["argmax"].as_u64().unwrap(), "{}", case.key);
                }
            }
        }
    }
}

#[test]
fn log_probabilities_equal_the_reference() {
    for device in KERNELS.devices(1) {
        for case in cases().iter().step_by(7) {
            let mut sampler = sampler(&device, limits(1, case.logits.len()));
            let logits = OnDevice::new(&*device, Dtype::F32, [&case.logits[..]]);
            let mut sequence = Sequence::new(Default::default(), 1);
            (sequence.params.temperature, sequence.params.logprobs) = (0.0, Some(5));
            sampler.set_row(0, &sequence.params, &sequence.context()).unwrap();
            let sampled = step(&mut sampler, &logits, &rows_of([0])).remove(0);
            let TokenLogprobs { logprob, rank, top } = sampled.logprob.unwrap();
            assert_eq!((rank, (sampled.token, logprob)), (1, top[0]), "{}", case.key);
            let wanted = case.expected["raw_top5"]["logprobs"].as_array().unwrap();
            let possible = case.logits.iter().filter(|&&logit| logit > f32::NEG_INFINITY).count();
            assert_eq!(top.len(), possible.min(wanted.len()), "{}", case.key);
            for ((_, found), wanted) in top.iter().zip(wanted) {
                assert!((f64::from(*found) - wanted.as_f64().unwrap()).abs() < 2e-5, "{}", case.key);
            }
        }
    }
}

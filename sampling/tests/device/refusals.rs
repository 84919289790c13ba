//! Calls that are refused before a kernel runs. The kernels check nothing, so each would be an invalid memory access.

use device::Dtype;
use sampling::SamplingParams;
use sampling::device::{DeviceSampler, Limits, Logits, Row};

use super::KERNELS;
use super::problem::{OnDevice, Sequence, limits, rows_of, sampler};

#[test]
fn a_request_that_exceeds_a_slot_is_refused_with_the_numbers_and_changes_nothing() {
    let Some(device) = KERNELS.one(0) else { return };
    let limits = Limits { max_logprobs: 4, list_words: 6, bad_word_tokens: 2, history_tokens: 9, ..limits(2, 50) };
    let mut sampler = sampler(&device, limits);
    let plain = SamplingParams::default;
    let cases = [
        (SamplingParams { logprobs: Some(5), ..plain() }, "found 5 alternatives of a token, expected at most 4"),
        (SamplingParams { bad_words: [vec![1; 4]].into(), ..plain() }, "found 3 tokens of a bad word before its last"),
        (
            SamplingParams { logit_bias: vec![(1, 1.0); 3], bad_words: [vec![1]].into(), ..plain() },
            "found 8 words of biases, stop ids and bad words, expected at most 6",
        ),
        (
            SamplingParams { presence_penalty: 1.0, ..plain() },
            "found 10 tokens of a sequence with penalties, expected at most 9",
        ),
    ];
    for (params, problem) in cases {
        let sequence = Sequence { output: vec![3; 7], ..Sequence::new(params, 1) };
        let error = sampler.set_row(1, &sequence.params, &sequence.context()).unwrap_err().to_string();
        assert!(error.contains(problem) && error.ends_with("sample such a row on the host"), "{error}");
        let error = sampler.stage(&rows_of([1]), 1).unwrap_err().to_string();
        assert_eq!(error, "sampling on the device: slot 1 holds no sequence; call set_row or fork first");
    }
}

#[test]
fn rows_and_logits_that_do_not_exist_are_refused() {
    let Some(device) = KERNELS.one(0) else { return };
    let mut sampler = sampler(&device, limits(2, 50));
    let sequence = Sequence::new(SamplingParams::default(), 1);
    assert!(sampler.set_row(2, &sequence.params, &sequence.context()).is_err());
    assert!(sampler.fork(0, 1, 1).is_err() && sampler.constrain(0, None).is_err());
    sampler.set_row(0, &sequence.params, &sequence.context()).unwrap();
    assert!(sampler.fork(0, 0, 1).is_err() && sampler.fork(0, 2, 1).is_err());
    let twice = [Row::new(0, 0); 2];
    for _ in 0..2 {
        let error = sampler.stage(&twice, 2).unwrap_err().to_string();
        assert!(error.contains("slot 0 is named twice"), "{error}");
    }
    assert!(sampler.stage(&rows_of([0]), 3).is_err() && sampler.stage(&rows_of([0]), 0).is_err());

    let logits = OnDevice::new(&*device, Dtype::F32, [&[0.0; 50][..]]);
    let rows = [Row::new(0, 1)];
    sampler.stage(&rows, 1).unwrap();
    let error = sampler.launch(&logits.logits(), 1).unwrap_err().to_string();
    assert_eq!(
        error,
        "sampling on the device: row 1 of the logits ends at byte 412, expected at most 212, the size of the buffer"
    );
    let narrow = Logits { stride: 49, ..logits.logits() };
    assert!(sampler.launch(&narrow, 1).is_err() && sampler.launch(&logits.logits(), 2).is_err());
    sampler.clear_row(0);
    assert!(sampler.stage(&rows_of([0]), 1).is_err());
}

#[test]
fn limits_that_are_zero_or_too_large_are_refused() {
    let Some(device) = KERNELS.one(0) else { return };
    for (max_num_seqs, vocab) in [(0, 5), (5, 0), (70_000, 5), (5, (1 << 22) + 1)] {
        assert!(DeviceSampler::new(device.clone(), limits(max_num_seqs, vocab)).is_err());
    }
}

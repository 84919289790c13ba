//! Every kernel under the sanitizers, each in its own process.

use std::sync::Arc;

use device::Device;
use sampling::device::{Limits, Row, TokenCopy};
use sampling::{SamplingParams, TokenSet};
use testkit::kernels::host::Instrument;

use super::KERNELS;
use super::problem::{OnDevice, Sequence, TYPES, generated, limits, rows_of, sampler, step};

/// Runs rows that cover every path through the kernels, with several chunks per row and with one.
fn work(device: &Arc<dyn Device>, vocabs: &[usize]) {
    let logprobs = Some(5);
    for (&vocab, dtype) in vocabs.iter().zip(TYPES.into_iter().cycle()) {
        let last = vocab as u32 - 1;
        let filters = SamplingParams { top_k: vocab as u32 / 2, top_p: 0.7, min_p: 1e-6, ..SamplingParams::default() };
        let listed = SamplingParams {
            repetition_penalty: 1.2,
            frequency_penalty: 0.3,
            min_tokens: 9,
            logit_bias: vec![(last, 3.0), (0, 1.0), (0, 0.1)],
            bad_words: [vec![1, 2], vec![last]].into(),
            logprobs,
            ..filters.clone()
        };
        // Bans everything except stop ids.
        let stops_alone =
            SamplingParams { allowed_token_ids: Some([2, last].into()), min_tokens: 9, ..filters.clone() };
        let all_params = [
            SamplingParams { typical_p: Some(0.6), ..filters },
            listed,
            stops_alone,
            SamplingParams { temperature: 0.0, logprobs, ..Default::default() },
            // Few tokens are undecided. Of the other rows with several chunks, more than a block lists.
            SamplingParams { top_k: 3, ..Default::default() },
        ];
        let mut sequences: Vec<Sequence> = all_params.into_iter().map(|params| Sequence::new(params, 3)).collect();
        sequences[0].allowed = Some(TokenSet::from_words(vec![0xffff_fff7; vocab.div_ceil(32)], vocab));
        let mut sampler = sampler(device, Limits { max_rows: 9, ..limits(7, vocab) });
        for (slot, sequence) in (0..).zip(&mut sequences) {
            (sequence.output, sequence.stop_ids) = (vec![1], vec![2, last]);
            sampler.set_row(slot, &sequence.params, &sequence.context()).unwrap();
        }
        sampler.fork(1, 5, 1).unwrap();
        // Rounded, so that cuts go through ties.
        let logits: Vec<f32> = generated(vocab, 1).iter().map(|x| (x * 0.25).round() * 4.0).collect();
        let on_device = OnDevice::new(&**device, dtype, [&logits[..]]);
        let several = OnDevice::new(&**device, dtype, [&logits[..]; 4]);
        let mut rows = rows_of(0..6);
        rows.iter_mut().for_each(|row| row.logits_row = 0);
        sampler.stage(&rows, 7).unwrap();
        sampler.launch(&on_device.logits(), 7).unwrap();
        sampler.read().unwrap();
        sampler.set_token_copies(&[(4, 0), (0, 6), (3, 2)].map(|(slot, index)| TokenCopy { slot, index })).unwrap();
        step(&mut sampler, &on_device, &rows[..2]);
        let with_drafts = [&[1, 2, last][..], &[], &[last, 0, 1]];
        let rows = [1, 0, 5].into_iter().zip(with_drafts);
        let rows: Vec<Row> = rows.flat_map(|(slot, drafts)| Row::with_drafts(slot, 0, drafts)).collect();
        step(&mut sampler, &several, &rows);
        sampler.copy_tokens(&device.alloc(7 * 4).unwrap()).unwrap();
    }
}

/// What the names of kernels begin with.
const ALL: [&str; 8] = [
    "sample_adjust",
    "sample_filter",
    "sample_draw",
    "sample_finish",
    "sample_history",
    "sample_fork",
    "sample_copy_tokens",
    "sample_accept",
];

fn assert_clean(sanitizer: Instrument) {
    let everything = testkit::everything();
    let seeds = if everything { &[0, 1, 77][..] } else { &[1][..] };
    let vocabs: &[usize] = if everything { &[8300, 40, 8192, 1, 20_000, 33] } else { &[8300, 40, 65] };
    KERNELS.are_clean(sanitizer, seeds, &ALL, |device| work(&device, vocabs));
}

#[test]
fn the_memory_sanitizers_find_nothing_in_the_kernels() {
    assert_clean(Instrument::Memory);
}

#[test]
#[ignore = "only in a step of its own: cargo xtask ci runs it"]
fn the_thread_sanitizer_finds_nothing_in_the_kernels() {
    assert_clean(Instrument::Thread);
}

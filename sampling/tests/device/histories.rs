//! Random sequences over several steps, on the device and on the host, compared bit by bit, with preemptions, forks and
//! grammars in between.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sampling::TokenSet;
use sampling::device::Row;

use super::KERNELS;
use super::problem::{OnDevice, Sequence, TYPES, limits, rounded, sampler, step};
use crate::rows::rows_of;

const STEPS: usize = 4;
/// Number of slots, greater than that of sequences.
const SLOTS: usize = 6;

/// An event of a sequence before a step.
#[derive(Clone, Debug)]
enum Act {
    Nothing,
    /// It has no row in this step.
    Waits,
    /// It loses its slot and resumes in another one.
    Preempted,
    /// It is constrained to these tokens, or not constrained any more.
    Constrained(Option<Vec<u32>>),
    /// It becomes a fork of the first sequence.
    Forked,
}

#[derive(Clone, Debug)]
struct History {
    vocab: usize,
    dtype: usize,
    sequences: Vec<Sequence>,
    /// Logits of each step and sequence.
    logits: Vec<Vec<Vec<f32>>>,
    acts: Vec<Vec<Act>>,
    /// Number of padding rows in each step.
    padding: usize,
}

fn histories() -> impl Strategy<Value = History> {
    (2usize..200, 1usize..4).prop_flat_map(|(vocab, count)| {
        let logit = prop_oneof![
            12 => (-40..40i32).prop_map(|x| x as f32 * 0.25),
            8 => -30.0f32..30.0,
            1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::MAX, f32::MIN, 1e-40]),
        ];
        // Rows without a possible token, or with equal logits.
        let row = prop_oneof![
            12 => prop::collection::vec(logit, vocab),
            1 => prop::sample::select(vec![f32::NEG_INFINITY, f32::NAN, 2.0]).prop_map(move |x| vec![x; vocab]),
        ];
        let sequence = (rows_of(vocab), any::<u64>(), prop::option::of(0usize..41)).prop_map(|(row, seed, logprobs)| {
            let mut sequence = Sequence::of(row, seed);
            sequence.params.logprobs = logprobs;
            sequence
        });
        let act = prop_oneof![
            6 => Just(Act::Nothing),
            1 => Just(Act::Waits),
            2 => Just(Act::Preempted),
            2 => prop::option::of(prop::collection::vec(0..vocab as u32, 0..9)).prop_map(Act::Constrained),
            1 => Just(Act::Forked),
        ];
        let logits = prop::collection::vec(prop::collection::vec(row, count), STEPS);
        let acts = prop::collection::vec(prop::collection::vec(act, count), STEPS);
        (prop::collection::vec(sequence, count), logits, acts, 0..TYPES.len(), 0usize..3).prop_map(
            move |(sequences, logits, acts, dtype, padding)| History { vocab, dtype, sequences, logits, acts, padding },
        )
    })
}

#[test]
fn every_history_draws_the_hosts_tokens_and_log_probabilities() {
    let cases = if testkit::everything() { 2000 } else { 96 };
    for device in KERNELS.devices(1) {
        let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
        let run = |history: History| {
            let History { vocab, mut sequences, .. } = history;
            let dtype = TYPES[history.dtype];
            let mut sampler = sampler(&device, limits(SLOTS, vocab));
            let mut slots: Vec<u32> = (0..sequences.len() as u32).collect();
            let mut free: Vec<u32> = (sequences.len() as u32..SLOTS as u32).collect();
            for (slot, sequence) in slots.iter().zip(&sequences) {
                sampler.set_row(*slot, &sequence.params, &sequence.context()).unwrap();
            }
            for (logits, acts) in history.logits.iter().zip(&history.acts) {
                let mut rows = Vec::new();
                for (i, act) in acts.iter().enumerate() {
                    match act {
                        Act::Waits => continue,
                        Act::Nothing => {}
                        Act::Preempted => {
                            sampler.clear_row(slots[i]);
                            free.insert(0, slots[i]);
                            slots[i] = free.pop().unwrap();
                            sampler.set_row(slots[i], &sequences[i].params, &sequences[i].context()).unwrap();
                        }
                        Act::Constrained(ids) => {
                            sequences[i].allowed = ids.as_ref().map(|ids| {
                                let mut set = TokenSet::new(vocab);
                                ids.iter().for_each(|&id| set.insert(id));
                                set
                            });
                            sampler.constrain(slots[i], sequences[i].allowed.as_ref()).unwrap();
                        }
                        Act::Forked if i > 0 => {
                            sequences[i] = Sequence { sequence: 90 + i as u32, ..sequences[0].clone() };
                            sampler.fork(slots[0], slots[i], 90 + i as u32).unwrap();
                        }
                        Act::Forked => {}
                    }
                    rows.push(Row::new(slots[i], i as u32));
                }
                // The order of rows changes.
                rows.reverse();
                let on_device = OnDevice::new(&*device, dtype, logits.iter().map(|row| &row[..]));
                let padded = (rows.len() + history.padding).min(SLOTS);
                sampler.stage(&rows, padded).unwrap();
                sampler.launch(&on_device.logits(), padded).unwrap();
                let pending = sampler.read().unwrap();
                let found: Vec<_> = sampler.collect(&pending).unwrap().collect();
                prop_assert_eq!(found.len(), rows.len());
                for (row, found) in rows.iter().zip(found) {
                    let i = row.logits_row as usize;
                    let wanted = sequences[i].sampled(&rounded(dtype, &logits[i]));
                    prop_assert_eq!(&found, &wanted, "sequence {}", i);
                    sequences[i].output.push(wanted.token);
                }
            }
            Ok(())
        };
        if let Err(problem) = runner.run(&histories(), run) {
            panic!("{}: {problem}", device.name());
        }
    }
}

#[test]
fn a_row_draws_the_same_alone_and_in_a_batch() {
    let Some(device) = KERNELS.one(7) else { return };
    let logits: Vec<Vec<f32>> = (0..5).map(|row| super::problem::generated(9000, row)).collect();
    let sequences: Vec<Sequence> = (0..5u32)
        .map(|i| {
            let params = sampling::SamplingParams {
                temperature: 0.4 + 0.3 * i as f32,
                top_k: 40 * (i % 3),
                top_p: if i % 2 == 0 { 0.8 } else { 1.0 },
                logprobs: (i > 2).then_some(7),
                ..Default::default()
            };
            Sequence::new(params, u64::from(i))
        })
        .collect();
    let together = {
        let mut sampler = sampler(&device, limits(5, 9000));
        for (slot, sequence) in (0..).zip(&sequences) {
            sampler.set_row(slot, &sequence.params, &sequence.context()).unwrap();
        }
        let on_device = OnDevice::new(&*device, TYPES[0], logits.iter().map(|row| &row[..]));
        step(&mut sampler, &on_device, &super::problem::rows_of(0..5))
    };
    for (i, sequence) in sequences.iter().enumerate() {
        let mut sampler = sampler(&device, limits(1, 9000));
        sampler.set_row(0, &sequence.params, &sequence.context()).unwrap();
        let on_device = OnDevice::new(&*device, TYPES[0], [&logits[i][..]]);
        let alone = step(&mut sampler, &on_device, &[Row::new(0, 0)]);
        assert_eq!(alone[0], together[i]);
    }
}

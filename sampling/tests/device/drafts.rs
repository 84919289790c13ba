//! Sequences with drafts: each row draws what the host draws behind the drafts before it, and the slot takes only the tokens up to the
//! first wrong draft.

use device::Dtype;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sampling::SamplingParams;
use sampling::device::{Limits, MAX_DRAFTS, Row, SampleError, TokenCopy};

use super::KERNELS;
use super::problem::{OnDevice, Sequence, TYPES, generated, limits, rounded, sampler, step};
use crate::rows::rows_of;

const STEPS: usize = 4;
/// Greatest number of drafts of a sequence in these steps.
const DRAFTS: usize = 4;

/// A draft: the token that is drawn before it, or this one.
type Draft = Option<u32>;

#[derive(Clone, Debug)]
struct History {
    vocab: usize,
    dtype: usize,
    sequences: Vec<Sequence>,
    /// For each step and sequence the drafts, and a row of logits for each and one more.
    drafts: Vec<Vec<Vec<Draft>>>,
    logits: Vec<Vec<Vec<Vec<f32>>>>,
    /// For each step, whether the first sequence gets another slot.
    moves: Vec<bool>,
    padding: usize,
}

fn histories() -> impl Strategy<Value = History> {
    // Few tokens, so that penalties and bad words meet those that are drawn.
    (2usize..40, 1usize..4).prop_flat_map(|(vocab, count)| {
        let logit = prop_oneof![4 => (-8..8i32).prop_map(|x| x as f32 * 0.25), 1 => -30.0f32..30.0];
        let row = prop::collection::vec(logit, vocab);
        let sequence = (rows_of(vocab), any::<u64>(), prop::option::of(0usize..9)).prop_map(|(row, seed, logprobs)| {
            let mut sequence = Sequence::of(row, seed);
            sequence.params.logprobs = logprobs;
            sequence
        });
        let draft = prop_oneof![3 => Just(None), 1 => (0..vocab as u32).prop_map(Some)];
        let drafts = prop::collection::vec(draft, 0..=DRAFTS);
        let drafts = prop::collection::vec(prop::collection::vec(drafts, count), STEPS);
        let logits = prop::collection::vec(prop::collection::vec(row, DRAFTS + 1), count);
        let logits = prop::collection::vec(logits, STEPS);
        let moves = prop::collection::vec(any::<bool>(), STEPS);
        (prop::collection::vec(sequence, count), drafts, logits, moves, 0..TYPES.len(), 0usize..3).prop_map(
            move |(sequences, drafts, logits, moves, dtype, padding)| History {
                vocab,
                dtype,
                sequences,
                drafts,
                logits,
                moves,
                padding,
            },
        )
    })
}

#[test]
fn rows_behind_drafts_draw_the_hosts_tokens_and_wrong_drafts_leave_nothing_in_the_slot() {
    let cases = if testkit::everything() { 2000 } else { 128 };
    for device in KERNELS.devices(1) {
        let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
        let (accepted, rejected) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
        let run = |history: History| {
            let History { vocab, mut sequences, .. } = history;
            let dtype = TYPES[history.dtype];
            let most = sequences.len() * (DRAFTS + 1) + history.padding;
            let mut sampler = sampler(&device, Limits { max_rows: most, ..limits(5, vocab) });
            let mut slots: Vec<u32> = (0..sequences.len() as u32).collect();
            for (slot, sequence) in slots.iter().zip(&sequences) {
                sampler.set_row(*slot, &sequence.params, &sequence.context()).unwrap();
            }
            for (step, logits) in history.logits.iter().enumerate() {
                if history.moves[step] {
                    sampler.clear_row(slots[0]);
                    slots[0] = 3 + step as u32 % 2;
                    sampler.set_row(slots[0], &sequences[0].params, &sequences[0].context()).unwrap();
                }
                let (mut rows, mut wanted) = (Vec::new(), Vec::new());
                for (i, sequence) in sequences.iter_mut().enumerate() {
                    let (len, first, drafts) = (sequence.output.len(), wanted.len(), &history.drafts[step][i]);
                    for (at, logits) in logits[i].iter().enumerate().take(drafts.len() + 1) {
                        let sampled = sequence.sampled(&rounded(dtype, logits));
                        // A row behind a wrong draft draws as if the draft were right.
                        sequence.output.extend(drafts.get(at).map(|draft| draft.unwrap_or(sampled.token)));
                        wanted.push(sampled);
                    }
                    let drafts = sequence.output.split_off(len);
                    let drawn: Vec<u32> = wanted[first..].iter().map(|sampled| sampled.token).collect();
                    let right = drafts.iter().zip(&drawn).take_while(|(draft, token)| draft == token).count();
                    accepted.set(accepted.get() + right);
                    rejected.set(rejected.get() + usize::from(right < drafts.len()));
                    sequence.output.extend(&drawn[..=right]);
                    rows.extend(Row::with_drafts(slots[i], (i * (DRAFTS + 1)) as u32, &drafts));
                }
                let all = logits.iter().flatten().map(|row| &row[..]);
                let on_device = OnDevice::new(&*device, dtype, all);
                let padded = rows.len() + history.padding;
                sampler.stage(&rows, padded).unwrap();
                sampler.launch(&on_device.logits(), padded).unwrap();
                let pending = sampler.read().unwrap();
                let found: Vec<_> = sampler.collect(&pending).unwrap().collect();
                prop_assert_eq!(found, wanted, "step {}", step);
            }
            Ok(())
        };
        if let Err(problem) = runner.run(&histories(), run) {
            panic!("{}: {problem}", device.name());
        }
        assert!(accepted.get() > 100 && rejected.get() > 100, "{accepted:?} right, {rejected:?} wrong");
    }
}

#[test]
fn the_last_token_of_a_slot_with_drafts_is_the_one_behind_the_drafts_that_are_right() {
    for device in KERNELS.devices(1) {
        let logits: Vec<Vec<f32>> = (0..=MAX_DRAFTS as u32).map(|seed| generated(300, seed)).collect();
        let on_device = OnDevice::new(&*device, Dtype::F32, logits.iter().map(|row| &row[..]));
        let params = SamplingParams { presence_penalty: 0.7, logprobs: Some(2), ..SamplingParams::default() };
        let mut sequence = Sequence::new(params, 5);
        let mut truth = Vec::new();
        for row in &logits {
            truth.push(sequence.sampled(row));
            sequence.output.push(truth.last().unwrap().token);
        }
        let tokens = device.alloc(4).unwrap();
        // As many drafts as a slot can have; none is wrong, the first, the last, and one between them.
        for wrong in [None, Some(0), Some(MAX_DRAFTS - 1), Some(9)] {
            sequence.output.clear();
            let mut sampler = sampler(&device, Limits { max_rows: MAX_DRAFTS + 1, ..limits(1, 300) });
            sampler.set_row(0, &sequence.params, &sequence.context()).unwrap();
            let mut drafts: Vec<u32> = truth[..MAX_DRAFTS].iter().map(|sampled| sampled.token).collect();
            wrong.into_iter().for_each(|at| drafts[at] = (drafts[at] + 1) % 300);
            let rows: Vec<Row> = Row::with_drafts(0, 0, &drafts).collect();
            let right = wrong.unwrap_or(MAX_DRAFTS);
            assert!(step(&mut sampler, &on_device, &rows)[..=right] == truth[..=right], "{wrong:?}");
            sampler.set_token_copies(&[TokenCopy { slot: 0, index: 0 }]).unwrap();
            sampler.stage(&[], 0).unwrap();
            sampler.copy_tokens(&tokens).unwrap();
            let mut found = [0; 4];
            device.download(&tokens, 0, &mut found).unwrap();
            assert_eq!(u32::from_ne_bytes(found), truth[right].token, "{wrong:?}");
            // The slot goes on with the tokens that count.
            sequence.output = truth[..=right].iter().map(|sampled| sampled.token).collect();
            let next = step(&mut sampler, &on_device, &[Row::new(0, 3)]);
            assert_eq!(next[0], sequence.sampled(&logits[3]), "{wrong:?}");
        }
    }
}

#[test]
fn rows_of_drafts_that_are_not_complete_and_consecutive_are_refused() {
    let Some(device) = KERNELS.one(0) else { return };
    let mut sampler = sampler(&device, Limits { max_rows: MAX_DRAFTS + 2, ..limits(2, 50) });
    for slot in 0..2 {
        let sequence = Sequence::new(SamplingParams::default(), 1);
        sampler.set_row(slot, &sequence.params, &sequence.context()).unwrap();
    }
    let rows: Vec<Row> = Row::with_drafts(0, 0, &[7, 8]).collect();
    let other = Row::new(1, 0);
    for wrong in [
        vec![rows[0], rows[1]],
        vec![rows[0], rows[2], rows[1]],
        vec![rows[1], rows[2]],
        vec![rows[0], other, rows[1], rows[2]],
        vec![rows[0], rows[1], other],
        vec![rows[2]],
        vec![other, rows[2]],
    ] {
        let error = sampler.stage(&wrong, wrong.len()).unwrap_err();
        assert!(matches!(error, SampleError::Drafts(_)), "{wrong:?}: {error}");
    }
    let twice = [&rows[..], &rows].concat();
    assert!(matches!(sampler.stage(&twice, 6), Err(SampleError::DuplicateSlot(0))));
    let many: Vec<Row> = Row::with_drafts(0, 0, &[1; MAX_DRAFTS + 1]).collect();
    assert!(matches!(sampler.stage(&many, many.len()), Err(SampleError::TooMany { .. })));
    sampler.stage(&[&[other], &rows[..]].concat(), 4).unwrap();
}

//! Where top_k and top_p cut a row. A draw shows one token, so each row is drawn with seeds for which a cut that keeps one token
//! more, or one less, gives another token.

use device::Dtype;
use sampling::{Sampler, SamplingParams, gumbel_noise};

use super::KERNELS;
use super::problem::{OnDevice, Sequence, generated, limits, rows_of, sampler, step};

/// Returns the lowest seed for which the last of these tokens wins a draw from all of them.
fn seed_for_the_last(logits: &[f32], temperature: f32, tokens: &[u32]) -> u64 {
    let (last, others) = tokens.split_last().unwrap();
    let sum = |seed, token: u32| f64::from(logits[token as usize] / temperature) + gumbel_noise(seed, 0, 0, token);
    let wins = |seed: &u64| others.iter().all(|&other| sum(*seed, other) < sum(*seed, *last));
    (0..2_000_000).find(wins).unwrap()
}

/// Draws from the row on all devices, with the seeds that show the last token kept and the first one dropped.
fn assert_cut(logits: &[f32], params: &SamplingParams) {
    let plain = Sequence::new(params.clone(), 0);
    let probabilities = Sampler::new().probabilities(logits, params, &plain.context());
    let mut order: Vec<u32> =
        (0..logits.len() as u32).filter(|&token| logits[token as usize] > f32::NEG_INFINITY).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    let kept = order.partition_point(|&token| probabilities[token as usize] > 0.0);
    // The last token kept wins; the first one dropped would win.
    let ends = [kept, (kept + 1).min(order.len())];
    let seeds = ends.map(|end| seed_for_the_last(logits, params.temperature, &order[..end]));
    assert_eq!(Sequence { seed: seeds[0], ..plain }.sampled(logits).token, order[kept - 1]);
    for device in KERNELS.devices(1) {
        let on_device = OnDevice::new(&*device, Dtype::F32, [logits; 2]);
        let mut sampler = sampler(&device, limits(2, logits.len()));
        let sequences = seeds.map(|seed| Sequence::new(params.clone(), seed));
        for (slot, sequence) in (0..).zip(&sequences) {
            sampler.set_row(slot, &sequence.params, &sequence.context()).unwrap();
        }
        for (sampled, sequence) in step(&mut sampler, &on_device, &rows_of(0..2)).iter().zip(&sequences) {
            assert_eq!(*sampled, sequence.sampled(logits), "{kept} kept, {params:?}");
        }
    }
}

fn cut(top_k: u32, top_p: f32) -> SamplingParams {
    SamplingParams { top_k, top_p, ..SamplingParams::default() }
}

#[test]
fn top_k_and_top_p_keep_the_same_tokens_as_on_the_host_to_the_last_one() {
    let logits = generated(20_001, 9);
    // A flat row, in which each cut goes through the bulk of the vocabulary.
    let flat: Vec<f32> = logits.iter().map(|x| x * 0.1).collect();
    for (top_k, top_p) in [(1, 1.0), (50, 1.0), (0, 0.3), (0, 0.9), (200, 0.5), (200, 0.95), (3, 1e-4)] {
        assert_cut(&logits, &cut(top_k, top_p));
        assert_cut(&flat, &cut(top_k, top_p.min(0.02)));
    }
    // A small part of the range of all logits.
    assert_cut(&logits, &SamplingParams { min_p: 0.2, ..cut(90, 0.8) });
    assert_cut(&flat, &SamplingParams { temperature: 0.25, ..cut(2000, 0.3) });
}

#[test]
fn ties_are_cut_by_id_in_rows_of_several_blocks() {
    // All logits equal: more undecided tokens than a block lists.
    assert_cut(&vec![1.5; 9001], &cut(0, 0.03));
    assert_cut(&vec![-1e6; 9001], &cut(70, 0.03));
    // 900 ties per block, of which each block could list its own, but not the row all.
    let ties: Vec<f32> =
        (0..45_000).map(|token| if token % 9 == 4 { 3.0 } else { -(token as f32) * 1e-3 - 4.0 }).collect();
    assert_cut(&ties, &cut(0, 0.1));
    // Few enough to be listed.
    assert_cut(&ties[..30_000], &cut(0, 0.1));
    assert_cut(&ties[..30_000], &cut(4000, 0.1));
}

#[test]
fn top_p_may_end_in_any_bin_that_ties_of_top_k_leave_open() {
    // 1,000 tokens over two units, and below them ties that hold more than half of the mass. Before the ties of the
    // k-th token are counted, the end of top_p is known only roughly.
    for ties in [600, 6000] {
        let logit = |i: u32| if i < 1000 { i as f32 * -0.002 } else { -2.0 };
        let logits: Vec<f32> = (0..1000 + ties).map(|i| logit((i * 7919) % (1000 + ties))).collect();
        for top_p in [0.05, 0.1, 0.5] {
            assert_cut(&logits, &cut(1100, top_p));
        }
    }
}

#[test]
fn cuts_among_impossible_and_distant_tokens_are_the_hosts() {
    let none = f32::NEG_INFINITY;
    // One token is left; a few among impossible ones; all else so far away that it cannot win; the largest numbers.
    let one = |at: usize, x: f32| (0..9001).map(|token| if token == at { x } else { none }).collect::<Vec<f32>>();
    let few: Vec<f32> = (0..9001).map(|token| if token % 1000 == 7 { token as f32 * 1e-4 } else { none }).collect();
    let far: Vec<f32> = (0..9001).map(|token| if token % 1000 == 7 { token as f32 * 1e-4 } else { -3e38 }).collect();
    let near_the_end: Vec<f32> = (0..9001).map(|token| if token % 1000 == 7 { 0.0 } else { -40.0 }).collect();
    for logits in [one(0, -2.0), one(9000, 1e30), few, far, near_the_end] {
        for (top_k, top_p) in [(5, 0.9), (20, 1.0), (0, 0.7), (8000, 0.9)] {
            let params = cut(top_k, top_p);
            for device in KERNELS.devices(1) {
                let on_device = OnDevice::new(&*device, Dtype::F32, [&logits[..]; 8]);
                let mut sampler = sampler(&device, limits(8, logits.len()));
                let sequences: Vec<_> = (0..8).map(|seed| Sequence::new(params.clone(), seed)).collect();
                for (slot, sequence) in (0..).zip(&sequences) {
                    sampler.set_row(slot, &sequence.params, &sequence.context()).unwrap();
                }
                for (sampled, sequence) in step(&mut sampler, &on_device, &rows_of(0..8)).iter().zip(&sequences) {
                    assert_eq!(*sampled, sequence.sampled(&logits), "{params:?}");
                }
            }
        }
    }
}

//! Attention on tiles: its definition once more, number by number; problems that are found at random; and values that a weight of zero
//! does not hide.

use std::sync::Arc;

use attention_kernels::{CacheFormat, Dtype, KvDtype, Layout, Operation, PARTITION, Variant};
use device::Device;
use linear::Arithmetic;
use proptest::prelude::*;
use simd::pairs::pair;
use simd::tiles::{GROUP, add_group};
use simd::{LANES, Lanes, Portable};
use trial::numbers::from_bytes;
use trial::{Look, Problem, Results};

use super::attention::is_the_same_alone;
use super::devices::variants_on;
use super::failures::same_bits;

/// The variants of the family that this CPU runs; the others are reported.
fn family(device: &Arc<dyn Device>) -> Vec<&'static Variant> {
    let all = variants_on(&**device, &[Operation::Decode, Operation::Prefill]);
    all.into_iter().filter(|variant| variant.capabilities.arithmetic == Arithmetic::Tiles).collect()
}

fn cpu() -> Arc<dyn Device> {
    device::open("cpu", Some(2)).unwrap()
}

const FORMAT: CacheFormat = CacheFormat { dtype: Dtype::F32, kv_dtype: KvDtype::Bf16, layout: Layout::Hnd };

fn run(device: &Arc<dyn Device>, variant: &Variant, problem: &Problem) -> Results {
    problem.on(device).unwrap().run(variant, 0..problem.batch.num_seqs(), true).unwrap()
}

/// The sum of products of numbers in bfloat16, in groups of 32 that are padded with zeros.
fn sum(products: &[[f32; 2]]) -> f32 {
    products.chunks(GROUP).fold(0.0, |sum, group| {
        let of = |which: usize, i: usize| group.get(i).map_or(0.0, |product| product[which]);
        let pairs = |which| (0..LANES).map(move |i| pair([of(which, 2 * i), of(which, 2 * i + 1)]));
        add_group(sum, pairs(0).zip(pairs(1)))
    })
}

/// The weights of a partition for scores by token, of which some are not seen; and the greatest score and the sum of weights.
fn weights(scores: &[Option<f32>; PARTITION], scale: f32) -> ([f32; PARTITION], [f32; 2]) {
    let greatest = scores.iter().flatten().fold(f32::MIN, |a, b| a.max(*b));
    let factor = scale * std::f32::consts::LOG2_E;
    let (mut weights, mut totals) = ([0.0; PARTITION], [Portable::<true>::splat(0.0); 2]);
    for (panel, weights) in weights.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let exponent = |score: f32| score.mul_add(factor, -greatest * factor);
        let exponents: [f32; LANES] =
            std::array::from_fn(|lane| scores[panel * LANES + lane].map_or(f32::NEG_INFINITY, exponent));
        let powers = Portable::<true>::load(&exponents).exp2();
        totals[panel % 2] = totals[panel % 2].add(powers);
        powers.store(weights);
    }
    (weights, [greatest * scale, totals[0].add(totals[1]).sum()])
}

/// The output of one head of a row, by the definition of the family. The problem has no sparse blocks.
fn defined(problem: &Problem, seq: usize, row: usize, head: usize) -> Vec<f32> {
    let (dim, kv_head) = (problem.shape.head_dim, head / (problem.num_heads / problem.shape.num_kv_heads));
    let rows = problem.rows_of(seq);
    let position = problem.batch.context_lens[seq] as usize - (rows.end - row);
    let query = &problem.query[row * problem.width() + head * dim..][..dim];
    let of_token = |numbers: &[f32], token: usize, d: usize| {
        let block_size = problem.shape.block_size;
        let slot = problem.batch.table(seq)[token / block_size] as usize * block_size + token % block_size;
        numbers[problem.shape.offset(slot, kv_head) + d]
    };
    let is_seen = |token: usize| token <= position && problem.window.is_none_or(|window| token + window > position);
    let is_biased = problem.soft_cap.is_some() || problem.slopes.is_some();
    let (mut out, mut state): (Vec<f32>, Option<[f32; 2]>) = (vec![0.0; dim], None);
    for first in (0..=position).step_by(PARTITION) {
        let scores: [Option<f32>; PARTITION] = std::array::from_fn(|i| {
            is_seen(first + i).then(|| {
                let of_key = |d| [query[d], of_token(&problem.keys, first + i, d)];
                let mut score = sum(&(0..dim).map(of_key).collect::<Vec<_>>());
                if is_biased {
                    score *= problem.scale;
                }
                if let Some(cap) = problem.soft_cap {
                    score = cap * (score / cap).tanh();
                }
                let slope = problem.slopes.as_ref().map_or(0.0, |slopes| slopes[head]);
                score + slope * ((first + i) as f32 - position as f32)
            })
        });
        if scores.iter().all(Option::is_none) {
            continue;
        }
        let (weights, [greatest, total]) = weights(&scores, if is_biased { 1.0 } else { problem.scale });
        let part: Vec<f32> = (0..dim)
            .map(|d| {
                let value = |i: usize| scores[i].map_or(0.0, |_| of_token(&problem.values, first + i, d));
                sum(&(0..PARTITION).map(|i| [weights[i], value(i)]).collect::<Vec<_>>()) + 0.0
            })
            .collect();
        let factor = |score: f32, after: f32| if score == after { 1.0 } else { (score - after).exp() };
        state = Some(match state {
            None => {
                out = part;
                [greatest, total]
            }
            Some([old, so_far]) => {
                let after = greatest.max(old);
                let (old, new) = (factor(old, after), factor(greatest, after));
                out.iter_mut().zip(part).for_each(|(sum, part)| *sum = *sum * old + part * new);
                [after, so_far * old + total * new]
            }
        });
    }
    let total = state.map_or(1.0, |state| state[1]);
    out.into_iter().map(|value| value / total).collect()
}

/// Settings of a problem, and which of its rows are looked at.
fn look() -> impl Strategy<Value = (u64, Look)> {
    let sizes =
        (1..=2usize, prop_oneof![1..=20usize, Just(3)], prop_oneof![1..=100usize, Just(64), Just(96)], 1..=40usize);
    let lens = prop::collection::vec((1..=24usize, prop_oneof![0..=90usize, 480..=560usize, 1000..=1060usize]), 1..=3);
    let window = prop_oneof![Just(None), (1..=700usize).prop_map(Some)];
    (any::<u64>(), sizes, lens, window, any::<[bool; 4]>()).prop_map(|(seed, sizes, lens, window, flags)| {
        let (kv_heads, group, dim, block_size) = sizes;
        let [soft_cap, alibi, sinks, in_pairs] = flags;
        let heads = (kv_heads * group, kv_heads);
        let lens = lens.into_iter().map(|(rows, before)| (rows, before + rows)).collect();
        let (dim, block_size) =
            if in_pairs { (dim.next_multiple_of(16), block_size.next_multiple_of(16)) } else { (dim, block_size) };
        let layout = if in_pairs { Layout::Pairs } else { Layout::Hnd };
        let format = CacheFormat { layout, ..FORMAT };
        (seed, Look { heads, dim, block_size, window, soft_cap, alibi, sinks, ..Look::plain(format, lens) })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if testkit::everything() { 400 } else { 24 }))]

    /// All variants compute the same bits for it, of a batch and of a sequence alone, and these are close to float64.
    #[test]
    fn attention_on_tiles_is_close_to_float64_and_has_one_definition_of_its_bits((seed, look) in look()) {
        let (device, problem) = (cpu(), Problem::new(seed, &look));
        let variants = family(&device);
        let want = run(&device, variants[variants.len() - 1], &problem);
        let truth = problem.truth();
        want.check(variants[0], &problem, &truth).unwrap();
        let one = seed as usize % look.lens.len();
        for variant in variants {
            let found = run(&device, variant, &problem);
            same_bits(variant.name, Dtype::F32, &found.output, &want.output).unwrap();
            same_bits(variant.name, Dtype::F32, found.lse.as_ref().unwrap(), want.lse.as_ref().unwrap()).unwrap();
            is_the_same_alone(variant, &problem, &problem.on(&device).unwrap(), one..one + 1, &want, true).unwrap();
        }
        // One row and head, number by number. A sink changes only what divides it.
        let (row, head) = (problem.rows_of(one).start + seed as usize / 7 % look.lens[one].0, seed as usize / 3 % look.heads.0);
        let plain = Problem { sinks: None, ..problem };
        let found = from_bytes(Dtype::F32, &run(&device, family(&device)[0], &plain).output);
        let got = &found[row * plain.out_width() + head * look.dim..][..look.dim];
        let want = defined(&plain, one, row, head);
        prop_assert!(got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "row {row}, head {head}: {got:?}, not {want:?}");
    }
}

/// Sets all values of a token of the first sequence.
fn set_values(problem: &mut Problem, token: usize, value: f32) {
    let shape = problem.shape;
    let slot = problem.batch.table(0)[token / shape.block_size] as usize * shape.block_size + token % shape.block_size;
    for head in 0..shape.num_kv_heads {
        problem.values[shape.offset(slot, head)..][..shape.head_dim].fill(value);
    }
}

#[test]
fn a_value_that_is_not_finite_reaches_only_rows_that_see_it() {
    let device = cpu();
    for (window, token) in [(None, 530), (None, 512), (Some(9), 520), (Some(40), 507)] {
        let look = Look { heads: (6, 2), window, ..Look::plain(FORMAT, vec![(40, 545)]) };
        let usual = Problem::new(3, &look);
        for value in [f32::INFINITY, f32::NAN] {
            let mut unusual = usual.clone();
            set_values(&mut unusual, token, value);
            for variant in family(&device) {
                let [usual, found] = [&usual, &unusual].map(|problem| run(&device, variant, problem).output);
                let width = unusual.out_width() * 4;
                for (row, (found, usual)) in found.chunks(width).zip(usual.chunks(width)).enumerate() {
                    let position = 505 + row;
                    let sees_it = token <= position && window.is_none_or(|window| token + window > position);
                    let is_finite = from_bytes(Dtype::F32, found).iter().all(|x| x.is_finite());
                    assert!(found == usual || sees_it, "{}: row {row}, token {token} is {value}", variant.name);
                    assert!(is_finite != sees_it, "{}: row {row}, token {token} is {value}", variant.name);
                }
            }
        }
    }
}

/// The sum of two groups is a subnormal number below zero, which is a negative zero. Groups that only other rows see add +0 to it.
#[test]
fn the_sign_of_a_zero_does_not_depend_on_the_rows_of_a_chunk() {
    let device = cpu();
    let mut whole = Problem::new(5, &Look::plain(FORMAT, vec![(40, 103)]));
    whole.query.fill(0.0);
    (0..103).for_each(|token| set_values(&mut whole, token, 0.0));
    set_values(&mut whole, 0, f32::from_bits(0x0080_0000));
    set_values(&mut whole, 32, -f32::from_bits(0x0081_0000));
    let mut one = Problem { query: whole.query[..whole.width()].to_vec(), ..whole.clone() };
    (one.batch.query_starts, one.batch.context_lens) = (vec![0, 1], vec![64]);
    for variant in family(&device) {
        let [one, whole] = [&one, &whole].map(|problem| run(&device, variant, problem).output);
        assert_eq!(one[..], whole[..one.len()], "{}", variant.name);
        assert!(one.iter().all(|byte| *byte == 0), "{}: {one:x?}", variant.name);
    }
}

//! Low-rank products of several adapters in one step.

use device::Dtype;
use linear::{AdapterRows, DownFactor, LowRank, LowRankProduct, UpFactor, low_rank};
use proptest::prelude::*;
use simd::{Isa, Pool};

use super::cpu::isas;
use super::weights::values;

/// Numbers in a type, and what they are exactly.
fn stored(dtype: Dtype, numbers: &[f32]) -> (Vec<u8>, Vec<f32>) {
    match dtype {
        Dtype::F32 => (super::f32_bytes(numbers), numbers.to_vec()),
        Dtype::Bf16 => {
            let all: Vec<half::bf16> = numbers.iter().map(|x| half::bf16::from_f32(*x)).collect();
            (all.iter().flat_map(|x| x.to_le_bytes()).collect(), all.iter().map(|x| x.to_f32()).collect())
        }
        Dtype::F16 => {
            let all: Vec<half::f16> = numbers.iter().map(|x| half::f16::from_f32(*x)).collect();
            (all.iter().flat_map(|x| x.to_le_bytes()).collect(), all.iter().map(|x| x.to_f32()).collect())
        }
    }
}

/// An adapter of a layer whose outputs are two parts, each with its own factors.
struct Made {
    packed: LowRank,
    /// The matrix that it adds to the weights, `[outputs, inputs]`.
    sum: Vec<f64>,
}

fn make(inputs: usize, parts: [usize; 2], ranks: [usize; 2], dtype: Dtype, seed: u64) -> Made {
    let mut factors = Vec::new();
    let mut sum = Vec::new();
    for (i, (outputs, rank)) in parts.into_iter().zip(ranks).enumerate() {
        let scale = 0.5 + i as f32;
        let (down, a) = stored(dtype, &values(rank * inputs, seed ^ (7 + i as u64)));
        let (up, b) = stored(dtype, &values(outputs * rank, seed ^ (70 + i as u64)));
        for output in 0..outputs {
            for input in 0..inputs {
                let product = |r: usize| f64::from(b[output * rank + r]) * f64::from(a[r * inputs + input]);
                sum.push(f64::from(scale) * (0..rank).map(product).sum::<f64>());
            }
        }
        factors.push((down, up, scale));
    }
    let down: Vec<_> = factors.iter().map(|(data, _, scale)| DownFactor { dtype, data, scale: *scale }).collect();
    let up: Vec<_> = factors
        .iter()
        .enumerate()
        .map(|(down, (_, data, _))| UpFactor { dtype, data, first_output: down * parts[0], down })
        .collect();
    Made { packed: LowRank::pack(inputs, &down, &up).unwrap(), sum }
}

struct Layer {
    adapters: Vec<Made>,
    inputs: usize,
    outputs: usize,
    width: usize,
}

impl Layer {
    fn run(&self, isa: Isa, threads: usize, x: &[f32], y: &mut [f32], of_rows: &[Option<u32>]) {
        let mut rows = AdapterRows::default();
        rows.set(of_rows.iter().copied());
        let of = |adapter: u32| self.adapters.get(adapter as usize).map(|made| &made.packed);
        let mut t = vec![f32::NAN; rows.len() * self.width];
        let (inputs, outputs, width) = (self.inputs, self.outputs, self.width);
        let product = LowRankProduct { x, inputs, y, outputs, rows: &rows, adapters: &of, t: &mut t, width };
        low_rank(isa, &Pool::new(Some(threads)).unwrap(), product);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn adapters_of_every_rank_and_type_add_their_products_and_rows_do_not_depend_on_the_batch(
        inputs in 1usize..70,
        parts in [1usize..60, 1usize..600],
        ranks in prop::collection::vec((1usize..40, prop_oneof![1usize..40, Just(256)]), 1..4),
        // One more than there are adapters: it does not target the layer.
        of_rows in prop::collection::vec(prop::option::of(0u32..4), 1..40),
        dtype in prop::sample::select(&Dtype::ALL[..]),
        threads in 1usize..4,
        seed: u64,
    ) {
        let adapters: Vec<Made> =
            ranks.iter().zip(0..).map(|(ranks, i)| make(inputs, parts, [ranks.0, ranks.1], dtype, seed ^ i)).collect();
        let outputs = parts[0] + parts[1];
        let layer = Layer { adapters, inputs, outputs, width: LowRank::most_width(2, 256) };
        let (x, before) = (values(of_rows.len() * inputs, seed), values(of_rows.len() * outputs, seed ^ 3));
        for isa in isas() {
            let mut y = before.clone();
            layer.run(isa, threads, &x, &mut y, &of_rows);
            for (row, adapter) in of_rows.iter().enumerate() {
                let (of_row, x) = (row * outputs..(row + 1) * outputs, &x[row * inputs..][..inputs]);
                let found = &y[of_row.clone()];
                let Some(made) = adapter.and_then(|adapter| layer.adapters.get(adapter as usize)) else {
                    prop_assert!(found == &before[of_row], "row {} without an adapter has changed", row);
                    continue;
                };
                for ((found, before), weights) in found.iter().zip(&before[of_row.clone()]).zip(made.sum.chunks(inputs)) {
                    let want = f64::from(*before)
                        + weights.iter().zip(x).map(|(weight, x)| weight * f64::from(*x)).sum::<f64>();
                    prop_assert!((f64::from(*found) - want).abs() < 2e-3, "{isa} row {row}: {found} {want}");
                }
                let mut alone = before[of_row].to_vec();
                layer.run(isa, 1, x, &mut alone, &[*adapter]);
                prop_assert_eq!(found, &alone[..], "{} row {}", isa, row);
            }
        }
    }
}

#[test]
fn factors_that_are_not_whole_are_refused_and_sizes_stay_below_their_bound() {
    let bytes = super::f32_bytes(&values(6 * 40, 1));
    let down = |data| DownFactor { dtype: Dtype::F32, data, scale: 1.0 };
    let up = |data, down| UpFactor { dtype: Dtype::F32, data, first_output: 0, down };
    let pack =
        |downs: &[DownFactor<'_>], ups: &[UpFactor<'_>]| LowRank::pack(40, downs, ups).map(|packed| packed.bytes());
    // Rank 2, three outputs.
    let size = pack(&[down(&bytes[..320])], &[up(&bytes[..24], 0)]).unwrap();
    assert!(size <= LowRank::most_bytes(40, 3, 1, 2) && size > 320, "{size}");
    for (a, b, which) in [(&bytes[..316], &bytes[..24], 0), (&bytes[..320], &bytes[..20], 0), (&[], &bytes[..24], 0)] {
        assert!(pack(&[down(a)], &[up(b, which)]).is_err());
    }
    assert!(pack(&[down(&bytes[..320])], &[up(&bytes[..24], 1)]).is_err());
}

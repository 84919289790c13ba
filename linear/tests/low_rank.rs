//! Low-rank products of several adapters in one step.

use device::Dtype;
use linear::{
    AdapterRows, Arithmetic, DownFactor, Gemm, LowRank, LowRankProduct, PackedMatrix, Rows, UpFactor, WeightRows,
    gemm_reference, low_rank,
};
use proptest::prelude::*;
use simd::{Isa, Pool};

use super::cpu::isas;
use super::weights::values;

/// Numbers in a type.
fn stored(dtype: Dtype, numbers: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => super::f32_bytes(numbers),
        Dtype::Bf16 => numbers.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
        Dtype::F16 => numbers.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect(),
    }
}

/// An adapter of a layer whose outputs are two parts, each with its own factors.
struct Made {
    packed: LowRank,
    /// One entry per part: A, the scale and B.
    parts: Vec<(PackedMatrix, f32, PackedMatrix)>,
}

impl Made {
    fn new(
        arithmetic: Arithmetic,
        inputs: usize,
        outputs: [usize; 2],
        ranks: [usize; 2],
        dtype: Dtype,
        seed: u64,
    ) -> Made {
        let factors = [0, 1].map(|i| {
            let down = stored(dtype, &values(ranks[i] * inputs, seed ^ (7 + i as u64)));
            let up = stored(dtype, &values(outputs[i] * ranks[i], seed ^ (70 + i as u64)));
            (down, 0.5 + i as f32, up)
        });
        let pool = Pool::alone();
        let matrix = |k: usize, data: &[u8]| {
            PackedMatrix::stored(&pool, arithmetic, k, &[WeightRows::Numbers(dtype, data)]).unwrap()
        };
        let parts = factors.iter().zip(ranks).map(|((a, scale, b), rank)| (matrix(inputs, a), *scale, matrix(rank, b)));
        let parts = parts.collect();
        let down = factors.each_ref().map(|(data, scale, _)| DownFactor { dtype, data, scale: *scale });
        let up = [0, 1].map(|i| UpFactor { dtype, data: &factors[i].2, first_output: i * outputs[0], down: i });
        Made { packed: LowRank::pack(&pool, arithmetic, inputs, &down, &up).unwrap(), parts }
    }

    /// What plain loops add to a row.
    fn addition(&self, x: &[f32]) -> Vec<f32> {
        let product = |x: &[f32], weights: &PackedMatrix| {
            let mut y = vec![0.0; weights.n()];
            gemm_reference(Gemm { x: Rows::Numbers(x), weights, bias: None, y: &mut y });
            y
        };
        let of_part = |(a, scale, b): &(PackedMatrix, f32, PackedMatrix)| {
            let t: Vec<f32> = product(x, a).iter().map(|t| t * scale).collect();
            product(&t, b)
        };
        self.parts.iter().flat_map(of_part).collect()
    }
}

struct Layer {
    adapters: Vec<Made>,
    inputs: usize,
    outputs: usize,
}

impl Layer {
    /// `x` and `y` are adjacent rows of the step, from row `first` on.
    fn run(&self, isa: Isa, threads: usize, (x, y): (&[f32], &mut [f32]), of_rows: &[Option<u32>], first: usize) {
        let mut rows = AdapterRows::default();
        rows.set(of_rows.iter().copied());
        let of = |adapter: u32| self.adapters.get(adapter as usize).map(|made| &made.packed);
        let (inputs, outputs) = (self.inputs, self.outputs);
        let product = LowRankProduct { x, inputs, y, outputs, rows: &rows, first, adapters: &of };
        low_rank(isa, &Pool::new(Some(threads)).unwrap(), product);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn adapters_of_every_rank_type_and_arithmetic_add_their_products_and_rows_do_not_depend_on_the_batch(
        inputs in 1usize..70,
        parts in [1usize..60, 1usize..600],
        ranks in prop::collection::vec((1usize..40, prop_oneof![1usize..40, Just(256)]), 1..4),
        // One more than there are adapters: it does not target the layer.
        of_rows in prop_oneof![
            prop::collection::vec(prop::option::of(0u32..4), 1..40),
            prop::collection::vec(prop_oneof![8 => Just(Some(0)), 1 => prop::option::of(0u32..4)], 40..110),
        ],
        dtype in prop::sample::select(&Dtype::ALL[..]),
        arithmetic in prop::sample::select(&[Arithmetic::Exact, Arithmetic::Pairs, Arithmetic::Tiles][..]),
        threads in 1usize..4,
        // The rows are computed in two parts.
        cut: usize,
        seed: u64,
    ) {
        let made = |((a, b), i): (&(usize, usize), u64)| Made::new(arithmetic, inputs, parts, [*a, *b], dtype, seed ^ i);
        let adapters: Vec<Made> = ranks.iter().zip(0..).map(made).collect();
        let outputs = parts[0] + parts[1];
        let layer = Layer { adapters, inputs, outputs };
        let (x, before) = (values(of_rows.len() * inputs, seed), values(of_rows.len() * outputs, seed ^ 3));
        for isa in isas() {
            let mut y = before.clone();
            let cut = cut % (of_rows.len() + 1);
            let (head, tail) = y.split_at_mut(cut * outputs);
            layer.run(isa, threads, (&x[..cut * inputs], head), &of_rows, 0);
            layer.run(isa, threads, (&x[cut * inputs..], tail), &of_rows, cut);
            for (row, adapter) in of_rows.iter().enumerate() {
                let (of_row, x) = (row * outputs..(row + 1) * outputs, &x[row * inputs..][..inputs]);
                let (found, before) = (&y[of_row.clone()], &before[of_row]);
                let Some(made) = adapter.and_then(|adapter| layer.adapters.get(adapter as usize)) else {
                    prop_assert!(found == before, "row {} without an adapter has changed", row);
                    continue;
                };
                for ((found, before), addition) in found.iter().zip(before).zip(made.addition(x)) {
                    let (want, most) = (before + addition, if arithmetic.rounds() { 0.0 } else { 2e-3 });
                    prop_assert!((found - want).abs() <= most, "{isa} {arithmetic} row {row}: {found} {want}");
                }
                let mut alone = before.to_vec();
                layer.run(isa, 1, (x, &mut alone), &[*adapter], 0);
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
    let pack = |downs: &[DownFactor<'_>], ups: &[UpFactor<'_>]| {
        LowRank::pack(&Pool::alone(), Arithmetic::Exact, 40, downs, ups).map(|packed| packed.bytes())
    };
    // Rank 2, three outputs.
    let size = pack(&[down(&bytes[..320])], &[up(&bytes[..24], 0)]).unwrap();
    assert!(size <= LowRank::most_bytes(40, 3, 1, 2) && size > 320, "{size}");
    for (a, b, which) in [(&bytes[..316], &bytes[..24], 0), (&bytes[..320], &bytes[..20], 0), (&[], &bytes[..24], 0)] {
        assert!(pack(&[down(a)], &[up(b, which)]).is_err());
    }
    assert!(pack(&[down(&bytes[..320])], &[up(&bytes[..24], 1)]).is_err());
}

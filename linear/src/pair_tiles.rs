//! Products of bfloat16 with stored weights on tile registers: the numbers that codes stand for are exact in bfloat16, and scales are
//! multiplied with their sums. Activations are rounded to bfloat16, as with weights in that type.

use std::thread::LocalKey;

use simd::int8::WithInts;
use simd::pairs::{Emulated, PairLanes};
use simd::tiles::{EMPTY, GROUP, Registers, Tile, add_group};
use simd::{Isa, LANES, Lanes, Pairs, dispatch_pairs, on_tiles};

use super::processor::Processor;
use super::scaled_tiles::{Band, Kind, Memory, Product, Scratch, Task, walk_on};

/// Pairs of bfloat16, of which a tile has 32 inputs, or 16 and as many zeros.
pub(super) struct Halves;

thread_local! {
    static MEMORY: Memory<Halves> = const { Memory::new() };
}

impl Kind for Halves {
    type A = Tile;
    type B = Tile;
    const ZERO: (Tile, Tile) = (EMPTY, EMPTY);
    const SCALES_ROWS: bool = false;

    fn memory() -> &'static LocalKey<Memory<Halves>> {
        &MEMORY
    }
    fn on_tiles(isa: Isa, task: &Task<'_, Halves>, scratch: &mut Scratch<Halves>) {
        match task.rows() {
            1 => on_tiles!(isa, 1, |t| walk_on::<Halves, _, 1>(isa, t, task, scratch)),
            2..=4 => on_tiles!(isa, 4, |t| walk_on::<Halves, _, 4>(isa, t, task, scratch)),
            _ => on_tiles!(isa, LANES, |t| walk_on::<Halves, _, LANES>(isa, t, task, scratch)),
        }
    }
    #[inline(always)]
    fn add<const NOW: usize>(t: &mut impl Registers, a: &Tile, b: &Tile) {
        t.load::<4>(a);
        t.load::<6>(b);
        t.add_products::<NOW, 4, 6>();
    }
    #[inline(always)]
    fn numbers<L: WithInts>(products: &Pairs) -> L {
        L::load(products.as_floats())
    }
}

/// Computes a product with rows of `k` floats, of which a tile takes `width`.
pub(super) fn run(processor: Processor<'_>, product: Product<'_, Halves>, (x, k): (&[f32], usize), width: usize) {
    product.run(processor, |band, to| {
        let rows = &x[band * LANES * k..product.rows.min((band + 1) * LANES) * k];
        let (isa, shape) = (processor.isa, [k, width, product.chain]);
        dispatch_pairs!(isa, round_band(rows: &[f32], shape: [usize; 3], to: &mut [Band<Tile>]));
    });
}

/// Rounds up to sixteen rows.
#[inline(always)]
fn round_band<D: PairLanes>(rows: &[f32], [k, width, chain]: [usize; 3], to: &mut [Band<Tile>]) {
    for (row, x) in rows.chunks(k).enumerate() {
        let mut tiles = x.chunks(width);
        for step in to.chunks_mut(chain) {
            let mut sum = 0.0;
            for to in &mut *step {
                // The last step may have tiles without inputs.
                sum += round_tile::<D>(tiles.next().unwrap_or_default(), &mut to.rows[row]);
            }
            step[0].sums[row] = sum;
        }
    }
}

/// Rounds the numbers of a tile, and returns the sum of the rounded ones.
#[inline(always)]
pub(super) fn round_tile<D: PairLanes>(x: &[f32], to: &mut Pairs) -> f32 {
    match x.first_chunk() {
        Some(x) if x.len() == GROUP => D::round(x, &mut to.0),
        _ => {
            let mut padded = [0.0; GROUP];
            padded[..x.len()].copy_from_slice(x);
            D::round(&padded, &mut to.0);
        }
    }
    D::Floats::load_half::<false>(to).add(D::Floats::load_half::<true>(to)).sum()
}

/// A step of one output, as the reference computes it: adds the products of `x` with the numbers of codes to `sum`. A tile takes
/// `width` inputs.
pub(super) fn reference(
    sum: f32,
    (x, numbers, width): (&[f32], &[f32], usize),
    scale: f32,
    minimum: Option<f32>,
) -> f32 {
    let (mut product, mut of_row) = (0.0, 0.0);
    for (x, numbers) in x.chunks(width).zip(numbers.chunks(width)) {
        let mut pairs = [Pairs::ZERO; 2];
        of_row += round_tile::<Emulated>(x, &mut pairs[0]);
        round_tile::<Emulated>(numbers, &mut pairs[1]);
        let [x, numbers] = pairs;
        product = add_group(product, x.0.into_iter().zip(numbers.0));
    }
    let sum = product.mul_add(scale, sum);
    minimum.map_or(sum, |minimum| of_row.mul_add(minimum, sum))
}

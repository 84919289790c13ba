//! Products of 8-bit integers on tile registers, for many rows. Integers are exact, and each output has the operations of the product with
//! vectors in their order, so both give the same bits for any number of rows.

use std::thread::LocalKey;

use simd::int8::{self, DotIsa, DotLanes, GROUP, IntLanes, WithInts};
use simd::tiles::{BYTES, ByteLines, ByteRows, Registers};
use simd::{Isa, LANES, Pairs, on_tiles};

use super::processor::Processor;
use super::rows::RowBlock;
use super::scaled_tiles::{Band, Kind, Memory, Product, Scratch, Task, Unpacked, walk_on};

/// Least number of rows of a band that is faster on tiles.
const MANY: usize = 13;

/// Signed bytes, of which a tile has 32 inputs, or 16 and as many zeros.
pub(super) struct Bytes;

thread_local! {
    static MEMORY: Memory<Bytes> = const { Memory::new() };
}

impl Kind for Bytes {
    type A = ByteRows;
    type B = ByteLines;
    const ZERO: (ByteRows, ByteLines) = (ByteRows([[0; BYTES]; LANES]), ByteLines([[0; GROUP]; BYTES / 4]));
    const SCALES_ROWS: bool = true;

    fn memory() -> &'static LocalKey<Memory<Bytes>> {
        &MEMORY
    }
    fn on_tiles(isa: Isa, task: &Task<'_, Bytes>, scratch: &mut Scratch<Bytes>) {
        let unit = if isa == Isa::Portable { isa } else { Isa::Amx };
        on_tiles!(unit, [LANES, 32], |t| walk_on::<Bytes, _, LANES>(isa, t, task, scratch));
    }
    #[inline(always)]
    fn add<const NOW: usize>(t: &mut impl Registers, a: &ByteRows, b: &ByteLines) {
        t.load_rows::<4>(a);
        t.load_lines::<6>(b);
        t.add_byte_products::<NOW, 4, 6>();
    }
    #[inline(always)]
    fn numbers<L: WithInts>(products: &Pairs) -> L {
        L::load_i32(products)
    }
}

/// Returns the bytes of scratch memory for a product of `rows` rows of `k` numbers with quantised weights on tiles, which is not
/// in [`scratch_bytes`](super::scratch_bytes); 0 if this CPU does not take them.
pub fn band_bytes(rows: usize, k: usize) -> usize {
    match DotIsa::Amx.is_available() {
        true => rows.div_ceil(LANES) * k.div_ceil(BYTES / 2) * size_of::<Band<ByteRows>>(),
        false => 0,
    }
}

impl Unpacked<ByteLines> {
    /// Writes line `line` of weights without the offsets of its bytes.
    #[inline(always)]
    pub fn write<D: DotLanes>(&mut self, line: usize, weights: int8::Weights<D>, offsets: &[u8; GROUP]) {
        let to = &mut self.lines.0[line];
        D::Sums::store(weights, to);
        to.iter_mut().zip(offsets).for_each(|(byte, offset)| *byte = byte.wrapping_sub(*offset));
    }
}

/// Computes the rows for which tiles are faster than vectors, from the first on, and returns their number. `halves`: a tile has 16
/// inputs.
pub(super) fn run(processor: Processor<'_>, product: Product<'_, Bytes>, x: &[RowBlock], halves: bool) -> usize {
    let rest = product.rows % LANES;
    let rows = if rest < MANY { product.rows - rest } else { product.rows };
    if processor.dot != DotIsa::Amx || rows == 0 {
        return 0;
    }
    let (blocks, parts) = (x.len() / product.rows, if halves { 2 } else { 1 });
    Product { rows, tiles: blocks * parts, ..product }.run(processor, |band, to| {
        for row in 0..LANES {
            let x = x.chunks_exact(blocks).nth(band * LANES + row);
            for (tile, to) in to.iter_mut().enumerate() {
                to.set(row, x.map_or(&RowBlock::ZERO, |x| &x[tile / parts]), halves.then_some(tile % parts));
            }
        }
    });
    rows
}

impl Band<ByteRows> {
    /// Writes a row of a tile: a block, or one of its halves.
    fn set(&mut self, row: usize, block: &RowBlock, half: Option<usize>) {
        // −128 times the sums, exactly.
        let (first, all) = (block.first_half / -128, block.correction / -128);
        let (inputs, sum) = match half {
            None => (0..BYTES, all),
            Some(0) => (0..BYTES / 2, first),
            Some(_) => (BYTES / 2..BYTES, all - first),
        };
        self.rows.0[row] = [0; BYTES];
        self.rows.0[row][..inputs.len()].copy_from_slice(&block.values.as_flattened()[inputs]);
        (self.scales[row], self.sums[row]) = (block.scale, sum as f32);
    }
}

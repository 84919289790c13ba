//! Activations in blocks of 32 bytes with a scale, as quantised weights are multiplied with. A product makes them from rows of
//! floats, unless the caller has already made them with [`RowBlock::set`].
//!
//! The integers of a block are `round(127·x / max |x|)`, ties to even, and its scale is the single-precision
//! `max |x| / 127`. Every step is one rounded operation in an order that does not depend on the instruction set (none is
//! fused), so blocks have the same bits everywhere.

use std::borrow::Cow;
use std::cell::Cell;

use simd::{Isa, Lanes, Pool, dispatch};

use super::quantize::BLOCK;
use super::rows::{RowBlock, Rows};

thread_local! {
    /// Memory of this thread's last product, reused by the next. It is taken out while in use, because a task of the product
    /// may itself run a product on this thread.
    static SCRATCH: Cell<Vec<RowBlock>> = const { Cell::new(Vec::new()) };
}

/// Returns the bytes of scratch memory, in addition to the operands, for a product of `rows` rows of `k` numbers with
/// quantised weights. The calling thread keeps that memory for its next product.
pub fn scratch_bytes(rows: usize, k: usize) -> usize {
    rows * k.div_ceil(BLOCK) * size_of::<RowBlock>()
}

/// Calls `f` with the rows of `x`, each of `k` numbers, in blocks; the last block of a row is padded with zeros.
pub(super) fn with_activations<R>(isa: Isa, pool: &Pool, x: Rows<'_>, k: usize, f: impl FnOnce(&[RowBlock]) -> R) -> R {
    let x = match x {
        Rows::Numbers(x) => x,
        Rows::Blocks(x) => return f(x),
    };
    let blocks = k.div_ceil(BLOCK);
    let mut scratch = SCRATCH.take();
    scratch.resize(x.len() / k * blocks, RowBlock::ZERO);
    pool.chunks_mut(&mut scratch, blocks, k * RowBlock::COST, |row, out| row_into(isa, &x[row * k..][..k], out));
    let result = f(&scratch);
    SCRATCH.set(scratch);
    result
}

/// Returns the rows in blocks, without vector instructions.
pub(super) fn rows_in_blocks(x: Rows<'_>, k: usize) -> Cow<'_, [RowBlock]> {
    let x = match x {
        Rows::Numbers(x) => x,
        Rows::Blocks(x) => return x.into(),
    };
    let blocks = k.div_ceil(BLOCK);
    let mut all = vec![RowBlock::ZERO; x.len() / k * blocks];
    x.chunks(k).zip(all.chunks_mut(blocks)).for_each(|(x, out)| row_into(Isa::Portable, x, out));
    all.into()
}

fn row_into(isa: Isa, x: &[f32], out: &mut [RowBlock]) {
    dispatch!(isa, blocks(x: &[f32], out: &mut [RowBlock]));
}

#[inline(always)]
fn blocks<L: Lanes>(x: &[f32], out: &mut [RowBlock]) {
    let (whole, rest) = x.as_chunks();
    for (x, out) in whole.iter().zip(out.iter_mut()) {
        out.set::<L>(x);
    }
    if !rest.is_empty() {
        let mut padded = [0.0; BLOCK];
        padded[..rest.len()].copy_from_slice(rest);
        out[whole.len()].set::<L>(&padded);
    }
}

//! Cache writes and block copies, one row of `head_dim` elements at a time. Rows are converted in a loop that is compiled
//! for the widest vectors of this CPU; the bits are those of a conversion number by number.

use device::Device;
use simd::pairs::Pairs;
use simd::{Isa, LANES, Lanes, Pool, prefetch};

use super::stored::{Bf16, GivenScales, Slot, Stored, by_kv_dtype, expect_ours, of_head, offsets, panel_offset};
use crate::args::{BlockCopyArgs, CacheWriteArgs, KvCache, Values};
use crate::error::KernelError;
use crate::format::Layout;
use crate::shape::KvShape;

/// Multiply-adds that take as long as writing one element, including the page faults of a new cache.
const COST: usize = 32;

/// New rows of keys, or of values.
struct Rows<'a> {
    source: &'a [f32],
    /// Index of the first element of the first row.
    offset: usize,
    stride: usize,
    slots: &'a [i64],
    shape: KvShape,
    /// One scale for all KV heads, or one each.
    scales: &'a [f32],
}

impl Rows<'_> {
    /// Returns the whole vectors of a row in one head.
    #[inline(always)]
    fn row(&self, row: usize, head: usize) -> &[[f32; LANES]] {
        let dim = self.shape.head_dim;
        self.source[self.offset + row * self.stride + head * dim..][..dim].as_chunks().0
    }

    /// Prefetches the row of a later panel, which may lie in the cache of another core.
    #[inline(always)]
    fn prefetch(&self, row: usize, head: usize) {
        if row < self.slots.len() {
            self.row(row, head).iter().for_each(|vector| prefetch(vector.as_ptr().cast()));
        }
    }
}

pub(super) fn cache_write(device: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
    write(Isa::best(), device.pool(), args)
}

/// Writes with the instruction set `isa`, which the CPU must have: keys on one thread, values on another.
pub(super) fn write(isa: Isa, pool: &Pool, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
    args.check()?;
    expect_ours(args.cache)?;
    let KvCache { shape, format, keys, values, scales } = args.cache;
    let (source, slots, shape, stride) = (args.source.host::<f32>()?, args.slot_mapping, *shape, args.stride);
    let given = GivenScales::of(scales.as_deref().and_then(|scales| scales.given(format.kv_dtype)))?;
    let rows = |offset, scales| Rows { source, offset, stride, slots, shape, scales };
    let cost = slots.len() * shape.num_kv_heads * shape.head_dim * COST;
    if format.layout == Layout::Pairs {
        let mut parts = vec![(0, rows(args.key_offset, given.keys), keys.host_mut::<Pairs>()?)];
        if let Values::Separate(values) = values {
            parts.push((1, rows(args.value_offset, given.values), values.host_mut()?));
        }
        pool.chunks_mut(&mut parts, 1, cost, |_, one| {
            for (which, rows, to) in one {
                simd::dispatch!(isa, write_pairs(which: &usize, rows: &Rows<'_>, to: &mut [Pairs]));
            }
        });
        return Ok(());
    }
    by_kv_dtype!(format.kv_dtype, |S| {
        let mut parts = vec![(rows(args.key_offset, given.keys), keys.host_mut::<<S as Stored>::Raw>()?)];
        if let Values::Separate(values) = values {
            parts.push((rows(args.value_offset, given.values), values.host_mut()?));
        }
        pool.chunks_mut(&mut parts, 1, cost, |_, one| {
            for (rows, elements) in one {
                simd::dispatch!(isa, write_rows::<S>(rows: &Rows<'_>, elements: &mut [<S as Stored>::Raw]));
            }
        });
    });
    Ok(())
}

/// `L` is not used: the loops are compiled for its instruction set.
#[allow(clippy::extra_unused_type_parameters)]
#[inline(always)]
fn write_rows<L: Lanes, S: Stored>(rows: &Rows<'_>, elements: &mut [S::Raw]) {
    let dim = rows.shape.head_dim;
    for (i, &slot) in rows.slots.iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else { continue };
        let slot = Slot::of(slot, rows.shape.block_size);
        for head in 0..rows.shape.num_kv_heads {
            let scale = of_head(rows.scales, head);
            let (row, row_scale) = offsets::<S>(&rows.shape, slot, head);
            // A scale of the row, if any, lies behind the row.
            let (before, from_scale) = elements.split_at_mut(row_scale);
            let source = &rows.source[rows.offset + i * rows.stride + head * dim..][..dim];
            S::write(source, scale, &mut before[row..][..dim], &mut from_scale[..S::SCALE]);
        }
    }
}

/// Writes keys (0) or values (1) in the layout of pairs.
#[inline(always)]
fn write_pairs<L: Lanes>(which: &usize, rows: &Rows<'_>, to: &mut [Pairs]) {
    let (mut rest, mut first) = (rows.slots, 0);
    while let Some(&slot) = rest.first() {
        // A whole panel has no pair that is already there in part.
        let panel = rest.first_chunk().filter(|slots| is_panel(slots));
        let count = if panel.is_some() { LANES } else { 1 };
        if let Ok(slot) = usize::try_from(slot) {
            let next = rest.get(count).and_then(|next| usize::try_from(*next).ok()).unwrap_or(slot);
            let [slot, next] = [slot, next].map(|slot| Slot::of(slot, rows.shape.block_size));
            for head in 0..rows.shape.num_kv_heads {
                let (start, at) = panel_offset(&rows.shape, slot, head);
                let (ahead, at_next) = panel_offset(&rows.shape, next, head);
                let ahead = to.as_ptr().wrapping_add(ahead);
                let lines = &mut to[start..][..rows.shape.head_dim / 2];
                match (panel.is_some(), which) {
                    (true, 0) => write_keys::<L>(rows, first, head, lines),
                    (true, _) => write_values(rows, first, head, lines),
                    (false, 0) => write_key(rows.row(first, head), at, lines),
                    (false, _) => write_value(rows.row(first, head), [at, at_next], lines, ahead),
                }
            }
        }
        (rest, first) = (&rest[count..], first + count);
    }
}

/// Whether these are the slots of a panel, in order.
#[inline(always)]
fn is_panel(slots: &[i64; LANES]) -> bool {
    slots[0] % LANES as i64 == 0 && slots.iter().zip(slots[0]..).all(|(slot, next)| *slot == next)
}

/// Writes the keys of a panel: sixteen columns of sixteen tokens at a time.
#[inline(always)]
fn write_keys<L: Lanes>(rows: &Rows<'_>, first: usize, head: usize, lines: &mut [Pairs]) {
    for (i, lines) in lines.as_chunks_mut::<{ LANES / 2 }>().0.iter_mut().enumerate() {
        let mut square = [L::splat(0.0); LANES];
        for (token, vector) in square.iter_mut().enumerate() {
            if i == 0 {
                rows.prefetch(first + LANES + token, head);
            }
            *vector = L::load(&rows.row(first + token, head)[i]);
        }
        let mut columns = [[0.0; LANES]; LANES];
        for (column, vector) in columns.iter_mut().zip(L::transpose(square)) {
            vector.store(column);
        }
        for (line, [even, odd]) in lines.iter_mut().zip(columns.as_chunks().0) {
            *line = paired(even, odd);
        }
    }
}

/// Writes the values of a panel: two tokens at a time.
#[inline(always)]
fn write_values(rows: &Rows<'_>, first: usize, head: usize, lines: &mut [Pairs]) {
    for (pair, lines) in lines.chunks_exact_mut(rows.shape.head_dim / LANES).enumerate() {
        let [even, odd] = [0, 1].map(|token| rows.row(first + 2 * pair + token, head));
        (0..2).for_each(|token| rows.prefetch(first + LANES + 2 * pair + token, head));
        for (line, (even, odd)) in lines.iter_mut().zip(even.iter().zip(odd)) {
            *line = paired(even, odd);
        }
    }
}

/// Returns the pairs of two vectors.
#[inline(always)]
fn paired(even: &[f32; LANES], odd: &[f32; LANES]) -> Pairs {
    let mut pairs = Pairs::ZERO;
    for (pair, (even, odd)) in pairs.0.iter_mut().zip(even.iter().zip(odd)) {
        *pair = u32::from(Bf16::narrow(*even)) | u32::from(Bf16::narrow(*odd)) << 16;
    }
    pairs
}

/// Writes the key of one token: a pair of each line of its panel.
#[inline(always)]
fn write_key(row: &[[f32; LANES]], at: usize, lines: &mut [Pairs]) {
    for (line, pair) in lines.iter_mut().zip(row.as_flattened().as_chunks::<2>().0) {
        line.0[at] = u32::from(Bf16::narrow(pair[0])) | u32::from(Bf16::narrow(pair[1])) << 16;
    }
}

/// Writes the value of one token: one half of each pair of its lines. `ahead` is the panel of the next token, usually of another
/// sequence; the lines to be written there are prefetched.
#[inline(always)]
fn write_value(row: &[[f32; LANES]], [at, next]: [usize; 2], lines: &mut [Pairs], ahead: *const Pairs) {
    let (kept, shift) = if at.is_multiple_of(2) { (0xffff_0000, 0) } else { (0x0000_ffff, 16) };
    let ahead = ahead.wrapping_add(next / 2 * row.len());
    for (i, (line, from)) in lines[at / 2 * row.len()..].iter_mut().zip(row).enumerate() {
        prefetch(ahead.wrapping_add(i).cast());
        for (pair, number) in line.0.iter_mut().zip(from) {
            *pair = *pair & kept | u32::from(Bf16::narrow(*number)) << shift;
        }
    }
}

pub(super) fn block_copy(_: &dyn Device, args: BlockCopyArgs<'_>) -> Result<(), KernelError> {
    args.check()?;
    expect_ours(args.cache)?;
    let bytes = args.cache.format.block_bytes(&args.cache.shape);
    for buffer in args.cache.buffers_mut() {
        let cache = buffer.host_mut::<u8>()?;
        for &(source, destination) in args.copies {
            let from = source as usize * bytes;
            cache.copy_within(from..from + bytes, destination as usize * bytes);
        }
    }
    Ok(())
}

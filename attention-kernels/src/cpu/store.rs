//! Cache writes and block copies, one row of `head_dim` elements at a time. Rows are converted in a loop that is compiled
//! for the widest vectors of this CPU; the bits are those of a conversion number by number.

use device::simd::Lanes;
use device::{Device, Isa, Pool};

use super::stored::{GivenScales, Slot, Stored, by_kv_dtype, expect_ours, of_head, place};
use crate::args::{BlockCopyArgs, CacheWriteArgs, KvCache, Values};
use crate::error::KernelError;
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

pub(super) fn cache_write(device: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
    write(Isa::best(), device.pool(), args)
}

/// Writes with the instruction set `isa`, which the CPU must have: keys on one thread, values on another.
pub(super) fn write(isa: Isa, pool: &Pool, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
    args.check()?;
    expect_ours(args.cache)?;
    let KvCache { shape, format, keys, values, scales } = args.cache;
    let (source, slots, shape, stride) = (args.source.host::<f32>()?, args.slot_mapping, *shape, args.stride);
    let given = GivenScales::of(scales.as_deref(), format.kv_dtype)?;
    let rows = |offset, scales| Rows { source, offset, stride, slots, shape, scales };
    let cost = slots.len() * shape.num_kv_heads * shape.head_dim * COST;
    by_kv_dtype!(format.kv_dtype, |S| {
        let mut parts = vec![(rows(args.key_offset, given.keys), keys.host_mut::<<S as Stored>::Raw>()?)];
        if let Values::Separate(values) = values {
            parts.push((rows(args.value_offset, given.values), values.host_mut()?));
        }
        pool.chunks_mut(&mut parts, 1, cost, |_, one| {
            for (rows, elements) in one {
                device::dispatch!(isa, write_rows::<S>(rows: &Rows<'_>, elements: &mut [<S as Stored>::Raw]));
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
            let (row, row_scale) = place::<S>(&rows.shape, slot, head);
            // A scale of the row, if any, lies behind the row.
            let (before, from_scale) = elements.split_at_mut(row_scale);
            let source = &rows.source[rows.offset + i * rows.stride + head * dim..][..dim];
            S::write(source, scale, &mut before[row..][..dim], &mut from_scale[..S::SCALE]);
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

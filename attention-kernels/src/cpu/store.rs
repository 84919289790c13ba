//! Cache writes and block copies, one row of `head_dim` elements at a time. Rows are converted in a loop that is compiled
//! for the widest vectors of this CPU; the bits are those of a conversion number by number.

use device::simd::Lanes;
use device::{Buffer, Device, Isa, Pool};

use super::stored::{GivenScales, Slot, Stored, by_kind, expect_ours, of_head, place};
use crate::args::{BlockCopyArgs, CacheWriteArgs, KvCache};
use crate::error::KernelError;
use crate::format::KvDtype;
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

/// Elements to write, by type.
enum Pages<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [u16]),
    Bf16(&'a mut [u16]),
    E4m3(&'a mut [u8]),
    E5m2(&'a mut [u8]),
    Int8(&'a mut [u8]),
    Int8PerToken(&'a mut [u8]),
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
    let mut both = [
        (rows(args.key_offset, given.keys), Pages::of(keys, format.kv_dtype)?),
        (rows(args.value_offset, given.values), Pages::of(values, format.kv_dtype)?),
    ];
    pool.chunks_mut(&mut both, 1, slots.len() * shape.num_kv_heads * shape.head_dim * COST, |_, one| {
        for (rows, pages) in one {
            device::dispatch!(isa, by_type(rows: &Rows<'_>, pages: &mut Pages<'_>));
        }
    });
    Ok(())
}

impl<'a> Pages<'a> {
    fn of(buffer: &'a mut Buffer, kv_dtype: KvDtype) -> Result<Pages<'a>, KernelError> {
        Ok(match kv_dtype {
            KvDtype::Same => Pages::F32(buffer.host_mut()?),
            KvDtype::F16 => Pages::F16(buffer.host_mut()?),
            KvDtype::Bf16 => Pages::Bf16(buffer.host_mut()?),
            KvDtype::Fp8E4m3 => Pages::E4m3(buffer.host_mut()?),
            KvDtype::Fp8E5m2 => Pages::E5m2(buffer.host_mut()?),
            KvDtype::Int8 => Pages::Int8(buffer.host_mut()?),
            KvDtype::Int8PerToken => Pages::Int8PerToken(buffer.host_mut()?),
        })
    }
}

/// `L` is not used: the loops are compiled for its instruction set.
#[allow(clippy::extra_unused_type_parameters)]
#[inline(always)]
fn by_type<L: Lanes>(rows: &Rows<'_>, pages: &mut Pages<'_>) {
    by_kind!(pages, |elements, S| write_rows::<S>(rows, elements))
}

#[inline(always)]
fn write_rows<S: Stored>(rows: &Rows<'_>, elements: &mut [S::Raw]) {
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
    for buffer in [&mut args.cache.keys, &mut args.cache.values] {
        let cache = buffer.host_mut::<u8>()?;
        for &(source, destination) in args.copies {
            let from = source as usize * bytes;
            cache.copy_within(from..from + bytes, destination as usize * bytes);
        }
    }
    Ok(())
}

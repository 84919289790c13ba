//! Cache writes and block copies, a row of `head_dim` elements at a time. Rows are brought to the cache's type in a loop
//! that is compiled for the widest vectors of this CPU; its bits are those of one number at a time.

use device::simd::Lanes;
use device::{Device, Isa};

use super::stored::{self, GivenScales, Stored, expect_ours, place};
use crate::args::{BlockCopyArgs, CacheWriteArgs, KernelError, KvShape};
use crate::format::KvDtype;

/// New rows of keys, or of values.
struct Rows<'a> {
    source: &'a [f32],
    /// The first element of the first row.
    offset: usize,
    stride: usize,
    slots: &'a [i64],
    shape: KvShape,
    /// One for each KV head.
    scales: &'a [f32],
}

/// The elements that are written, by their type.
enum Pages<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [u16]),
    Bf16(&'a mut [u16]),
    E4m3(&'a mut [u8]),
    E5m2(&'a mut [u8]),
    Int8(&'a mut [u8]),
    Int8PerToken(&'a mut [u8]),
}

pub(super) fn cache_write(_: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
    write(Isa::best(), args)
}

/// Writes with the instructions of `isa`, which this CPU must have.
pub(super) fn write(isa: Isa, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
    args.check()?;
    expect_ours(args.cache)?;
    let given = GivenScales::of(args.cache)?;
    let scales: [Vec<f32>; 2] =
        std::array::from_fn(|which| (0..args.cache.shape.num_kv_heads).map(|head| given.head(head)[which]).collect());
    let (source, slots, shape) = (args.source.host::<f32>()?, args.slot_mapping, args.cache.shape);
    let kv_dtype = args.cache.format.kv_dtype;
    for ((offset, buffer), scales) in
        [(args.key_offset, &mut args.cache.keys), (args.value_offset, &mut args.cache.values)].into_iter().zip(&scales)
    {
        let rows = &Rows { source, offset, stride: args.stride, slots, shape, scales };
        let pages = &mut match kv_dtype {
            KvDtype::Same => Pages::F32(buffer.host_mut()?),
            KvDtype::F16 => Pages::F16(buffer.host_mut()?),
            KvDtype::Bf16 => Pages::Bf16(buffer.host_mut()?),
            KvDtype::Fp8E4m3 => Pages::E4m3(buffer.host_mut()?),
            KvDtype::Fp8E5m2 => Pages::E5m2(buffer.host_mut()?),
            KvDtype::Int8 => Pages::Int8(buffer.host_mut()?),
            KvDtype::Int8PerToken => Pages::Int8PerToken(buffer.host_mut()?),
        };
        device::dispatch!(isa, by_type(rows: &Rows<'_>, pages: &mut Pages<'_>));
    }
    Ok(())
}

/// The lanes are not asked for: the loops are compiled for their instruction set.
#[allow(clippy::extra_unused_type_parameters)]
#[inline(always)]
fn by_type<L: Lanes>(rows: &Rows<'_>, pages: &mut Pages<'_>) {
    match pages {
        Pages::F32(elements) => write_rows::<stored::F32>(rows, elements),
        Pages::F16(elements) => write_rows::<stored::F16>(rows, elements),
        Pages::Bf16(elements) => write_rows::<stored::Bf16>(rows, elements),
        Pages::E4m3(elements) => write_rows::<stored::E4m3>(rows, elements),
        Pages::E5m2(elements) => write_rows::<stored::E5m2>(rows, elements),
        Pages::Int8(elements) => write_rows::<stored::Int8>(rows, elements),
        Pages::Int8PerToken(elements) => write_rows::<stored::Int8PerToken>(rows, elements),
    }
}

#[inline(always)]
fn write_rows<S: Stored>(rows: &Rows<'_>, elements: &mut [S::Raw]) {
    let dim = rows.shape.head_dim;
    for (i, &slot) in rows.slots.iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else { continue };
        for (head, &scale) in rows.scales.iter().enumerate() {
            let (row, row_scale) = place::<S>(&rows.shape, slot, head);
            // The scale of a row lies behind it, if it has one at all.
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

//! Launches of the kernels that write and copy caches.

use device::{Arg, Buffer, Device, Launch};

use super::attention::{grid, halves};
use super::names::{self, MODULE};
use crate::args::{BlockCopyArgs, CacheWriteArgs, KvScales};
use crate::error::{KernelError, at_least, expect};
use crate::format::KvDtype;

/// Bytes of a block that one thread block copies.
const COPY_SHARE: usize = 16 << 10;

pub(super) fn write(device: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
    let variant = "cuda.reshape_and_cache";
    args.check_sizes()?;
    let missing = |what| KernelError::NotLoaded { variant, what };
    let workspace = args.workspace.ok_or(missing("workspace"))?;
    if !workspace.has_slots(args.slot_mapping) {
        return Err(missing("such slots"));
    }
    if args.slot_mapping.is_empty() {
        return Ok(()); // the driver refuses a grid of no blocks
    }
    let (cache, shape) = (&*args.cache, args.cache.shape);
    expect("block size of the cache", shape.block_size, workspace.limits().block_size)?;
    at_least("blocks of the cache", shape.num_blocks, workspace.limits().num_blocks)?;
    expect("head size modulo 8", shape.head_dim % 8, 0)?;
    at_least("greatest head size", 256, shape.head_dim)?;
    cache.format.check_scaled_rows(variant, &shape)?;
    for (what, elements) in [
        ("bytes of a row of new keys and values modulo 16", args.stride),
        ("bytes before the new keys modulo 16", args.key_offset),
        ("bytes before the new values modulo 16", args.value_offset),
    ] {
        expect(what, elements * cache.format.dtype.bytes() % 16, 0)?;
    }
    if args.slot_mapping.is_empty() {
        return Ok(());
    }
    let strides = cache.format.strides(&shape);
    let mut words = [0; 14];
    for (i, stride) in [args.stride, strides.block, strides.head, strides.token].into_iter().enumerate() {
        words[2 * i..2 * i + 2].copy_from_slice(&halves(stride as u64));
    }
    for (word, count) in words[8..].iter_mut().zip([shape.num_kv_heads, shape.head_dim, shape.block_size]) {
        *word = grid(count)?;
    }
    words[11] = cache.format.kv_code(variant, &KvDtype::ON_GPU)?;
    words[12] = u32::from(cache.scales.as_ref().is_some_and(|scales| scales.per_head));
    let scales = |which: fn(&KvScales) -> &Buffer| {
        cache.scales.as_ref().map_or(Arg::null(), |scales| Arg::pointer(which(scales), 0))
    };
    let bytes = cache.format.dtype.bytes();
    let parameters = [
        Arg::pointer(args.source, args.key_offset * bytes),
        Arg::pointer(args.source, args.value_offset * bytes),
        Arg::pointer(&cache.keys, 0),
        Arg::pointer(&cache.values, 0),
        Arg::pointer(workspace.slot_mapping(), 0),
        scales(|scales| &scales.keys),
        scales(|scales| &scales.values),
        Arg::bytes(&words),
    ];
    device.launch(&Launch {
        module: MODULE,
        kernel: names::reshape_and_cache(cache.format),
        grid: [grid(args.slot_mapping.len())?, 1, 1],
        block: [128, 1, 1],
        shared_bytes: 0,
        args: &parameters,
    })?;
    Ok(())
}

pub(super) fn copy(device: &dyn Device, args: BlockCopyArgs<'_>) -> Result<(), KernelError> {
    args.check()?;
    let missing = |what| KernelError::NotLoaded { variant: "cuda.copy_blocks", what };
    let workspace = args.workspace.ok_or(missing("workspace"))?;
    let runs = workspace.runs_of(args.copies).ok_or(missing("such block copies"))?;
    let cache = &*args.cache;
    let bytes = cache.format.block_bytes(&cache.shape);
    expect("bytes of a block modulo 16", bytes % 16, 0)?;
    let mut words = [0; 6];
    words.chunks_exact_mut(2).for_each(|stride| stride.copy_from_slice(&halves(bytes as u64)));
    let mut first = 0;
    for &run in runs {
        let parameters = [
            Arg::pointer(&cache.keys, 0),
            Arg::pointer(&cache.values, 0),
            Arg::pointer(&cache.keys, 0),
            Arg::pointer(&cache.values, 0),
            Arg::pointer(workspace.pairs(), first * 2 * size_of::<u32>()),
            Arg::bytes(&words),
        ];
        device.launch(&Launch {
            module: MODULE,
            kernel: "copy_blocks",
            grid: [grid(run)?, 2, grid(bytes.div_ceil(COPY_SHARE))?],
            block: [256, 1, 1],
            shared_bytes: 0,
            args: &parameters,
        })?;
        first += run;
    }
    Ok(())
}

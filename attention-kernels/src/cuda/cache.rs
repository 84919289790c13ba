//! Launches of the kernels that write and copy caches.

use device::{Arg, Device, Launch};

use super::names::{self, MODULE};
use super::parameters::{BlockCopyShape, CacheWriteShape, count, kv_format, scale_pointers};
use crate::args::{BlockCopyArgs, CacheWriteArgs};
use crate::error::{KernelError, expect};

/// Bytes of a block that one thread block copies.
const COPY_SHARE: usize = 16 << 10;
/// Most thread blocks of a block's copy, the limit of a grid's third dimension.
const MOST_SHARES: usize = 65535;

pub(super) fn write(device: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
    let variant = "cuda.reshape_and_cache";
    args.check_sizes()?;
    let missing = |what| KernelError::NotLoaded { variant, what };
    let workspace = args.workspace.ok_or(missing("workspace"))?;
    if !workspace.has_slots(args.slot_mapping) {
        return Err(missing("such slots"));
    }
    if args.slot_mapping.is_empty() {
        return Ok(()); // a driver refuses an empty grid
    }
    let (cache, shape, format) = (&*args.cache, args.cache.shape, args.cache.format);
    workspace.check_cache(&shape)?;
    expect("head size modulo 8", shape.head_dim % 8, 0)?;
    format.check_scaled_rows(variant, &shape)?;
    for (what, elements) in [
        ("bytes of a row of new keys and values modulo 16", args.stride),
        ("bytes before the new keys modulo 16", args.key_offset),
        ("bytes before the new values modulo 16", if cache.is_latent() { 0 } else { args.value_offset }),
    ] {
        expect(what, elements * format.dtype.bytes() % 16, 0)?;
    }
    let strides = format.strides(&shape);
    let write = CacheWriteShape {
        source_stride: args.stride as i64,
        block_stride: strides.block as i64,
        head_stride: strides.head as i64,
        token_stride: strides.token as i64,
        num_kv_heads: count(shape.num_kv_heads)?,
        head_dim: count(shape.head_dim)?,
        block_size: count(shape.block_size)?,
        kv_format: kv_format(variant, format)?,
        scale_stride: cache.scale_stride(),
        reserved: 0,
    };
    let bytes = format.dtype.bytes();
    let [key_scales, value_scales] = scale_pointers(cache);
    let parameters = [
        Arg::pointer(args.source, args.key_offset * bytes),
        if cache.is_latent() { Arg::null() } else { Arg::pointer(args.source, args.value_offset * bytes) },
        Arg::pointer(&cache.keys, 0),
        if cache.is_latent() { Arg::null() } else { Arg::pointer(cache.values(), 0) },
        Arg::pointer(workspace.slot_mapping(), 0),
        key_scales,
        value_scales,
        Arg::bytes(&write),
    ];
    device.launch(&Launch {
        module: MODULE,
        kernel: &names::Name::new(format_args!("reshape_and_cache_{}{}", format.dtype, names::suffix(format))),
        grid: [count(args.slot_mapping.len())?, 1, 1],
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
    let bytes = cache.block_bytes();
    expect("bytes of a block modulo 16", bytes % 16, 0)?;
    let block_bytes = bytes as i64;
    let shape = BlockCopyShape { source_stride: block_bytes, target_stride: block_bytes, block_bytes };
    let mut first = 0;
    for &run in runs {
        let parameters = [
            Arg::pointer(&cache.keys, 0),
            Arg::pointer(cache.values(), 0),
            Arg::pointer(&cache.keys, 0),
            Arg::pointer(cache.values(), 0),
            Arg::pointer(workspace.pairs.buffer(), first * 2 * size_of::<u32>()),
            Arg::bytes(&shape),
        ];
        device.launch(&Launch {
            module: MODULE,
            kernel: "copy_blocks",
            grid: [count(run)?, count(cache.buffers().count())?, count(bytes.div_ceil(COPY_SHARE).min(MOST_SHARES))?],
            block: [256, 1, 1],
            shared_bytes: 0,
            args: &parameters,
        })?;
        first += run;
    }
    Ok(())
}

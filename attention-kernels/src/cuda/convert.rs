//! The launch that converts a whole cache between a float type and 8 bits.

use device::{Arg, Buffer, Device, Launch};

use super::attention::{grid, halves};
use super::names::{self, MODULE};
use crate::args::{KvCache, KvScales};
use crate::error::{KernelError, expect};
use crate::format::{KvDtype, Layout};

const NAME: &str = "convert_fp8";
/// Threads of a block, each with 8 elements at a time.
const THREADS: usize = 256;
/// Thread blocks of the largest launch: each then strides over the rest.
const MOST_BLOCKS: usize = 1 << 14;

/// Writes all keys and values of a cache into one of another type: from f16, bf16 or f32 ([`KvDtype::Same`]) to fp8 or int8
/// (value / scale, clamped, rounded to nearest even), or back (byte × scale). The scales are those of the 8-bit cache. It is
/// given to the compute queue.
///
/// There is nothing to choose, so it stands in no registry: one kernel, for `cuda` and `cuda-sim`, bound by memory.
///
/// ```no_run
/// use attention_kernels::{CacheFormat, Dtype, KvCache, KvDtype, KvShape, convert_fp8};
/// let device = device::open("cuda", None)?;
/// let shape = KvShape { num_blocks: 512, num_kv_heads: 8, block_size: 16, head_dim: 128 };
/// let full = CacheFormat { dtype: Dtype::Bf16, ..CacheFormat::default() };
/// let wide = KvCache::with_format(&*device, shape, full)?;
/// let mut half = KvCache::with_format(&*device, shape, CacheFormat { kv_dtype: KvDtype::Fp8E4m3, ..full })?;
/// convert_fp8(&*device, &wide, &mut half)?;
/// # Ok::<(), attention_kernels::KernelError>(())
/// ```
///
/// # Errors
/// Caches of two shapes, layouts or query types, none or two of 8 bits, heads that are no multiple of 8 elements, and those of
/// the launch.
pub fn convert_fp8(device: &dyn Device, from: &KvCache, to: &mut KvCache) -> Result<(), KernelError> {
    from.check()?;
    to.check()?;
    let (shape, layout) = (from.shape, from.format.layout);
    expect("blocks of the converted cache", to.shape.num_blocks, shape.num_blocks)?;
    expect("KV heads of the converted cache", to.shape.num_kv_heads, shape.num_kv_heads)?;
    expect("tokens per block of the converted cache", to.shape.block_size, shape.block_size)?;
    expect("head size of the converted cache", to.shape.head_dim, shape.head_dim)?;
    expect("head size modulo 8", shape.head_dim % 8, 0)?;
    let quantise = to.format.kv_dtype.takes_scales();
    let alike = (from.format.dtype, layout) == (to.format.dtype, to.format.layout);
    let plain = if quantise { from } else { &*to };
    if !alike || quantise == from.format.kv_dtype.takes_scales() || plain.format.kv_dtype != KvDtype::Same {
        return Err(KernelError::Unsupported { variant: NAME, found: format!("{} into {}", from.format, to.format) });
    }
    let elements = shape.num_blocks * shape.block_elements();
    if elements == 0 {
        return Ok(()); // the driver refuses a grid of no blocks
    }
    let small = if quantise { &*to } else { from };
    let scales = small.scales.as_ref();
    let (per_scale, num_scales) = match layout {
        _ if !scales.is_some_and(|scales| scales.per_head) => (elements, 1),
        Layout::Hnd => (shape.block_size * shape.head_dim, shape.num_kv_heads),
        Layout::Nhd => (shape.head_dim, shape.num_kv_heads),
    };
    let mut words = [0; 6];
    words[..2].copy_from_slice(&halves(elements as u64));
    words[2..4].copy_from_slice(&halves(per_scale as u64));
    words[4] = grid(num_scales)?;
    words[5] = small.format.kv_code(NAME, &KvDtype::ON_GPU)?;
    let scales = |which: fn(&KvScales) -> &Buffer| scales.map_or(Arg::null(), |scales| Arg::pointer(which(scales), 0));
    let blocks = (elements / 8).div_ceil(THREADS).min(MOST_BLOCKS);
    for (from, to, scales) in [
        (&from.keys, &to.keys, scales(|scales| &scales.keys)),
        (&from.values, &to.values, scales(|scales| &scales.values)),
    ] {
        device.launch(&Launch {
            module: MODULE,
            kernel: names::convert_fp8(small.format.dtype, quantise),
            grid: [grid(blocks)?, 1, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: &[Arg::pointer(from, 0), Arg::pointer(to, 0), scales, Arg::bytes(&words)],
        })?;
    }
    Ok(())
}

//! Conversion of a whole cache between a float type and 8 bits.

use device::{Arg, Device, Launch};

use super::names::MODULE;
use super::parameters::{ConvertShape, count, kv_format, scale_pointers};
use crate::args::KvCache;
use crate::error::{KernelError, expect};
use crate::format::{KvDtype, Layout};

const NAME: &str = "convert_fp8";
/// Threads per block; a thread converts 8 elements at a time.
const THREADS: usize = 256;
/// Most thread blocks of a launch. Larger caches are covered by a loop in each thread.
const MOST_BLOCKS: usize = 1 << 14;

/// Enqueues the conversion of all keys and values of a cache into a cache of another type: from f16, bf16 or f32
/// ([`KvDtype::Same`]) to fp8 or int8 (value / scale, clamped, rounded to nearest, ties to even), or back (byte × scale). The
/// scales are those of the 8-bit cache.
///
/// Runs on `cuda` and `cuda-sim`. There is only one kernel, which is bound by memory, so it is not in the registry.
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
/// The caches differ in shape, layout or query type, one is latent, not exactly one of them has 8 bits, the head size is not a multiple of 8,
/// or the launch fails.
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
    let latent = from.is_latent() || to.is_latent();
    let plain = if quantise { from } else { &*to };
    if latent || !alike || quantise == from.format.kv_dtype.takes_scales() || plain.format.kv_dtype != KvDtype::Same {
        return Err(KernelError::Unsupported { variant: NAME, found: format!("{} into {}", from.format, to.format) });
    }
    let elements = shape.num_blocks * shape.block_elements();
    if elements == 0 {
        return Ok(()); // a driver refuses an empty grid
    }
    let small = if quantise { &*to } else { from };
    let (per_scale, num_scales) = match layout {
        _ if small.scale_stride() == 0 => (elements, 1),
        Layout::Nhd => (shape.head_dim, shape.num_kv_heads),
        _ => (shape.block_size * shape.head_dim, shape.num_kv_heads),
    };
    let run = ConvertShape {
        elements: elements as i64,
        elements_per_scale: per_scale as i64,
        num_scales: count(num_scales)?,
        format: kv_format(NAME, small.format)?,
    };
    let kernel = format!("convert_fp8_{}_{}", if quantise { "from" } else { "to" }, small.format.dtype);
    let blocks = (elements / 8).div_ceil(THREADS).min(MOST_BLOCKS);
    let [key_scales, value_scales] = scale_pointers(small);
    for (from, to, scales) in [(&from.keys, &to.keys, key_scales), (from.values(), to.values(), value_scales)] {
        device.launch(&Launch {
            module: MODULE,
            kernel: &kernel,
            grid: [count(blocks)?, 1, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: &[Arg::pointer(from, 0), Arg::pointer(to, 0), scales, Arg::bytes(&run)],
        })?;
    }
    Ok(())
}

//! The CUDA variants: a safe wrapper around each kernel of `csrc/`, for `cuda` and `cuda-sim`.
//!
//! A wrapper checks sizes, picks a compiled instance, and computes grid and threads as listed in `csrc/README.md`. In a graph
//! grids depend on shapes only, never on the length of a sequence. How much dynamic shared memory a kernel needs is stated by
//! its source.

mod attention;
mod cache;
mod chosen;
mod convert;
mod linear;
mod low_rank;
pub(crate) mod names;
mod parameters;
mod rounded;
mod sums;
mod tiles;
mod unpacked;
mod wide;
mod yardstick;

use device::{Device, Product};

use crate::args::LinearArgs;
use crate::error::KernelError;
use crate::format::{Dtype, KvDtype, Layout};
use crate::variant::{Capabilities, Latents, Sizes, register};
use crate::work::MOST_ROWS;
use attention::Split;
pub use chosen::{ChosenMemory, LaunchedChosen, launch_chosen};
pub use convert::convert_fp8;
pub use linear::expert_linear;
pub use wide::ordered_bytes;
pub use yardstick::read_memory;

const HALVES: &[Dtype] = &[Dtype::F16, Dtype::Bf16];

/// What all variants support.
const ANY: Capabilities = Capabilities {
    devices: &["cuda", "cuda-sim"],
    compute_capability: (8, 0),
    dtypes: &Dtype::ALL,
    kv_dtypes: &KvDtype::ON_GPU,
    layouts: &Layout::COMMON,
    head_sizes: Sizes::UpTo { max: usize::MAX, step: 8 },
    block_sizes: Sizes::ANY,
    // On an H200 (docs/benchmarks/gpu-h200-2026-11-26.md).
    proven: true,
    ..Capabilities::NONE
};

/// Capabilities of attention kernels. Kernels of one `family` sum in the same order.
const fn attention(dtypes: &'static [Dtype], head_sizes: Sizes, family: &'static str, rank: u32) -> Capabilities {
    Capabilities {
        dtypes,
        head_sizes,
        window: true,
        soft_cap: true,
        alibi: true,
        sinks: true,
        block_sparse: true,
        lse: true,
        row_invariant: Some(family),
        rank,
        ..ANY
    }
}

const INSTANCES: Sizes = Sizes::List(&names::HEAD_SIZES);

const ROWS: &str = "cuda.rows";
const TILES: &str = "cuda.tiles";
const GENERIC: &str = "cuda.generic";

/// Capabilities of the kernels that use tensor cores.
const fn tiles(rank: u32) -> Capabilities {
    Capabilities { rounds_weights: true, ..attention(HALVES, INSTANCES, TILES, rank) }
}

// A prefill kernel would give 16 rows of a long context to one thread block of each KV head.
const GROUPED: Capabilities =
    Capabilities { decode_rows: MOST_ROWS, items_at_once: Some(attention::grouped_at_once), ..tiles(2) };
register!("cuda.paged_gqa", Decode, GROUPED, Attention(attention::grouped));
register!(
    "cuda.paged_v2",
    Decode,
    attention(HALVES, INSTANCES, ROWS, 1),
    Attention(|device, args| { attention::decode("cuda.paged_v2", Split::ByWorkList, device, args) })
);
register!(
    "cuda.paged_v1",
    Decode,
    attention(HALVES, INSTANCES, ROWS, 0),
    Attention(|device, args| { attention::decode("cuda.paged_v1", Split::No, device, args) })
);
register!(
    "cuda.paged_prefill",
    Prefill,
    tiles(1),
    Attention(|device, args| {
        attention::prefill(["cuda.paged_prefill", "paged_prefill"], &names::HEAD_SIZES, device, args)
    })
);

// Not row-invariant: the online softmax of these two starts at the first tile that neighbouring rows see, so a row's bits depend on them.
const PREFILL_128: Capabilities =
    Capabilities { head_sizes: Sizes::List(names::NARROW_HEADS), row_invariant: None, proven: false, ..tiles(2) };
register!(
    "cuda.prefill_128",
    Prefill,
    PREFILL_128,
    Attention(|device, args| {
        attention::prefill(["cuda.prefill_128", "prefill_128"], names::NARROW_HEADS, device, args)
    })
);

const SM90: Capabilities = Capabilities {
    compute_capability: (9, 0),
    exact_compute_capability: true,
    kv_dtypes: &[KvDtype::Same],
    block_sizes: Sizes::List(&names::SM90_BLOCK_SIZES),
    head_sizes: Sizes::List(&names::SM90_HEAD_SIZES),
    row_invariant: None,
    ..tiles(3)
};
register!("cuda.prefill_sm90", Prefill, SM90, Attention(attention::prefill_sm90));

// A thread block for each row and head, also in prefill: for float32, and for caches and head sizes that no other kernel has.
const ANY_HEAD: Capabilities = Capabilities {
    latent: Latents::Any,
    ..attention(&Dtype::ALL, Sizes::UpTo { max: names::WIDEST_HEAD, step: 1 }, GENERIC, 0)
};
register!(
    "cuda.generic",
    Decode,
    ANY_HEAD,
    Attention(|device, args| attention::generic(Split::ByWorkList, device, args))
);
register!("cuda.generic", Prefill, ANY_HEAD, Attention(|device, args| attention::generic(Split::No, device, args)));

// Latents of DeepSeek's and Kimi's models. Blocks of 64 rows need the shared memory of an A100 or H100.
const LATENT: Capabilities = Capabilities {
    latent: Latents::Only(&names::LATENTS),
    proven: false,
    rounds_weights: true,
    decode_rows: MOST_ROWS,
    ..attention(HALVES, Sizes::List(&[names::LATENTS[0][0]]), "cuda.latents", 1)
};
const LATENT_64: Capabilities = Capabilities { shared_bytes: 163 << 10, rank: 2, ..LATENT };
const SHARED_64: Capabilities = Capabilities { items_at_once: Some(attention::latent_at_once::<64>), ..LATENT_64 };
const SHARED_16: Capabilities = Capabilities { items_at_once: Some(attention::latent_at_once::<16>), ..LATENT };
register!("cuda.latent_64", Decode, SHARED_64, Attention(|device, args| attention::latent_decode(64, device, args)));
register!("cuda.latent_64", Prefill, LATENT_64, Attention(|device, args| attention::latent_prefill(32, device, args)));
register!("cuda.latent_16", Decode, SHARED_16, Attention(|device, args| attention::latent_decode(16, device, args)));
register!("cuda.latent_16", Prefill, LATENT, Attention(|device, args| attention::latent_prefill(16, device, args)));

register!("cuda.reshape_and_cache", CacheWrite, Capabilities { latent: Latents::Any, ..ANY }, CacheWrite(cache::write));
// The layers' kernel is tested up to this head size.
const FUSED: Capabilities = Capabilities { head_sizes: Sizes::UpTo { max: 256, step: 8 }, fused: true, rank: 1, ..ANY };
register!("cuda.fused", CacheWrite, FUSED, CacheWrite(cache::write));
register!("cuda.product", Linear, ANY, Linear(product));
register!("cuda.linear", Linear, Capabilities { takes_codes: true, rank: 1, ..ANY }, Linear(linear::linear));
// Only the products of experts differ.
const EXPERTS: Capabilities = Capabilities {
    compute_capability: (9, 0),
    exact_compute_capability: true,
    takes_codes: true,
    orders_experts: true,
    proven: false,
    rank: 2,
    ..ANY
};
register!("cuda.grouped_experts", Linear, EXPERTS, Linear(linear::linear));
register!("cuda.low_rank", LowRank, ANY, LowRank(low_rank::low_rank));
const COPY: Capabilities = Capabilities { latent: Latents::Any, block_bytes_step: 16, ..ANY };
register!("cuda.copy_blocks", BlockCopy, COPY, BlockCopy(cache::copy));

/// Computes a linear layer with the matrix product of the device.
fn product(device: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
    let LinearArgs { x, rows, weights, bias, y, output: y_format, .. } = args;
    let (x, weights) = (x.numbers("cuda.product")?, weights.factor()?);
    Ok(device.product(Product { x, rows, weights, bias, y, y_format, columns: None, slices: None })?)
}

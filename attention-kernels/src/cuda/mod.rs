//! The CUDA variants: a safe wrapper around each kernel of `csrc/`, for `cuda` and `cuda-sim` alike.
//!
//! A wrapper checks shapes, picks the instance's name, and computes grid, threads and shared memory as `csrc/README.md` has
//! them. It reads no length of a sequence to do so: what is launched follows from the shapes alone.

mod attention;
mod cache;
mod convert;
mod linear;
mod names;
mod rule;
mod yardsticks;

use crate::format::{Dtype, KvDtype, Layout};
use crate::variant::{Capabilities, Kernel, Operation, Sizes, Variant};
use attention::Context;
pub use convert::convert_fp8;
use linear::linear;
pub use rule::PagedRule;
pub(crate) use yardsticks::{TILE_OPERATIONS, TILE_THREADS, multiply_tiles, read_memory};

const HALVES: &[Dtype] = &[Dtype::F16, Dtype::Bf16];

/// What all of them can do.
const ANY: Capabilities = Capabilities {
    devices: &["cuda", "cuda-sim"],
    compute_capability: (8, 0),
    dtypes: &Dtype::ALL,
    kv_dtypes: &KvDtype::ON_GPU,
    // Kernels take strides.
    layouts: &Layout::ALL,
    head_sizes: Sizes::UpTo { max: 256, step: 8 },
    block_sizes: Sizes::UpTo { max: 128, step: 1 },
    proven: false,
    ..Capabilities::NONE
};

/// The attention kernels, by the family whose sums have one order.
const fn attention(dtypes: &'static [Dtype], head_sizes: Sizes, family: &'static str, rank: u32) -> Capabilities {
    Capabilities {
        dtypes,
        head_sizes,
        window: true,
        soft_cap: true,
        alibi: true,
        lse: true,
        row_invariant: Some(family),
        rank,
        ..ANY
    }
}

const INSTANCES: Sizes = Sizes::List(&names::HEAD_SIZES);

macro_rules! register {
    ($name:literal, $operation:ident, $capabilities:expr, $kind:ident($function:expr)) => {
        inventory::submit! { Variant {
            name: $name,
            operation: Operation::$operation,
            capabilities: $capabilities,
            kernel: Kernel::$kind($function),
        } }
    };
}

const ROWS: &str = "cuda.rows";
const TILES: &str = "cuda.tiles";
const GENERIC: &str = "cuda.generic";

/// Those on tensor cores.
const fn tiles(rank: u32) -> Capabilities {
    Capabilities { rounds_weights: true, ..attention(HALVES, INSTANCES, TILES, rank) }
}

register!(
    "cuda.paged",
    Decode,
    attention(HALVES, INSTANCES, ROWS, 3),
    Attention(|device, args| { attention::decode("cuda.paged", Context::ByRule, device, args) })
);
register!("cuda.paged_gqa", Decode, tiles(2), Attention(attention::grouped));
register!(
    "cuda.paged_v2",
    Decode,
    attention(HALVES, INSTANCES, ROWS, 1),
    Attention(|device, args| { attention::decode("cuda.paged_v2", Context::Split, device, args) })
);
register!(
    "cuda.paged_v1",
    Decode,
    attention(HALVES, INSTANCES, ROWS, 0),
    Attention(|device, args| { attention::decode("cuda.paged_v1", Context::Whole, device, args) })
);
register!("cuda.paged_prefill", Prefill, tiles(1), Attention(attention::prefill));

// Its online softmax runs from the first tile that the rows beside a row see, so a row's bits depend on them.
const HOPPER: Capabilities = Capabilities {
    compute_capability: (9, 0),
    exact_compute_capability: true,
    kv_dtypes: &[KvDtype::Same],
    block_sizes: Sizes::List(&names::HOPPER_BLOCKS),
    row_invariant: None,
    head_sizes: Sizes::List(&[64, 128]),
    ..tiles(0)
};
register!("cuda.prefill_sm90", Prefill, HOPPER, Attention(attention::hopper));

const SINGLES: Capabilities = attention(&[Dtype::F32], Sizes::UpTo { max: 256, step: 1 }, GENERIC, 0);
register!("cuda.generic", Decode, SINGLES, Attention(attention::generic));
register!("cuda.generic", Prefill, SINGLES, Attention(attention::generic));

register!("cuda.reshape_and_cache", CacheWrite, ANY, CacheWrite(cache::write));
register!("cuda.fused", CacheWrite, Capabilities { fused: true, rank: 1, ..ANY }, CacheWrite(cache::write));
register!("cuda.product", Linear, Capabilities { rank: 0, ..ANY }, Linear(linear));
register!("cuda.copy_blocks", BlockCopy, Capabilities { block_bytes_step: 16, ..ANY }, BlockCopy(cache::copy));

//! The CPU variants: `cpu.reference` in plain loops, and one kernel source compiled for each vector instruction set.

pub(crate) mod chosen;
mod fast;
mod kernel;
mod low_rank;
mod merge;
mod pair_scores;
mod pair_values;
mod reference;
mod scores;
mod store;
mod stored;
mod tile;
mod tiled;
mod values;

use linear::Arithmetic;
use simd::Isa;

use crate::format::{KvDtype, Layout};
use crate::variant::{Capabilities, Latents, register};

/// Capabilities of attention.
const fn attention(name: &'static str, isa: Isa, rank: u32) -> Capabilities {
    Capabilities {
        window: true,
        block_sparse: true,
        soft_cap: true,
        alibi: true,
        sinks: true,
        lse: true,
        row_invariant: Some(name),
        ..plain(isa, rank)
    }
}

/// Capabilities of the other operations.
const fn plain(isa: Isa, rank: u32) -> Capabilities {
    Capabilities { isa, kv_dtypes: &KvDtype::ALL, latent: Latents::Any, rank, ..Capabilities::CPU }
}

/// Capabilities of writing to a cache and of copying its blocks.
const fn memory(rank: u32) -> Capabilities {
    Capabilities { layouts: &[Layout::Pairs, Layout::Hnd], ..plain(Isa::Portable, rank) }
}

/// Capabilities of linear layers. The reference takes only unquantised rows, so quantising them before a product is tested
/// against it.
const fn product(isa: Isa, rank: u32) -> Capabilities {
    Capabilities { takes_blocks: rank > 0, ..plain(isa, rank) }
}

/// Registers decode, prefill and linear for one instruction set.
macro_rules! register_all {
    ($name:literal, $isa:expr, $rank:literal, $attention:expr, $linear:expr) => {
        register!($name, Decode, attention($name, $isa, $rank), Attention($attention));
        register!($name, Prefill, attention($name, $isa, $rank), Attention($attention));
        register!($name, Linear, product($isa, $rank), Linear($linear));
    };
}

/// Registers the vector kernels for one instruction set.
macro_rules! register_fast {
    ($name:literal, $isa:ident, $rank:literal) => {
        register_all!(
            $name,
            Isa::$isa,
            $rank,
            |device, args| fast::attention((Isa::$isa, Arithmetic::Exact), device, args),
            |device, args| fast::linear(Isa::$isa, device, args)
        );
        register_low_rank!($name, $isa, $rank);
    };
}

/// Registers low-rank additions for one instruction set, which multiply in the arithmetic that adapters were packed for.
macro_rules! register_low_rank {
    ($name:literal, $isa:ident, $rank:literal) => {
        register!(
            $name,
            LowRank,
            plain(Isa::$isa, $rank),
            LowRank(|device, args| low_rank::low_rank(Isa::$isa, device, args))
        );
    };
}

/// Capabilities of attention that multiplies in bfloat16. Every instruction set computes the same bits.
const fn rounded(arithmetic: Arithmetic, isa: Isa, rank: u32) -> Capabilities {
    let family = if matches!(arithmetic, Arithmetic::Tiles) { "cpu.tiles" } else { "cpu.bf16" };
    let layouts = &[Layout::Pairs, Layout::Hnd];
    Capabilities { arithmetic, layouts, kv_dtypes: &[KvDtype::Bf16], ..attention(family, isa, rank) }
}

/// Registers attention in an arithmetic that rounds to bfloat16, for one instruction set.
macro_rules! register_rounded {
    ($name:literal, $isa:ident, $arithmetic:ident, $rank:literal) => {
        register_rounded!($name, $isa, $arithmetic, $rank, Decode);
        register_rounded!($name, $isa, $arithmetic, $rank, Prefill);
    };
    ($name:literal, $isa:ident, $arithmetic:ident, $rank:literal, $op:ident) => {
        register!(
            $name,
            $op,
            rounded(Arithmetic::$arithmetic, Isa::$isa, $rank),
            Attention(|device, args| { fast::attention((Isa::$isa, Arithmetic::$arithmetic), device, args) })
        );
    };
}

register_all!("cpu.reference", Isa::Portable, 0, reference::attention, reference::linear);
register_fast!("cpu.portable", Portable, 1);
#[cfg(target_arch = "x86_64")]
register_fast!("cpu.avx2", Avx2, 2);
#[cfg(target_arch = "x86_64")]
register_fast!("cpu.avx512", Avx512, 3);
#[cfg(target_arch = "aarch64")]
register_fast!("cpu.neon", Neon, 2);

register_rounded!("cpu.portable_bf16", Portable, Pairs, 4);
#[cfg(target_arch = "x86_64")]
register_rounded!("cpu.avx2_bf16", Avx2, Pairs, 5);
#[cfg(target_arch = "x86_64")]
register_rounded!("cpu.avx512_bf16", Avx512Bf16, Pairs, 6);

/// Registers linear layers in an arithmetic that rounds to bfloat16, for one instruction set.
macro_rules! register_linear {
    ($name:literal, $isa:ident, $arithmetic:ident, $rank:literal) => {
        register!(
            $name,
            Linear,
            Capabilities {
                arithmetic: Arithmetic::$arithmetic,
                takes_blocks: true,
                activates: matches!(Arithmetic::$arithmetic, Arithmetic::Tiles),
                ..plain(Isa::$isa, $rank)
            },
            Linear(|device, args| fast::linear(Isa::$isa, device, args))
        );
    };
}

// Every linear layer multiplies a matrix in the arithmetic that it was packed for. These have the instructions for it.
#[cfg(target_arch = "x86_64")]
register_linear!("cpu.amx_bf16", Amx, Tiles, 7);
#[cfg(target_arch = "x86_64")]
register_linear!("cpu.avx512_bf16", Avx512Bf16, Pairs, 6);
#[cfg(target_arch = "x86_64")]
register_low_rank!("cpu.amx_bf16", Amx, 7);
#[cfg(target_arch = "x86_64")]
register_low_rank!("cpu.avx512_bf16", Avx512Bf16, 6);
// The bits of tiles without them, which costs more than pairs: `auto` takes these nowhere.
#[cfg(target_arch = "x86_64")]
register_linear!("cpu.avx512_tiles", Avx512, Tiles, 0);
#[cfg(target_arch = "x86_64")]
register_linear!("cpu.avx2_tiles", Avx2, Tiles, 0);
register_linear!("cpu.portable_tiles", Portable, Tiles, 0);
#[cfg(target_arch = "x86_64")]
register_rounded!("cpu.amx_bf16", Amx, Tiles, 7);
#[cfg(target_arch = "x86_64")]
register_rounded!("cpu.avx512_tiles", Avx512, Tiles, 0);
#[cfg(target_arch = "x86_64")]
register_rounded!("cpu.avx2_tiles", Avx2, Tiles, 0);
register_rounded!("cpu.portable_tiles", Portable, Tiles, 0);

register!("cpu.reference", CacheWrite, memory(0), CacheWrite(reference::cache_write));
register!("cpu.rows", CacheWrite, memory(1), CacheWrite(store::cache_write));
register!("cpu.reference", BlockCopy, memory(0), BlockCopy(reference::block_copy));
register!("cpu.rows", BlockCopy, memory(1), BlockCopy(store::block_copy));

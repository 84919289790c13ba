//! The CPU variants: `cpu.reference` in plain loops, and one kernel source compiled for each vector instruction set.

mod fast;
mod kernel;
mod low_rank;
mod merge;
mod reference;
mod scores;
mod store;
mod stored;
mod tile;
mod values;

use device::Isa;

use crate::format::KvDtype;
use crate::variant::{Capabilities, register};

/// Capabilities of attention.
const fn attention(name: &'static str, isa: Isa, rank: u32) -> Capabilities {
    Capabilities {
        window: true,
        block_sparse: true,
        trees: true,
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
    Capabilities { isa, kv_dtypes: &KvDtype::ALL, latent: true, rank, ..Capabilities::CPU }
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
            |device, args| fast::attention(Isa::$isa, device, args),
            |device, args| fast::linear(Isa::$isa, device, args)
        );
        register!(
            $name,
            LowRank,
            plain(Isa::$isa, $rank),
            LowRank(|device, args| low_rank::low_rank(Isa::$isa, device, args))
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

register!("cpu.reference", CacheWrite, plain(Isa::Portable, 0), CacheWrite(reference::cache_write));
register!("cpu.rows", CacheWrite, plain(Isa::Portable, 1), CacheWrite(store::cache_write));
register!("cpu.reference", BlockCopy, plain(Isa::Portable, 0), BlockCopy(reference::block_copy));
register!("cpu.rows", BlockCopy, plain(Isa::Portable, 1), BlockCopy(store::block_copy));

//! The CPU variants: `cpu.reference` in plain loops, and one kernel source compiled for each vector instruction set.

mod fast;
mod kernel;
mod merge;
mod reference;
mod scores;
mod store;
mod stored;
mod tile;
mod values;

use device::Isa;

use crate::format::{Dtype, KvDtype, Layout};
use crate::variant::{Capabilities, Kernel, Operation, Sizes, Variant};

/// Capabilities of attention.
const fn attention(name: &'static str, isa: Isa, rank: u32) -> Capabilities {
    Capabilities { window: true, soft_cap: true, alibi: true, lse: true, row_invariant: Some(name), ..plain(isa, rank) }
}

/// Capabilities of the other operations.
const fn plain(isa: Isa, rank: u32) -> Capabilities {
    Capabilities {
        devices: &["cpu"],
        isa,
        dtypes: &[Dtype::F32],
        kv_dtypes: &KvDtype::ALL,
        layouts: &[Layout::Hnd],
        head_sizes: Sizes::ANY,
        block_sizes: Sizes::ANY,
        rank,
        ..Capabilities::NONE
    }
}

/// Capabilities of linear layers. The reference takes only unquantised rows, so quantising them before a product is tested
/// against it.
const fn product(isa: Isa, rank: u32) -> Capabilities {
    Capabilities { takes_blocks: rank > 0, ..plain(isa, rank) }
}

/// Registers decode, prefill and linear for one instruction set.
macro_rules! register {
    ($name:literal, $isa:expr, $rank:literal, $attention:expr, $linear:expr) => {
        inventory::submit! { Variant {
            name: $name, operation: Operation::Decode, capabilities: attention($name, $isa, $rank), kernel: Kernel::Attention($attention),
        } }
        inventory::submit! { Variant {
            name: $name, operation: Operation::Prefill, capabilities: attention($name, $isa, $rank), kernel: Kernel::Attention($attention),
        } }
        inventory::submit! { Variant {
            name: $name, operation: Operation::Linear, capabilities: product($isa, $rank), kernel: Kernel::Linear($linear),
        } }
    };
}

register!("cpu.reference", Isa::Portable, 0, reference::attention, reference::linear);
register!("cpu.portable", Isa::Portable, 1, |d, a| fast::attention(Isa::Portable, d, a), |d, a| fast::linear(
    Isa::Portable,
    d,
    a
));
#[cfg(target_arch = "x86_64")]
register!("cpu.avx2", Isa::Avx2, 2, |d, a| fast::attention(Isa::Avx2, d, a), |d, a| fast::linear(Isa::Avx2, d, a));
#[cfg(target_arch = "x86_64")]
register!("cpu.avx512", Isa::Avx512, 3, |d, a| fast::attention(Isa::Avx512, d, a), |d, a| fast::linear(
    Isa::Avx512,
    d,
    a
));
#[cfg(target_arch = "aarch64")]
register!("cpu.neon", Isa::Neon, 2, |d, a| fast::attention(Isa::Neon, d, a), |d, a| fast::linear(Isa::Neon, d, a));

inventory::submit! { Variant {
    name: "cpu.reference", operation: Operation::CacheWrite, capabilities: plain(Isa::Portable, 0), kernel: Kernel::CacheWrite(reference::cache_write),
} }
inventory::submit! { Variant {
    name: "cpu.rows", operation: Operation::CacheWrite, capabilities: plain(Isa::Portable, 1), kernel: Kernel::CacheWrite(store::cache_write),
} }
inventory::submit! { Variant {
    name: "cpu.reference", operation: Operation::BlockCopy, capabilities: plain(Isa::Portable, 0), kernel: Kernel::BlockCopy(reference::block_copy),
} }
inventory::submit! { Variant {
    name: "cpu.rows", operation: Operation::BlockCopy, capabilities: plain(Isa::Portable, 1), kernel: Kernel::BlockCopy(store::block_copy),
} }

//! The CPU's variants: `cpu.reference` in plain loops, and one kernel source compiled for each vector unit.

mod fast;
mod reference;
mod store;

use device::Isa;

use crate::registry::{Capabilities, Kernel, Operation, Variant};

/// What the CPU's attention can do. Only plain loops need no scratch on the stack, so only they take any head size.
const fn attention(isa: Isa, rank: u32) -> Capabilities {
    let max_head_dim = if rank == 0 { usize::MAX } else { fast::MAX_HEAD_DIM };
    Capabilities {
        device: "cpu",
        isa,
        max_head_dim,
        window: true,
        soft_cap: true,
        alibi: true,
        row_invariant: true,
        rank,
    }
}

/// The other operations know nothing of scores.
const fn plain(isa: Isa, rank: u32) -> Capabilities {
    Capabilities { window: false, soft_cap: false, alibi: false, ..attention(isa, rank) }
}

/// Registers decode, prefill and linear for one instruction set.
macro_rules! register {
    ($name:literal, $isa:expr, $rank:literal, $attention:expr, $linear:expr) => {
        inventory::submit! { Variant {
            name: $name, operation: Operation::Decode, capabilities: attention($isa, $rank), kernel: Kernel::Attention($attention),
        } }
        inventory::submit! { Variant {
            name: $name, operation: Operation::Prefill, capabilities: attention($isa, $rank), kernel: Kernel::Attention($attention),
        } }
        inventory::submit! { Variant {
            name: $name, operation: Operation::Linear, capabilities: plain($isa, $rank), kernel: Kernel::Linear($linear),
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

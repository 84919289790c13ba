//! Kernel variants as values, collected from every crate that is linked.

use std::fmt;

use device::{Device, Isa};

use crate::args::{AttentionArgs, BlockCopyArgs, CacheWriteArgs, KernelError, LinearArgs};

/// What a kernel does. Its name here is its key in `[kernels]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Attention of one query token per sequence.
    Decode,
    /// Attention of many query tokens per sequence.
    Prefill,
    /// New keys and values into their slots.
    CacheWrite,
    /// Whole blocks to other blocks (copy-on-write).
    BlockCopy,
    /// Matrix product with a weight matrix.
    Linear,
}

impl Operation {
    /// All of them, in the order in which they are listed.
    pub const ALL: [Operation; 5] =
        [Operation::Decode, Operation::Prefill, Operation::CacheWrite, Operation::BlockCopy, Operation::Linear];

    /// Key in the `[kernels]` table.
    pub fn key(self) -> &'static str {
        match self {
            Operation::Decode => "decode",
            Operation::Prefill => "prefill",
            Operation::CacheWrite => "cache_write",
            Operation::BlockCopy => "block_copy",
            Operation::Linear => "linear",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.key())
    }
}

/// The function behind a variant; its kind is its operation.
#[derive(Clone, Copy)]
pub enum Kernel {
    /// For [`Operation::Decode`] and [`Operation::Prefill`].
    Attention(fn(&dyn Device, AttentionArgs<'_>) -> Result<(), KernelError>),
    /// For [`Operation::CacheWrite`].
    CacheWrite(fn(&dyn Device, CacheWriteArgs<'_>) -> Result<(), KernelError>),
    /// For [`Operation::BlockCopy`].
    BlockCopy(fn(&dyn Device, BlockCopyArgs<'_>) -> Result<(), KernelError>),
    /// For [`Operation::Linear`].
    Linear(fn(&dyn Device, LinearArgs<'_>) -> Result<(), KernelError>),
}

/// What a variant can do. Values are float32 in the layout of the crate docs for every variant so far.
#[derive(Clone, Copy, Debug)]
pub struct Capabilities {
    /// Backend that runs it: `"cpu"`.
    pub device: &'static str,
    /// Instruction set that the CPU must have.
    pub isa: Isa,
    /// Greatest head size; matters to attention alone.
    pub max_head_dim: usize,
    /// Sliding windows.
    pub window: bool,
    /// Soft-capped scores.
    pub soft_cap: bool,
    /// ALiBi slopes.
    pub alibi: bool,
    /// Results do not depend on the batch; see the crate docs.
    pub row_invariant: bool,
    /// `auto` takes the greatest rank among those that can serve.
    pub rank: u32,
}

/// One implementation of one operation.
pub struct Variant {
    /// Name, `device.kind`.
    pub name: &'static str,
    /// What it does.
    pub operation: Operation,
    /// What it can do.
    pub capabilities: Capabilities,
    /// The function.
    pub kernel: Kernel,
}

inventory::collect!(Variant);

/// Every registered variant of an operation, best rank first, then by name.
pub fn variants(operation: Operation) -> Vec<&'static Variant> {
    let mut found: Vec<&'static Variant> =
        inventory::iter::<Variant>.into_iter().filter(|v| v.operation == operation).collect();
    found.sort_by_key(|v| (std::cmp::Reverse(v.capabilities.rank), v.name));
    found
}

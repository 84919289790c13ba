//! Kernel variants as values, collected from every crate that is linked.

use std::fmt;

use device::profile::{self, Cost, Running};
use device::{Device, Isa, Queue};

use crate::args::{AttentionArgs, BlockCopyArgs, CacheWriteArgs, LinearArgs};
use crate::error::KernelError;
use crate::format::{Dtype, KvDtype, Layout};
use crate::plugin::LoadedKernel;

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

    /// Whether it computes scores.
    pub fn is_attention(self) -> bool {
        matches!(self, Operation::Decode | Operation::Prefill)
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
    /// Of a plug-in, for any operation but [`Operation::Linear`].
    Loaded(LoadedKernel),
    /// For [`Operation::Linear`].
    Linear(fn(&dyn Device, LinearArgs<'_>) -> Result<(), KernelError>),
}

/// The sizes that a variant takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// These alone.
    List(&'static [usize]),
    /// Every multiple of `step` from it up to `max`.
    UpTo {
        /// The greatest.
        max: usize,
        /// What it is a multiple of.
        step: usize,
    },
}

impl Sizes {
    /// Every size.
    pub const ANY: Sizes = Sizes::UpTo { max: usize::MAX, step: 1 };

    /// Whether `size` is one of them.
    pub fn contain(&self, size: usize) -> bool {
        match *self {
            Sizes::List(sizes) => sizes.contains(&size),
            Sizes::UpTo { max, step } => size > 0 && size <= max && size.is_multiple_of(step),
        }
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Sizes::List(sizes) => {
                let sizes: Vec<String> = sizes.iter().map(ToString::to_string).collect();
                f.write_str(&sizes.join(","))
            }
            Sizes::UpTo { max, step } => {
                if max == usize::MAX {
                    f.write_str("any")?;
                } else {
                    write!(f, "<={max}")?;
                }
                if step > 1 { write!(f, ",*{step}") } else { Ok(()) }
            }
        }
    }
}

/// What a variant can do. [`Capabilities::NONE`] is the start for one that is written down.
#[derive(Clone, Copy, Debug)]
pub struct Capabilities {
    /// Backends that run it: `"cpu"`, or `"cuda"` and `"cuda-sim"`.
    pub devices: &'static [&'static str],
    /// Instruction set that the CPU must have.
    pub isa: Isa,
    /// Least major and minor number of a GPU.
    pub compute_capability: (u32, u32),
    /// It has instructions of GPUs of that number alone, which later ones lack.
    pub exact_compute_capability: bool,
    /// Types of queries and outputs; for [`Operation::Linear`], of its operands.
    pub dtypes: &'static [Dtype],
    /// Types of the cache.
    pub kv_dtypes: &'static [KvDtype],
    /// Orders of the cache's dimensions.
    pub layouts: &'static [Layout],
    /// Elements per head.
    pub head_sizes: Sizes,
    /// Tokens per block.
    pub block_sizes: Sizes,
    /// What the bytes of one head's block must be a multiple of.
    pub block_bytes_step: usize,
    /// Greatest number of query rows of a sequence.
    pub max_query_len: usize,
    /// Sliding windows.
    pub window: bool,
    /// Soft-capped scores.
    pub soft_cap: bool,
    /// ALiBi slopes.
    pub alibi: bool,
    /// Output of the log of the sum of exp(score).
    pub lse: bool,
    /// Results do not depend on the batch; see the crate docs. Variants of equal names here agree in every bit.
    pub row_invariant: Option<&'static str>,
    /// Weights of values are rounded to the type of the query, as tensor cores take them: half an ulp more of error.
    pub rounds_weights: bool,
    /// Of a cache write: a layer's own kernel, which has the keys and values in hand, writes them too. The function is for
    /// those who have no layer.
    pub fused: bool,
    /// Of a product with quantised weights: it takes rows that are in 8 bits already ([`Rows::Blocks`](crate::Rows::Blocks)), so
    /// that the operation before it can make them.
    pub takes_blocks: bool,
    /// It has passed the conformance table on the hardware that it is for. `auto` takes one that has not only where no
    /// other can serve.
    pub proven: bool,
    /// `auto` takes the greatest rank among those that can serve.
    pub rank: u32,
}

impl Capabilities {
    /// Runs nowhere and does nothing.
    pub const NONE: Capabilities = Capabilities {
        devices: &[],
        isa: Isa::Portable,
        compute_capability: (0, 0),
        exact_compute_capability: false,
        dtypes: &[],
        kv_dtypes: &[],
        layouts: &[],
        head_sizes: Sizes::List(&[]),
        block_sizes: Sizes::List(&[]),
        block_bytes_step: 1,
        max_query_len: usize::MAX,
        window: false,
        soft_cap: false,
        alibi: false,
        lse: false,
        row_invariant: None,
        rounds_weights: false,
        fused: false,
        takes_blocks: false,
        proven: true,
        rank: 0,
    };

    /// Whether the device is one of its own and, on a CPU, has the instructions.
    pub fn runs_on(&self, device: &str) -> bool {
        self.devices.contains(&device) && self.isa.is_available()
    }

    /// Whether a GPU of that compute capability has the instructions; `None`: there is none to compare with.
    pub fn runs_on_gpu(&self, found: Option<(u32, u32)>) -> bool {
        let needs = self.compute_capability;
        found.is_none_or(|found| if self.exact_compute_capability { found == needs } else { found >= needs })
    }
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

impl Variant {
    /// Attention, of a variant for [`Operation::Decode`] or [`Operation::Prefill`].
    ///
    /// # Errors
    /// A variant of another operation, arguments that do not fit each other, and whatever goes wrong in it.
    pub fn attention(&self, device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
        let _time = self.time(device, || args.cost());
        match self.kernel {
            Kernel::Attention(run) => run(device, args),
            Kernel::Loaded(kernel) if self.operation.is_attention() => kernel.attention(device, args),
            _ => Err(self.not_for("attention")),
        }
    }

    /// Keys and values into their slots, of a variant for [`Operation::CacheWrite`].
    ///
    /// # Errors
    /// As [`Variant::attention`].
    pub fn cache_write(&self, device: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
        let _time = self.time(device, || args.cost());
        match self.kernel {
            Kernel::CacheWrite(run) => run(device, args),
            Kernel::Loaded(kernel) if self.operation == Operation::CacheWrite => kernel.cache_write(device, args),
            _ => Err(self.not_for("a cache write")),
        }
    }

    /// Copies of blocks, of a variant for [`Operation::BlockCopy`].
    ///
    /// # Errors
    /// As [`Variant::attention`].
    pub fn block_copy(&self, device: &dyn Device, args: BlockCopyArgs<'_>) -> Result<(), KernelError> {
        let _time = self.time(device, || args.cost());
        match self.kernel {
            Kernel::BlockCopy(run) => run(device, args),
            Kernel::Loaded(kernel) if self.operation == Operation::BlockCopy => kernel.block_copy(device, args),
            _ => Err(self.not_for("a block copy")),
        }
    }

    /// A matrix product, of a variant for [`Operation::Linear`].
    ///
    /// # Errors
    /// As [`Variant::attention`].
    pub fn linear(&self, device: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
        let _time = self.time(device, || args.cost());
        match self.kernel {
            Kernel::Linear(run) => run(device, args),
            _ => Err(self.not_for("a matrix product")),
        }
    }

    /// Of a call, for the device's profile, if it has one.
    fn time<'a>(&self, device: &'a dyn Device, cost: impl FnOnce() -> Cost) -> Option<Running<'a>> {
        profile::start(device, Queue::Compute, self.operation.key(), self.name, cost)
    }

    fn not_for(&self, found: &str) -> KernelError {
        KernelError::Unsupported { variant: self.name, found: found.to_string() }
    }
}

inventory::collect!(Variant);

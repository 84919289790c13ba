//! Kernel variants, collected from every linked crate.

use std::fmt;

use device::profile::{self, Cost, Running};
use device::{Device, DeviceError, Queue};
use linear::Arithmetic;
use simd::Isa;

use crate::args::{AttentionArgs, BlockCopyArgs, CacheWriteArgs, KvCache, LinearArgs};
use crate::error::KernelError;
use crate::format::{CacheFormat, Dtype, KvDtype, Layout};
use crate::low_rank::LowRankArgs;
use crate::plugin::LoadedKernel;
use crate::shape::KvShape;

/// Operation that a kernel performs. `Display` prints its key in the `[kernels]` table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Attention of one query token per sequence, or a few ([`Capabilities::decode_rows`]).
    Decode,
    /// Attention of many query tokens per sequence.
    Prefill,
    /// Write of new keys and values into their slots.
    CacheWrite,
    /// Copy of whole blocks (copy-on-write).
    BlockCopy,
    /// Matrix product with a weight matrix.
    Linear,
    /// Low-rank addition to a matrix product, of the rows of several adapters (LoRA).
    LowRank,
}

impl Operation {
    /// All operations, in the order in which they are listed.
    pub const ALL: [Operation; 6] = [
        Operation::Decode,
        Operation::Prefill,
        Operation::CacheWrite,
        Operation::BlockCopy,
        Operation::Linear,
        Operation::LowRank,
    ];

    /// Operations on caches. Their variants must agree on the cache format, so a set has all four.
    pub(crate) const ON_CACHES: [Operation; 4] =
        [Operation::Decode, Operation::Prefill, Operation::CacheWrite, Operation::BlockCopy];

    /// Returns the key in the `[kernels]` table.
    pub fn key(self) -> &'static str {
        match self {
            Operation::Decode => "decode",
            Operation::Prefill => "prefill",
            Operation::CacheWrite => "cache_write",
            Operation::BlockCopy => "block_copy",
            Operation::Linear => "linear",
            Operation::LowRank => "low_rank",
        }
    }

    /// Whether the operation works on a cache.
    pub(crate) fn is_on_caches(self) -> bool {
        Operation::ON_CACHES.contains(&self)
    }

    /// Whether the operation is attention.
    pub fn is_attention(self) -> bool {
        matches!(self, Operation::Decode | Operation::Prefill)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.key())
    }
}

/// Function of a variant. Its kind must match the operation.
#[derive(Clone, Copy)]
pub enum Kernel {
    /// For [`Operation::Decode`] and [`Operation::Prefill`].
    Attention(fn(&dyn Device, AttentionArgs<'_>) -> Result<(), KernelError>),
    /// For [`Operation::CacheWrite`].
    CacheWrite(fn(&dyn Device, CacheWriteArgs<'_>) -> Result<(), KernelError>),
    /// For [`Operation::BlockCopy`].
    BlockCopy(fn(&dyn Device, BlockCopyArgs<'_>) -> Result<(), KernelError>),
    /// Function of a plug-in, for operations on caches.
    Loaded(LoadedKernel),
    /// For [`Operation::Linear`].
    Linear(fn(&dyn Device, LinearArgs<'_>) -> Result<(), KernelError>),
    /// For [`Operation::LowRank`].
    LowRank(fn(&dyn Device, LowRankArgs<'_>) -> Result<(), KernelError>),
}

/// Sizes that a variant supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// Only these sizes.
    List(&'static [usize]),
    /// All multiples of `step` up to `max`.
    UpTo {
        /// Largest size.
        max: usize,
        /// Divisor of every size.
        step: usize,
    },
}

impl Sizes {
    /// All sizes.
    pub const ANY: Sizes = Sizes::UpTo { max: usize::MAX, step: 1 };

    /// Whether `size` is supported.
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

/// Latent caches ([`KvCache::latent`]) that a variant supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Latents {
    /// None.
    None,
    /// All, beside caches with separate values.
    Any,
    /// Nothing but latent caches with so many elements of a key and of a value.
    Only(&'static [[usize; 2]]),
}

impl Latents {
    /// Returns what is wrong with a cache with keys of `key` elements, of which the first `value` are the value if it is latent; `None` if
    /// it is supported.
    pub fn misfit(self, key: usize, value: Option<usize>) -> Option<String> {
        match (self, value) {
            (Latents::Any, _) | (Latents::None, None) => None,
            (Latents::None, Some(_)) => Some("a latent cache".to_string()),
            (Latents::Only(_), None) => Some("a cache with values beside keys".to_string()),
            (Latents::Only(sizes), Some(value)) if sizes.contains(&[key, value]) => None,
            (Latents::Only(_), Some(value)) => Some(format!("a latent cache with keys of {key} and values of {value}")),
        }
    }
}

/// Bytes of shared memory that a thread block of a GPU can have (CUDA C++ Programming Guide, "Technical Specifications per Compute
/// Capability").
pub(crate) fn most_shared_bytes(capability: (u32, u32)) -> usize {
    let kib = match capability {
        (8, 0 | 7) => 163,
        (9..12, _) => 227,
        _ => 99,
    };
    kib << 10
}

/// Returns how many items of the list of work a device computes at once, for a cache of this format and shape and a number of query
/// heads.
pub type ItemsAtOnce = fn(&dyn Device, CacheFormat, KvShape, usize) -> Result<usize, DeviceError>;

/// What a variant supports. [`Capabilities::NONE`] is the base for new ones.
#[derive(Clone, Copy, Debug)]
pub struct Capabilities {
    /// Backends that run the variant: `"cpu"`, or `"cuda"` and `"cuda-sim"`.
    pub devices: &'static [&'static str],
    /// Instruction set that the CPU must have.
    pub isa: Isa,
    /// Lowest compute capability (major, minor) of a GPU.
    pub compute_capability: (u32, u32),
    /// Whether the variant uses instructions that only GPUs of exactly that compute capability have.
    pub exact_compute_capability: bool,
    /// Bytes of shared memory of its greatest thread block.
    pub shared_bytes: usize,
    /// Types of queries and outputs; for operations that have none, of the operands.
    pub dtypes: &'static [Dtype],
    /// How an operation rounds its operands before it multiplies. Only a model that computes in bfloat16
    /// ([`Needs::arithmetic`](crate::Needs::arithmetic)) is served by one that rounds to it.
    pub arithmetic: Arithmetic,
    /// Types of the cache.
    pub kv_dtypes: &'static [KvDtype],
    /// Layouts of the cache.
    pub layouts: &'static [Layout],
    /// Supported latent caches.
    pub latent: Latents,
    /// Elements per head.
    pub head_sizes: Sizes,
    /// Tokens per block.
    pub block_sizes: Sizes,
    /// Divisor of the bytes of one head's block.
    pub block_bytes_step: usize,
    /// For decode by a list of work whose contexts may be split further for few sequences: how many items of the list the device
    /// computes at once.
    pub items_at_once: Option<ItemsAtOnce>,
    /// Most query rows per sequence.
    pub max_query_len: usize,
    /// For decode: query rows per sequence up to which a set prefers the variant to that of prefill.
    pub decode_rows: usize,
    /// Supports sliding windows.
    pub window: bool,
    /// Supports block-sparse attention ([`BlockSparse`](crate::BlockSparse)).
    pub block_sparse: bool,
    /// Supports soft-capped scores.
    pub soft_cap: bool,
    /// Supports ALiBi slopes.
    pub alibi: bool,
    /// Supports attention sinks.
    pub sinks: bool,
    /// Can output the log of the sum of exp(score).
    pub lse: bool,
    /// Family of row-invariant variants, if results do not depend on the batch (see the crate docs). Variants of the same
    /// family compute equal bits.
    pub row_invariant: Option<&'static str>,
    /// Rounds the weights of values to the type of the query, as tensor cores require, which adds half an ulp of error.
    pub rounds_weights: bool,
    /// For a cache write: the layer's own kernel, which has the keys and values at hand, writes them too. The function is
    /// for callers without a layer.
    pub fused: bool,
    /// For a product with quantised weights: accepts rows that are already quantised to 8 bits
    /// ([`Rows::Blocks`](crate::Rows::Blocks)), so that the previous operation can quantise them.
    pub takes_blocks: bool,
    /// For a product: accepts an activation, with weights that support it
    /// ([`PackedMatrix::takes_activation`](linear::PackedMatrix::takes_activation)).
    pub activates: bool,
    /// For a product: accepts weights that are codes ([`Tiles`](linear::Tiles)). For another variant, a model on a device that
    /// launches kernels is loaded as numbers.
    pub takes_codes: bool,
    /// For a product: those of experts order their rows first, for which they have memory
    /// ([`ExpertLinearArgs::ordered`](crate::ExpertLinearArgs::ordered)).
    pub orders_experts: bool,
    /// Has passed the conformance tests on the hardware that it is for. `auto` takes an unproven variant only if no proven
    /// one can serve.
    pub proven: bool,
    /// Preference of `auto`: the highest rank among the variants that can serve wins.
    pub rank: u32,
}

impl Capabilities {
    /// Runs on no device and supports nothing.
    pub const NONE: Capabilities = Capabilities {
        devices: &[],
        isa: Isa::Portable,
        compute_capability: (0, 0),
        exact_compute_capability: false,
        shared_bytes: 0,
        dtypes: &[],
        arithmetic: Arithmetic::Exact,
        kv_dtypes: &[],
        layouts: &[],
        latent: Latents::None,
        head_sizes: Sizes::List(&[]),
        block_sizes: Sizes::List(&[]),
        block_bytes_step: 1,
        items_at_once: None,
        max_query_len: usize::MAX,
        decode_rows: 1,
        window: false,
        block_sparse: false,
        soft_cap: false,
        alibi: false,
        sinks: false,
        lse: false,
        row_invariant: None,
        rounds_weights: false,
        fused: false,
        takes_blocks: false,
        activates: false,
        takes_codes: false,
        orders_experts: false,
        proven: true,
        rank: 0,
    };

    /// Runs on every CPU, in float32 with a cache in float32, for all sizes; supports no option. A variant for a CPU starts
    /// from here and states what else it can do.
    pub const CPU: Capabilities = Capabilities {
        devices: &["cpu"],
        dtypes: &[Dtype::F32],
        kv_dtypes: &[KvDtype::Same],
        layouts: &[Layout::Hnd],
        head_sizes: Sizes::ANY,
        block_sizes: Sizes::ANY,
        ..Capabilities::NONE
    };

    /// Whether a backend runs the variant and, on a CPU, has the instruction set.
    pub fn runs_on(&self, device: &str) -> bool {
        self.devices.contains(&device) && self.isa.is_available()
    }

    /// Whether a GPU of that compute capability has the instructions and the shared memory; true for `None`, a device without one.
    pub fn runs_on_gpu(&self, found: Option<(u32, u32)>) -> bool {
        found.is_none_or(|found| self.has_instructions_of(found) && self.shared_bytes <= most_shared_bytes(found))
    }

    /// Whether a GPU of that compute capability has the instructions.
    pub(crate) fn has_instructions_of(&self, found: (u32, u32)) -> bool {
        let needs = self.compute_capability;
        if self.exact_compute_capability { found == needs } else { found >= needs }
    }
}

/// One implementation of one operation.
pub struct Variant {
    /// Name, in the form `device.kind`.
    pub name: &'static str,
    /// Operation.
    pub operation: Operation,
    /// Capabilities.
    pub capabilities: Capabilities,
    /// Function.
    pub kernel: Kernel,
}

impl Variant {
    /// Returns how many items of the list of work this decode kernel computes at once; 0 if contexts are not to be split further for few
    /// sequences, as on a device whose results must not depend on the batch.
    ///
    /// # Errors
    /// The kernel cannot be loaded.
    pub fn items_at_once(
        &self,
        device: &dyn Device,
        format: CacheFormat,
        shape: KvShape,
        num_heads: usize,
    ) -> Result<usize, DeviceError> {
        match self.capabilities.items_at_once {
            Some(of) if !device.features().deterministic => of(device, format, shape, num_heads),
            _ => Ok(0),
        }
    }

    /// Computes attention; for variants of [`Operation::Decode`] and [`Operation::Prefill`].
    ///
    /// # Errors
    /// The variant is for another operation, the arguments do not match each other, or the kernel fails.
    pub fn attention(&self, device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
        let _time = self.time(device, || args.cost());
        let can = &self.capabilities;
        let extras = [
            (args.window.is_some() && !can.window, "a window"),
            (args.sparse.is_some() && !can.block_sparse, "block-sparse attention"),
            (args.soft_cap.is_some() && !can.soft_cap, "a soft cap"),
            (args.alibi_slopes.is_some() && !can.alibi, "ALiBi slopes"),
            (args.sinks.is_some() && !can.sinks, "attention sinks"),
            (args.lse.is_some() && !can.lse, "an lse output"),
        ];
        if let Some((_, found)) = extras.into_iter().find(|extra| extra.0) {
            return Err(self.not_for(found));
        }
        self.expect_takes(args.cache)?;
        match self.kernel {
            Kernel::Attention(run) => run(device, args),
            Kernel::Loaded(kernel) if self.operation.is_attention() => kernel.attention(device, args),
            _ => Err(self.not_for("attention")),
        }
    }

    /// Writes keys and values into their slots; for variants of [`Operation::CacheWrite`].
    ///
    /// # Errors
    /// As for [`Variant::attention`].
    pub fn cache_write(&self, device: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
        let _time = self.time(device, || args.cost());
        self.expect_takes(args.cache)?;
        match self.kernel {
            Kernel::CacheWrite(run) => run(device, args),
            Kernel::Loaded(kernel) if self.operation == Operation::CacheWrite => kernel.cache_write(device, args),
            _ => Err(self.not_for("a cache write")),
        }
    }

    /// Copies blocks; for variants of [`Operation::BlockCopy`].
    ///
    /// # Errors
    /// As for [`Variant::attention`].
    pub fn block_copy(&self, device: &dyn Device, args: BlockCopyArgs<'_>) -> Result<(), KernelError> {
        let _time = self.time(device, || args.cost());
        self.expect_takes(args.cache)?;
        match self.kernel {
            Kernel::BlockCopy(run) => run(device, args),
            Kernel::Loaded(kernel) if self.operation == Operation::BlockCopy => kernel.block_copy(device, args),
            _ => Err(self.not_for("a block copy")),
        }
    }

    /// Computes a matrix product; for variants of [`Operation::Linear`].
    ///
    /// # Errors
    /// As for [`Variant::attention`].
    pub fn linear(&self, device: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
        let _time = self.time(device, || args.cost());
        match self.kernel {
            Kernel::Linear(_) if args.activation.is_some() && !self.capabilities.activates => {
                Err(self.not_for("a matrix product with an activation"))
            }
            Kernel::Linear(run) => run(device, args),
            _ => Err(self.not_for("a matrix product")),
        }
    }

    /// Adds low-rank products to the outputs of a linear layer; for variants of [`Operation::LowRank`].
    ///
    /// # Errors
    /// As for [`Variant::attention`].
    pub fn low_rank(&self, device: &dyn Device, args: LowRankArgs<'_>) -> Result<(), KernelError> {
        let _time = self.time(device, || args.cost());
        match self.kernel {
            Kernel::LowRank(run) => run(device, args),
            _ => Err(self.not_for("a low-rank addition")),
        }
    }

    /// Starts timing a call if the device has a profile.
    fn time<'a>(&self, device: &'a dyn Device, cost: impl FnOnce() -> Cost) -> Option<Running<'a>> {
        profile::start(device, Queue::Compute, self.operation.key(), self.name, cost)
    }

    fn expect_takes(&self, cache: &KvCache) -> Result<(), KernelError> {
        let value_dim = cache.is_latent().then(|| cache.value_dim());
        if let Some(found) = self.capabilities.latent.misfit(cache.shape.head_dim, value_dim) {
            Err(self.not_for(&found))
        } else if !self.capabilities.layouts.contains(&cache.format.layout) {
            Err(self.not_for(&cache.format.to_string()))
        } else {
            Ok(())
        }
    }

    fn not_for(&self, found: &str) -> KernelError {
        KernelError::Unsupported { variant: self.name, found: found.to_string() }
    }
}

inventory::collect!(Variant);

/// Registers a variant of this crate.
macro_rules! register {
    ($name:expr, $operation:ident, $capabilities:expr, $kind:ident($function:expr)) => {
        inventory::submit! { $crate::variant::Variant {
            name: $name,
            operation: $crate::variant::Operation::$operation,
            capabilities: $capabilities,
            kernel: $crate::variant::Kernel::$kind($function),
        } }
    };
}
pub(crate) use register;

//! The requirements of a model, and why a variant does not meet them.

use device::Device;
use linear::Arithmetic;

use crate::format::{CacheFormat, Dtype, KvDtype, Layout};
use crate::variant::{Kernel, Operation, Variant, most_shared_bytes};

/// Requirements of a model and of the user's settings, which every kernel of a set must meet.
///
/// ```
/// use attention_kernels::{KvDtype, Needs};
/// let needs = Needs { head_dim: 128, kv_dtype: KvDtype::Fp8E4m3, ..Needs::default() };
/// assert_eq!((needs.device.as_str(), needs.block_size), ("cpu", 16));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Name of the backend.
    pub device: String,
    /// Compute capability of the GPU; `None` on `cpu` and `cuda-sim`, which have none.
    pub compute_capability: Option<(u32, u32)>,
    /// Type of queries and outputs.
    pub dtype: Dtype,
    /// Narrower type to which operations may round their operands before they multiply, on a CPU that holds them in float32.
    pub arithmetic: Dtype,
    /// Type of the cache.
    pub kv_dtype: KvDtype,
    /// Elements per head.
    pub head_dim: usize,
    /// Elements per head of the other layers, if the model has heads of two sizes.
    pub other_head_dim: Option<usize>,
    /// Elements of a value in a latent cache, whose values are in the keys ([`KvCache::latent`](crate::KvCache::latent)); `None`:
    /// values have a buffer of their own.
    pub latent: Option<usize>,
    /// Tokens per block.
    pub block_size: usize,
    /// Most query rows per sequence that the decode kernel gets.
    pub decode_query_len: usize,
    /// Whether a layer has a sliding window.
    pub window: bool,
    /// Tokens of a sparse block ([`BlockSparse`](crate::BlockSparse)), of which blocks of the cache must be divisors; `None`: no
    /// layer is block-sparse.
    pub block_sparse: Option<usize>,
    /// Whether a layer caps its scores.
    pub soft_cap: bool,
    /// Whether the model has ALiBi slopes.
    pub alibi: bool,
    /// Whether the model has attention sinks.
    pub sinks: bool,
    /// Whether the log of the sum of exp(score) is required.
    pub lse: bool,
    /// Whether a row's bits must depend on the row alone, the same in decode and prefill.
    pub row_invariant: bool,
    /// Whether weights must be multiplied as codes ([`Tiles`](linear::Tiles)), and must not become numbers instead.
    pub codes: bool,
}

impl Default for Needs {
    /// Requirements of a float32 model with heads of 64 elements on a CPU.
    fn default() -> Needs {
        Needs {
            device: "cpu".to_string(),
            compute_capability: None,
            dtype: Dtype::F32,
            arithmetic: Dtype::F32,
            kv_dtype: KvDtype::Same,
            head_dim: 64,
            other_head_dim: None,
            latent: None,
            block_size: 16,
            decode_query_len: 1,
            window: false,
            block_sparse: None,
            soft_cap: false,
            alibi: false,
            sinks: false,
            lse: false,
            row_invariant: false,
            codes: false,
        }
    }
}

impl Needs {
    /// Returns the default requirements on a device.
    pub fn on(device: &dyn Device) -> Needs {
        let (name, compute_capability) = (device.name().to_string(), device.compute_capability());
        Needs { device: name, compute_capability, ..Needs::default() }
    }

    /// Returns the cache format in a layout.
    pub fn format(&self, layout: Layout) -> CacheFormat {
        CacheFormat { dtype: self.dtype, kv_dtype: self.kv_dtype, layout }
    }

    /// Whether the cache can have a layout.
    pub fn suit(&self, layout: Layout) -> bool {
        let dims = [Some(self.head_dim), self.other_head_dim];
        dims.into_iter().flatten().all(|dim| layout.suits(self.kv_dtype, self.block_size, dim, self.latent.is_some()))
    }

    /// Returns how products with weights round and sum if a variant computes them.
    pub fn products_of(&self, linear: &Variant) -> Arithmetic {
        match (linear.capabilities.arithmetic, self.arithmetic) {
            (Arithmetic::Exact, Dtype::Bf16) => Arithmetic::Pairs,
            (own, _) => own,
        }
    }

    /// Returns why a variant cannot serve; `None` if it can.
    pub fn unmet(&self, variant: &Variant) -> Option<String> {
        let can = &variant.capabilities;
        self.misfit(variant)
            .or_else(|| if variant.operation.is_on_caches() { self.unmet_by_cache(variant) } else { None })
            .or_else(|| {
                if !variant.operation.is_attention() {
                    return None;
                }
                let length = if variant.operation == Operation::Decode { self.decode_query_len } else { usize::MAX };
                if length > can.max_query_len {
                    return Some(format!("it takes at most {} query rows of a sequence", can.max_query_len));
                }
                if let Some(sparse) = self.block_sparse.filter(|sparse| !sparse.is_multiple_of(self.block_size)) {
                    return Some(format!(
                        "the model's sparse blocks have {sparse} tokens, --block-size is {}; choose a divisor of {sparse}",
                        self.block_size
                    ));
                }
                let extras = [
                    (self.window && !can.window, "the model has sliding windows"),
                    (self.block_sparse.is_some() && !can.block_sparse, "the model has block-sparse attention"),
                    (self.soft_cap && !can.soft_cap, "the model caps its scores"),
                    (self.alibi && !can.alibi, "the model has ALiBi slopes"),
                    (self.sinks && !can.sinks, "the model has attention sinks"),
                    (self.lse && !can.lse, "it has no lse output"),
                    (self.row_invariant && can.row_invariant.is_none(), "it is not row-invariant"),
                ];
                extras.into_iter().find(|extra| extra.0).map(|extra| extra.1.to_string())
            })
    }

    /// Checks function, device and type.
    fn misfit(&self, variant: &Variant) -> Option<String> {
        let can = &variant.capabilities;
        let fits = match variant.kernel {
            Kernel::Attention(_) => variant.operation.is_attention(),
            Kernel::CacheWrite(_) => variant.operation == Operation::CacheWrite,
            Kernel::BlockCopy(_) => variant.operation == Operation::BlockCopy,
            Kernel::Linear(_) => variant.operation == Operation::Linear,
            Kernel::LowRank(_) => variant.operation == Operation::LowRank,
            Kernel::Loaded(_) => variant.operation.is_on_caches(),
        };
        if !fits {
            Some(format!("its function does not do {}", variant.operation))
        } else if !can.devices.contains(&self.device.as_str()) {
            Some(format!("it runs on {}, the device is {}", can.devices.join(" and "), self.device))
        } else if let Some(missing) = can.isa.missing() {
            Some(missing)
        } else if let Some(found) = self.compute_capability.filter(|found| !can.runs_on_gpu(Some(*found))) {
            let ((a, b), (c, d)) = (can.compute_capability, found);
            let exactly = if can.exact_compute_capability { "exactly " } else { "" };
            if can.has_instructions_of(found) {
                let [needs, has] = [can.shared_bytes, most_shared_bytes(found)].map(|bytes| bytes >> 10);
                Some(format!("it needs {needs} KiB of shared memory for a thread block, this GPU has {has}"))
            } else {
                Some(format!("it needs compute capability {exactly}{a}.{b}, this GPU has {c}.{d}"))
            }
        } else if !can.dtypes.contains(&self.dtype) {
            Some(format!("it computes in {}, the model in {}", list(can.dtypes), self.dtype))
        } else if can.arithmetic.rounds() && self.arithmetic != Dtype::Bf16 {
            Some(format!("it rounds to {}, the model computes in {}", Dtype::Bf16, self.arithmetic))
        } else if self.codes && variant.operation == Operation::Linear && !can.takes_codes {
            Some("it takes no weights in 8 or 4 bits".to_string())
        } else {
            None
        }
    }

    fn unmet_by_cache(&self, variant: &Variant) -> Option<String> {
        let can = &variant.capabilities;
        let dims = [Some(self.head_dim), self.other_head_dim].into_iter().flatten();
        if !can.kv_dtypes.contains(&self.kv_dtype) {
            Some(format!("its cache holds {}, not {}", list(can.kv_dtypes), self.kv_dtype))
        } else if let Some(found) = can.latent.misfit(self.head_dim, self.latent) {
            Some(format!("the model has {found}"))
        } else if let Some(dim) = dims.clone().find(|dim| !can.head_sizes.contain(*dim)) {
            Some(format!("its head sizes are {}, the model's is {dim}", can.head_sizes))
        } else if !can.block_sizes.contain(self.block_size) {
            Some(format!("its block sizes are {}, --block-size is {}", can.block_sizes, self.block_size))
        } else {
            let format = self.format(Layout::default());
            let mut bytes = dims.map(|dim| self.block_size.saturating_mul(format.row_bytes(dim)));
            let step = can.block_bytes_step;
            bytes.find(|bytes| !bytes.is_multiple_of(step)).map(|bytes| {
                format!("it moves {step} bytes at a time, a head's block has {bytes}; make --block-size a multiple of {step}")
            })
        }
    }
}

/// Joins values with commas, for tables and messages.
pub(crate) fn list<T: ToString>(values: &[T]) -> String {
    let values: Vec<String> = values.iter().map(ToString::to_string).collect();
    if values.is_empty() { "nothing".to_string() } else { values.join(",") }
}

//! A point of a grid, and the measurements of a variant there.

use std::collections::BTreeMap;

use device::Device;
use device::sim::Counts;
use linear::Quantization;

use crate::time::Time;
use attention_kernels::Needs;
use attention_kernels::Variant;
use attention_kernels::{CacheFormat, Dtype, KvDtype, Layout};

/// A point of the grid.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Type in which operations compute. A CPU holds queries, activations and outputs in float32, and rounds them to this type
    /// where it multiplies.
    pub dtype: Dtype,
    /// Type of the cache. [`KvDtype::Same`] is `dtype`.
    pub kv_dtype: KvDtype,
    /// Number of query heads.
    pub heads: usize,
    /// Number of KV heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_size: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Number of sequences.
    pub batch: usize,
    /// Context length of each sequence in tokens.
    pub context: usize,
    /// Query rows of each sequence.
    pub query_len: usize,
    /// Outputs of a matrix product.
    pub outputs: usize,
    /// What its weights are quantised to; `None`: they are numbers.
    pub weights: Option<Quantization>,
}

impl Shape {
    /// Returns the requirements that a variant must meet.
    pub(super) fn needs(&self, device: &dyn Device) -> Needs {
        let rounds = device.features().packs_matrices && self.dtype == Dtype::Bf16;
        Needs {
            dtype: if rounds { Dtype::F32 } else { self.dtype },
            arithmetic: if rounds { self.dtype } else { Dtype::F32 },
            kv_dtype: if rounds && self.kv_dtype == KvDtype::Same { KvDtype::Bf16 } else { self.kv_dtype },
            head_dim: self.head_size,
            block_size: self.block_size,
            decode_query_len: self.query_len,
            codes: self.weights.is_some(),
            ..Needs::on(device)
        }
    }

    /// Returns the cache format in the first suitable layout that a variant supports.
    pub(super) fn format(&self, variant: &Variant, device: &dyn Device) -> CacheFormat {
        let needs = self.needs(device);
        let takes = |layout: &Layout| variant.capabilities.layouts.contains(layout);
        needs.format(Layout::ALL.into_iter().filter(takes).find(|layout| needs.suit(*layout)).unwrap_or_default())
    }

    /// Returns k of the benchmarked linear layer: heads times head size.
    pub(super) fn inputs(&self) -> usize {
        self.heads * self.head_size
    }

    /// Returns the number of elements of a row of keys, or of values.
    pub(super) fn kv_width(&self) -> usize {
        self.kv_heads * self.head_size
    }
}

/// Measurements of one variant at one shape.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Time of one call with all its launches. Empty if launches are counted.
    pub time: Time,
    /// The kernels of one call, each with the number of its launches and the sum of their counts. Empty if launches are timed.
    pub kernels: BTreeMap<String, (u64, Counts)>,
    /// Bytes that a call must read and write, each counted once.
    pub bytes: u64,
    /// Number of multiplications and additions of a call.
    pub operations: u64,
    /// Greatest error against float64, in ulps of the shape's type. For operations whose result is exact: 0 if it is
    /// correct, else infinity.
    pub ulps: f64,
}

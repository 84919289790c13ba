//! A point of a grid, and what a variant did with it.

use device::Device;

use super::time::Time;
use crate::format::{CacheFormat, Dtype, KvDtype, Layout};
use crate::needs::Needs;
use crate::variant::Variant;

/// One point of the grid.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Of queries.
    pub dtype: Dtype,
    /// Of the cache.
    pub kv_dtype: KvDtype,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_size: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Sequences.
    pub batch: usize,
    /// Tokens of each.
    pub context: usize,
    /// Query rows of each.
    pub query_len: usize,
}

impl Shape {
    /// What a variant must be able to do.
    pub(super) fn needs(&self, device: &dyn Device) -> Needs {
        Needs {
            dtype: self.dtype,
            kv_dtype: self.kv_dtype,
            head_dim: self.head_size,
            block_size: self.block_size,
            decode_query_len: self.query_len,
            ..Needs::on(device)
        }
    }

    /// The format in the first layout of a variant.
    pub(super) fn format(&self, variant: &Variant) -> CacheFormat {
        let layouts = Layout::ALL.into_iter().find(|layout| variant.capabilities.layouts.contains(layout));
        CacheFormat { dtype: self.dtype, kv_dtype: self.kv_dtype, layout: layouts.unwrap_or_default() }
    }

    /// Elements of a row of keys, or of values.
    pub(super) fn kv_width(&self) -> usize {
        self.kv_heads * self.head_size
    }
}

/// What one variant did with one shape.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Of one call, all its launches.
    pub time: Time,
    /// That a call must read and write, each once.
    pub bytes: u64,
    /// Multiplications and additions of a call.
    pub operations: u64,
    /// Greatest error against float64, in ulps of the output's type; 0 where what is written is exact, infinity where not.
    pub ulps: f64,
}

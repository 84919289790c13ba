//! The least that each operation must move and compute, for profiles. Bytes count once, however often a kernel reads them.

use device::gemm::RowBlock;
use device::profile::Cost;

use crate::args::{AttentionArgs, BlockCopyArgs, CacheWriteArgs, KvCache, LinearArgs, Rows};

impl AttentionArgs<'_> {
    /// Queries and outputs, and the keys and values of each sequence that any of its rows sees; for each visible pair of tokens
    /// and each head a product with the key and one with the value.
    pub fn cost(&self) -> Cost {
        let (batch, shape) = (self.batch, self.cache.shape);
        let (mut rows, mut read, mut pairs) = (0, 0, 0);
        for seq in self.seqs.clone() {
            let first = batch.query_starts[seq] as usize;
            let own = batch.query_starts[seq + 1] as usize - first;
            // Padding has none, and a context is never shorter than its rows.
            let Some(before) = (batch.context_lens[seq] as usize).checked_sub(own) else { continue };
            let seen = |position: usize| self.window.map_or(position + 1, |window| window.min(position + 1));
            rows += own;
            read += if own > 0 { seen(before) + own - 1 } else { 0 };
            pairs += (before..before + own).map(seen).sum::<usize>();
        }
        let width = self.num_heads * shape.head_dim;
        Cost {
            bytes: (2 * rows * width * self.cache.format.dtype.bytes() + read * token_bytes(self.cache)) as u64,
            operations: (4 * pairs * width) as u64,
        }
    }
}

impl CacheWriteArgs<'_> {
    /// Keys and values as they are computed, and as they are kept.
    pub fn cost(&self) -> Cost {
        let (shape, format) = (self.cache.shape, self.cache.format);
        let tokens = self.slot_mapping.iter().filter(|slot| **slot >= 0).count();
        let computed = 2 * shape.num_kv_heads * shape.head_dim * format.dtype.bytes();
        Cost { bytes: (tokens * (computed + token_bytes(self.cache))) as u64, operations: 0 }
    }
}

impl BlockCopyArgs<'_> {
    /// Keys and values of each block, read and written.
    pub fn cost(&self) -> Cost {
        Cost { bytes: (4 * self.copies.len() * self.cache.block_bytes()) as u64, operations: 0 }
    }
}

impl LinearArgs<'_> {
    /// All weights, inputs and outputs; a product for each weight and row.
    pub fn cost(&self) -> Cost {
        let (n, k) = (self.weights.n(), self.weights.k());
        // Packed weights are a CPU's, whose numbers are float32; else inputs have the type of the weights.
        let number = self.weights.numbers().map_or(size_of::<f32>(), |numbers| numbers.len_bytes() / (n * k).max(1));
        let input = match self.x {
            Rows::Numbers(_) => k * number,
            Rows::Blocks(_) => k.div_ceil(RowBlock::LEN) * size_of::<RowBlock>(),
        };
        Cost {
            bytes: (self.weights.bytes() + self.rows * (input + n * self.output.bytes())) as u64,
            operations: (2 * self.rows * n * k) as u64,
        }
    }
}

/// Bytes of one token's keys and values in one layer.
fn token_bytes(cache: &KvCache) -> usize {
    2 * cache.shape.num_kv_heads * cache.format.row_bytes(cache.shape.head_dim)
}

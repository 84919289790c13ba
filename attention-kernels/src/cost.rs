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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::args::{AttentionBatch, KvShape};
    use crate::format::Dtype;

    #[test]
    fn attention_reads_what_its_rows_see_and_a_product_all_weights() {
        let device = device::open("cpu", Some(1)).unwrap();
        let shape = KvShape { num_blocks: 8, num_kv_heads: 1, block_size: 8, head_dim: 16 };
        let cache = KvCache::new(&*device, shape).unwrap();
        let query = device.alloc(1024).unwrap();
        let mut output = device.alloc(1024).unwrap();
        // Two rows at positions 8 and 9, one at position 4, and padding.
        let (query_starts, context_lens) = (vec![0, 2, 3, 4], vec![10, 5, 0]);
        let batch = AttentionBatch { query_starts, context_lens, block_tables: vec![0; 6], max_blocks: 2 };
        let mut cost = |window| {
            let args = AttentionArgs {
                query: &query,
                query_stride: 32,
                num_heads: 2,
                output: &mut output,
                lse: None,
                cache: &cache,
                batch: &batch,
                seqs: 0..3,
                scale: 1.0,
                window,
                soft_cap: None,
                alibi_slopes: None,
                workspace: None,
            };
            args.cost()
        };
        // 3 rows of 2 heads in and out; a token of the cache has 2 * 16 numbers.
        let rows = 3 * 2 * 2 * 16 * 4;
        assert_eq!(cost(None), Cost { bytes: rows + (10 + 5) * 128, operations: 4 * 32 * (9 + 10 + 5) });
        assert_eq!(cost(Some(3)), Cost { bytes: rows + (4 + 3) * 128, operations: 4 * 32 * 9 });

        let weights = device.matrix(4, &[(device::gemm::WeightFormat::F16, &[0; 4 * 16 * 2])]).unwrap();
        let args = LinearArgs {
            x: Rows::Numbers(&query),
            rows: 3,
            weights: &weights,
            bias: None,
            y: &mut output,
            output: Dtype::F32,
        };
        assert_eq!(args.cost().operations, 2 * 3 * 16 * 4);
        assert_eq!(args.cost().bytes, weights.bytes() as u64 + 3 * (4 + 16) * 4);
    }
}

//! Lower bounds on the bytes and operations of each call, for profiles. Bytes count once, however often a kernel reads
//! them.

use device::profile::Cost;
use linear::RowBlock;

use crate::args::{AttentionArgs, BlockCopyArgs, CacheWriteArgs, KvCache, LinearArgs, Rows};
use crate::low_rank::{LowRankArgs, Sizes};
use crate::sparse::BlockSparse;

impl AttentionArgs<'_> {
    /// Returns the bytes of queries, outputs, and the keys and values that some row of a sequence sees, in a block-sparse layer
    /// with some head of the KV head and the operations of two products, with key and value, for
    /// each visible pair of tokens and each head.
    pub fn cost(&self) -> Cost {
        let (batch, shape) = (self.batch, self.cache.shape);
        let (mut rows, mut read, mut pairs) = (0, 0, 0);
        for seq in self.seqs.clone() {
            let own = (batch.query_starts[seq + 1] - batch.query_starts[seq]) as usize;
            // Padding has no context. Other contexts are at least as long as their rows.
            let Some(before) = (batch.context_lens[seq] as usize).checked_sub(own) else { continue };
            rows += own;
            match &self.sparse {
                Some(sparse) => {
                    let (of_seq, seen) = self.sparse_cost(sparse, before, own);
                    (read, pairs) = (read + of_seq, pairs + seen);
                }
                None => {
                    let seen = |position: usize| self.window.map_or(position + 1, |window| window.min(position + 1));
                    read += if own > 0 { (seen(before) + own - 1) * shape.num_kv_heads } else { 0 };
                    pairs += (before..before + own).map(seen).sum::<usize>() * self.num_heads;
                }
            }
        }
        // Elements of one head in a query row and in an output row.
        let width = shape.head_dim + self.cache.value_dim();
        let of_rows = rows * self.num_heads * width * self.cache.format.dtype.bytes();
        Cost { bytes: (of_rows + read * head_bytes(self.cache)) as u64, operations: (2 * pairs * width) as u64 }
    }

    /// Returns the tokens that KV heads read for `rows` rows of a sequence from a position on, each the union of what its heads
    /// see, and the visible pairs of a token and a head's row.
    fn sparse_cost(&self, sparse: &BlockSparse, position: usize, rows: usize) -> (usize, usize) {
        let (kv_heads, end) = (self.cache.shape.num_kv_heads, position + rows);
        let first = |position: usize| self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let group = self.num_heads / kv_heads.max(1);
        let (mut read, mut pairs) = (0, 0);
        for kv_head in (0..kv_heads).filter(|_| rows > 0) {
            let heads = kv_head * group..(kv_head + 1) * group;
            // No later row sees a block before it that the first row does not see.
            let all = sparse.heads(heads.clone(), kv_head);
            read += all.runs(position, first(position)..end).map(|run| run.len()).sum::<usize>();
            for head in heads {
                let pattern = sparse.heads(head..head + 1, kv_head);
                let seen = |at: usize| pattern.runs(at, first(at)..at + 1).map(|run| run.len()).sum::<usize>();
                // Without a window, the rows of a block see the same tokens before it.
                let mut at = position;
                while at < end {
                    let block = if self.window.is_some() { 1 } else { sparse.block_size.max(1) };
                    let alike = (block - at % block).min(end - at);
                    pairs += alike * seen(at) + alike * (alike - 1) / 2;
                    at += alike;
                }
            }
        }
        (read, pairs)
    }
}

impl CacheWriteArgs<'_> {
    /// Returns the bytes of keys and values as they are read and as they are stored.
    pub fn cost(&self) -> Cost {
        let (shape, format) = (self.cache.shape, self.cache.format);
        let tokens = self.slot_mapping.iter().filter(|slot| **slot >= 0).count();
        let computed = self.cache.buffers().count() * shape.num_kv_heads * shape.head_dim * format.dtype.bytes();
        Cost { bytes: (tokens * (computed + token_bytes(self.cache))) as u64, operations: 0 }
    }
}

impl BlockCopyArgs<'_> {
    /// Returns the bytes of keys and values of each block, read and written.
    pub fn cost(&self) -> Cost {
        let copied = self.copies.len() * self.cache.buffers().count() * self.cache.block_bytes();
        Cost { bytes: 2 * copied as u64, operations: 0 }
    }
}

impl LinearArgs<'_> {
    /// Returns the bytes of weights, inputs and outputs, and the operations of one product for each weight and row.
    pub fn cost(&self) -> Cost {
        let (n, k) = (self.weights.n(), self.weights.k());
        let number = self.weights.dtype().bytes();
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

impl LowRankArgs<'_> {
    /// Returns the bytes of the factors of the slots in use, and of inputs and of outputs, read and written, of their rows; and the
    /// operations of one product for each of these factors and rows.
    pub fn cost(&self) -> Cost {
        let Sizes { inputs, outputs, .. } = self.sizes();
        let (mut cost, mut last) = (Cost { bytes: 0, operations: 0 }, None);
        for (slot, rows) in self.rows.by_slot().tasks() {
            let (numbers, bytes) = self.factors_of(slot);
            let rows = if numbers > 0 { self.held(rows) } else { 0 };
            if rows == 0 {
                continue;
            }
            // The tasks of a slot are neighbours.
            let factors = if last.replace(slot) == Some(slot) { 0 } else { numbers * bytes };
            cost.bytes += (factors + rows * (inputs + 2 * outputs) * self.dtype().bytes()) as u64;
            cost.operations += (2 * rows * numbers) as u64;
        }
        cost
    }
}

/// Returns the bytes of one token's keys and values in one layer.
fn token_bytes(cache: &KvCache) -> usize {
    cache.shape.num_kv_heads * head_bytes(cache)
}

/// Returns the bytes of one token's key and value in one head.
fn head_bytes(cache: &KvCache) -> usize {
    cache.buffers().count() * cache.format.row_bytes(cache.shape.head_dim)
}

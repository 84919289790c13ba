//! What kernels are called with. Shapes are checked here, once, so that a kernel may trust them.

use std::ops::Range;

use device::{Buffer, Device, DeviceError, Matrix};

/// Keys are reduced in partitions of this many tokens, counted from the start of the sequence.
pub const PARTITION: usize = 512;

/// A kernel was called with something it can not work on.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The memory is not where the kernel can use it.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A size does not match another.
    #[error("{what}: found {found}, expected {expected}")]
    Shape {
        /// Which operand.
        what: &'static str,
        /// Its size.
        found: usize,
        /// The size that the others ask for.
        expected: usize,
    },
}

/// Shape of one layer's key (or value) cache: `[num_blocks, num_kv_heads, block_size, head_dim]`, float32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl KvShape {
    /// Elements of one block of one layer's keys (or values).
    pub fn block_elements(&self) -> usize {
        self.num_kv_heads * self.block_size * self.head_dim
    }

    /// Offset of head `head` of the token in `slot` (= block × block_size + offset).
    pub fn offset(&self, slot: usize, head: usize) -> usize {
        let (block, at) = (slot / self.block_size, slot % self.block_size);
        ((block * self.num_kv_heads + head) * self.block_size + at) * self.head_dim
    }
}

/// The paged keys and values of one layer.
pub struct KvCache {
    /// Shape of both buffers.
    pub shape: KvShape,
    /// Keys, after the rotary embedding.
    pub keys: Buffer,
    /// Values.
    pub values: Buffer,
}

impl KvCache {
    /// Zeroed caches on `device`.
    pub fn new(device: &dyn Device, shape: KvShape) -> Result<KvCache, DeviceError> {
        let bytes = shape.num_blocks.saturating_mul(shape.block_elements()).saturating_mul(size_of::<f32>());
        Ok(KvCache { shape, keys: device.alloc(bytes)?, values: device.alloc(bytes)? })
    }

    /// Copies a whole block into a block of another cache, as when a sequence is swapped out or in. Both must be memory
    /// that the CPU can reach.
    ///
    /// # Errors
    /// Caches whose blocks are of different shape, and blocks that one of them does not have.
    pub fn copy_block_to(&self, src: usize, other: &mut KvCache, dst: usize) -> Result<(), KernelError> {
        let size = self.shape.block_elements();
        let found = other.shape.block_elements();
        if found != size {
            return Err(KernelError::Shape { what: "elements of a swapped block", found, expected: size });
        }
        for (what, found, blocks) in
            [("block to swap", src, self.shape.num_blocks), ("block to swap to", dst, other.shape.num_blocks)]
        {
            if found >= blocks {
                return Err(KernelError::Shape { what, found, expected: blocks });
            }
        }
        for (from, to) in [(&self.keys, &mut other.keys), (&self.values, &mut other.values)] {
            to.host_mut::<f32>()?[dst * size..][..size].copy_from_slice(&from.host::<f32>()?[src * size..][..size]);
        }
        Ok(())
    }
}

/// Where each sequence's query rows, context and blocks are. The rows of sequence s are
/// `query_starts[s]..query_starts[s + 1]`; they are the *last* tokens of its context.
#[derive(Clone, Debug, Default)]
pub struct AttentionBatch {
    /// `[num_seqs + 1]`, from 0, not decreasing.
    pub query_starts: Vec<u32>,
    /// `[num_seqs]`: tokens in all, the query rows included. 0 marks padding: its output rows are zero.
    pub context_lens: Vec<u32>,
    /// `[num_seqs, max_blocks]`, padded with −1.
    pub block_tables: Vec<i32>,
    /// Width of `block_tables`.
    pub max_blocks: usize,
}

impl AttentionBatch {
    /// Sequences in the batch.
    pub fn num_seqs(&self) -> usize {
        self.context_lens.len()
    }

    /// The block table of a sequence.
    pub fn table(&self, seq: usize) -> &[i32] {
        &self.block_tables[seq * self.max_blocks..][..self.max_blocks]
    }
}

/// Attention of the query rows of some sequences of a batch over their paged context (decode: one row each).
pub struct AttentionArgs<'a> {
    /// Query row t, head h starts at `t * query_stride + h * head_dim`; float32, after the rotary embedding.
    pub query: &'a Buffer,
    /// Elements from one row to the next.
    pub query_stride: usize,
    /// Query heads; head h reads key/value head `h * num_kv_heads / num_heads`.
    pub num_heads: usize,
    /// `[rows, num_heads, head_dim]`; only the rows of `seqs` are written.
    pub output: &'a mut Buffer,
    /// Keys and values, those of the query tokens included.
    pub cache: &'a KvCache,
    /// The whole batch.
    pub batch: &'a AttentionBatch,
    /// The sequences to compute.
    pub seqs: Range<usize>,
    /// Scores are `scale * q·k`.
    pub scale: f32,
    /// `Some(w)`: position i sees only i-w+1..=i.
    pub window: Option<usize>,
    /// `Some(c)`: scores become `c * tanh(score / c)`.
    pub soft_cap: Option<f32>,
    /// `[num_heads]`: `slope * (key position - query position)` is added to the score.
    pub alibi_slopes: Option<&'a [f32]>,
}

impl AttentionArgs<'_> {
    /// The query rows of `seqs`.
    pub fn rows(&self) -> Range<usize> {
        self.batch.query_starts[self.seqs.start] as usize..self.batch.query_starts[self.seqs.end] as usize
    }

    /// Checks every size that a kernel relies on.
    pub fn check(&self) -> Result<(), KernelError> {
        let batch = self.batch;
        let (seqs, shape) = (batch.num_seqs(), self.cache.shape);
        expect("query_starts", batch.query_starts.len(), seqs + 1)?;
        expect("block_tables", batch.block_tables.len(), seqs * batch.max_blocks)?;
        at_least("sequences in the batch", seqs, self.seqs.end)?;
        expect("num_heads modulo num_kv_heads", self.num_heads % shape.num_kv_heads, 0)?;
        let (rows, width) = (self.rows().end, self.num_heads * shape.head_dim);
        if rows > 0 {
            at_least("query elements", self.query.len_bytes() / 4, (rows - 1) * self.query_stride + width)?;
        }
        at_least("output elements", self.output.len_bytes() / 4, rows * width)?;
        let cache_elements = shape.num_blocks * shape.block_elements();
        expect("key cache elements", self.cache.keys.len_bytes() / 4, cache_elements)?;
        expect("value cache elements", self.cache.values.len_bytes() / 4, cache_elements)?;
        if let Some(slopes) = self.alibi_slopes {
            expect("alibi slopes", slopes.len(), self.num_heads)?;
        }
        for seq in self.seqs.clone() {
            let rows = batch.query_starts[seq + 1].wrapping_sub(batch.query_starts[seq]) as usize;
            let context = batch.context_lens[seq] as usize;
            if context == 0 {
                continue;
            }
            at_least("context length", context, rows)?;
            let blocks = context.div_ceil(shape.block_size);
            at_least("blocks in a table", batch.max_blocks, blocks)?;
            // A window's first blocks may have been given back: their entries are holes and are not read.
            let first = self.window.map_or(0, |w| (context - rows + 1).saturating_sub(w)) / shape.block_size;
            for &block in &batch.table(seq)[first..blocks] {
                if block < 0 || block as usize >= shape.num_blocks {
                    return Err(KernelError::Shape {
                        what: "block id",
                        found: block as usize,
                        expected: shape.num_blocks,
                    });
                }
            }
        }
        Ok(())
    }
}

/// New keys and values into their slots.
pub struct CacheWriteArgs<'a> {
    /// Row t of the keys starts at `key_offset + t * stride`, that of the values at `value_offset + t * stride`, each
    /// `[num_kv_heads, head_dim]`: both may be parts of one fused QKV buffer.
    pub source: &'a Buffer,
    /// First element of the keys.
    pub key_offset: usize,
    /// First element of the values.
    pub value_offset: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// One per row: block × block_size + offset, or −1 to skip the row.
    pub slot_mapping: &'a [i64],
    /// Where they go.
    pub cache: &'a mut KvCache,
}

impl CacheWriteArgs<'_> {
    /// Checks every size that a kernel relies on.
    pub fn check(&self) -> Result<(), KernelError> {
        let shape = self.cache.shape;
        let width = shape.num_kv_heads * shape.head_dim;
        if let Some(last) = self.slot_mapping.len().checked_sub(1) {
            let end = self.key_offset.max(self.value_offset) + last * self.stride + width;
            at_least("key and value elements", self.source.len_bytes() / 4, end)?;
        }
        let slots = shape.num_blocks * shape.block_size;
        match self.slot_mapping.iter().find(|&&slot| slot < -1 || slot >= slots as i64) {
            Some(&slot) => Err(KernelError::Shape { what: "slot", found: slot as usize, expected: slots }),
            None => Ok(()),
        }
    }
}

/// Whole blocks copied within one layer's cache, in order.
pub struct BlockCopyArgs<'a> {
    /// `(source, destination)` block ids.
    pub copies: &'a [(u32, u32)],
    /// The cache.
    pub cache: &'a mut KvCache,
}

impl BlockCopyArgs<'_> {
    /// Checks every block id.
    pub fn check(&self) -> Result<(), KernelError> {
        let num_blocks = self.cache.shape.num_blocks;
        match self.copies.iter().flat_map(|&(a, b)| [a, b]).find(|&id| id as usize >= num_blocks) {
            Some(id) => Err(KernelError::Shape { what: "block id", found: id as usize, expected: num_blocks }),
            None => Ok(()),
        }
    }
}

/// `y = x·Wᵀ + bias` for the first `rows` rows of `x`.
pub struct LinearArgs<'a> {
    /// `[rows, k]`, float32.
    pub x: &'a Buffer,
    /// Rows to compute.
    pub rows: usize,
    /// `[n, k]`.
    pub weights: &'a Matrix,
    /// `[n]`.
    pub bias: Option<&'a Buffer>,
    /// `[rows, n]`, overwritten.
    pub y: &'a mut Buffer,
}

fn expect(what: &'static str, found: usize, expected: usize) -> Result<(), KernelError> {
    if found == expected { Ok(()) } else { Err(KernelError::Shape { what, found, expected }) }
}

fn at_least(what: &'static str, found: usize, expected: usize) -> Result<(), KernelError> {
    if found >= expected { Ok(()) } else { Err(KernelError::Shape { what, found, expected }) }
}

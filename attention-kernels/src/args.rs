//! What kernels are called with. Shapes are checked here, once, so that a kernel may trust them.

use std::ops::Range;
use std::sync::Arc;

use device::{Buffer, Device, DeviceError, Matrix};

use crate::batch::AttentionBatch;
use crate::error::{KernelError, at_least, check_copies, check_slots, expect};
use crate::format::{CacheFormat, Dtype, KvDtype, Layout};
use crate::shape::KvShape;
use crate::workspace::Workspace;

/// What a stored element of 8 bits is multiplied with, float32: `[1]`, or `[num_kv_heads]` each.
pub struct KvScales {
    /// Of the keys.
    pub keys: Buffer,
    /// Of the values.
    pub values: Buffer,
    /// One for each KV head.
    pub per_head: bool,
}

/// The paged keys and values of one layer.
pub struct KvCache {
    /// Shape of both buffers.
    pub shape: KvShape,
    /// Types and layout.
    pub format: CacheFormat,
    /// Keys, after the rotary embedding.
    pub keys: Buffer,
    /// Values.
    pub values: Buffer,
    /// Of elements whose type takes some ([`KvDtype::takes_scales`]); `None`: 1. Layers that share pages have their own.
    pub scales: Option<Arc<KvScales>>,
}

impl KvCache {
    /// Zeroed caches on `device` in the default format.
    pub fn new(device: &dyn Device, shape: KvShape) -> Result<KvCache, DeviceError> {
        KvCache::with_format(device, shape, CacheFormat::default())
    }

    /// Zeroed caches on `device`, without scales.
    pub fn with_format(device: &dyn Device, shape: KvShape, format: CacheFormat) -> Result<KvCache, DeviceError> {
        let bytes = shape.num_blocks.saturating_mul(format.block_bytes(&shape));
        Ok(KvCache { shape, format, keys: device.alloc(bytes)?, values: device.alloc(bytes)?, scales: None })
    }

    pub(crate) fn check(&self) -> Result<(), KernelError> {
        let bytes = self.shape.num_blocks * self.format.block_bytes(&self.shape);
        expect("key cache bytes", self.keys.len_bytes(), bytes)?;
        expect("value cache bytes", self.values.len_bytes(), bytes)?;
        if let Some(scales) = &self.scales {
            let count = if scales.per_head { self.shape.num_kv_heads } else { 1 };
            expect("bytes of key scales", scales.keys.len_bytes(), count * size_of::<f32>())?;
            expect("bytes of value scales", scales.values.len_bytes(), count * size_of::<f32>())?;
        }
        Ok(())
    }

    /// Bytes of a block of the keys, and as many of the values.
    pub fn block_bytes(&self) -> usize {
        self.format.block_bytes(&self.shape)
    }
}

impl KvCache {
    /// Fills the slots of a block from `from_slot` on, in all heads, with what is no number, so that reading them is loud: NaN,
    /// scales that are NaN, or, in a type that has neither, −128, which no writer leaves.
    ///
    /// # Errors
    /// A block or slot that does not exist, and those of the device.
    pub fn poison(&mut self, device: &dyn Device, block: usize, from_slot: usize) -> Result<(), KernelError> {
        let (shape, format) = (self.shape, self.format);
        at_least("blocks of the cache", shape.num_blocks, block.saturating_add(1))?;
        at_least("slots of a block", shape.block_size, from_slot)?;
        let fill = if format.kv_dtype == KvDtype::Int8 { 0x80 } else { 0xff };
        let row = shape.head_dim * format.element_bytes();
        let scale = format.row_bytes(shape.head_dim) - row;
        // Stretches of a slot's bytes side by side, each of so many bytes a slot, from the start of the block.
        let heads = shape.num_kv_heads;
        let stretches: Vec<(usize, usize)> = match format.layout {
            Layout::Nhd => vec![(0, heads * row)],
            Layout::Hnd => {
                let head = shape.block_size * (row + scale);
                (0..heads).flat_map(|i| [(i * head, row), (i * head + shape.block_size * row, scale)]).collect()
            }
        };
        for pages in [&mut self.keys, &mut self.values] {
            for (start, bytes) in stretches.iter().filter(|(_, bytes)| *bytes > 0) {
                let at = block * format.block_bytes(&shape) + start + from_slot * bytes;
                device.fill(pages, at, (shape.block_size - from_slot) * bytes, fill)?;
            }
        }
        Ok(())
    }
}

/// Attention of the query rows of some sequences of a batch over their paged context (decode: one row each). Types and
/// layout are those of the cache.
pub struct AttentionArgs<'a> {
    /// Query row t, head h starts at `t * query_stride + h * head_dim`, after the rotary embedding.
    pub query: &'a Buffer,
    /// Elements from one row to the next.
    pub query_stride: usize,
    /// Query heads; head h reads key/value head `h * num_kv_heads / num_heads`.
    pub num_heads: usize,
    /// `[rows, num_heads, head_dim]`; only the rows of `seqs` are written.
    pub output: &'a mut Buffer,
    /// `[rows, num_heads]`, float32: natural log of the sum of exp(score), for those who merge results. −∞ for padding.
    pub lse: Option<&'a mut Buffer>,
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
    /// The batch on the device and room for partial results; the CPU's variants need none.
    pub workspace: Option<&'a Workspace>,
}

impl AttentionArgs<'_> {
    /// The query rows of `seqs`.
    pub fn rows(&self) -> Range<usize> {
        self.batch.query_starts[self.seqs.start] as usize..self.batch.query_starts[self.seqs.end] as usize
    }

    /// Checks every size and every length and block id that a kernel on the host relies on.
    pub fn check(&self) -> Result<(), KernelError> {
        self.check_sizes()?;
        let shape = self.cache.shape;
        self.batch.check_seqs(self.seqs.clone(), (shape.num_blocks, shape.block_size), self.window)
    }

    /// Checks every size, and no length of a sequence.
    pub(crate) fn check_sizes(&self) -> Result<(), KernelError> {
        let (batch, shape, bytes) = (self.batch, self.cache.shape, self.cache.format.dtype.bytes());
        batch.check_sizes()?;
        at_least("sequences in the batch", batch.num_seqs(), self.seqs.end)?;
        at_least("end of the sequences", self.seqs.end, self.seqs.start)?;
        expect("num_heads modulo num_kv_heads", self.num_heads % shape.num_kv_heads, 0)?;
        let (rows, width) = (batch.num_rows(), self.num_heads * shape.head_dim);
        let end = self.rows().end;
        at_least("rows of the batch", rows, end)?;
        if end > 0 {
            at_least("query elements", self.query.len_bytes() / bytes, (end - 1) * self.query_stride + width)?;
        }
        at_least("output elements", self.output.len_bytes() / bytes, end * width)?;
        if let Some(lse) = &self.lse {
            at_least("lse elements", lse.len_bytes() / size_of::<f32>(), end * self.num_heads)?;
        }
        if let Some(slopes) = self.alibi_slopes {
            expect("alibi slopes", slopes.len(), self.num_heads)?;
        }
        at_least("window", self.window.unwrap_or(1), 1)?;
        self.cache.check()
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
    /// One per row: block × block_size + offset, or −1 to skip the row. No slot stands twice.
    pub slot_mapping: &'a [i64],
    /// Where they go.
    pub cache: &'a mut KvCache,
    /// The slots on the device; the CPU's variants need none.
    pub workspace: Option<&'a Workspace>,
}

impl CacheWriteArgs<'_> {
    /// Checks every size and slot that a kernel on the host relies on.
    pub fn check(&self) -> Result<(), KernelError> {
        self.check_sizes()?;
        check_slots(self.slot_mapping, self.cache.shape.num_blocks * self.cache.shape.block_size)
    }

    pub(crate) fn check_sizes(&self) -> Result<(), KernelError> {
        let shape = self.cache.shape;
        if let Some(last) = self.slot_mapping.len().checked_sub(1) {
            let end = self.key_offset.max(self.value_offset) + last * self.stride + shape.num_kv_heads * shape.head_dim;
            at_least("key and value elements", self.source.len_bytes() / self.cache.format.dtype.bytes(), end)?;
        }
        self.cache.check()
    }
}

/// Whole blocks copied within one layer's cache, in order.
pub struct BlockCopyArgs<'a> {
    /// `(source, destination)` block ids.
    pub copies: &'a [(u32, u32)],
    /// The cache.
    pub cache: &'a mut KvCache,
    /// The copies on the device; the CPU's variants need none.
    pub workspace: Option<&'a Workspace>,
}

impl BlockCopyArgs<'_> {
    /// Checks every block id.
    pub fn check(&self) -> Result<(), KernelError> {
        check_copies(self.copies, self.cache.shape.num_blocks)?;
        self.cache.check()
    }
}

/// What a linear layer is applied to.
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    /// `[rows, k]`, of the model's type.
    Numbers(&'a Buffer),
    /// `[rows, ceil(k / 32)]` of [`RowBlock`](device::gemm::RowBlock)s: brought to 8 bits by the operation before, for quantised weights and
    /// variants that take them so ([`Capabilities::takes_blocks`](crate::Capabilities::takes_blocks)).
    Blocks(&'a Buffer),
}

impl<'a> Rows<'a> {
    /// The buffer of numbers, for variants that take nothing else.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] for rows in blocks.
    pub fn numbers(self, variant: &'static str) -> Result<&'a Buffer, KernelError> {
        match self {
            Rows::Numbers(x) => Ok(x),
            Rows::Blocks(_) => Err(KernelError::Unsupported { variant, found: "rows in blocks".to_string() }),
        }
    }
}

/// `y = x·Wᵀ + bias` for the first `rows` rows of `x`.
pub struct LinearArgs<'a> {
    /// The rows, or more.
    pub x: Rows<'a>,
    /// Rows to compute.
    pub rows: usize,
    /// `[n, k]`.
    pub weights: &'a Matrix,
    /// `[n]`, of the output's type.
    pub bias: Option<&'a Buffer>,
    /// `[rows, n]`, overwritten.
    pub y: &'a mut Buffer,
    /// Type of `y`: the model's, or float32.
    pub output: Dtype,
}

//! Arguments of kernels, and the checks of their sizes on which kernels rely.

use std::ops::Range;
use std::sync::Arc;

use device::{Buffer, Device, DeviceError};
use linear::{Activation, Matrix};
use simd::LANES;

use crate::batch::AttentionBatch;
use crate::error::{KernelError, at_least, check_copies, check_slots, expect};
use crate::format::{CacheFormat, Dtype, KvDtype, Layout};
use crate::scratch::LinearScratch;
use crate::shape::KvShape;
use crate::sparse::BlockSparse;
use crate::workspace::Workspace;

/// Factors by which stored elements of 8 bits are multiplied: float32, `[1]` or `[num_kv_heads]`.
pub struct KvScales {
    /// Scales of the keys.
    pub keys: Buffer,
    /// Scales of the values. A latent cache does not read them: its values have the scales of the keys.
    pub values: Buffer,
    /// Whether there is a scale for each KV head.
    pub per_head: bool,
}

impl KvScales {
    /// Returns the scales of keys and of separate values, if the type takes scales.
    pub(crate) fn given(&self, kv_dtype: KvDtype) -> Option<[&Buffer; 2]> {
        kv_dtype.takes_scales().then_some([&self.keys, &self.values])
    }
}

/// Where a cache has its values.
pub enum Values {
    /// In a buffer of their own, like that of the keys.
    Separate(Buffer),
    /// In the keys: the value of a token is the first `dim` elements of its key.
    InKeys {
        /// Elements of a value, at most those of a key.
        dim: usize,
    },
}

impl From<Buffer> for Values {
    fn from(values: Buffer) -> Values {
        Values::Separate(values)
    }
}

/// The paged keys and values of one layer.
///
/// In a *latent* cache ([`KvCache::latent`]) values are a part of the keys, so there is one buffer and one vector per token:
/// multi-head latent attention in its absorbed form ("DeepSeek-V2", DeepSeek-AI, 2024, section 2.1) has one KV head of
/// `kv_lora_rank + qk_rope_head_dim` elements, the first `kv_lora_rank` of which are the value.
pub struct KvCache {
    /// Shape of the keys, and of values with a buffer of their own.
    pub shape: KvShape,
    /// Element types and layout.
    pub format: CacheFormat,
    /// Keys, after the rotary embedding.
    pub keys: Buffer,
    /// Values.
    pub values: Values,
    /// Scales, for types that take them ([`KvDtype::takes_scales`]); `None`: 1. Layers that share pages have separate
    /// scales.
    pub scales: Option<Arc<KvScales>>,
}

impl KvCache {
    /// Allocates a zeroed cache in the default format.
    pub fn new(device: &dyn Device, shape: KvShape) -> Result<KvCache, DeviceError> {
        KvCache::with_format(device, shape, CacheFormat::default())
    }

    /// Allocates a zeroed cache without scales.
    pub fn with_format(device: &dyn Device, shape: KvShape, format: CacheFormat) -> Result<KvCache, DeviceError> {
        let bytes = shape.num_blocks.saturating_mul(format.block_bytes(&shape));
        let (keys, values) = (device.alloc(bytes)?, device.alloc(bytes)?.into());
        Ok(KvCache { shape, format, keys, values, scales: None })
    }

    /// Allocates a zeroed latent cache, whose values are the first `value_dim` elements of its keys.
    ///
    /// ```
    /// use attention_kernels::{CacheFormat, KvCache, KvShape};
    /// let device = device::open("cpu", Some(1))?;
    /// let shape = KvShape { num_blocks: 4, num_kv_heads: 1, block_size: 16, head_dim: 576 };
    /// let cache = KvCache::latent(&*device, shape, CacheFormat::default(), 512)?;
    /// assert_eq!((cache.value_dim(), cache.buffers().count()), (512, 1));
    /// # Ok::<(), attention_kernels::KernelError>(())
    /// ```
    ///
    /// # Errors
    /// `value_dim` is 0 or more than `head_dim`, or the device has not enough memory.
    pub fn latent(
        device: &dyn Device,
        shape: KvShape,
        format: CacheFormat,
        value_dim: usize,
    ) -> Result<KvCache, KernelError> {
        let keys = device.alloc(shape.num_blocks.saturating_mul(format.block_bytes(&shape)))?;
        let cache = KvCache { shape, format, keys, values: Values::InKeys { dim: value_dim }, scales: None };
        cache.check()?;
        Ok(cache)
    }

    pub(crate) fn check(&self) -> Result<(), KernelError> {
        let bytes = self.shape.num_blocks * self.format.block_bytes(&self.shape);
        expect("key cache bytes", self.keys.len_bytes(), bytes)?;
        let KvShape { block_size, head_dim, .. } = self.shape;
        if !self.format.layout.suits(self.format.kv_dtype, block_size, head_dim, self.is_latent()) {
            let found = format!("{} in blocks of {block_size} and heads of {head_dim}", self.format);
            return Err(KernelError::Unsupported { variant: "KvCache", found });
        }
        match &self.values {
            Values::Separate(values) => expect("value cache bytes", values.len_bytes(), bytes)?,
            Values::InKeys { dim } => {
                at_least("elements of a latent value", *dim, 1)?;
                at_least("elements of a latent key", self.shape.head_dim, *dim)?;
            }
        }
        if let Some(scales) = &self.scales {
            let count = if scales.per_head { self.shape.num_kv_heads } else { 1 };
            expect("bytes of key scales", scales.keys.len_bytes(), count * size_of::<f32>())?;
            expect("bytes of value scales", scales.values.len_bytes(), count * size_of::<f32>())?;
        }
        Ok(())
    }

    /// Whether values are in the keys.
    pub fn is_latent(&self) -> bool {
        matches!(self.values, Values::InKeys { .. })
    }

    /// Returns the buffer that values are read from.
    pub fn values(&self) -> &Buffer {
        match &self.values {
            Values::Separate(values) => values,
            Values::InKeys { .. } => &self.keys,
        }
    }

    /// Returns the elements of a value in one head, which are those of an output.
    pub fn value_dim(&self) -> usize {
        match self.values {
            Values::Separate(_) => self.shape.head_dim,
            Values::InKeys { dim } => dim,
        }
    }

    /// Iterates over the buffers: keys, and values if they have their own.
    pub fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        let values = if let Values::Separate(values) = &self.values { Some(values) } else { None };
        std::iter::once(&self.keys).chain(values)
    }

    /// As [`KvCache::buffers`], for writing.
    pub fn buffers_mut(&mut self) -> impl Iterator<Item = &mut Buffer> {
        let values = if let Values::Separate(values) = &mut self.values { Some(values) } else { None };
        std::iter::once(&mut self.keys).chain(values)
    }

    /// Bytes of one block in each of the buffers.
    pub fn block_bytes(&self) -> usize {
        self.format.block_bytes(&self.shape)
    }

    /// Returns the scales of keys and of values, if the type takes scales and has some.
    pub(crate) fn given_scales(&self) -> Option<[&Buffer; 2]> {
        let given = self.scales.as_deref()?.given(self.format.kv_dtype)?;
        Some(if self.is_latent() { [given[0]; 2] } else { given })
    }

    /// Distance between the scales of two KV heads: 1, or 0 where all heads share one scale.
    pub(crate) fn scale_stride(&self) -> u32 {
        u32::from(self.scales.as_ref().is_some_and(|scales| scales.per_head))
    }

    /// Fills the slots of a block from `from_slot` on, in all heads, with values that make a stale read visible: NaN, NaN
    /// scales, or −128 for a type that has neither; no writer stores −128.
    ///
    /// # Errors
    /// The block or slot does not exist, or the device fails.
    pub fn poison(&mut self, device: &dyn Device, block: usize, from_slot: usize) -> Result<(), KernelError> {
        let (shape, format) = (self.shape, self.format);
        at_least("blocks of the cache", shape.num_blocks, block.saturating_add(1))?;
        at_least("slots of a block", shape.block_size, from_slot)?;
        let fill = if format.kv_dtype == KvDtype::Int8 { 0x80 } else { 0xff };
        let row = shape.head_dim * format.element_bytes();
        let scale = format.row_bytes(shape.head_dim) - row;
        // Runs of equal-sized items, one item for each of some slots: start of the run within the block, slots, bytes per item.
        let (heads, size, dim) = (shape.num_kv_heads, shape.block_size, shape.head_dim);
        let head = size * (row + scale);
        let runs = |which: usize| -> Vec<(usize, Range<usize>, usize)> {
            match (format.layout, which) {
                (Layout::Nhd, _) => vec![(0, 0..size, heads * row)],
                (Layout::Hnd, _) => {
                    let of_head = |i| [(i * head, 0..size, row), (i * head + size * row, 0..size, scale)];
                    (0..heads).flat_map(of_head).collect()
                }
                // A line of sixteen pairs.
                (Layout::Pairs, 0) => {
                    let line = |i| (64 * i, i / (dim / 2) * LANES % size..i / (dim / 2) * LANES % size + LANES, 4);
                    (0..heads * head / 64).map(line).collect()
                }
                // A pair.
                (Layout::Pairs, _) => {
                    let pair = |i| (4 * i, i / dim * 2 % size..i / dim * 2 % size + 2, 2);
                    (0..heads * head / 4).map(pair).collect()
                }
            }
        };
        for (which, pages) in self.buffers_mut().enumerate() {
            let is_filled = |(_, slots, bytes): &(usize, Range<usize>, usize)| from_slot < slots.end && *bytes > 0;
            for (start, slots, bytes) in runs(which).into_iter().filter(is_filled) {
                let skipped = from_slot.saturating_sub(slots.start);
                let at = block * format.block_bytes(&shape) + start + skipped * bytes;
                device.fill(pages, at, (slots.len() - skipped) * bytes, fill)?;
            }
        }
        Ok(())
    }
}

/// Attention of the query rows of some sequences of a batch over their paged context; in decode each has few rows
/// ([`Capabilities::decode_rows`](crate::Capabilities::decode_rows)). Types and layout are those of the cache.
pub struct AttentionArgs<'a> {
    /// Query rows, after the rotary embedding. Head h of row t starts at `t * query_stride + h * head_dim`.
    pub query: &'a Buffer,
    /// Elements from one row to the next.
    pub query_stride: usize,
    /// Number of query heads. Head h reads KV head `h * num_kv_heads / num_heads`.
    pub num_heads: usize,
    /// Output `[rows, num_heads, value_dim]` ([`KvCache::value_dim`]); only the rows of `seqs` are written.
    pub output: &'a mut Buffer,
    /// Natural log of the denominator of the softmax, float32 `[rows, num_heads]`, for callers that merge results: of the sum
    /// of exp(score), including exp(sink). So a caller that merges parts of a context passes the sinks with one part only. −∞
    /// for padding.
    pub lse: Option<&'a mut Buffer>,
    /// Keys and values, including those of the query tokens.
    pub cache: &'a KvCache,
    /// All sequences of the batch.
    pub batch: &'a AttentionBatch,
    /// Sequences to compute.
    pub seqs: Range<usize>,
    /// Scores are `scale * q·k`.
    pub scale: f32,
    /// Sliding window: with `Some(w)` position i sees positions i-w+1..=i.
    pub window: Option<usize>,
    /// Blocks that each head sees; `None`: all. A row sees a position if the window and this rule allow it.
    pub sparse: Option<BlockSparse>,
    /// Soft cap: with `Some(c)` a score becomes `c * tanh(score / c)`.
    pub soft_cap: Option<f32>,
    /// ALiBi slopes, float32 `[num_heads]`: `slope * (key position - query position)` is added to the score (Press et al.,
    /// 2021).
    pub alibi_slopes: Option<&'a Buffer>,
    /// Attention sinks, float32 `[num_heads]`: a logit for each head that takes part in the softmax of every row that sees a
    /// token, and has no value. It is neither scaled nor capped (gpt-oss, 2025).
    pub sinks: Option<&'a Buffer>,
    /// The batch on the device, and space for partial results. CPU variants need none.
    pub workspace: Option<&'a Workspace>,
}

impl AttentionArgs<'_> {
    /// Returns the query rows of `seqs`.
    pub fn rows(&self) -> Range<usize> {
        self.batch.query_starts[self.seqs.start] as usize..self.batch.query_starts[self.seqs.end] as usize
    }

    /// Checks everything that a CPU kernel relies on: sizes, lengths and block ids.
    pub fn check(&self) -> Result<(), KernelError> {
        self.check_sizes()?;
        let shape = self.cache.shape;
        self.batch.check_seqs(self.seqs.clone(), (shape.num_blocks, shape.block_size), self.window)
    }

    /// Checks sizes, but not the lengths of sequences.
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
        let out_width = self.num_heads * self.cache.value_dim();
        at_least("output elements", self.output.len_bytes() / bytes, end * out_width)?;
        if let Some(lse) = &self.lse {
            at_least("lse elements", lse.len_bytes() / size_of::<f32>(), end * self.num_heads)?;
        }
        for (what, of_heads) in [("bytes of ALiBi slopes", self.alibi_slopes), ("bytes of sinks", self.sinks)] {
            if let Some(of_heads) = of_heads {
                expect(what, of_heads.len_bytes(), self.num_heads * size_of::<f32>())?;
            }
        }
        at_least("window", self.window.unwrap_or(1), 1)?;
        if let Some(sparse) = &self.sparse {
            sparse.check(shape.block_size)?;
        }
        self.cache.check()
    }
}

/// Write of new keys and values into their slots.
pub struct CacheWriteArgs<'a> {
    /// New keys and values, possibly parts of one fused QKV buffer: row t of the keys starts at `key_offset + t * stride`,
    /// row t of the values at `value_offset + t * stride`, each `[num_kv_heads, head_dim]`.
    pub source: &'a Buffer,
    /// Index of the first element of the keys.
    pub key_offset: usize,
    /// Index of the first element of the values. Ignored for a latent cache, whose values are in the keys.
    pub value_offset: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Slot of each row, block × block_size + offset, or −1 to skip the row. No slot occurs twice.
    pub slot_mapping: &'a [i64],
    /// Cache that is written.
    pub cache: &'a mut KvCache,
    /// The slots on the device. CPU variants need none.
    pub workspace: Option<&'a Workspace>,
}

impl CacheWriteArgs<'_> {
    /// Checks everything that a CPU kernel relies on: sizes and slots.
    pub fn check(&self) -> Result<(), KernelError> {
        self.check_sizes()?;
        check_slots(self.slot_mapping, self.cache.shape.num_blocks * self.cache.shape.block_size)
    }

    pub(crate) fn check_sizes(&self) -> Result<(), KernelError> {
        let shape = self.cache.shape;
        if let Some(last) = self.slot_mapping.len().checked_sub(1) {
            let values = if self.cache.is_latent() { self.key_offset } else { self.value_offset };
            let end = self.key_offset.max(values) + last * self.stride + shape.num_kv_heads * shape.head_dim;
            at_least("key and value elements", self.source.len_bytes() / self.cache.format.dtype.bytes(), end)?;
        }
        self.cache.check()
    }
}

/// Copies of whole blocks within the cache of one layer, in order.
pub struct BlockCopyArgs<'a> {
    /// Pairs of source and destination block ids.
    pub copies: &'a [(u32, u32)],
    /// Cache in which blocks are copied.
    pub cache: &'a mut KvCache,
    /// The copies on the device. CPU variants need none.
    pub workspace: Option<&'a Workspace>,
}

impl BlockCopyArgs<'_> {
    /// Checks sizes and block ids.
    pub fn check(&self) -> Result<(), KernelError> {
        check_copies(self.copies, self.cache.shape.num_blocks)?;
        self.cache.check()
    }
}

/// Input rows of a linear layer.
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    /// Numbers `[rows, k]`, of the model's type.
    Numbers(&'a Buffer),
    /// Rows that the previous operation has quantised to 8 bits: `[rows, ceil(k / 32)]` of
    /// [`RowBlock`](linear::RowBlock). For quantised weights, and for variants that support them
    /// ([`Capabilities::takes_blocks`](crate::Capabilities::takes_blocks)).
    Blocks(&'a Buffer),
}

impl<'a> Rows<'a> {
    /// Returns the buffer of numbers, for variants that support nothing else.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if the rows are in blocks.
    pub fn numbers(self, variant: &'static str) -> Result<&'a Buffer, KernelError> {
        match self {
            Rows::Numbers(x) => Ok(x),
            Rows::Blocks(_) => Err(KernelError::Unsupported { variant, found: "rows in blocks".to_string() }),
        }
    }
}

/// Linear layer: `y = x·Wᵀ + bias` for the first `rows` rows of `x`.
pub struct LinearArgs<'a> {
    /// Input rows, at least `rows`.
    pub x: Rows<'a>,
    /// Number of rows to compute.
    pub rows: usize,
    /// Weights `[n, k]`.
    pub weights: &'a Matrix,
    /// Bias `[n]`, of the output's type.
    pub bias: Option<&'a Buffer>,
    /// Output `[rows, n]`, overwritten; `[rows, n / 2]` with an activation.
    pub y: &'a mut Buffer,
    /// Type of `y`: that of the model, or float32.
    pub output: Dtype,
    /// A function of the first half of the outputs, which then multiplies the other half. Only for variants and weights that support it
    /// ([`Capabilities::activates`](crate::Capabilities::activates)).
    pub activation: Option<Activation>,
    /// Memory that some weights need on a device that launches kernels ([`LinearScratch`]).
    pub scratch: Option<&'a mut LinearScratch>,
}

/// Products of the rows of each expert of a mixture ([`expert_linear`](crate::expert_linear)).
pub struct ExpertLinearArgs<'a> {
    /// Input rows `[assignments / top_k, k]`, of the weights' type.
    pub x: &'a Buffer,
    /// Number of assignments of rows to experts.
    pub assignments: usize,
    /// Assignments per row of `x`; 1: it has a row per assignment.
    pub top_k: usize,
    /// Weights `[experts, n, k]`.
    pub weights: &'a Matrix,
    /// Biases `[experts, n]`, of the weights' type.
    pub bias: Option<&'a Buffer>,
    /// Output `[assignments, n]` of the weights' type, overwritten.
    pub y: &'a mut Buffer,
    /// u32 `[assignments]`: the assignments of expert 0, then those of expert 1, and so on.
    pub order: &'a Buffer,
    /// u32 `[experts + 1]`, ascending: where those of each expert begin in `order`.
    pub starts: &'a Buffer,
    /// Number of experts.
    pub experts: usize,
    /// Memory for the rows of all assignments in the order of experts and of codes ([`ordered_bytes`](crate::ordered_bytes)), for kernels
    /// that multiply many rows of an expert at once; overwritten.
    pub ordered: Option<&'a mut Buffer>,
}

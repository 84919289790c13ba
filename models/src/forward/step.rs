//! The memory of a step: a static plan of its buffers, taken once for the greatest step.
//!
//! ```text
//! bytes   rows × hidden      hidden   the residual stream
//!         rows × hidden      narrow   normed rows, what a half of a layer adds to the stream, normed rows, …
//!         rows × heads       qkv
//!         rows × heads       attended
//!         rows × 2 ffn       gate_up
//!         rows × ffn         activated
//!         rows × wider       blocks   instead of `activated`, where products take rows in 8 bits: 40 bytes for 32 numbers
//!         rows × head_dim    rope     float32
//!         64 × hidden        chosen   rows whose logits are wanted
//!         64 × vocabulary    logits   float32
//! ```
//!
//! Where tokens are drawn on the device, the last two have a row for each sequence of a step, if those are more.

use attention_kernels::{Dtype, KernelSet, WorkspaceLimits};
use device::gemm::{Quantization, RowBlock};
use device::{Buffer, Device, DeviceError};

use super::LOGIT_ROWS;
use crate::ModelConfig;

/// Block copies that go to a kernel at once.
const COPIES: usize = 256;

/// The greatest step, and the pool that its kernels work on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Tokens of all sequences.
    pub max_rows: usize,
    /// Sequences.
    pub max_seqs: usize,
    /// Tokens of the longest sequence.
    pub max_model_len: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Blocks in the pool; no memory depends on it.
    pub num_blocks: usize,
}

impl StepLimits {
    /// Rows whose logits can be had at once on a device that launches kernels.
    pub(super) fn result_rows(&self) -> usize {
        self.max_seqs.min(self.max_rows).max(LOGIT_ROWS)
    }

    /// What the attention kernels of one group of layers work in.
    pub(super) fn workspace(&self, num_heads: usize, head_dim: usize) -> WorkspaceLimits {
        WorkspaceLimits {
            max_seqs: self.max_seqs,
            max_rows: self.max_rows,
            max_blocks: self.max_model_len.div_ceil(self.block_size),
            num_blocks: self.num_blocks,
            block_size: self.block_size,
            num_heads,
            head_dim,
            // Rows that decode: prefill does not split contexts.
            split_rows: self.max_seqs.min(self.max_rows),
            max_copies: COPIES,
        }
    }
}

/// What rows are made of.
#[derive(Clone, Copy)]
pub(super) struct Form {
    /// The model's type.
    pub dtype: Dtype,
    /// What goes into products with quantised weights is brought to 8 bits by the operation before, if that is not attention.
    pub blocks: bool,
}

impl Form {
    pub fn of(kernels: &KernelSet, quantization: Option<Quantization>) -> Form {
        let blocks = quantization.is_some() && kernels.linear.capabilities.takes_blocks;
        Form { dtype: kernels.format.dtype, blocks }
    }

    /// Of a device that launches kernels.
    pub fn launched(dtype: Dtype) -> Form {
        Form { dtype, blocks: false }
    }
}

/// Everything that a step writes. Rows are of the model's type where nothing else is said.
pub(super) struct StepBuffers {
    pub max_rows: usize,
    pub hidden: Buffer,
    pub narrow: Buffer,
    pub qkv: Buffer,
    pub attended: Buffer,
    pub gate_up: Buffer,
    pub activated: Buffer,
    /// Where normed and activated rows go instead of `narrow` and `activated` if the product that they are for takes them in 8
    /// bits.
    pub blocks: Option<Buffer>,
    /// Cosines, then sines, of each row's position.
    pub rope: Buffer,
    pub chosen: Buffer,
    pub logits: Buffer,
}

impl StepBuffers {
    /// Bytes of each buffer, in the order of the fields.
    fn sizes(config: &ModelConfig, form: Form, max_rows: usize, result_rows: usize) -> [usize; 10] {
        let (hidden, ffn, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (bytes, single) = (form.dtype.bytes(), size_of::<f32>());
        let blocks = max_rows * hidden.max(ffn).div_ceil(RowBlock::LEN) * size_of::<RowBlock>();
        let (activated, blocks) = if form.blocks { (0, blocks) } else { (max_rows * ffn * bytes, 0) };
        [
            max_rows * hidden * bytes,
            max_rows * hidden * bytes,
            max_rows * (config.num_heads + 2 * config.num_kv_heads) * dim * bytes,
            max_rows * config.num_heads * dim * bytes,
            max_rows * 2 * ffn * bytes,
            activated,
            blocks,
            max_rows * dim * single,
            result_rows * hidden * bytes,
            result_rows * config.vocab_size * single,
        ]
    }

    /// All of them together.
    pub fn bytes(config: &ModelConfig, form: Form, max_rows: usize, result_rows: usize) -> usize {
        StepBuffers::sizes(config, form, max_rows, result_rows).into_iter().sum()
    }

    pub fn new(
        device: &dyn Device,
        config: &ModelConfig,
        form: Form,
        max_rows: usize,
    ) -> Result<StepBuffers, DeviceError> {
        let mut sizes = StepBuffers::sizes(config, form, max_rows, LOGIT_ROWS).into_iter();
        let mut next = || device.alloc(sizes.next().unwrap_or(0));
        Ok(StepBuffers {
            max_rows,
            hidden: next()?,
            narrow: next()?,
            qkv: next()?,
            attended: next()?,
            gate_up: next()?,
            activated: next()?,
            blocks: Some(next()?).filter(|_| form.blocks),
            rope: next()?,
            chosen: next()?,
            logits: next()?,
        })
    }

    /// Makes room for the results of so many rows at once.
    pub fn reserve_results(
        &mut self,
        device: &dyn Device,
        config: &ModelConfig,
        dtype: Dtype,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let form = Form { dtype, blocks: self.blocks.is_some() };
        let [.., chosen, logits] = StepBuffers::sizes(config, form, self.max_rows, rows);
        // What is replaced goes first, so that never more is held than was planned.
        (self.chosen, self.logits) = (device.alloc(0)?, device.alloc(0)?);
        (self.chosen, self.logits) = (device.alloc(chosen)?, device.alloc(logits)?);
        Ok(())
    }
}

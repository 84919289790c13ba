//! The memory of a step: its buffers, allocated once for the largest step.
//!
//! ```text
//! max_rows × width of each register     widths: [`Program::widths`]
//! max_rows × head_dim, float32          for each rotary table
//! 64 × hidden_size                      hidden states of requested rows
//! 64 × vocab_size, float32              their logits
//! ```
//!
//! If tokens are drawn on the device, the last two have a row for each sequence of a step where that is more than 64. Rows in
//! 8 bits take 40 bytes per 32 numbers.

use attention_kernels::{Dtype, KernelError, WorkspaceLimits};
use device::{Buffer, Device, DeviceError};
use linear::RowBlock;

use super::op::Register;
use super::program::Program;
use crate::decoder::{Decoder, Heads};

/// Greatest number of rows whose logits are copied to the host at once. It bounds the logits buffer, which has as many rows, or
/// one per sequence of a step if logits stay on the device ([`Model::device_logits`](super::Model::device_logits)).
pub const LOGIT_ROWS: usize = 64;

/// Number of rows of a step that the device holds logits of, and draws from, if each of `max_num_seqs` sequences has up to `drafts`
/// drafts: all of them, but no more than there are sequences or [`LOGIT_ROWS`], so that drafts take little memory.
///
/// ```
/// assert_eq!(models::most_drawn_rows(4, 0), 4);
/// assert_eq!(models::most_drawn_rows(4, 3), 16);
/// assert_eq!(models::most_drawn_rows(256, 3), 256);
/// ```
pub fn most_drawn_rows(max_num_seqs: usize, drafts: usize) -> usize {
    max_num_seqs.saturating_mul(1 + drafts).min(max_num_seqs.max(LOGIT_ROWS))
}

/// Enqueues a copy of tokens that are known only on the device into the step's token array
/// ([`Model::forward_with`](super::Model::forward_with)).
pub type Fill<'a> = &'a dyn Fn(&Buffer) -> Result<(), KernelError>;

/// Hidden states that the batch of a predictor reads.
#[derive(Clone, Copy)]
pub struct States<'a> {
    /// `[any, width]` each, in the type of the computation: [`Model::states`](super::Model::states) of the target, copies of them, or one buffer of
    /// [`Model::copy_own`](super::Model::copy_own).
    pub buffers: &'a [Buffer],
    /// For each row of the batch the row of these buffers.
    pub rows: &'a [u32],
    /// They are outputs of the predictor itself.
    pub are_own: bool,
}

/// What a step reads in addition to its batch.
#[derive(Clone, Copy)]
pub(super) struct Extra<'a> {
    pub fill: Option<Fill<'a>>,
    pub states: Option<States<'a>>,
}

const MAX_COPIES: usize = 256;

/// Partial results of split contexts: with 8 KV heads some thirty for each thread block that an H200 runs at once, so that blocks
/// finish at about the same time. Further contexts are not split.
const MAX_PARTIALS: usize = 2048;

/// Size of the largest step, and of the block pool that its kernels work on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Tokens of all sequences of a step.
    pub max_rows: usize,
    /// Sequences of a step.
    pub max_seqs: usize,
    /// Tokens of the longest sequence.
    pub max_model_len: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Blocks in the pool; no buffer depends on it.
    pub num_blocks: usize,
}

impl StepLimits {
    /// Rows whose logits a device that launches kernels can hold at once.
    pub(super) fn result_rows(&self) -> usize {
        self.max_seqs.min(self.max_rows).max(LOGIT_ROWS)
    }

    /// Limits of the workspace of the attention kernels of one group of layers.
    pub(super) fn workspace(&self, heads: Heads) -> WorkspaceLimits {
        WorkspaceLimits {
            // A graph for drafts has a sequence for each of its rows.
            max_seqs: self.result_rows(),
            max_rows: self.max_rows,
            max_blocks: self.max_model_len.div_ceil(self.block_size),
            num_blocks: self.num_blocks,
            block_size: self.block_size,
            num_heads: heads.num_heads,
            head_dim: heads.head_dim,
            max_partials: MAX_PARTIALS + self.max_seqs,
            items_at_once: 0,
            max_copies: MAX_COPIES,
        }
    }
}

pub(super) struct StepSizes {
    registers: [usize; Register::COUNT],
    ropes: Vec<usize>,
    /// Of each state that is kept for a predictor.
    taps: Vec<usize>,
    results: usize,
    logits: usize,
    own_logits: usize,
}

impl StepSizes {
    /// Sizes for steps of at most `max_rows` tokens of this type, and results for at most `result_rows` of them.
    pub fn new(decoder: &Decoder, program: &Program, dtype: Dtype, max_rows: usize, result_rows: usize) -> StepSizes {
        let mut registers = program.widths.map(|width| max_rows * width * dtype.bytes());
        let blocks = program.widths[Register::Q8 as usize].div_ceil(RowBlock::LEN);
        registers[Register::Q8 as usize] = max_rows * blocks * size_of::<RowBlock>();
        let head = decoder.head.linear.as_ref().filter(|head| !head.gathered_outputs.is_empty());
        let own_logits = head.map_or(0, |head| head.rows());
        let tables = program.ropes.iter().map(|rope| max_rows * rope.dims * size_of::<f32>());
        StepSizes {
            registers,
            ropes: tables.collect(),
            taps: vec![max_rows * decoder.hidden_size() * dtype.bytes(); decoder.taps.len()],
            results: result_rows * decoder.output_width() * dtype.bytes(),
            logits: result_rows * decoder.num_logits() * size_of::<f32>(),
            own_logits: result_rows * own_logits * size_of::<f32>(),
        }
    }

    pub fn bytes(&self) -> usize {
        self.registers.iter().chain(&self.ropes).chain(&self.taps).sum::<usize>()
            + self.results
            + self.logits
            + self.own_logits
    }
}

/// Buffers that a step writes. Rows are of the model's type unless stated otherwise.
pub(super) struct StepBuffers {
    pub max_rows: usize,
    pub registers: Registers,
    /// Rotary tables, float32: cosines, then sines, of each row's position.
    pub ropes: Vec<Buffer>,
    /// States that are kept for a predictor.
    pub taps: Vec<Buffer>,
    /// Hidden states of the requested rows.
    pub results: Buffer,
    pub logits: Buffer,
    /// This rank's part of the logits, if those of all ranks are gathered.
    pub own_logits: Buffer,
}

impl StepBuffers {
    pub fn new(device: &dyn Device, sizes: StepSizes, max_rows: usize) -> Result<StepBuffers, DeviceError> {
        let alloc = |size: usize| device.alloc(size);
        Ok(StepBuffers {
            max_rows,
            registers: Registers::new(sizes.registers.into_iter().map(alloc).collect::<Result<_, _>>()?),
            ropes: sizes.ropes.into_iter().map(alloc).collect::<Result<_, _>>()?,
            taps: sizes.taps.into_iter().map(alloc).collect::<Result<_, _>>()?,
            results: alloc(sizes.results)?,
            logits: alloc(sizes.logits)?,
            own_logits: alloc(sizes.own_logits)?,
        })
    }

    pub fn replace_results(&mut self, device: &dyn Device, sizes: &StepSizes) -> Result<(), DeviceError> {
        // Free the old ones first: the plan has no memory for both.
        for buffer in [&mut self.results, &mut self.logits, &mut self.own_logits] {
            *buffer = device.alloc(0)?;
        }
        self.results = device.alloc(sizes.results)?;
        self.logits = device.alloc(sizes.logits)?;
        self.own_logits = device.alloc(sizes.own_logits)?;
        Ok(())
    }
}

/// The registers of a program: a buffer each, and the names that they currently have.
pub(super) struct Registers {
    buffers: Vec<Buffer>,
    /// Index of the buffer that each register currently is.
    names: [usize; Register::COUNT],
}

impl Registers {
    /// Registers with these buffers, in the order of [`Register`].
    pub fn new(buffers: Vec<Buffer>) -> Registers {
        Registers { buffers, names: std::array::from_fn(|register| register) }
    }

    pub fn get(&self, register: Register) -> &Buffer {
        &self.buffers[self.names[register as usize]]
    }

    pub fn get_mut(&mut self, register: Register) -> &mut Buffer {
        &mut self.buffers[self.names[register as usize]]
    }

    /// The buffers of several distinct registers.
    pub fn several<const N: usize>(&mut self, registers: [Register; N]) -> Result<[&mut Buffer; N], KernelError> {
        let places = registers.map(|register| self.names[register as usize]);
        self.buffers.get_disjoint_mut(places).map_err(|_| KernelError::Shape {
            what: "different registers of an operation",
            found: N - 1,
            expected: N,
        })
    }

    /// Swaps the buffers of two registers until the next step.
    pub fn swap(&mut self, a: Register, b: Register) {
        self.names.swap(a as usize, b as usize);
    }

    #[cfg(test)]
    pub fn bytes(&self) -> Vec<usize> {
        self.buffers.iter().map(Buffer::len_bytes).collect()
    }

    /// Gives every register its original buffer: captured graphs hold their addresses.
    pub fn reset_names(&mut self) {
        self.names = std::array::from_fn(|register| register);
    }
}

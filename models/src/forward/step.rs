//! The memory of a step: a static plan of its buffers, taken once for the greatest step.
//!
//! ```text
//! max_rows × width of each register     the program says how wide they are ([`Program::widths`])
//! max_rows × head_dim, float32          for each rotary table
//! 64 × hidden_size                      rows whose results are wanted
//! 64 × vocab_size, float32              logits
//! ```
//!
//! Where tokens are drawn on the device, the last two have a row for each sequence of a step, if those are more. Rows in 8 bits
//! take 40 bytes for 32 numbers.

use attention_kernels::{Dtype, KernelError, WorkspaceLimits};
use device::gemm::RowBlock;
use device::{Buffer, Device, DeviceError};

use super::program::{Program, Register};
use crate::decoder::{Decoder, Heads};

/// Rows whose logits the host gets at once; bounds the logits buffer at this many times the vocabulary, or at as many as there
/// are sequences in a step where they stay on the device ([`Model::device_logits`](super::Model::device_logits)).
pub const LOGIT_ROWS: usize = 64;

/// Orders the way of tokens that the device alone knows into the array of a step's tokens ([`Model::forward_with`](super::Model::forward_with)).
pub type Fill<'a> = &'a dyn Fn(&Buffer) -> Result<(), KernelError>;

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
    pub(super) fn workspace(&self, heads: Heads) -> WorkspaceLimits {
        WorkspaceLimits {
            max_seqs: self.max_seqs,
            max_rows: self.max_rows,
            max_blocks: self.max_model_len.div_ceil(self.block_size),
            num_blocks: self.num_blocks,
            block_size: self.block_size,
            num_heads: heads.num_heads,
            head_dim: heads.head_dim,
            // Rows that decode: prefill does not split contexts.
            split_rows: self.max_seqs.min(self.max_rows),
            max_copies: COPIES,
        }
    }
}

/// Bytes of each buffer of a step.
pub(super) struct StepSizes {
    registers: [usize; Register::COUNT],
    ropes: Vec<usize>,
    chosen: usize,
    logits: usize,
}

impl StepSizes {
    /// Sizes for steps of at most `max_rows` tokens and results of at most `result_rows` of them; rows have that type.
    pub fn new(decoder: &Decoder, program: &Program, dtype: Dtype, max_rows: usize, result_rows: usize) -> StepSizes {
        let mut registers = program.widths.map(|width| max_rows * width * dtype.bytes());
        let blocks = program.widths[Register::Blocks as usize].div_ceil(RowBlock::LEN);
        registers[Register::Blocks as usize] = max_rows * blocks * size_of::<RowBlock>();
        let table = max_rows * decoder.heads().head_dim * size_of::<f32>();
        StepSizes {
            registers,
            ropes: vec![table; program.ropes.len()],
            chosen: result_rows * decoder.hidden_size() * dtype.bytes(),
            logits: result_rows * decoder.vocab_size() * size_of::<f32>(),
        }
    }

    /// All of them together.
    pub fn bytes(&self) -> usize {
        self.registers.iter().chain(&self.ropes).sum::<usize>() + self.chosen + self.logits
    }
}

/// Everything that a step writes. Rows are of the model's type where nothing else is said.
pub(super) struct StepBuffers {
    pub max_rows: usize,
    pub registers: [Buffer; Register::COUNT],
    /// Which buffer each register is, as long as the step runs.
    names: [usize; Register::COUNT],
    /// Cosines, then sines, of each row's position, for each rotary embedding.
    pub ropes: Vec<Buffer>,
    pub chosen: Buffer,
    pub logits: Buffer,
}

impl StepBuffers {
    pub fn new(device: &dyn Device, sizes: StepSizes, max_rows: usize) -> Result<StepBuffers, DeviceError> {
        let alloc = |size: usize| device.alloc(size);
        let [a, b, c, d, e, f, g] = sizes.registers;
        Ok(StepBuffers {
            max_rows,
            registers: [alloc(a)?, alloc(b)?, alloc(c)?, alloc(d)?, alloc(e)?, alloc(f)?, alloc(g)?],
            names: std::array::from_fn(|register| register),
            ropes: sizes.ropes.into_iter().map(alloc).collect::<Result<_, _>>()?,
            chosen: alloc(sizes.chosen)?,
            logits: alloc(sizes.logits)?,
        })
    }

    /// Makes room for other results.
    pub fn replace_results(&mut self, device: &dyn Device, sizes: &StepSizes) -> Result<(), DeviceError> {
        // What is replaced goes first, so that never more is held than was planned.
        (self.chosen, self.logits) = (device.alloc(0)?, device.alloc(0)?);
        (self.chosen, self.logits) = (device.alloc(sizes.chosen)?, device.alloc(sizes.logits)?);
        Ok(())
    }

    /// Which of the buffers a register is.
    pub fn buffer_of(&self, register: Register) -> usize {
        self.names[register as usize]
    }

    /// The buffer of a register, to be written.
    pub fn register_mut(&mut self, register: Register) -> &mut Buffer {
        &mut self.registers[self.buffer_of(register)]
    }

    /// Several registers, of which no two are the same.
    pub fn several<const N: usize>(&mut self, registers: [Register; N]) -> Result<[&mut Buffer; N], KernelError> {
        let places = registers.map(|register| self.buffer_of(register));
        self.registers.get_disjoint_mut(places).map_err(|_| KernelError::Shape {
            what: "different registers of an operation",
            found: N - 1,
            expected: N,
        })
    }

    /// Two registers change names until the next step.
    pub fn swap(&mut self, a: Register, b: Register) {
        self.names.swap(a as usize, b as usize);
    }

    /// Gives every register the buffer that it had at the start: graphs know them by their addresses.
    pub fn reset_names(&mut self) {
        self.names = std::array::from_fn(|register| register);
    }
}

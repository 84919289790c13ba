//! Runs of operations on blocks of rows, each by one thread of a CPU.
//!
//! Between two attentions most operations compute a row from that row alone. In a step of many rows a thread therefore computes all
//! operations of such a run for some rows, then for the next: the rows stay in its cache from one operation to the next, and threads
//! do not wait for each other until the run ends.
//!
//! ```text
//! all threads, operation by operation        each thread, block by block
//!   norm    rows 0..512                        norm, gate_up, silu, down, …    rows 0..128     thread 0
//!   gate_up rows 0..512                        norm, gate_up, silu, down, …    rows 256..384   thread 1
//!   silu    rows 0..512                        …
//! ```
//!
//! **Registers.** Those that a run reads from before it, or that are read after it, are cut into the rows of the blocks. The others
//! hold a row only until the run ends: each thread takes a part of them as large as a block, for all of its blocks.
//!
//! The weights are read once for each block and not once for the step, so blocks must be long enough.

use std::sync::{Mutex, PoisonError};

use attention_kernels::KernelError;
use device::{Device, DeviceError};
use simd::lock;

use super::op::{Op, Register};
use super::program::Program;
use super::row_ops::RowOps;
use super::step::Registers;

/// Most rows of a block.
const MOST_ROWS: usize = 128;
/// Fewest rows of each thread that are worth blocks.
const LEAST_ROWS: usize = 64;
/// Blocks are a multiple of this: rows of a pair of tiles. It also aligns their rows to cache lines.
const STEP: usize = 32;

/// The runs of a program, and the memory of their blocks.
pub(super) struct Blocks {
    runs: Vec<Run>,
    blocks: Vec<Block>,
    /// Registers of threads that compute several blocks.
    spare: Mutex<Vec<Block>>,
}

/// Adjacent operations on rows.
struct Run {
    /// Index of the first.
    first: usize,
    /// Their number.
    len: usize,
    /// Registers that are used before or after the run, with the bytes of a row.
    outer: Vec<(Register, usize)>,
    /// The other registers, likewise.
    inner: Vec<(Register, usize)>,
}

/// Rows of a step.
struct Block {
    index: usize,
    rows: usize,
    registers: Registers,
    outcome: Result<(), KernelError>,
}

impl Block {
    fn new(device: &dyn Device, index: usize) -> Result<Block, DeviceError> {
        let empty = (0..Register::COUNT).map(|_| device.alloc(0)).collect::<Result<_, _>>()?;
        Ok(Block { index, rows: 0, registers: Registers::new(empty), outcome: Ok(()) })
    }
}

/// What a run lends to its blocks; gives it back when it is dropped.
struct Lent<'a> {
    run: &'a Run,
    registers: &'a mut Registers,
    blocks: &'a mut [Block],
    spare: &'a Mutex<Vec<Block>>,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let mut spare = lock(self.spare);
        spare.sort_unstable_by_key(|block| block.index);
        for (register, _) in &self.run.outer {
            give_back(self.registers, *register, self.blocks);
        }
        for (register, _) in &self.run.inner {
            give_back(self.registers, *register, &mut spare);
            give_back(self.registers, *register, self.blocks);
        }
    }
}

/// Cuts a register into the rows of blocks, in their order.
fn lend(
    registers: &mut Registers,
    (register, bytes): (Register, usize),
    rows: usize,
    blocks: &mut [Block],
) -> Result<(), DeviceError> {
    let from = registers.get_mut(register);
    for block in blocks.iter_mut().rev() {
        *block.registers.get_mut(register) = from.split_off(block.index * rows * bytes)?;
    }
    Ok(())
}

fn give_back(registers: &mut Registers, register: Register, blocks: &mut [Block]) {
    let to = registers.get_mut(register);
    for block in blocks {
        // Blocks that were lent nothing have an empty buffer, which belongs to another place.
        if let Ok(rows) = block.registers.get_mut(register).split_off(0)
            && rows.len_bytes() > 0
        {
            let _ = to.join(rows);
        }
    }
}

impl Blocks {
    /// Finds the runs of a program on a CPU.
    pub fn new(program: &Program, row_ops: &RowOps<'_>) -> Blocks {
        let (ops, mut runs, mut first) = (&program.ops[..], Vec::new(), 0);
        while first < ops.len() {
            let mut widths: Vec<(Register, usize)> = Vec::new();
            let fits = |widths: &[(Register, usize)], of_op: &[(Register, usize)]| {
                let differs = |(register, bytes)| widths.iter().any(|it| it.0 == register && it.1 != bytes);
                !of_op.is_empty() && !of_op.iter().copied().any(differs)
            };
            let mut end = first;
            while let Some(of_op) = ops.get(end).map(|op| row_ops.widths(op)).filter(|of_op| fits(&widths, of_op)) {
                of_op.into_iter().for_each(|it| {
                    if !widths.contains(&it) {
                        widths.push(it)
                    }
                });
                end += 1;
            }
            let is_outer = |&(register, _): &(Register, usize)| {
                let touches = |op: &&Op| op.reads(register) || op.overwrites(register);
                let read_first = ops[first..end].iter().find(touches).is_none_or(|op| op.reads(register));
                // Logits are computed from what `Branch` holds at the end.
                let read_later =
                    ops[end..].iter().find(touches).map_or(register == Register::Branch, |op| op.reads(register));
                read_first || read_later
            };
            let (outer, inner) = widths.into_iter().partition(is_outer);
            if end > first + 1 {
                runs.push(Run { first, len: end - first, outer, inner });
            }
            first = end.max(first + 1);
        }
        Blocks { runs, blocks: Vec::new(), spare: Mutex::default() }
    }

    /// Runs the operations from `first` on, if that is a run and there are enough rows. Returns their number, or 0.
    pub fn run(
        &mut self,
        program: &Program,
        first: usize,
        (registers, rows): (&mut Registers, usize),
        row_ops: &RowOps<'_>,
    ) -> Result<usize, KernelError> {
        let (pool, device) = (row_ops.device.pool(), row_ops.device);
        let threads = pool.threads();
        let Ok(run) = self.runs.binary_search_by_key(&first, |run| run.first) else { return Ok(0) };
        let per_thread = rows.div_ceil(threads * MOST_ROWS);
        let size = rows.div_ceil(threads * per_thread).next_multiple_of(STEP);
        let count = rows.div_ceil(size);
        if rows < threads * LEAST_ROWS || count < 2 {
            return Ok(0);
        }
        let run = &self.runs[run];
        while self.blocks.len() < count {
            self.blocks.push(Block::new(device, self.blocks.len())?);
        }
        // Threads that compute one block each use its own rows of all registers.
        let spare = if per_thread > 1 { threads } else { 0 };
        let of_threads = self.spare.get_mut().unwrap_or_else(PoisonError::into_inner);
        while of_threads.len() < spare {
            of_threads.push(Block::new(device, of_threads.len())?);
        }
        let lent = Lent { run, registers, blocks: &mut self.blocks[..count], spare: &self.spare };
        for outer in &run.outer {
            lend(lent.registers, *outer, size, lent.blocks)?;
        }
        for inner in &run.inner {
            match spare {
                0 => lend(lent.registers, *inner, size, lent.blocks)?,
                _ => lend(lent.registers, *inner, size, &mut lock(lent.spare)[..spare])?,
            }
        }
        pool.chunks_mut(lent.blocks, 1, usize::MAX, |index, blocks| {
            for block in blocks {
                block.rows = size.min(rows - index * size);
                let mut own = if spare > 0 { lock(lent.spare).pop() } else { None };
                let mut exchange = |block: &mut Block| {
                    let Some(own) = &mut own else { return };
                    for (register, _) in &run.inner {
                        std::mem::swap(block.registers.get_mut(*register), own.registers.get_mut(*register));
                    }
                };
                exchange(block);
                let ops = &program.ops[run.first..][..run.len];
                let of_step = index * size..index * size + block.rows;
                let run = |op| row_ops.run(op, &mut block.registers, of_step.clone(), None);
                block.outcome = ops.iter().try_for_each(run);
                exchange(block);
                lock(lent.spare).extend(own);
            }
        });
        let outcome = lent.blocks.iter_mut().try_for_each(|block| std::mem::replace(&mut block.outcome, Ok(())));
        outcome.map(|()| run.len)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use attention_kernels::{Dtype, KernelChoice, Needs, select};
    use device::Device;
    use linear::Quantization;

    use crate::decoder::Form;
    use crate::forward::{ForwardBatch, StepLimits};
    use crate::{Model, ModelConfig, ModelFiles, Weights};

    const LIMITS: StepLimits =
        StepLimits { max_rows: 400, max_seqs: 2, max_model_len: 400, block_size: 16, num_blocks: 50 };

    /// Bits of the logits of some rows of a step with two prompts, and the bytes of each register afterwards. `in_blocks`: whether a run
    /// may be computed in blocks.
    fn logits(
        case: &str,
        threads: usize,
        (form, arithmetic): (Form, Dtype),
        rows: usize,
        in_blocks: bool,
    ) -> (Vec<u32>, Vec<usize>) {
        let device: Arc<dyn Device> = device::open("cpu", Some(threads)).unwrap();
        let folder = format!("{}/tests/reference/{case}", env!("CARGO_MANIFEST_DIR"));
        let files = ModelFiles::open(folder.as_ref()).unwrap();
        let decoder = ModelConfig::load(&files).unwrap().decoder.in_form(form);
        let needs = Needs { dtype: Dtype::F32, arithmetic, ..Model::needs(&decoder, &*device) };
        let tiles = KernelChoice { linear: "cpu.portable_tiles".to_string(), ..KernelChoice::default() };
        let choice = if arithmetic == Dtype::F32 { KernelChoice::default() } else { tiles };
        let kernels = select(&choice, &needs).unwrap();
        let weights = Weights::open(&files).unwrap();
        let mut model =
            Model::load(&decoder, &weights, device.clone(), kernels, LIMITS.max_rows, &|_, _| Ok(())).unwrap();
        let (_, blocks) = (model.reserve(&LIMITS), model.blocks.as_mut().unwrap());
        assert!(!blocks.runs.is_empty(), "{case} has no run");
        if !in_blocks {
            model.blocks = None;
        }
        let mut caches = model.new_cache(LIMITS.num_blocks, LIMITS.block_size).unwrap();
        let mut batch = ForwardBatch::default();
        batch.clear(model.layout().groups.len());
        let first = rows / 3;
        let mut needed = Vec::new();
        for (sequence, len) in [first, rows - first].into_iter().enumerate() {
            let table: Vec<i32> = (0..25).map(|block| block * 2 + sequence as i32).collect();
            let slots: Vec<i64> = (0..len).map(|at| i64::from(table[at / 16]) * 16 + at as i64 % 16).collect();
            let tokens: Vec<u32> = (0..len as u32).map(|at| 3 + (at * 7 + sequence as u32) % 90).collect();
            let groups: Vec<_> = batch.groups.iter().map(|_| (&slots[..], &table[..])).collect();
            needed.push(batch.push(0, &tokens, groups));
        }
        model.forward(&batch, &mut caches).unwrap();
        let of_blocks = model.blocks.as_ref().map_or(0, |blocks| blocks.blocks.len());
        assert_eq!(of_blocks > 0, in_blocks, "{case}: {of_blocks} blocks");
        let found = model.logits(&needed).unwrap().iter().map(|logit| logit.to_bits()).collect();
        (found, model.step.registers.bytes())
    }

    #[test]
    fn a_step_in_blocks_of_rows_has_the_bits_of_one_without() {
        let (dense, q8) = ((Form::Dense, Dtype::F32), (Form::Quantized(Quantization::Q8), Dtype::F32));
        for (case, threads, form, rows) in [
            ("qwen3", 2, dense, 133),
            ("qwen3", 1, q8, 300),
            ("qwen3", 3, q8, 400),
            ("gemma2", 2, dense, 300),
            ("gpt-neox", 2, dense, 256),
            ("qwen3-moe", 2, dense, 200),
            ("qwen3", 2, (Form::Dense, Dtype::Bf16), 133),
        ] {
            let [(found, bytes), (expected, own)] =
                [true, false].map(|in_blocks| logits(case, threads, form, rows, in_blocks));
            assert!(found == expected, "{case}, {threads} threads, {form:?}, {rows} rows");
            assert_eq!(bytes, own, "{case}: registers are whole again");
        }
    }
}

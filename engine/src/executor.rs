//! A plan becomes memory operations and one forward pass. It decides nothing.

use std::collections::HashMap;
use std::sync::Arc;

use attention_kernels::{BlockCopyArgs, KernelError, KernelSet, KvCache};
use device::Device;
use kvblock::BlockId;
use models::{ForwardBatch, Model};
use sched::{MemOp, SeqId, StepPlan};

/// The model, its paged cache, and the block tables as the plans have described them.
pub(crate) struct Executor {
    device: Arc<dyn Device>,
    kernels: KernelSet,
    model: Model,
    /// One per layer.
    caches: Vec<KvCache>,
    tables: HashMap<SeqId, Vec<BlockId>>,
    batch: ForwardBatch,
    /// Spans in the order of the batch.
    order: Vec<usize>,
    /// Last row of each span, in the order of the plan.
    last_rows: Vec<u32>,
    copies: Vec<(u32, u32)>,
}

impl Executor {
    pub fn new(device: Arc<dyn Device>, kernels: KernelSet, model: Model, caches: Vec<KvCache>) -> Executor {
        Executor {
            device,
            kernels,
            model,
            caches,
            tables: HashMap::new(),
            batch: ForwardBatch::default(),
            order: Vec::new(),
            last_rows: Vec::new(),
            copies: Vec::new(),
        }
    }

    pub fn vocab_size(&self) -> usize {
        self.model.config().vocab_size
    }

    /// Runs the step. Hidden states stay on the device for [`Executor::logits`].
    pub fn run(&mut self, plan: &StepPlan) -> Result<(), KernelError> {
        for seq in &plan.released {
            self.tables.remove(seq);
        }
        self.memory(&plan.memory)?;
        for span in &plan.spans {
            let table = self.tables.entry(span.seq).or_default();
            table.truncate(span.table.keep);
            table.extend_from_slice(&span.table.append);
        }
        let max_blocks = plan.spans.iter().map(|span| self.tables[&span.seq].len()).max().unwrap_or(0);
        self.batch.clear(max_blocks);
        // Single tokens first: they form one call of the decode kernel.
        self.order.clear();
        self.order.extend(0..plan.spans.len());
        self.order.sort_by_key(|&i| plan.spans[i].tokens.len() > 1);
        self.last_rows.clear();
        self.last_rows.resize(plan.spans.len(), 0);
        for &i in &self.order {
            let span = &plan.spans[i];
            let table = self.tables[&span.seq].iter().map(|block| block.0);
            self.last_rows[i] = self.batch.push(span.start, &span.tokens, &span.slots, table);
        }
        let Executor { device, model, batch, caches, .. } = self;
        device.pool().enter(|| model.forward(batch, caches))
    }

    /// Row of the last token of span `span` of the plan that ran last.
    pub fn last_row(&self, span: usize) -> u32 {
        self.last_rows[span]
    }

    /// Logits of rows of the last step; at most [`models::LOGIT_ROWS`].
    pub fn logits(&mut self, rows: &[u32]) -> Result<&[f32], KernelError> {
        let Executor { device, model, .. } = self;
        device.pool().enter(|| model.logits(rows))
    }

    /// Applies memory operations in order; neighbouring copies go to the kernel together.
    fn memory(&mut self, ops: &[MemOp]) -> Result<(), KernelError> {
        for run in ops.chunk_by(|a, b| matches!((a, b), (MemOp::Copy { .. }, MemOp::Copy { .. }))) {
            self.copies.clear();
            for op in run {
                match *op {
                    MemOp::Copy { src, dst } => self.copies.push((src.0, dst.0)),
                    MemOp::Poison { block, from_slot } => self.poison(block, from_slot)?,
                }
            }
            if !self.copies.is_empty() {
                for cache in &mut self.caches {
                    self.kernels
                        .block_copy(&*self.device, BlockCopyArgs { copies: &self.copies, cache, workspace: None })?;
                }
            }
        }
        Ok(())
    }

    /// Fills what must not be read again with NaN, in every layer (debug builds order this).
    fn poison(&mut self, block: BlockId, from_slot: usize) -> Result<(), KernelError> {
        for cache in &mut self.caches {
            let shape = cache.shape;
            for head in 0..shape.num_kv_heads {
                let start = shape.offset(block.0 as usize * shape.block_size + from_slot, head);
                let end = start + (shape.block_size - from_slot) * shape.head_dim;
                cache.keys.host_mut::<f32>()?[start..end].fill(f32::NAN);
                cache.values.host_mut::<f32>()?[start..end].fill(f32::NAN);
            }
        }
        Ok(())
    }
}

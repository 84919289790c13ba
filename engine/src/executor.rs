//! A plan becomes memory operations and one forward pass. It decides nothing.

use std::collections::HashMap;
use std::sync::Arc;

use attention_kernels::{KernelError, KvCache, SwapSpace};
use device::profile::{Phase, Step};
use device::{Device, Profile, Queue};
use models::{ForwardBatch, Model};
use sched::{BlockId, MemOp, SeqId, Span, StepPlan};

/// The model, its paged cache, and the block tables as the plans have described them.
pub(crate) struct Executor {
    device: Arc<dyn Device>,
    model: Model,
    /// One for each place in a page.
    caches: Vec<KvCache>,
    /// For requests that are swapped out.
    swap_space: SwapSpace,
    /// One table per group of layers; −1 behind a window.
    tables: HashMap<SeqId, Vec<Vec<i32>>>,
    batch: ForwardBatch,
    /// Spans in the order of the batch.
    order: Vec<usize>,
    /// Last row of each span, in the order of the plan.
    last_rows: Vec<u32>,
    /// Source and target blocks of neighbouring operations of one kind.
    pairs: Vec<(u32, u32)>,
    /// Of the tests: so many more memory operations succeed; `None`: all.
    #[cfg(test)]
    pub fault_after: Option<usize>,
}

impl Executor {
    pub fn new(device: Arc<dyn Device>, model: Model, caches: Vec<KvCache>, swap_space: SwapSpace) -> Executor {
        Executor {
            device,
            model,
            caches,
            swap_space,
            tables: HashMap::new(),
            batch: ForwardBatch::default(),
            order: Vec::new(),
            last_rows: Vec::new(),
            pairs: Vec::new(),
            #[cfg(test)]
            fault_after: None,
        }
    }

    /// A step of the device's profile, if it has one.
    pub fn profile_step(&self) -> Option<Step> {
        Profile::step(&self.device)
    }

    /// Where the phases of a step are recorded, if they are.
    pub fn profile(&self) -> Option<Arc<Profile>> {
        self.device.profile().cloned()
    }

    /// A phase of the step, if they are recorded.
    pub fn phase(&self, name: &'static str) -> Option<Phase> {
        self.device.profile()?.phase(name)
    }

    pub fn vocab_size(&self) -> usize {
        self.model.config().vocab_size
    }

    /// Runs the step. Hidden states stay on the device for [`Executor::logits`]: of the last row of a span that samples, and of
    /// all rows where `scored`.
    pub fn run(&mut self, plan: &StepPlan, scored: impl Fn(&Span) -> bool) -> Result<(), KernelError> {
        let inputs = self.phase("inputs");
        for seq in &plan.released {
            self.tables.remove(seq);
        }
        self.memory(&plan.memory)?;
        let mut max_blocks = 0;
        for span in &plan.spans {
            let tables = self.tables.entry(span.seq).or_default();
            tables.resize_with(span.groups.len(), Vec::new);
            for (table, group) in tables.iter_mut().zip(&span.groups) {
                group.table.apply(table, -1, |block| block.0 as i32);
                max_blocks = max_blocks.max(table.len());
            }
        }
        self.batch.clear(self.model.layout().groups.len(), max_blocks);
        // Single tokens first: they form one call of the decode kernel.
        self.order.clear();
        self.order.extend(0..plan.spans.len());
        self.order.sort_by_key(|&i| plan.spans[i].tokens.len() > 1);
        self.last_rows.clear();
        self.last_rows.resize(plan.spans.len(), 0);
        for &i in &self.order {
            let span = &plan.spans[i];
            let tables = self.tables.get(&span.seq).into_iter().flatten();
            let groups = span.groups.iter().zip(tables).map(|(group, table)| (&group.slots[..], &table[..]));
            let last = self.batch.push(span.start, &span.tokens, groups);
            self.last_rows[i] = last;
            let first = match (scored(span), span.sample.is_empty()) {
                (true, _) => last + 1 - span.tokens.len() as u32,
                (false, false) => last,
                (false, true) => last + 1,
            };
            self.batch.needed.get_or_insert_default().extend(first..=last);
        }
        drop(inputs);
        let _phase = self.phase("launch");
        let Executor { device, model, batch, caches, .. } = self;
        device.pool().enter(|| model.forward(batch, caches))
    }

    /// Row of the last token of span `span` of the plan that ran last.
    pub fn last_row(&self, span: usize) -> u32 {
        self.last_rows[span]
    }

    /// Logits of rows of the last step; at most [`models::LOGIT_ROWS`].
    pub fn logits(&mut self, rows: &[u32]) -> Result<&[f32], KernelError> {
        let _phase = self.phase("launch");
        let Executor { device, model, .. } = self;
        device.pool().enter(|| model.logits(rows))
    }

    /// Width of [`Executor::hidden`].
    pub fn hidden_size(&self) -> usize {
        self.model.config().hidden_size
    }

    /// Hidden states of rows of the last step behind the final norm; at most [`models::LOGIT_ROWS`].
    pub fn hidden(&mut self, rows: &[u32]) -> Result<&[f32], KernelError> {
        let _phase = self.phase("launch");
        let Executor { device, model, .. } = self;
        device.pool().enter(|| model.hidden(rows))
    }

    /// Applies memory operations in order; neighbours of one kind go to the device together.
    fn memory(&mut self, ops: &[MemOp]) -> Result<(), KernelError> {
        let _phase = if ops.is_empty() { None } else { self.phase("memory") };
        for run in ops.chunk_by(|a, b| std::mem::discriminant(a) == std::mem::discriminant(b)) {
            self.pairs.clear();
            for op in run {
                #[cfg(test)]
                self.meet_fault(op)?;
                match *op {
                    MemOp::Copy { src, dst } => self.pairs.push((src.0, dst.0)),
                    MemOp::SwapOut { src, dst } => self.pairs.push((src.0, dst.0)),
                    MemOp::SwapIn { src, dst } => self.pairs.push((src.0, dst.0)),
                    MemOp::Poison { block, from_slot } => self.poison(block, from_slot)?,
                }
            }
            let Executor { device, model, caches, swap_space, pairs, .. } = self;
            match run[0] {
                MemOp::Copy { .. } => model.copy_blocks(pairs, caches)?,
                // What comes behind needs the blocks, or overwrites them.
                MemOp::SwapOut { .. } => {
                    device.wait(Queue::Compute, &swap_space.swap_out(&**device, caches, pairs)?)?;
                }
                MemOp::SwapIn { .. } => {
                    device.wait(Queue::Compute, &swap_space.swap_in(&**device, caches, pairs)?)?;
                }
                MemOp::Poison { .. } => {}
            }
        }
        Ok(())
    }

    /// Fails where a test wants a copy to fail.
    #[cfg(test)]
    fn meet_fault(&mut self, op: &MemOp) -> Result<(), KernelError> {
        let found = || "a fault that a test asked for".to_string();
        match &mut self.fault_after {
            Some(_) if matches!(op, MemOp::Poison { .. }) => Ok(()),
            Some(0) => {
                self.fault_after = None;
                Err(KernelError::Unsupported { variant: "memory", found: found() })
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Makes what must not be read again loud, in all layers (debug builds order this).
    fn poison(&mut self, block: BlockId, from_slot: usize) -> Result<(), KernelError> {
        self.caches.iter_mut().try_for_each(|cache| cache.poison(&*self.device, block.index(), from_slot))
    }
}

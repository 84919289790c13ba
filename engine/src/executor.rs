//! A plan becomes memory operations and one forward pass. It decides nothing.

use std::collections::HashMap;
use std::sync::Arc;

use attention_kernels::{KernelError, KvCache};
use device::{Device, DeviceError, Pinned, Queue};
use models::{ForwardBatch, Model};
use sched::{BlockId, MemOp, SeqId, Span, StepPlan};

/// The model, its paged cache, and the block tables as the plans have described them.
pub(crate) struct Executor {
    device: Arc<dyn Device>,
    model: Model,
    /// One for each place in a page.
    caches: Vec<KvCache>,
    /// Pages of requests that are swapped out, for each of them.
    host: Vec<HostPages>,
    /// One table per group of layers; −1 behind a window.
    tables: HashMap<SeqId, Vec<Vec<i32>>>,
    batch: ForwardBatch,
    /// Spans in the order of the batch.
    order: Vec<usize>,
    /// Last row of each span, in the order of the plan.
    last_rows: Vec<u32>,
    copies: Vec<(u32, u32)>,
    /// Of the tests: so many more memory operations succeed; `None`: all.
    #[cfg(test)]
    pub fault_after: Option<usize>,
}

impl Executor {
    pub fn new(
        device: Arc<dyn Device>,
        model: Model,
        caches: Vec<KvCache>,
        host_blocks: usize,
    ) -> Result<Executor, DeviceError> {
        let pages = |cache: &KvCache| HostPages::new(&*device, cache, host_blocks);
        let host = caches.iter().map(pages).collect::<Result<_, _>>()?;
        Ok(Executor {
            device,
            model,
            caches,
            host,
            tables: HashMap::new(),
            batch: ForwardBatch::default(),
            order: Vec::new(),
            last_rows: Vec::new(),
            copies: Vec::new(),
            #[cfg(test)]
            fault_after: None,
        })
    }

    pub fn vocab_size(&self) -> usize {
        self.model.config().vocab_size
    }

    /// Runs the step. Hidden states stay on the device for [`Executor::logits`]: of the last row of a span that samples, and of
    /// all rows where `scored`.
    pub fn run(&mut self, plan: &StepPlan, scored: impl Fn(&Span) -> bool) -> Result<(), KernelError> {
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

    /// Width of [`Executor::hidden`].
    pub fn hidden_size(&self) -> usize {
        self.model.config().hidden_size
    }

    /// Hidden states of rows of the last step behind the final norm; at most [`models::LOGIT_ROWS`].
    pub fn hidden(&mut self, rows: &[u32]) -> Result<&[f32], KernelError> {
        let Executor { device, model, .. } = self;
        device.pool().enter(|| model.hidden(rows))
    }

    /// Applies memory operations in order; neighbouring copies go to the kernel together.
    fn memory(&mut self, ops: &[MemOp]) -> Result<(), KernelError> {
        for run in ops.chunk_by(|a, b| matches!((a, b), (MemOp::Copy { .. }, MemOp::Copy { .. }))) {
            self.copies.clear();
            for op in run {
                #[cfg(test)]
                self.meet_fault(op)?;
                match *op {
                    MemOp::Copy { src, dst } => self.copies.push((src.0, dst.0)),
                    MemOp::Poison { block, from_slot } => self.poison(block, from_slot)?,
                    MemOp::SwapOut { src, dst } => {
                        for (cache, host) in self.caches.iter().zip(&mut self.host) {
                            host.take(&*self.device, cache, src.index(), dst.index())?;
                        }
                    }
                    MemOp::SwapIn { src, dst } => {
                        for (cache, host) in self.caches.iter_mut().zip(&self.host) {
                            host.give(&*self.device, src.index(), cache, dst.index())?;
                        }
                    }
                }
            }
            if !self.copies.is_empty() {
                self.model.copy_blocks(&self.copies, &mut self.caches)?;
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

/// Page-locked host memory for pages of one place: blocks go there and back in order with the launches, and nobody waits.
struct HostPages {
    keys: Pinned,
    values: Pinned,
}

impl HostPages {
    fn new(device: &dyn Device, cache: &KvCache, blocks: usize) -> Result<HostPages, DeviceError> {
        let bytes = blocks.saturating_mul(cache.block_bytes());
        Ok(HostPages { keys: device.pinned(bytes)?, values: device.pinned(bytes)? })
    }

    /// Block `src` of the cache becomes block `dst` here.
    fn take(&mut self, device: &dyn Device, cache: &KvCache, src: usize, dst: usize) -> Result<(), DeviceError> {
        let bytes = cache.block_bytes();
        for (pages, host) in [(&cache.keys, &mut self.keys), (&cache.values, &mut self.values)] {
            device.download_async(Queue::Compute, pages, src * bytes, host, dst * bytes, bytes)?;
        }
        Ok(())
    }

    /// Block `src` here becomes block `dst` of the cache.
    fn give(&self, device: &dyn Device, src: usize, cache: &mut KvCache, dst: usize) -> Result<(), DeviceError> {
        let bytes = cache.block_bytes();
        for (host, pages) in [(&self.keys, &mut cache.keys), (&self.values, &mut cache.values)] {
            device.upload_async(Queue::Compute, host, src * bytes, pages, dst * bytes, bytes)?;
        }
        Ok(())
    }
}

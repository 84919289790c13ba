//! Executes a plan: memory operations, then one forward pass. On a device that computes asynchronously, the host waits only for
//! the results that it reads.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use attention_kernels::{KernelError, KvCache, SwapSpace, Values};
use device::{Buffer, Device, Event, Queue};
use models::lora::Adapter;
use models::{Fill, ForwardBatch, Model};
use sched::{MemOp, SeqId, Span, StepId, StepPlan};

use super::transfers::{Direction, TouchedBlocks, Transfer, Transfers};
use super::{StepError, phase};

/// Which hidden states of a span are kept after the last layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needed {
    None,
    /// Only those of this number of last tokens.
    Last(usize),
    All,
}

/// What a step has to know of a span beside its plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OfSpan {
    pub needed: Needed,
    /// Slot of its adapter.
    pub adapter: Option<u32>,
    /// Position from which on its tokens are those of the second text of a pair.
    pub second: Option<u32>,
}

/// Block tables of all sequences, one for each group of layers; −1 for blocks before a window.
pub(crate) type Tables = HashMap<SeqId, Vec<Vec<i32>>>;

/// What the draft model uses.
pub(crate) struct ForDrafts<'a> {
    /// The model whose tokens are drawn.
    pub target: &'a mut Model,
    pub tables: &'a Tables,
    /// The caches of the draft model.
    pub caches: &'a mut [KvCache],
    /// The row of the last step with the last token of each of its spans.
    pub last_rows: &'a [u32],
}

/// The model, its paged cache, and the block tables as the plans have described them.
pub(crate) struct Executor {
    device: Arc<dyn Device>,
    model: Model,
    /// One cache for each place in a page of the model, then those of the draft model.
    caches: Vec<KvCache>,
    /// Number of places of the model.
    places: usize,
    swap_space: SwapSpace,
    /// Swaps that the compute queue has not waited for.
    transfers: Transfers,
    /// Recorded after the last block copy or poisoning, which swaps must wait for; `None` without a swap space.
    operated: Option<Event>,
    /// Blocks that the next operation or forward pass reads and writes; used only while a swap is in flight.
    touched: TouchedBlocks,
    /// Blocks that the current step writes, if it swaps out.
    claimed: TouchedBlocks,
    tables: Tables,
    batch: ForwardBatch,
    /// Indices of the spans in the order of the batch.
    order: Vec<usize>,
    /// Last row of each span, in the order of the plan.
    last_rows: Vec<u32>,
    /// Source and target blocks of consecutive operations of one kind.
    pairs: Vec<(u32, u32)>,
    /// Bytes of the keys and of the values of each cache, while their memory is given back.
    freed: Vec<(usize, usize)>,
}

impl Executor {
    pub fn new(device: Arc<dyn Device>, model: Model, caches: Vec<KvCache>, swap_space: SwapSpace) -> Executor {
        Executor {
            device,
            places: model.layout().places,
            model,
            caches,
            swap_space,
            transfers: Transfers::default(),
            operated: None,
            touched: TouchedBlocks::default(),
            claimed: TouchedBlocks::default(),
            tables: HashMap::new(),
            batch: ForwardBatch::default(),
            order: Vec::new(),
            last_rows: Vec::new(),
            pairs: Vec::new(),
            freed: Vec::new(),
        }
    }

    /// Gives the memory of the caches back. Graphs contain its addresses, so a model with captured ones cannot.
    pub fn free_cache(&mut self) -> Result<(), StepError> {
        if self.model.graphs().sizes > 0 && self.device.features().launches {
            let why =
                "CUDA graphs contain its addresses; use level 2, which drops them too, or start with --enforce-eager";
            return Err(StepError(format!("the cache cannot be given back: {why}")));
        }
        self.empty_caches().map_err(|error| StepError(error.to_string()))
    }

    fn empty_caches(&mut self) -> Result<(), KernelError> {
        self.tables.clear();
        let empty = |buffer: &mut Buffer| -> Result<usize, KernelError> {
            let bytes = buffer.len_bytes();
            // Devices do not allocate nothing.
            *buffer = self.device.alloc(1)?;
            Ok(bytes)
        };
        self.freed.clear();
        for KvCache { keys, values, .. } in &mut self.caches {
            let of_values = if let Values::Separate(values) = values { empty(values)? } else { 0 };
            self.freed.push((empty(keys)?, of_values));
        }
        Ok(())
    }

    /// Allocates the memory of the caches again.
    pub fn allocate_cache(&mut self) -> Result<(), KernelError> {
        for (KvCache { keys, values, .. }, (of_keys, of_values)) in self.caches.iter_mut().zip(&self.freed) {
            // After a failure, some are allocated already.
            if keys.len_bytes() < *of_keys {
                *keys = self.device.alloc(*of_keys)?;
            }
            if let Values::Separate(values) = values
                && values.len_bytes() < *of_values
            {
                *values = self.device.alloc(*of_values)?;
            }
        }
        self.freed.clear();
        Ok(())
    }

    /// Puts an adapter into a slot of the model.
    pub fn set_adapter(&mut self, slot: usize, adapter: Arc<Adapter>) -> Result<(), KernelError> {
        self.model.set_adapter(slot, Some(adapter))
    }

    /// Drops the block tables of sequences.
    pub fn release(&mut self, released: &[SeqId]) {
        for seq in released {
            self.tables.remove(seq);
        }
    }

    /// Begins a step: memory operations and block tables. Work that is ordered afterwards may read and write the blocks of the
    /// tables.
    pub fn begin(&mut self, plan: &StepPlan) -> Result<(), KernelError> {
        let _phase = phase(&*self.device, "inputs");
        self.claim(plan);
        self.apply_memory_ops(plan)?;
        for span in &plan.spans {
            let tables = self.tables.entry(span.seq).or_default();
            tables.resize_with(span.groups.len(), Vec::new);
            for (table, group) in tables.iter_mut().zip(&span.groups) {
                group.table.apply(table, -1, |block| block.0 as i32);
            }
        }
        self.wait_for_swaps(plan)
    }

    /// Whether the model has logits to draw from. It has none if it sends its rows to another stage.
    pub fn draws(&self) -> bool {
        !self.model.decoder().sends()
    }

    /// Prepares the batch of a step that has begun. `of_span` also returns which hidden states of a span [`Executor::logits`] and
    /// [`Executor::hidden`] will read.
    pub fn prepare(
        &mut self,
        plan: &StepPlan,
        mut of_span: impl FnMut(usize, &Span) -> OfSpan,
    ) -> Result<(), KernelError> {
        let _phase = phase(&*self.device, "inputs");
        self.batch.clear(self.model.layout().groups.len());
        // Few tokens come first: one call of the decode kernel covers all of them.
        let most = self.model.decode_rows();
        self.order.clear();
        self.order.extend(0..plan.spans.len());
        self.order.sort_by_key(|&i| plan.spans[i].tokens.len() > most);
        self.last_rows.clear();
        self.last_rows.resize(plan.spans.len(), 0);
        for &i in &self.order {
            let span = &plan.spans[i];
            let tables = self.tables.get(&span.seq).into_iter().flatten();
            let groups = span.groups.iter().zip(tables).map(|(group, table)| (&group.slots[..], &table[..]));
            let last = self.batch.push(span.start, &span.tokens, groups);
            self.last_rows[i] = last;
            let OfSpan { needed, adapter, second } = of_span(i, span);
            adapter.into_iter().for_each(|slot| self.batch.set_adapter(slot));
            second.into_iter().for_each(|position| self.batch.set_second(position));
            self.batch.set_drafts(span.drafts);
            let first = match needed {
                Needed::All => last + 1 - span.tokens.len() as u32,
                Needed::Last(count) => last + 1 - count.min(span.tokens.len()) as u32,
                Needed::None => last + 1,
            };
            self.batch.needed.get_or_insert_default().extend(first..=last);
            if span.awaits.is_some() {
                self.batch.tokens[last as usize] = ForwardBatch::AWAITED;
            }
        }
        // Not those of this step: they have only just been ordered.
        Ok(self.transfers.forget_done(plan.step)?)
    }

    /// Marks the blocks that a step with swaps writes. They are swapped out first, so that the step waits for no others.
    fn claim(&mut self, plan: &StepPlan) {
        let Some(cache) = self.caches.first() else { return };
        if !plan.memory.iter().any(|op| matches!(op, MemOp::SwapOut { .. })) {
            return;
        }
        self.claimed.clear(cache.shape.num_blocks);
        let groups = plan.spans.iter().flat_map(|span| &span.groups);
        for slot in groups.flat_map(|group| &group.slots).filter_map(|slot| usize::try_from(*slot).ok()) {
            self.claimed.mark_written(slot / cache.shape.block_size);
        }
        for op in &plan.memory {
            if let MemOp::Copy { dst, .. } | MemOp::SwapIn { dst, .. } = op {
                self.claimed.mark_written(dst.index());
            }
        }
    }

    /// Clears the marks of touched blocks. Returns `false` if no swap is in flight, so that nothing has to be marked.
    fn begin_touching(&mut self) -> bool {
        let cache = self.caches.first().filter(|_| !self.transfers.is_empty());
        if let Some(cache) = cache {
            self.touched.clear(cache.shape.num_blocks);
        }
        cache.is_some()
    }

    /// Makes the forward pass wait for the swaps of blocks that it reads or writes, and for no others.
    fn wait_for_swaps(&mut self, plan: &StepPlan) -> Result<(), KernelError> {
        if !self.begin_touching() {
            return Ok(());
        }
        let Executor { caches, tables, touched, .. } = self;
        let Some(block_size) = caches.first().map(|cache| cache.shape.block_size) else { return Ok(()) };
        let index = |number: i64| usize::try_from(number).ok();
        for span in &plan.spans {
            let tables = tables.get(&span.seq).into_iter().flatten();
            tables.flatten().filter_map(|block| index(i64::from(*block))).for_each(|block| touched.mark_read(block));
            let slots = span.groups.iter().flat_map(|group| &group.slots);
            slots.filter_map(|slot| index(*slot)).for_each(|slot| touched.mark_written(slot / block_size));
        }
        self.wait_for_touched()
    }

    /// Makes the compute queue wait for the swaps of touched blocks.
    fn wait_for_touched(&mut self) -> Result<(), KernelError> {
        let Executor { device, transfers, touched, .. } = self;
        if let Some(last) = transfers.drain_conflicting(touched).next_back() {
            device.wait(Queue::Compute, &last.event)?;
        }
        Ok(())
    }

    /// Applies memory operations in order. Consecutive ones of the same kind are ordered together.
    fn apply_memory_ops(&mut self, plan: &StepPlan) -> Result<(), KernelError> {
        let _phase = if plan.memory.is_empty() { None } else { phase(&*self.device, "memory") };
        for run in plan.memory.chunk_by(|a, b| std::mem::discriminant(a) == std::mem::discriminant(b)) {
            self.pairs.clear();
            for op in run {
                match *op {
                    MemOp::Copy { src, dst } => self.pairs.push((src.0, dst.0)),
                    MemOp::SwapOut { src, dst } => self.pairs.push((src.0, dst.0)),
                    MemOp::SwapIn { src, dst } => self.pairs.push((src.0, dst.0)),
                    MemOp::Poison { .. } => {}
                    other => return Err(unknown(other)),
                }
            }
            match run[0] {
                MemOp::SwapOut { .. } => self.swap(Direction::Out, plan.step)?,
                MemOp::SwapIn { .. } => self.swap(Direction::In, plan.step)?,
                MemOp::Copy { .. } | MemOp::Poison { .. } => self.copy_or_poison(run)?,
                other => return Err(unknown(other)),
            }
        }
        Ok(())
    }

    /// Orders swaps on the copy queue, beside the step that runs.
    fn swap(&mut self, direction: Direction, step: StepId) -> Result<(), KernelError> {
        if let Some(operated) = self.operated.take() {
            self.device.wait(Queue::Copy, &operated)?;
        }
        keep_last_writes(&mut self.pairs);
        let is_urgent = |block: u32| direction == Direction::Out && self.claimed.is_written(block);
        let (first, others): (Vec<_>, Vec<_>) = self.pairs.iter().partition(|pair| is_urgent(pair.0));
        for pairs in [first, others].into_iter().filter(|pairs| !pairs.is_empty()) {
            let Executor { device, caches, swap_space, transfers, .. } = self;
            let event = match direction {
                Direction::Out => swap_space.swap_out(&**device, caches, &pairs)?,
                Direction::In => swap_space.swap_in(&**device, caches, &pairs)?,
            };
            transfers.push(Transfer { step, direction, pairs, event });
        }
        Ok(())
    }

    /// Orders block copies, or the poisoning of blocks, on the compute queue.
    fn copy_or_poison(&mut self, run: &[MemOp]) -> Result<(), KernelError> {
        if self.begin_touching() {
            for op in run {
                match *op {
                    MemOp::Copy { src, dst } => {
                        self.touched.mark_read(src.index());
                        self.touched.mark_written(dst.index());
                    }
                    MemOp::Poison { block, .. } => self.touched.mark_written(block.index()),
                    _ => {}
                }
            }
            self.wait_for_touched()?;
        }
        let Executor { device, model, caches, swap_space, pairs, operated, .. } = self;
        for op in run {
            // Debug builds order this, so that contents that must not be read again are loud.
            // Some pages have no slots: only a new page is poisoned.
            if let MemOp::Poison { block, from_slot } = *op
                && (from_slot == 0 || model.layout().has_slots())
            {
                caches.iter_mut().try_for_each(|cache| cache.poison(&**device, block.index(), from_slot))?;
            }
        }
        if !pairs.is_empty() {
            model.copy_blocks(pairs, caches)?;
        }
        if swap_space.num_blocks() > 0 {
            *operated = Some(device.record(Queue::Compute)?);
        }
        Ok(())
    }

    /// Bytes of a block of host memory.
    pub fn host_block_bytes(&self) -> usize {
        self.swap_space.block_bytes()
    }

    /// Contents of a block of host memory, after all swaps that were ordered.
    pub fn read_host_block(&self, block: u32) -> Result<Vec<u8>, KernelError> {
        self.device.record(Queue::Copy)?.synchronize()?;
        self.swap_space.read_block(block)
    }

    /// Overwrites a block of host memory, after all swaps that were ordered.
    pub fn write_host_block(&mut self, block: u32, contents: &[u8]) -> Result<(), KernelError> {
        self.device.record(Queue::Copy)?.synchronize()?;
        self.swap_space.write_block(block, contents)
    }

    /// Runs the forward pass. `fill` copies tokens that are known only on the device into the batch.
    pub fn forward(&mut self, fill: Option<Fill<'_>>) -> Result<(), KernelError> {
        let Executor { device, model, batch, caches, places, .. } = self;
        let _phase = phase(&**device, "launch");
        let mut forward = || model.forward_with(batch, &mut caches[..*places], fill);
        // The threads of the pool compute only on a CPU.
        if device.features().launches { forward() } else { device.pool().enter(forward) }
    }

    /// What the draft model uses.
    pub fn for_drafts(&mut self) -> ForDrafts<'_> {
        let Executor { model, tables, caches, places, last_rows, .. } = self;
        ForDrafts { target: model, tables, caches: &mut caches[*places..], last_rows }
    }

    /// Row of the last token of span `span` in the plan that was prepared last.
    pub fn last_row(&self, span: usize) -> u32 {
        self.last_rows[span]
    }

    /// Logits of rows of the last step, float32, on the device; at most [`models::most_drawn_rows`].
    pub fn device_logits(&mut self, rows: &[u32]) -> Result<&Buffer, KernelError> {
        self.model.device_logits(rows)
    }

    /// Logits of at most [`models::LOGIT_ROWS`] rows of the last step.
    pub fn logits(&mut self, rows: &[u32]) -> Result<&[f32], KernelError> {
        let Executor { device, model, .. } = self;
        let _phase = phase(&**device, "launch");
        device.pool().enter(|| model.logits(rows))
    }

    /// Hidden states, after the final norm, of at most [`models::LOGIT_ROWS`] rows of the last step, and their width.
    pub fn hidden(&mut self, rows: &[u32]) -> Result<(&[f32], usize), KernelError> {
        let Executor { device, model, .. } = self;
        let _phase = phase(&**device, "launch");
        let width = model.decoder().hidden_size();
        Ok((device.pool().enter(|| model.hidden(rows))?, width))
    }
}

/// The error for a memory operation that this executor cannot apply. Skipping it would leave wrong contents behind.
fn unknown(op: MemOp) -> KernelError {
    KernelError::Unsupported { variant: "memory", found: op.to_string() }
}

/// Drops the copies to a target that a later copy of the list overwrites, which happens if the first contents are given up at once.
/// Copies to different targets may then be done in any order.
fn keep_last_writes(pairs: &mut Vec<(u32, u32)>) {
    let mut written = HashSet::new();
    pairs.reverse();
    pairs.retain(|(_, to)| written.insert(*to));
    pairs.reverse();
}

#[cfg(test)]
mod tests {
    use super::keep_last_writes;

    #[test]
    fn of_several_copies_to_one_block_the_last_is_kept() {
        let mut pairs = vec![(1, 7), (2, 8), (3, 7), (4, 9), (5, 8), (6, 7)];
        keep_last_writes(&mut pairs);
        assert_eq!(pairs, [(4, 9), (5, 8), (6, 7)]);
    }
}

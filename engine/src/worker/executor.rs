//! A plan becomes memory operations and one forward pass. On a device that launches kernels the host waits for nothing but the
//! results that it asks for.

use std::collections::HashMap;
use std::sync::Arc;

use attention_kernels::{KernelError, KvCache, SwapSpace};
use device::profile::{Phase, Step};
use device::{Buffer, Device, DeviceError, Event, Pool, Profile, Queue};
use models::{Fill, ForwardBatch, Model};
use sched::{BlockId, MemOp, SeqId, Span, StepId, StepPlan};

use super::transfers::{Direction, Touched, Transfer, Transfers};

/// Which hidden states of a span stay behind the last layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needed {
    None,
    /// That of its last token.
    Last,
    All,
}

/// The model, its paged cache, and the block tables as the plans have described them.
pub(crate) struct Executor {
    device: Arc<dyn Device>,
    model: Model,
    /// One for each place in a page.
    caches: Vec<KvCache>,
    /// For requests that are swapped out.
    swap_space: SwapSpace,
    /// Swaps that no step has had to wait for yet.
    transfers: Transfers,
    /// Recorded behind the last operation on blocks that the compute queue was given outside of forward passes; none where
    /// there is no swap space.
    operated: Option<Event>,
    /// Blocks of the step, or of the memory operations, that may have to wait for a swap; used only while one is under way.
    touched: Touched,
    /// Blocks that the step being prepared writes to, if it swaps out.
    claimed: Touched,
    /// One table per group of layers; −1 behind a window.
    tables: HashMap<SeqId, Vec<Vec<i32>>>,
    batch: ForwardBatch,
    /// Spans in the order of the batch.
    order: Vec<usize>,
    /// Last row of each span, in the order of the plan.
    last_rows: Vec<u32>,
    /// Source and target blocks of neighbouring operations of one kind.
    pairs: Vec<(u32, u32)>,
}

impl Executor {
    pub fn new(device: Arc<dyn Device>, model: Model, caches: Vec<KvCache>, swap_space: SwapSpace) -> Executor {
        Executor {
            device,
            model,
            caches,
            swap_space,
            transfers: Transfers::default(),
            operated: None,
            touched: Touched::default(),
            claimed: Touched::default(),
            tables: HashMap::new(),
            batch: ForwardBatch::default(),
            order: Vec::new(),
            last_rows: Vec::new(),
            pairs: Vec::new(),
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

    /// Threads of the host.
    pub fn threads(&self) -> &Pool {
        self.device.pool()
    }

    /// Forgets the tables of sequences.
    pub fn forget(&mut self, released: &[SeqId]) {
        for seq in released {
            self.tables.remove(seq);
        }
    }

    /// Does what comes before the forward pass: memory operations, block tables, the batch. `needed` says which hidden states
    /// of a span stay for [`Executor::logits`] and [`Executor::hidden`].
    pub fn prepare(
        &mut self,
        plan: &StepPlan,
        mut needed: impl FnMut(usize, &Span) -> Needed,
    ) -> Result<(), KernelError> {
        let _phase = self.phase("inputs");
        self.claim(plan);
        self.memory(plan)?;
        for span in &plan.spans {
            let tables = self.tables.entry(span.seq).or_default();
            tables.resize_with(span.groups.len(), Vec::new);
            for (table, group) in tables.iter_mut().zip(&span.groups) {
                group.table.apply(table, -1, |block| block.0 as i32);
            }
        }
        self.batch.clear(self.model.layout().groups.len());
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
            let first = match needed(i, span) {
                Needed::All => last + 1 - span.tokens.len() as u32,
                Needed::Last => last,
                Needed::None => last + 1,
            };
            self.batch.needed.get_or_insert_default().extend(first..=last);
            if span.awaits.is_some() {
                self.batch.tokens[last as usize] = ForwardBatch::AWAITED;
            }
        }
        self.wait_for_swaps(plan)?;
        Ok(self.transfers.forget_done(plan.step)?)
    }

    /// Notes the blocks that a step with swaps writes to: those go to host memory first, so that it waits for no others.
    fn claim(&mut self, plan: &StepPlan) {
        let Some(cache) = self.caches.first() else { return };
        if !plan.memory.iter().any(|op| matches!(op, MemOp::SwapOut { .. })) {
            return;
        }
        self.claimed.begin(cache.shape.num_blocks);
        let groups = plan.spans.iter().flat_map(|span| &span.groups);
        for slot in groups.flat_map(|group| &group.slots).filter_map(|slot| usize::try_from(*slot).ok()) {
            self.claimed.write(slot / cache.shape.block_size);
        }
        for op in &plan.memory {
            if let MemOp::Copy { dst, .. } | MemOp::SwapIn { dst, .. } = op {
                self.claimed.write(dst.index());
            }
        }
    }

    /// Begins to note blocks that may have to wait for a swap; `false` if no swap is under way.
    fn may_wait(&mut self) -> bool {
        let cache = self.caches.first().filter(|_| !self.transfers.is_empty());
        if let Some(cache) = cache {
            self.touched.begin(cache.shape.num_blocks);
        }
        cache.is_some()
    }

    /// Lets the forward pass begin after the swaps of blocks that it needs, and not after others.
    fn wait_for_swaps(&mut self, plan: &StepPlan) -> Result<(), KernelError> {
        if !self.may_wait() {
            return Ok(());
        }
        let Executor { caches, tables, touched, .. } = self;
        let Some(block_size) = caches.first().map(|cache| cache.shape.block_size) else { return Ok(()) };
        let index = |number: i64| usize::try_from(number).ok();
        for span in &plan.spans {
            let tables = tables.get(&span.seq).into_iter().flatten();
            tables.flatten().filter_map(|block| index(i64::from(*block))).for_each(|block| touched.read(block));
            let slots = span.groups.iter().flat_map(|group| &group.slots);
            slots.filter_map(|slot| index(*slot)).for_each(|slot| touched.write(slot / block_size));
        }
        self.wait_for_touched()
    }

    /// Lets the compute queue wait for the swaps whose blocks were noted.
    fn wait_for_touched(&mut self) -> Result<(), KernelError> {
        let Executor { device, transfers, touched, .. } = self;
        let (writes, reads) = (|block| touched.is_written(block), |block| touched.is_read(block));
        if let Some(last) = transfers.drain_conflicting(writes, reads).next_back() {
            device.wait(Queue::Compute, &last.event)?;
        }
        Ok(())
    }

    /// Gives the copy queue swaps, beside the step that runs.
    fn swap(&mut self, direction: Direction, step: StepId) -> Result<(), KernelError> {
        if let Some(operated) = self.operated.take() {
            self.device.wait(Queue::Copy, &operated)?;
        }
        let soon = |block: u32| direction == Direction::Out && self.claimed.is_written(block);
        let (first, others): (Vec<_>, Vec<_>) = self.pairs.iter().partition(|pair| soon(pair.0));
        for pairs in [first, others].into_iter().filter(|pairs| !pairs.is_empty()) {
            let Executor { device, caches, swap_space, transfers, .. } = self;
            let device = &**device;
            let event = match direction {
                Direction::Out => swap_space.swap_out(device, caches, &pairs)?,
                Direction::In => swap_space.swap_in(device, caches, &pairs)?,
            };
            transfers.push(Transfer { step, direction, pairs, event });
        }
        Ok(())
    }

    /// Runs the forward pass. `fill` brings tokens that the device alone knows to their rows.
    pub fn forward(&mut self, fill: Option<Fill<'_>>) -> Result<(), KernelError> {
        let _phase = self.phase("launch");
        let Executor { device, model, batch, caches, .. } = self;
        let mut forward = || model.forward_with(batch, caches, fill);
        // Elsewhere the pool's threads have nothing to do.
        if device.features().launches { forward() } else { device.pool().enter(forward) }
    }

    /// Marks the end of all work so far.
    pub fn mark(&self) -> Result<Event, DeviceError> {
        self.device.record(Queue::Compute)
    }

    /// Waits for all work.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.device.synchronize()
    }

    /// Logits of rows of the last step, float32, left on the device; at most as many as there are sequences.
    pub fn device_logits(&mut self, rows: &[u32]) -> Result<&Buffer, KernelError> {
        self.model.device_logits(rows)
    }

    /// Row of the last token of span `span` of the plan that was prepared last.
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
        self.model.decoder().hidden_size()
    }

    /// Hidden states of rows of the last step behind the final norm; at most [`models::LOGIT_ROWS`].
    pub fn hidden(&mut self, rows: &[u32]) -> Result<&[f32], KernelError> {
        let _phase = self.phase("launch");
        let Executor { device, model, .. } = self;
        device.pool().enter(|| model.hidden(rows))
    }

    /// Applies memory operations in order; neighbours of one kind go to the device together.
    fn memory(&mut self, plan: &StepPlan) -> Result<(), KernelError> {
        let _phase = if plan.memory.is_empty() { None } else { self.phase("memory") };
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
                MemOp::Copy { .. } | MemOp::Poison { .. } => self.operate(run)?,
                other => return Err(unknown(other)),
            }
        }
        Ok(())
    }

    /// Gives the compute queue copies, or poison.
    fn operate(&mut self, run: &[MemOp]) -> Result<(), KernelError> {
        if self.may_wait() {
            for op in run {
                match *op {
                    MemOp::Copy { src, dst } => {
                        self.touched.read(src.index());
                        self.touched.write(dst.index());
                    }
                    MemOp::Poison { block, .. } => self.touched.write(block.index()),
                    _ => {}
                }
            }
            self.wait_for_touched()?;
        }
        for op in run {
            if let MemOp::Poison { block, from_slot } = *op {
                self.poison(block, from_slot)?;
            }
        }
        let Executor { device, model, caches, swap_space, pairs, operated, .. } = self;
        if !pairs.is_empty() {
            model.copy_blocks(pairs, caches)?;
        }
        if swap_space.num_blocks() > 0 {
            *operated = Some(device.record(Queue::Compute)?);
        }
        Ok(())
    }

    /// Makes what must not be read again loud, in all layers (debug builds order this).
    fn poison(&mut self, block: BlockId, from_slot: usize) -> Result<(), KernelError> {
        self.caches.iter_mut().try_for_each(|cache| cache.poison(&*self.device, block.index(), from_slot))
    }
}

/// The error of a memory operation that this executor cannot apply. Skipping one would leave wrong contents behind.
fn unknown(op: MemOp) -> KernelError {
    KernelError::Unsupported { variant: "memory", found: op.to_string() }
}

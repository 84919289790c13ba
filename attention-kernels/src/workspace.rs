//! Arrays of a step on the device, and space for partial results, as the CUDA kernels need them.
//!
//! A workspace is allocated once for the largest step and set once per step, whatever the number of layers; neither that
//! nor a launch allocates device memory. [`Workspace::set`] notes what has changed since the previous step, for an
//! [`Upload`](crate::Upload); [`Workspace::load`] also sends it, and waits. It costs time proportional to the blocks in use, not to
//! the longest table. Kernels check nothing, so a load checks that lengths, block ids and slots stay inside the cache, and a launch
//! compares its arguments with what was loaded.

use std::collections::HashSet;

use device::{Buffer, Device, DeviceError};

use crate::batch::AttentionBatch;
use crate::error::{KernelError, at_least, check_copies, check_slots, expect};
use crate::mirror::Mirror;
use crate::shape::KvShape;
use crate::work::{LEAST_PARTITION, NO_PARTIALS, WorkList};

/// Size of the largest step that a [`Workspace`] can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceLimits {
    /// Number of sequences.
    pub max_seqs: usize,
    /// Number of query rows of all sequences.
    pub max_rows: usize,
    /// Number of blocks in the table of a sequence.
    pub max_blocks: usize,
    /// Number of blocks in the pool.
    pub num_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Number of partial results of contexts that are split over thread blocks, one for each partition and query row; each costs
    /// `num_heads * (head_dim + 2) * 4` bytes. Contexts that find no space are not split, which
    /// changes no bit. 0: contexts are never split.
    pub max_partials: usize,
    /// Items of the list of work that the decode kernel computes at once ([`Variant::items_at_once`](crate::Variant::items_at_once)):
    /// while a step has fewer, its partitions are smaller. 0: always [`PARTITION`](crate::PARTITION) tokens.
    pub items_at_once: usize,
    /// Number of block copies of a step.
    pub max_copies: usize,
}

impl WorkspaceLimits {
    /// Returns the bytes of device memory that a workspace allocates.
    pub fn bytes(&self) -> usize {
        self.sizes().into_iter().sum()
    }

    /// Returns the bytes of each buffer, in the order of the fields of [`Workspace`].
    fn sizes(&self) -> [usize; 9] {
        let longest = (self.max_blocks * self.block_size).div_ceil(LEAST_PARTITION as usize);
        let partials = self.max_partials.min(self.max_rows * longest);
        [
            WorkList::bytes(self.max_seqs, partials),
            self.max_seqs * size_of::<i32>(),
            self.max_seqs * self.max_blocks * size_of::<i32>(),
            self.max_seqs * size_of::<u32>(),
            (self.max_seqs + 1) * size_of::<u32>(),
            self.max_rows * size_of::<i64>(),
            self.max_copies * 2 * size_of::<u32>(),
            partials * self.num_heads * self.head_dim * size_of::<f32>(),
            partials * self.num_heads * 2 * size_of::<f32>(),
        ]
    }
}

/// Arrays of a step and space for partial results, on the device.
pub struct Workspace {
    limits: WorkspaceLimits,
    /// The words of [`WorkList::words`].
    pub(crate) work: Mirror,
    /// `[num_seqs]` i32.
    pub(crate) first_partials: Mirror,
    /// `[num_seqs, limits.max_blocks]` i32, padded with −1.
    pub(crate) block_tables: Mirror,
    /// `[num_seqs]` u32.
    pub(crate) context_lens: Mirror,
    /// `[num_seqs + 1]` u32.
    pub(crate) query_starts: Mirror,
    /// `[rows]` i64.
    slot_mapping: Mirror,
    /// `[copies, 2]` u32.
    pub(crate) pairs: Mirror,
    /// `[max_partials, num_heads, head_dim]` f32, or a layer's own shape of at most that size.
    pub(crate) partial_sums: Buffer,
    /// `[max_partials, num_heads, 2]` f32.
    pub(crate) partial_states: Buffer,
    /// Contents of the buffers.
    loaded: Loaded,
}

#[derive(Default)]
struct Loaded {
    context_lens: Vec<u32>,
    query_starts: Vec<u32>,
    work: WorkList,
    /// Number of block-table entries that were compared.
    compared: usize,
    /// Grids do not depend on lengths.
    fixed: Option<usize>,
    window: Option<usize>,
    slot_mapping: Vec<i64>,
    copies: Vec<(u32, u32)>,
    /// Lengths of the runs of copies that may run concurrently.
    runs: Vec<usize>,
}

impl Workspace {
    /// Allocates the memory.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn new(device: &dyn Device, limits: WorkspaceLimits) -> Result<Workspace, DeviceError> {
        let [work, first_partials, tables, lens, starts, slots, pairs, sums, states] = limits.sizes();
        Ok(Workspace {
            limits,
            work: Mirror::new(device, work)?,
            first_partials: Mirror::new(device, first_partials)?,
            block_tables: Mirror::new(device, tables)?,
            context_lens: Mirror::new(device, lens)?,
            query_starts: Mirror::new(device, starts)?,
            slot_mapping: Mirror::new(device, slots)?,
            pairs: Mirror::new(device, pairs)?,
            partial_sums: device.alloc(sums)?,
            partial_states: device.alloc(states)?,
            loaded: Loaded::default(),
        })
    }

    /// Returns the limits.
    pub fn limits(&self) -> &WorkspaceLimits {
        &self.limits
    }

    /// Sets a step, of which nothing has reached the device yet: send [`Workspace::arrays`]. `slot_mapping` has one slot per
    /// row, or is empty if nothing is written. `window` is the widest window of the layers that read these tables, `None` if one
    /// of them has none; table entries behind it are not read.
    ///
    /// `fixed`: for launches that are captured into a [`device::Graph`] or for its replay, so grids do not depend on the current
    /// lengths; the number of query rows that a sequence may have. A replay must have this number, and as many rows and sequences
    /// as the capture; padding has a context of 0, one row, and the slot −1.
    ///
    /// # Errors
    /// Sizes exceed the limits, a sequence has more rows than `fixed`, lengths contradict each other, or block ids or slots lie outside the pool.
    pub fn set(
        &mut self,
        batch: &AttentionBatch,
        slot_mapping: &[i64],
        window: Option<usize>,
        fixed: Option<usize>,
    ) -> Result<(), KernelError> {
        let limits = self.limits;
        batch.check_sizes()?;
        if let Some(most) = fixed {
            let rows = batch.query_starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
            at_least("query rows of a sequence that a captured launch serves", most, rows.max().unwrap_or(0))?;
        }
        at_least("sequences that the workspace holds", limits.max_seqs, batch.num_seqs())?;
        at_least("rows that the workspace holds", limits.max_rows, batch.num_rows().max(slot_mapping.len()))?;
        let longest = batch.block_tables.longest();
        at_least("width of block tables that the workspace holds", limits.max_blocks, longest)?;
        batch.check_seqs(0..batch.num_seqs(), (limits.num_blocks, limits.block_size), window)?;
        check_slots(slot_mapping, limits.num_blocks * limits.block_size)?;
        // If an array below has no space, the step counts as not set.
        self.loaded.context_lens.clear();
        self.loaded.query_starts.clear();
        self.loaded.slot_mapping.clear();
        self.loaded.compared = self.block_tables.set_rows(limits.max_blocks, -1, batch.block_tables.iter())?;
        self.context_lens.set(batch.context_lens.iter().map(|x| x.to_ne_bytes()))?;
        self.query_starts.set(batch.query_starts.iter().map(|x| x.to_ne_bytes()))?;
        self.slot_mapping.set(slot_mapping.iter().map(|x| x.to_ne_bytes()))?;
        let work = &mut self.loaded.work;
        let space = self.partial_states.len_bytes() / (2 * size_of::<f32>() * limits.num_heads.max(1));
        work.plan(batch, window, space, limits.items_at_once);
        self.work.set(work.words())?;
        self.first_partials.set(work.first_partials.iter().map(|x| x.to_ne_bytes()))?;
        self.loaded.context_lens.extend_from_slice(&batch.context_lens);
        self.loaded.query_starts.extend_from_slice(&batch.query_starts);
        self.loaded.slot_mapping.extend_from_slice(slot_mapping);
        self.loaded.fixed = fixed;
        self.loaded.window = window;
        Ok(())
    }

    /// Sets the block copies of a step, which are made in this order; send [`Workspace::arrays`].
    ///
    /// # Errors
    /// There are more copies than the limit, or a block lies outside the pool.
    pub fn set_copies(&mut self, copies: &[(u32, u32)]) -> Result<(), KernelError> {
        at_least("copies that the workspace holds", self.limits.max_copies, copies.len())?;
        check_copies(copies, self.limits.num_blocks)?;
        self.loaded.copies.clear();
        let pair = |&(from, to): &(u32, u32)| (u64::from(to) << 32 | u64::from(from)).to_le_bytes();
        self.pairs.set(copies.iter().map(pair))?;
        self.loaded.copies.extend_from_slice(copies);
        self.loaded.runs = runs(copies);
        Ok(())
    }

    /// Returns the arrays that the host sets.
    pub fn arrays(&mut self) -> [&mut Mirror; 7] {
        let Workspace { work, first_partials, block_tables, context_lens, query_starts, slot_mapping, pairs, .. } =
            self;
        [work, first_partials, block_tables, context_lens, query_starts, slot_mapping, pairs]
    }

    /// Sets a step, sends it, and waits until it has arrived.
    ///
    /// # Errors
    /// As for [`Workspace::set`]; the error of a copy.
    pub fn load(
        &mut self,
        device: &dyn Device,
        batch: &AttentionBatch,
        slot_mapping: &[i64],
        window: Option<usize>,
    ) -> Result<(), KernelError> {
        self.set(batch, slot_mapping, window, None)?;
        self.send(device)
    }

    /// Sets block copies, sends them, and waits until they have arrived.
    ///
    /// # Errors
    /// As for [`Workspace::set_copies`]; the error of a copy.
    pub fn load_copies(&mut self, device: &dyn Device, copies: &[(u32, u32)]) -> Result<(), KernelError> {
        self.set_copies(copies)?;
        self.send(device)
    }

    fn send(&mut self, device: &dyn Device) -> Result<(), KernelError> {
        Ok(self.arrays().into_iter().try_for_each(|array| array.send(device))?)
    }

    /// Returns the most query rows of a sequence that a launch for some sequences must serve.
    pub(crate) fn query_len(&self, starts: &[u32]) -> usize {
        let longest = || starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0);
        self.loaded.fixed.unwrap_or_else(longest)
    }

    /// Whether a launch may have partial results.
    pub(crate) fn may_split(&self) -> bool {
        self.loaded.fixed.is_some() || self.loaded.work.first_partials.iter().any(|first| *first != NO_PARTIALS)
    }

    /// Returns the number of items of work; `None` if a launch must serve any number.
    pub(crate) fn items(&self) -> Option<usize> {
        self.loaded.fixed.is_none().then_some(self.loaded.work.items.len())
    }

    /// Returns the slots that were loaded last, `[rows]` i64.
    pub fn slot_mapping(&self) -> &Buffer {
        self.slot_mapping.buffer()
    }

    /// Returns the block tables, `[num_seqs, limits.max_blocks]` i32, the context lengths, `[num_seqs]` u32, and the first rows,
    /// `[num_seqs + 1]` u32, that were loaded last.
    pub fn sequences(&self) -> [&Buffer; 3] {
        [self.block_tables.buffer(), self.context_lens.buffer(), self.query_starts.buffer()]
    }

    /// Whether this batch was loaded, for a kernel with that window. Block ids are not compared.
    pub(crate) fn has_batch(&self, batch: &AttentionBatch, window: Option<usize>) -> bool {
        let loaded = &self.loaded;
        let sees = loaded.window.is_none_or(|widest| window.is_some_and(|window| window <= widest));
        sees && loaded.context_lens == batch.context_lens && loaded.query_starts == batch.query_starts
    }

    /// Returns the number of block-table entries that the last load compared with those on the device.
    pub fn compared_entries(&self) -> usize {
        self.loaded.compared
    }

    /// Whether these slots were loaded.
    pub fn has_slots(&self, slot_mapping: &[i64]) -> bool {
        self.loaded.slot_mapping == slot_mapping
    }

    /// Checks that a cache of this shape has the blocks that the loaded block ids and slots may refer to.
    pub(crate) fn check_cache(&self, shape: &KvShape) -> Result<(), KernelError> {
        expect("block size of the cache", shape.block_size, self.limits.block_size)?;
        at_least("blocks of the cache", shape.num_blocks, self.limits.num_blocks)
    }

    /// Returns the lengths of the runs of these copies if they were loaded.
    pub(crate) fn runs_of(&self, copies: &[(u32, u32)]) -> Option<&[usize]> {
        (self.loaded.copies == copies).then_some(self.loaded.runs.as_slice())
    }

    /// Checks that partial results of a layer fit into the space of one.
    pub(crate) fn check_partials(&self, num_heads: usize, value_dim: usize) -> Result<(), KernelError> {
        let WorkspaceLimits { num_heads: most, head_dim, .. } = self.limits;
        at_least("query heads that the workspace holds", most, num_heads)?;
        at_least("elements of a row that the workspace holds", most * head_dim, num_heads * value_dim)
    }
}

/// Splits a list of block copies into runs whose copies may be made in any order, and returns their lengths. A new run starts at a copy that writes a block which an earlier copy of the run reads
/// or writes, or that reads a block which an earlier copy writes.
fn runs(copies: &[(u32, u32)]) -> Vec<usize> {
    let (mut runs, mut named, mut written) = (Vec::new(), HashSet::new(), HashSet::new());
    for &(from, to) in copies {
        if runs.is_empty() || named.contains(&to) || written.contains(&from) || from == to {
            runs.push(0);
            named.clear();
            written.clear();
        }
        named.extend([from, to]);
        written.insert(to);
        if let Some(run) = runs.last_mut() {
            *run += 1;
        }
    }
    runs
}

//! Low-rank additions to linear layers (LoRA; Hu et al., 2021), for the rows of several adapters at once: the arguments, and what a
//! device that launches kernels holds.
//!
//! ```text
//! LowRankSlots, per layer    slot 0 │ slot 1 │ …    a slot: header, parts, scales, panels of A, panels of B
//! LowRankRows, per step      number of tasks │ slot, first row of t, rows of each │ row of x and y for each row of t
//! ```
//!
//! `csrc/low_rank_args.cuh` states both. They keep their addresses, so a captured graph serves whatever adapters and rows they hold
//! when it is replayed. Factors have the type of the device's activations. A slot's memory is allocated for the greatest rank.

use device::{Buffer, Device, DeviceError, Dtype, Pinned, Queue};
use linear::{AdapterRows, LowRank};

use crate::error::{KernelError, at_least, expect};
use crate::mirror::Mirror;

/// Bytes of a `LowRankHeader` and of a `LowRankPart`.
const HEADER: usize = 16;
const PART: usize = 32;
/// Alignment of scales and panels.
const ALIGN: usize = 64;
/// Ranks, or outputs, of a panel.
const PANEL: usize = 16;

/// Size of the greatest addition to a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowRankSize {
    /// Inputs of the layer.
    pub inputs: usize,
    /// Outputs of the layer.
    pub outputs: usize,
    /// Number of factors A, and of factors B.
    pub parts: usize,
    /// Greatest rank of each A.
    pub rank: usize,
}

impl LowRankSize {
    /// Floats of t in a row.
    pub fn width(&self) -> usize {
        LowRank::most_width(self.parts, self.rank)
    }

    /// Returns the bytes of a slot on a device that launches kernels.
    pub fn slot_bytes(&self, dtype: Dtype) -> usize {
        let up = (self.outputs + self.parts * PANEL) * self.rank;
        let aligned = |bytes: usize| bytes.next_multiple_of(ALIGN);
        let panels = aligned(self.width() * self.inputs * dtype.bytes()) + aligned(up * dtype.bytes());
        // The panels of each part are aligned.
        aligned(HEADER + self.parts * PART) + aligned(4 * self.width()) + panels + self.parts * ALIGN
    }
}

/// The factors of one linear layer in every slot, on a device that launches kernels.
pub struct LowRankSlots {
    size: LowRankSize,
    dtype: Dtype,
    pub(crate) slot_bytes: usize,
    pub(crate) memory: Buffer,
    /// Number of numbers in the factors of each slot.
    numbers: Vec<usize>,
}

impl LowRankSlots {
    /// Allocates empty slots.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(
        device: &dyn Device,
        dtype: Dtype,
        slots: usize,
        size: LowRankSize,
    ) -> Result<LowRankSlots, DeviceError> {
        let slot_bytes = size.slot_bytes(dtype);
        let memory = device.alloc(slots.saturating_mul(slot_bytes))?;
        Ok(LowRankSlots { size, dtype, slot_bytes, memory, numbers: vec![0; slots] })
    }

    /// Copies an addition into a slot, or empties the slot, behind the launches that are enqueued, and waits until that is done.
    /// `stage` has the bytes of a slot.
    ///
    /// # Errors
    /// The slot does not exist, or the addition exceeds the layer or the greatest size; the slot keeps its contents. After an error
    /// of the device it is empty or unusable.
    pub fn set(
        &mut self,
        device: &dyn Device,
        stage: &mut Pinned,
        slot: usize,
        addition: Option<&LowRank>,
    ) -> Result<(), KernelError> {
        let (size, dtype) = (self.size, self.dtype);
        at_least("slots of adapters", self.numbers.len(), slot.saturating_add(1))?;
        let mut words = vec![0u32; (HEADER + size.parts * PART) / size_of::<u32>()];
        // Of the scales, of A, and of each B.
        let mut places = Vec::new();
        let mut end = (HEADER + size.parts * PART).next_multiple_of(ALIGN);
        let mut place = |bytes: usize| {
            let at = end;
            end = (end + bytes).next_multiple_of(ALIGN);
            places.push(at..at + bytes);
            u32::try_from(at).map_err(|_| KernelError::Shape {
                what: "bytes of an adapter in a layer",
                found: at,
                expected: u32::MAX as usize,
            })
        };
        if let Some(addition) = addition {
            let scales = addition.scales();
            expect("inputs of an adapter", addition.inputs(), size.inputs)?;
            at_least("ranks of a layer", size.width(), scales.len())?;
            at_least("parts of a layer", size.parts, addition.up().len())?;
            words[0] = (scales.len() / PANEL) as u32;
            words[1] = addition.up().len() as u32;
            words[2] = place(4 * scales.len())?;
            words[3] = place(addition.down_numbers() * dtype.bytes())?;
            for (up, words) in addition.up().iter().zip(words[4..].chunks_exact_mut(PART / size_of::<u32>())) {
                at_least("outputs of a layer", size.outputs, up.outputs.end)?;
                at_least("ranks of an adapter", scales.len(), up.ranks.end)?;
                let ranges = [up.outputs.start, up.outputs.len(), up.ranks.start, up.ranks.len()];
                words.iter_mut().zip(ranges).for_each(|(word, number)| *word = number as u32);
                words[4] = place(up.numbers() * dtype.bytes())?;
            }
        }
        at_least("bytes of a slot", self.slot_bytes, end)?;
        let host = &mut stage.host_mut::<u8>()?;
        at_least("bytes of the staging memory", host.len(), end)?;
        host.as_chunks_mut().0.iter_mut().zip(&words).for_each(|(to, word)| *to = word.to_le_bytes());
        if let (Some(addition), [scales, down, ups @ ..]) = (addition, &places[..]) {
            let to = host[scales.clone()].as_chunks_mut().0.iter_mut();
            to.zip(addition.scales()).for_each(|(to, scale)| *to = scale.to_le_bytes());
            addition.write_down(dtype, &mut host[down.clone()]);
            addition.up().iter().zip(ups).for_each(|(up, place)| up.write(dtype, &mut host[place.clone()]));
        }
        let up = addition.map_or(0, |addition| addition.up().iter().map(|up| up.numbers()).sum());
        self.numbers[slot] = addition.map_or(0, LowRank::down_numbers) + up;
        device.upload_async(Queue::Compute, stage, 0, &mut self.memory, slot * self.slot_bytes, end)?;
        Ok(device.record(Queue::Compute)?.synchronize()?)
    }
}

/// The rows of a step by slot. On a device that launches kernels, also the array that these read.
pub struct LowRankRows {
    rows: AdapterRows,
    /// Number of slots.
    slots: usize,
    /// One past the last row with an adapter.
    end: usize,
    table: Option<Mirror>,
    /// Contents of the array; reused.
    words: Vec<u32>,
}

impl LowRankRows {
    /// No rows, with memory for steps of `max_rows` rows.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(device: &dyn Device, max_rows: usize, slots: usize) -> Result<LowRankRows, DeviceError> {
        let table = || Mirror::new(device, LowRankRows::bytes(max_rows, slots));
        let table = device.features().launches.then(table).transpose()?;
        Ok(LowRankRows { rows: AdapterRows::default(), slots, end: 0, table, words: Vec::new() })
    }

    /// Returns the bytes of device memory on a device that launches kernels.
    pub fn bytes(max_rows: usize, slots: usize) -> usize {
        (1 + 3 * AdapterRows::most_tasks(max_rows, slots) + max_rows) * size_of::<u32>()
    }

    /// Sets the slot of each row of the step, in the order of the rows. Nothing has reached the device yet: send
    /// [`LowRankRows::array`].
    ///
    /// # Errors
    /// A slot does not exist, or there are more rows than there is memory for.
    pub fn set(&mut self, of_rows: impl IntoIterator<Item = Option<u32>>) -> Result<(), KernelError> {
        let LowRankRows { rows, slots, end, table, words } = self;
        rows.set(of_rows);
        words.clear();
        words.push(rows.tasks().len() as u32);
        let (mut first, mut last) = (0, None);
        for (slot, of_task) in rows.tasks() {
            at_least("slots of adapters", *slots, slot as usize + 1)?;
            words.extend([slot, first, of_task.len() as u32]);
            first += of_task.len() as u32;
        }
        for (_, row) in rows.tasks().flat_map(|(_, of_task)| of_task) {
            words.push(*row);
            last = last.max(Some(*row));
        }
        *end = last.map_or(0, |last| last as usize + 1);
        table.as_mut().map_or(Ok(()), |table| table.set(words.iter().map(|word| word.to_ne_bytes())))
    }

    /// Returns the array of the rows on a device that launches kernels.
    pub fn array(&mut self) -> Option<&mut Mirror> {
        self.table.as_mut()
    }

    /// As [`LowRankRows::set`], and sends the array and waits until it has arrived.
    ///
    /// # Errors
    /// As for [`LowRankRows::set`]; the error of the copy.
    pub fn load(
        &mut self,
        device: &dyn Device,
        of_rows: impl IntoIterator<Item = Option<u32>>,
    ) -> Result<(), KernelError> {
        self.set(of_rows)?;
        Ok(self.array().map_or(Ok(()), |array| array.send(device))?)
    }

    pub(crate) fn by_slot(&self) -> &AdapterRows {
        &self.rows
    }

    /// Returns whether no row has an adapter.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// Factors of a linear layer for a step's slots.
pub enum LowRankFactors<'a> {
    /// On a CPU.
    Host {
        /// Inputs of the layer.
        inputs: usize,
        /// Outputs of the layer.
        outputs: usize,
        /// The addition of a slot; `None`: it adds nothing to this layer.
        of: &'a (dyn Fn(u32) -> Option<&'a LowRank> + Sync),
        /// The step's row that is the first of x and y. Rows of the step that these do not have are ignored.
        first: usize,
    },
    /// On a device that launches kernels, for all rows of the step.
    Device {
        /// The factors.
        slots: &'a LowRankSlots,
        /// Scratch for t, float32 `[num_rows, width]`.
        t: &'a mut Buffer,
    },
}

/// Low-rank addition to a linear layer: `y += (s·x·Aᵀ)·Bᵀ` for the rows that have an adapter, each with the factors of its slot.
/// Other rows are not touched. The result of a row depends on that row and its slot alone, bit for bit. On a CPU factors are multiplied in
/// the arithmetic that they were packed for.
pub struct LowRankArgs<'a> {
    /// Input rows `[num_rows, inputs]`.
    pub x: &'a Buffer,
    /// Outputs `[num_rows, outputs]`, of the same type, which are added to.
    pub y: &'a mut Buffer,
    /// Number of rows of x and y.
    pub num_rows: usize,
    /// The slots of the rows of the step.
    pub rows: &'a LowRankRows,
    /// The factors of the slots.
    pub factors: LowRankFactors<'a>,
}

/// Sizes of a call.
pub(crate) struct Sizes {
    pub inputs: usize,
    pub outputs: usize,
    pub width: usize,
}

impl LowRankArgs<'_> {
    /// Sizes of the layer and of t.
    pub(crate) fn sizes(&self) -> Sizes {
        match &self.factors {
            LowRankFactors::Host { inputs, outputs, .. } => Sizes { inputs: *inputs, outputs: *outputs, width: 0 },
            LowRankFactors::Device { slots, .. } => {
                let LowRankSize { inputs, outputs, .. } = slots.size;
                Sizes { inputs, outputs, width: slots.size.width() }
            }
        }
    }

    /// Checks everything that a kernel relies on.
    pub(crate) fn check(&self) -> Result<Sizes, KernelError> {
        let sizes = self.sizes();
        if let LowRankFactors::Device { slots, t } = &self.factors {
            expect("slots of the rows", self.rows.slots, slots.numbers.len())?;
            at_least("rows of the step", self.num_rows, self.rows.end)?;
            at_least("elements of t", t.len_bytes() / size_of::<f32>(), self.num_rows * sizes.width)?;
        }
        let elements = |buffer: &Buffer| buffer.len_bytes() / self.dtype().bytes();
        at_least("inputs of the rows", elements(self.x), self.num_rows * sizes.inputs)?;
        at_least("outputs of the rows", elements(self.y), self.num_rows * sizes.outputs)?;
        Ok(sizes)
    }

    /// The greatest number of tasks of a step with so many rows.
    pub(crate) fn most_tasks(&self) -> usize {
        AdapterRows::most_tasks(self.num_rows, self.rows.slots)
    }

    /// The array of the rows on the device.
    pub(crate) fn table(&self) -> Option<&Buffer> {
        self.rows.table.as_ref().map(Mirror::buffer)
    }

    /// Number of numbers in the factors of a slot, and the bytes of one.
    pub(crate) fn factors_of(&self, slot: u32) -> (usize, usize) {
        match &self.factors {
            LowRankFactors::Host { of, .. } => {
                let up = |it: &LowRank| it.up().iter().map(|up| up.numbers()).sum::<usize>();
                let it = of(slot);
                let numbers = it.map_or(0, |it| it.down_numbers() + up(it));
                (numbers, it.map_or(0, LowRank::bytes) / numbers.max(1))
            }
            LowRankFactors::Device { slots, .. } => {
                (slots.numbers.get(slot as usize).copied().unwrap_or(0), slots.dtype.bytes())
            }
        }
    }

    /// Number of the step's rows that x and y have.
    pub(crate) fn held(&self, of_task: &[(u32, u32)]) -> usize {
        let first = if let LowRankFactors::Host { first, .. } = self.factors { first } else { 0 };
        of_task.iter().filter(|(_, row)| (first..first + self.num_rows).contains(&(*row as usize))).count()
    }

    /// Type of x and y.
    pub(crate) fn dtype(&self) -> Dtype {
        if let LowRankFactors::Device { slots, .. } = &self.factors { slots.dtype } else { Dtype::F32 }
    }
}

//! LoRA adapters in a step: the slots, the rows of each, and the product behind that of a linear layer.
//!
//! A slot holds the adapter that a row names by number ([`ForwardBatch::adapters`]). Rows without an adapter keep their bits: the
//! product of the layer is computed as without adapters, and only rows with one are added to. A step without such rows launches
//! nothing more than without adapters. On a device that launches kernels, all memory is allocated when the model is loaded, and a
//! slot's factors are uploaded when it is set.

use std::ops::Range;
use std::sync::Arc;

use attention_kernels::{
    Dtype, KernelError, KernelSet, LowRankArgs, LowRankFactors, LowRankRows, LowRankSize, LowRankSlots, Mirror,
};
use device::{Buffer, Device, DeviceError, Features, Pinned};
use linear::LowRank;

use super::ForwardBatch;
use crate::Decoder;
use crate::lora::{Adapter, AdapterLimits, adapter_sizes, most_adapter_width};

/// See the [module](self).
pub(super) struct Adapters {
    factors: Factors,
    /// Inputs and outputs of each linear layer.
    shapes: Vec<[usize; 2]>,
    /// The rows of the step by slot, before and after rows are dropped.
    all: LowRankRows,
    kept: LowRankRows,
    /// Slot of each row; reused.
    of_rows: Vec<Option<u32>>,
    /// Whether the step adds products.
    pub active: bool,
}

/// Contents of the slots.
enum Factors {
    Host(Vec<Option<Arc<Adapter>>>),
    Device {
        /// In the order of the decoder's linear layers; `None` for those that take no adapters.
        layers: Vec<Option<LowRankSlots>>,
        stage: Pinned,
        /// Whether a slot holds an adapter.
        filled: Vec<bool>,
    },
}

impl Factors {
    /// Number of slots.
    fn len(&self) -> usize {
        match self {
            Factors::Host(slots) => slots.len(),
            Factors::Device { filled, .. } => filled.len(),
        }
    }

    fn is_filled(&self, slot: u32) -> bool {
        match self {
            Factors::Host(slots) => slots.get(slot as usize).is_some_and(Option::is_some),
            Factors::Device { filled, .. } => filled.get(slot as usize).copied().unwrap_or(false),
        }
    }
}

impl Adapters {
    /// Bytes of the buffers of steps of so many rows, not counting the slots
    /// ([`adapter_slot_bytes`](crate::lora::adapter_slot_bytes)).
    pub fn bytes(decoder: &Decoder, device: &dyn Device, max_rows: usize) -> usize {
        let Some(limits) = decoder.adapters else { return 0 };
        let features = device.features();
        if !features.launches {
            let most = |of: fn(&LowRankSize) -> usize| {
                adapter_sizes(decoder, &limits).flatten().map(|size| of(&size)).max().unwrap_or(0)
            };
            let (inputs, outputs, parts) = (most(|it| it.inputs), most(|it| it.outputs), most(|it| it.parts));
            let of_thread = LowRank::scratch_bytes(inputs, outputs, parts, limits.rank);
            return device.pool().threads() * of_thread;
        }
        Adapters::scratch_bytes(decoder, features, max_rows) + 2 * LowRankRows::bytes(max_rows, limits.slots)
    }

    /// Bytes of the scratch memory of products, which a device that launches kernels needs: float32 `[max_rows, width]`.
    pub fn scratch_bytes(decoder: &Decoder, features: Features, max_rows: usize) -> usize {
        let width = |limits| most_adapter_width(decoder, &limits);
        if features.launches { max_rows * decoder.adapters.map_or(0, width) * size_of::<f32>() } else { 0 }
    }

    /// Empty slots for a decoder that computes in a type.
    pub fn new(
        device: &dyn Device,
        decoder: &Decoder,
        limits: &AdapterLimits,
        dtype: Dtype,
        max_rows: usize,
    ) -> Result<Adapters, DeviceError> {
        let sizes: Vec<_> = adapter_sizes(decoder, limits).collect();
        let factors = if device.features().launches {
            let largest = sizes.iter().flatten().map(|size| size.slot_bytes(dtype)).max().unwrap_or(0);
            let layer = |size| LowRankSlots::new(device, dtype, limits.slots, size);
            let layers = sizes.into_iter().map(|size| size.map(layer).transpose()).collect::<Result<_, _>>()?;
            Factors::Device { layers, stage: device.pinned(largest)?, filled: vec![false; limits.slots] }
        } else {
            Factors::Host(vec![None; limits.slots])
        };
        let rows = || LowRankRows::new(device, max_rows, limits.slots);
        Ok(Adapters {
            factors,
            shapes: decoder.linears().map(|linear| [linear.inputs, linear.rows()]).collect(),
            all: rows()?,
            kept: rows()?,
            of_rows: Vec::with_capacity(max_rows),
            active: false,
        })
    }

    /// Puts an adapter into a slot, or empties the slot. After an error of the device the slot is empty.
    pub fn set(&mut self, device: &dyn Device, slot: usize, adapter: Option<Arc<Adapter>>) -> Result<(), KernelError> {
        let expected = self.factors.len();
        if slot >= expected {
            return Err(KernelError::Shape { what: "slot of an adapter", found: slot, expected });
        }
        match &mut self.factors {
            Factors::Host(slots) => slots[slot] = adapter,
            Factors::Device { layers, stage, filled } => {
                filled[slot] = false;
                for (linear, layer) in layers.iter_mut().enumerate() {
                    if let Some(layer) = layer {
                        let addition = adapter.as_ref().and_then(|adapter| adapter.linear(linear));
                        layer.set(device, stage, slot, addition)?;
                    }
                }
                filled[slot] = adapter.is_some();
            }
        }
        Ok(())
    }

    /// Checks the slots of a batch and groups its rows; [`Adapters::arrays`] must then be sent to a device that launches kernels.
    pub fn load(&mut self, batch: &ForwardBatch) -> Result<(), KernelError> {
        let Adapters { factors, all, kept, of_rows, active, .. } = self;
        of_rows.clear();
        let starts = batch.groups.first().map_or(&[][..], |group| &group.attention.query_starts);
        for (seq, bounds) in starts.windows(2).enumerate() {
            let slot = batch.adapters.get(seq).copied().filter(|slot| *slot != ForwardBatch::NO_ADAPTER);
            if let Some(slot) = slot.filter(|slot| !factors.is_filled(*slot)) {
                let (found, expected) = (slot as usize, factors.len());
                return Err(KernelError::Shape { what: "slot with an adapter", found, expected });
            }
            of_rows.extend((bounds[0]..bounds[1]).map(|_| slot));
        }
        all.set(of_rows.iter().copied())?;
        if let Some(needed) = &batch.needed {
            kept.set(needed.iter().map(|row| of_rows.get(*row as usize).copied().flatten()))?;
        }
        *active = !all.is_empty();
        Ok(())
    }

    /// The arrays of the rows on a device that launches kernels.
    pub fn arrays(&mut self) -> impl Iterator<Item = &mut Mirror> {
        [&mut self.all, &mut self.kept].into_iter().flat_map(LowRankRows::array)
    }

    /// Adds the adapters' products of some rows of `x` to `y`, the output of a linear layer. `dropped`: the rows are among those that
    /// are left after the others were dropped. `t`: [scratch memory](Adapters::scratch_bytes).
    pub fn apply(
        &self,
        (kernels, device): (&KernelSet, &dyn Device),
        linear: usize,
        (x, y): (&Buffer, &mut Buffer),
        (of_step, dropped): (Range<usize>, bool),
        t: Option<&mut Buffer>,
    ) -> Result<(), KernelError> {
        let rows = if dropped { &self.kept } else { &self.all };
        let Some(&[inputs, outputs]) = self.shapes.get(linear) else { return Ok(()) };
        let on_host = if let Factors::Host(slots) = &self.factors { &slots[..] } else { &[] };
        let of = |slot: u32| -> Option<&LowRank> { on_host.get(slot as usize)?.as_ref()?.linear(linear) };
        let (first, num_rows) = (of_step.start, of_step.len());
        let factors = match (&self.factors, t) {
            (Factors::Host(slots), _) => {
                if rows.is_empty() || (0..slots.len() as u32).all(|slot| of(slot).is_none()) {
                    return Ok(());
                }
                LowRankFactors::Host { inputs, outputs, of: &of, first }
            }
            // What the slots hold does not matter: a captured graph is replayed with other contents.
            (Factors::Device { layers, .. }, Some(t)) => match layers.get(linear) {
                Some(Some(slots)) => LowRankFactors::Device { slots, t },
                _ => return Ok(()),
            },
            (Factors::Device { .. }, None) => return Ok(()),
        };
        kernels.low_rank.low_rank(device, LowRankArgs { x, y, num_rows, rows, factors })
    }
}

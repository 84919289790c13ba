//! LoRA adapters in a step: the slots, the rows of each, and the product behind that of a linear layer.
//!
//! A slot holds the adapter that a row names by number ([`ForwardBatch::adapters`]). Rows without an adapter keep their bits: the
//! product of the layer is computed as without adapters, and only rows with one are added to.

use std::sync::Arc;

use attention_kernels::KernelError;
use device::gemm::{AdapterRows, LowRank, LowRankProduct, low_rank};
use device::{Buffer, Device, Isa};

use super::ForwardBatch;
use crate::Decoder;
use crate::lora::{Adapter, AdapterLimits, most_adapter_width};

/// See the [module](self).
pub(super) struct Adapters {
    slots: Vec<Option<Arc<Adapter>>>,
    /// Inputs and outputs of each linear layer.
    shapes: Vec<[usize; 2]>,
    isa: Isa,
    /// The rows of the step by slot, before and after rows are dropped.
    all: AdapterRows,
    kept: AdapterRows,
    /// Slot of each row; reused.
    of_rows: Vec<Option<u32>>,
    /// `[max_rows, width]`.
    scratch: Vec<f32>,
    width: usize,
}

impl Adapters {
    /// Bytes of the buffers of steps of so many rows.
    pub fn bytes(decoder: &Decoder, max_rows: usize) -> usize {
        let width = decoder.adapters.map_or(0, |limits| most_adapter_width(decoder, &limits));
        max_rows * width * size_of::<f32>()
    }

    /// Empty slots for a decoder.
    pub fn new(decoder: &Decoder, limits: &AdapterLimits, max_rows: usize) -> Adapters {
        let width = most_adapter_width(decoder, limits);
        Adapters {
            slots: vec![None; limits.slots],
            shapes: decoder.linears().map(|linear| [linear.inputs, linear.rows()]).collect(),
            isa: Isa::best(),
            all: AdapterRows::default(),
            kept: AdapterRows::default(),
            of_rows: Vec::with_capacity(max_rows),
            scratch: vec![0.0; max_rows * width],
            width,
        }
    }

    pub fn set(&mut self, slot: usize, adapter: Option<Arc<Adapter>>) -> Result<(), KernelError> {
        let expected = self.slots.len();
        let place = self.slots.get_mut(slot);
        *place.ok_or(KernelError::Shape { what: "slot of an adapter", found: slot, expected })? = adapter;
        Ok(())
    }

    /// Checks the slots of a batch and groups its rows.
    pub fn load(&mut self, batch: &ForwardBatch) -> Result<(), KernelError> {
        let Adapters { slots, all, kept, of_rows, .. } = self;
        of_rows.clear();
        let Some(group) = batch.groups.first() else { return Ok(()) };
        for (seq, bounds) in group.attention.query_starts.windows(2).enumerate() {
            let slot = batch.adapters.get(seq).copied().filter(|slot| *slot != ForwardBatch::NO_ADAPTER);
            if let Some(slot) = slot
                && slots.get(slot as usize).is_none_or(Option::is_none)
            {
                let (found, expected) = (slot as usize, slots.len());
                return Err(KernelError::Shape { what: "slot with an adapter", found, expected });
            }
            of_rows.extend((bounds[0]..bounds[1]).map(|_| slot));
        }
        all.set(of_rows.iter().copied());
        match &batch.needed {
            Some(needed) => kept.set(needed.iter().map(|row| of_rows.get(*row as usize).copied().flatten())),
            None => kept.clone_from(all),
        }
        Ok(())
    }

    /// Adds the adapters' products of the rows of `x` to `y`, the output of a linear layer. `dropped`: the rows are those that
    /// are left after the others were dropped.
    pub fn apply(
        &mut self,
        device: &dyn Device,
        linear: usize,
        x: &Buffer,
        y: &mut Buffer,
        dropped: bool,
    ) -> Result<(), KernelError> {
        let Adapters { slots, shapes, isa, all, kept, scratch, width, .. } = self;
        let rows = if dropped { &*kept } else { &*all };
        let of = |slot: u32| -> Option<&LowRank> { slots.get(slot as usize)?.as_ref()?.linear(linear) };
        if rows.is_empty() || (0..slots.len() as u32).all(|slot| of(slot).is_none()) {
            return Ok(());
        }
        let Some(&[inputs, outputs]) = shapes.get(linear) else { return Ok(()) };
        let (x, y) = (x.host::<f32>()?, y.host_mut::<f32>()?);
        let product = LowRankProduct { x, inputs, y, outputs, rows, adapters: &of, t: scratch, width: *width };
        low_rank(*isa, device.pool(), product);
        Ok(())
    }
}

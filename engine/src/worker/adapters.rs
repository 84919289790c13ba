//! The adapters of a step in the slots of the model.
//!
//! A slot keeps its adapter until a step needs the slot for another. The one that was used longest ago makes room. Adapters come from
//! the store in host memory. The engine plans a request only while the store has its adapter; in a replay the store reads it here.

use std::sync::Arc;

use models::lora::{AdapterError, AdapterRef, AdapterStore};

use super::executor::Executor;
use attention_kernels::KernelError;

/// Why the adapters of a step could not be provided.
#[derive(Debug, thiserror::Error)]
pub(super) enum SlotError {
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error("a step of more than {0} adapters (--max-loras)")]
    TooMany(usize),
}

/// A slot: the digest of its adapter, and the last step that used it.
type Slot = (Option<String>, u64);

/// See the [module](self).
pub(super) struct AdapterSlots {
    store: Arc<AdapterStore>,
    slots: Vec<Slot>,
    step: u64,
}

impl AdapterSlots {
    pub fn new(store: Arc<AdapterStore>, slots: usize) -> AdapterSlots {
        AdapterSlots { store, slots: vec![(None, 0); slots], step: 0 }
    }

    /// The slot of an adapter; `None` if no slot has it.
    pub fn slot_of(&self, adapter: &AdapterRef) -> Option<u32> {
        let at = self.slots.iter().position(|(digest, _)| digest.as_ref() == Some(&adapter.digest));
        at.map(|slot| slot as u32)
    }

    /// Puts the adapters of a step into slots.
    pub fn assign<'a>(
        &mut self,
        wanted: impl Iterator<Item = &'a AdapterRef> + Clone,
        executor: &mut Executor,
    ) -> Result<(), SlotError> {
        self.step += 1;
        // Those that are in a slot stay there.
        for slot in wanted.clone().filter_map(|adapter| self.slot_of(adapter)).collect::<Vec<_>>() {
            self.slots[slot as usize].1 = self.step;
        }
        for adapter in wanted {
            if self.slot_of(adapter).is_some() {
                continue;
            }
            let loaded = self.store.get(adapter)?;
            let (most, step) = (self.slots.len(), self.step);
            let free = self.slots.iter_mut().enumerate().min_by_key(|(_, (_, used))| *used);
            let (at, slot) = free.filter(|(_, (_, used))| *used < step).ok_or(SlotError::TooMany(most))?;
            // A slot whose upload fails has no adapter.
            slot.0 = None;
            executor.set_adapter(at, loaded)?;
            *slot = (Some(adapter.digest.clone()), step);
        }
        Ok(())
    }
}

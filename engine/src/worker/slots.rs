//! Which sequences draw on the device, and in which of its slots.
//!
//! A sequence gets a slot of the [`DeviceSampler`] with the first row that it draws from, and has it until it ends or loses
//! its keys and values. When it resumes it gets another, with the output that it has by then.
//!
//! Costs: nothing is allocated, and nothing sent, for a sequence that goes on as before.

use std::sync::Arc;

use attention_kernels::KernelError;
use device::profile::{self, Cost};
use device::{Buffer, Device, Dtype, Queue};
use sampling::device::{DeviceSampler, Limits, Logits, Pending, Row, SampleError, TokenCopy};
use sampling::{Context, Sampled, TokenSet};
use sched::SeqId;

use super::NewRequest;
use super::request::RequestState;

/// The device's sampler, and who is in it.
pub(super) struct Slots {
    device: Arc<dyn Device>,
    sampler: DeviceSampler,
    free: Vec<u32>,
    /// Of the step that is made ready.
    rows: Vec<Row>,
    places: Vec<TokenCopy>,
}

impl Slots {
    pub fn new(device: Arc<dyn Device>, limits: Limits) -> Result<Slots, SampleError> {
        let sampler = DeviceSampler::new(device.clone(), limits)?;
        let count = limits.max_num_seqs;
        let free = (0..count as u32).rev().collect();
        let (rows, places) = (Vec::with_capacity(count), Vec::with_capacity(count));
        Ok(Slots { device, sampler, free, rows, places })
    }

    /// Takes a sequence's slot away, if it has one.
    pub fn release(&mut self, slot: &mut Option<u32>) {
        if let Some(slot) = slot.take() {
            self.sampler.clear_row(slot);
            self.free.push(slot);
        }
    }

    /// Takes the slots of all sequences of a request away.
    pub fn release_all(&mut self, request: &mut RequestState) {
        request.slots.iter_mut().for_each(|slot| self.release(slot));
    }

    /// Slots that are taken.
    pub fn in_use(&self) -> usize {
        self.limits().max_num_seqs - self.free.len()
    }

    /// What a slot has room for.
    pub fn limits(&self) -> &Limits {
        self.sampler.limits()
    }

    /// Begins a step.
    pub fn begin(&mut self) {
        self.rows.clear();
        self.places.clear();
    }

    /// Adds a row for each of these sequences, which draw from one row of the logits and are held to `allowed`.
    pub fn add_rows(
        &mut self,
        request: &mut RequestState,
        sequences: &[SeqId],
        logits_row: u32,
        allowed: Option<&TokenSet>,
    ) -> Result<(), SampleError> {
        // Sequences that share a row have the same output so far, so that one is a fork of the other.
        let mut first = None;
        for &SeqId { index, .. } in sequences {
            let Some(Some(output)) = request.outputs.get(index as usize) else { continue };
            let slot = match (request.slots[index as usize], first) {
                (Some(slot), _) => {
                    if allowed.is_some() {
                        self.sampler.constrain(slot, allowed)?;
                    }
                    slot
                }
                (None, from) => {
                    let found = self.sampler.limits().max_num_seqs;
                    let slot =
                        self.free.pop().ok_or(SampleError::TooMany { what: "slots", found: found + 1, most: found })?;
                    // It is the sequence's from here on, whatever comes.
                    request.slots[index as usize] = Some(slot);
                    match from {
                        Some(from) => self.sampler.fork(from, slot, index)?,
                        None => {
                            let NewRequest { prompt, stop_ids, seed, sampling, .. } = &*request.request;
                            let (seed, sequence) = (*seed, index);
                            let context = Context { prompt, output, stop_ids, allowed, seed, sequence };
                            self.sampler.set_row(slot, sampling, &context)?;
                        }
                    }
                    slot
                }
            };
            first.get_or_insert(slot);
            self.rows.push(Row { slot, logits_row });
        }
        Ok(())
    }

    /// The last token of the sequence in that slot, which a step in flight draws, is token `at` of this step.
    pub fn awaits(&mut self, slot: u32, at: u32) {
        self.places.push(TokenCopy { slot, index: at });
    }

    /// Sends what the step needs; before its forward pass.
    pub fn stage(&mut self) -> Result<(), SampleError> {
        self.sampler.set_token_copies(&self.places)?;
        self.sampler.stage(&self.rows, self.rows.len())
    }

    /// Puts the tokens that the step awaits in their places.
    pub fn fill(&self, tokens: &Buffer) -> Result<(), KernelError> {
        self.sampler.copy_tokens(tokens).map_err(|error| match error {
            SampleError::Device(error) => error.into(),
            SampleError::TokenIndex { index, len } => {
                KernelError::Shape { what: "row of an awaited token", found: index as usize, expected: len }
            }
            other => KernelError::Unsupported { variant: "sampling", found: other.to_string() },
        })
    }

    /// Draws from these rows of logits, which are of float32 and without gaps; behind the forward pass.
    pub fn draw(&mut self, logits: &Buffer) -> Result<Pending, SampleError> {
        let logits = Logits { buffer: logits, dtype: Dtype::F32, stride: self.sampler.limits().vocab };
        let time = profile::start(&*self.device, Queue::Compute, "sample", "cuda.sample", Cost::default);
        self.sampler.launch(&logits, self.rows.len())?;
        drop(time);
        self.sampler.read()
    }

    /// Waits for the draws of a step.
    pub fn collect(&self, pending: &Pending) -> Result<impl Iterator<Item = Sampled>, SampleError> {
        let _phase = self.device.profile().and_then(|profile| profile.phase("wait"));
        self.sampler.collect(pending)
    }
}

//! Which sequences draw on the device, and in which slots of its sampler.
//!
//! A sequence gets a slot of the [`DeviceSampler`] with the first row that it draws from, and keeps it until it ends or loses its
//! keys and values. When it resumes, it gets another slot, filled with its output so far.
//!
//! A sequence that simply continues costs no allocation and no copy to the device.
//!
//! The rows of a sequence with drafts are drawn in one step. The slot takes only the tokens up to the first wrong draft, as the worker
//! does when it collects the step, so it stays as it is when the sequence goes on.

use std::collections::HashMap;
use std::sync::Arc;

use attention_kernels::KernelError;
use device::profile::{self, Cost};
use device::{Buffer, Device, Dtype, Queue};
use sampling::device::{DeviceSampler, Limits, Logits, Pending, Row, SampleError, TokenCopy};
use sampling::{Context, Sampled, TokenSet};
use sched::{RequestId, SeqId, Span};

use super::request::RequestState;
use super::{Draw, NewRequest, phase};

/// A row that the device draws from.
#[derive(Clone, Copy)]
pub(super) struct DeviceRow {
    pub seq: SeqId,
    /// The draft that its token is compared with; `None`: no further row of the sequence follows.
    pub draft: Option<u32>,
}

impl DeviceRow {
    /// The rows of a sequence with these drafts.
    pub fn each(seq: SeqId, drafts: &[u32]) -> impl Iterator<Item = DeviceRow> {
        drafts.iter().map(|draft| Some(*draft)).chain([None]).map(move |draft| DeviceRow { seq, draft })
    }
}

/// The device's sampler and its free slots.
pub(super) struct Slots {
    device: Arc<dyn Device>,
    sampler: DeviceSampler,
    free: Vec<u32>,
    /// Rows that the current step draws from.
    rows: Vec<Row>,
    /// Tokens of the current step that are known only on the device.
    places: Vec<TokenCopy>,
}

impl Slots {
    pub fn new(device: Arc<dyn Device>, limits: Limits) -> Result<Slots, SampleError> {
        let sampler = DeviceSampler::new(device.clone(), limits)?;
        let count = limits.max_num_seqs;
        let free = (0..count as u32).rev().collect();
        let (rows, places) = (Vec::with_capacity(limits.max_rows), Vec::with_capacity(count));
        Ok(Slots { device, sampler, free, rows, places })
    }

    /// Frees a sequence's slot, if it has one.
    pub fn release(&mut self, slot: &mut Option<u32>) {
        if let Some(slot) = slot.take() {
            self.sampler.clear_row(slot);
            self.free.push(slot);
        }
    }

    /// Frees the slots of all sequences of a request.
    pub fn release_all(&mut self, request: &mut RequestState) {
        request.slots.iter_mut().for_each(|slot| self.release(slot));
    }

    /// Number of slots in use.
    pub fn in_use(&self) -> usize {
        self.sampler.limits().max_num_seqs - self.free.len()
    }

    /// Clears the lists for a new step.
    pub fn begin(&mut self) {
        self.rows.clear();
        self.places.clear();
    }

    /// Most rows of a step.
    pub fn max_rows(&self) -> usize {
        self.sampler.limits().max_rows
    }

    /// Adds a draw for each of these sequences from one row of the logits, restricted to `allowed`. With `drafts`, from that row and
    /// one further row for each of them.
    pub fn add_rows(
        &mut self,
        request: &mut RequestState,
        sequences: impl IntoIterator<Item = SeqId>,
        logits_row: u32,
        (allowed, drafts): (Option<&TokenSet>, &[u32]),
    ) -> Result<(), SampleError> {
        // Sequences that share a row have the same output so far, so their slots are forks of the first one's.
        let mut first = None;
        for SeqId { index, .. } in sequences {
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
                    // Assigned before the calls that may fail, so that it is freed with the sequence.
                    request.slots[index as usize] = Some(slot);
                    let sequence = request.request.first_sequence + index;
                    match from {
                        Some(from) => self.sampler.fork(from, slot, sequence)?,
                        None => {
                            let NewRequest { prompt, stop_ids, seed, sampling, .. } = &*request.request;
                            let context = Context { prompt, output, stop_ids, allowed, seed: *seed, sequence };
                            self.sampler.set_row(slot, sampling, &context)?;
                        }
                    }
                    slot
                }
            };
            first.get_or_insert(slot);
            self.rows.extend(Row::with_drafts(slot, logits_row, drafts));
        }
        Ok(())
    }

    /// Notes that token `at` of this step is the last token of the sequence in `slot`, which a step in flight draws.
    pub fn add_awaited(&mut self, slot: u32, at: u32) {
        self.places.push(TokenCopy { slot, index: at });
    }

    /// Sends the step's inputs to the sampler, before the forward pass.
    pub fn stage(&mut self) -> Result<(), SampleError> {
        self.sampler.set_token_copies(&self.places)?;
        self.sampler.stage(&self.rows, self.rows.len())
    }

    /// Copies the awaited tokens into the step's token array.
    pub fn fill(&self, tokens: &Buffer) -> Result<(), KernelError> {
        self.sampler.copy_tokens(tokens).map_err(|error| match error {
            SampleError::Device(error) => error.into(),
            SampleError::TokenIndex { index, len } => {
                KernelError::Shape { what: "row of an awaited token", found: index as usize, expected: len }
            }
            other => KernelError::Unsupported { variant: "sampling", found: other.to_string() },
        })
    }

    /// Draws from contiguous float32 rows of logits, after the forward pass.
    pub fn draw(&mut self, logits: &Buffer) -> Result<Pending, SampleError> {
        let logits = Logits { buffer: logits, dtype: Dtype::F32, stride: self.sampler.limits().vocab };
        let time = profile::start(&*self.device, Queue::Compute, "sample", "cuda.sample", Cost::default);
        self.sampler.launch(&logits, self.rows.len())?;
        drop(time);
        self.sampler.read()
    }

    /// Waits for the draws of a step.
    pub fn collect(&self, pending: &Pending) -> Result<impl Iterator<Item = Sampled>, SampleError> {
        let _phase = phase(&*self.device, "wait");
        self.sampler.collect(pending)
    }
}

/// Number of tokens that the device draws in a step from spans without drafts.
pub(super) fn num_single_draws(spans: &[Span], draws: &[Draw], requests: &HashMap<RequestId, RequestState>) -> usize {
    if spans.iter().all(|span| span.drafts == 0) {
        return 0;
    }
    let tokens = spans.iter().zip(draws).filter(|(_, draw)| matches!(draw, Draw::Tokens { .. }));
    let state = |span: &Span| requests.get(&span.seq.request).filter(|state| !state.request.on_host);
    tokens.filter_map(|(span, _)| Some(state(span)?.live(span).count())).sum()
}

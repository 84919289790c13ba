//! The device sampler: its memory, its slots, and a step.

use std::sync::Arc;

use device::{Arg, Buffer, Device, DeviceError, Dtype, Event, Launch, Pinned, Queue};

use super::args::{
    AcceptShape, CHUNK_THREADS, ForkShape, HistoryShape, MAX_DRAFTS, MODULE, NO_SLOT, ROW_THREADS, Row, RowParams,
    RowResult, SampleShape, TokenCopy, Top, flag,
};
use super::arrays::{Array, Arrays};
use super::limits::{Limits, SampleError, at_most};
use super::slot::{EncodedRequest, Slot};
use super::staging::Staging;
use crate::{Context, Sampled, SamplingParams, TokenLogprobs, TokenSet};

/// The kernels of a step, in order.
fn kernels(dtype: Dtype) -> [&'static str; 4] {
    match dtype {
        Dtype::F32 => ["sample_adjust_f32", "sample_filter_f32", "sample_draw_f32", "sample_finish_f32"],
        Dtype::F16 => ["sample_adjust_f16", "sample_filter_f16", "sample_draw_f16", "sample_finish_f16"],
        Dtype::Bf16 => ["sample_adjust_bf16", "sample_filter_bf16", "sample_draw_bf16", "sample_finish_bf16"],
    }
}

/// Rows of logits on the device.
#[derive(Clone, Copy)]
pub struct Logits<'a> {
    /// The memory; the first row begins at its first byte.
    pub buffer: &'a Buffer,
    /// Type of the logits.
    pub dtype: Dtype,
    /// Elements from the beginning of one row to that of the next, at least the vocabulary.
    pub stride: usize,
}

/// The host's copy of a step's results.
struct Results {
    rows: Pinned,
    tops: Pinned,
    step: u64,
    /// For each row, how many alternatives were requested; `None` without log-probabilities.
    logprobs: Vec<Option<usize>>,
}

/// A step in flight. [`DeviceSampler::collect`] returns its tokens.
pub struct Pending {
    step: u64,
    event: Event,
}

/// Draws tokens on a device. See the [module documentation](super).
pub struct DeviceSampler {
    pub(super) device: Arc<dyn Device>,
    pub(super) limits: Limits,
    pub(super) arrays: Arrays,
    pub(super) staging: Staging,
    slots: Vec<Slot>,
    /// Number of the last step.
    step: u64,
    /// Number of [`DeviceSampler::stage`] calls, refused ones included.
    staged: u64,
    /// Rows of the staged step.
    rows: Vec<Row>,
    /// Contents of [`Array::Rows`], padding included.
    sent_rows: Vec<Row>,
    /// See [`DeviceSampler::set_token_copies`].
    pub(super) token_copies: Vec<TokenCopy>,
    /// Contents of [`Array::TokenCopies`].
    pub(super) sent_token_copies: Vec<TokenCopy>,
    /// Results of the last step with an even number, and of the last with an odd one.
    results: [Results; 2],
}

impl DeviceSampler {
    /// Allocates the memory and loads the kernels.
    ///
    /// # Errors
    /// Limits that are out of range, too little memory, or missing kernels.
    pub fn new(device: Arc<dyn Device>, limits: Limits) -> Result<DeviceSampler, SampleError> {
        limits.check()?;
        device.load(MODULE)?;
        let (seqs, rows) = (limits.max_num_seqs, limits.max_rows);
        let results = || {
            let (results, tops) = (device.pinned(limits.result_bytes())?, device.pinned(limits.top_bytes())?);
            Ok::<_, DeviceError>(Results { rows: results, tops, step: 0, logprobs: Vec::with_capacity(rows) })
        };
        Ok(DeviceSampler {
            arrays: Arrays::new(&*device, &limits)?,
            staging: Staging::new(&*device, limits.staging_bytes())?,
            slots: vec![Slot::default(); seqs],
            step: 0,
            staged: 0,
            rows: Vec::with_capacity(rows),
            sent_rows: Vec::with_capacity(rows),
            token_copies: Vec::with_capacity(seqs),
            sent_token_copies: Vec::with_capacity(seqs),
            results: [results()?, results()?],
            device,
            limits,
        })
    }

    /// The limits that it was built for.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Assigns a sequence, new or resumed, to a slot. Its tokens are then drawn as
    /// [`Sampler::sample`](crate::Sampler::sample) would with these parameters and this context.
    ///
    /// # Errors
    /// [`SampleError::TooMany`], and those of the device.
    pub fn set_row(&mut self, slot: u32, params: &SamplingParams, context: &Context<'_>) -> Result<(), SampleError> {
        let limits = self.limits;
        at_most("slots", slot as usize + 1, limits.max_num_seqs)?;
        let EncodedRequest { params, list, allowed } = EncodedRequest::new(&limits, params, context)?;
        let is_penalised = params.flags & flag::PENALISED != 0;
        let (prompt, output) = if is_penalised {
            (context.prompt, context.output)
        } else {
            (&[][..], &context.output[context.output.len().saturating_sub(limits.bad_word_tokens)..])
        };
        at_most("tokens of a sequence with penalties", prompt.len() + output.len(), limits.history_tokens)?;

        self.reserve(limits.slot_bytes() + size_of_val(prompt) + size_of_val(output))?;
        let at = slot as usize;
        self.staging.upload(Array::Lists, at * limits.list_words, &list);
        if let Some(allowed) = &allowed {
            self.staging.upload(Array::Allowed, at * limits.mask_words(), allowed.words());
        }
        self.staging.upload(Array::History, 0, prompt);
        self.staging.upload(Array::History, prompt.len(), output);
        self.staging.history(HistoryShape {
            slot,
            vocab: limits.vocab as u32,
            tail_tokens: limits.tail_tokens() as u32,
            penalised: u32::from(is_penalised),
            prompt_tokens: prompt.len() as u32,
            last_tokens: output.len() as u32,
            output_len: context.output.len() as u32,
            padding: 0,
        });
        self.slots[at].params = Some(params);
        match context.allowed {
            Some(set) => self.upload_constraint(at, set),
            None => self.upload_params(at),
        }
        Ok(())
    }

    /// Restricts a slot to a set of tokens, or lifts the restriction. A set applies until the next call, so a row with
    /// a grammar needs a call in each step.
    ///
    /// # Errors
    /// [`SampleError::NotSet`], and those of the device.
    pub fn constrain(&mut self, slot: u32, set: Option<&TokenSet>) -> Result<(), SampleError> {
        let at = self.find(slot)?;
        self.reserve(self.limits.slot_bytes())?;
        match set {
            Some(set) => self.upload_constraint(at, set),
            None => {
                if let Some(params) = &mut self.slots[at].params {
                    params.flags &= !flag::CONSTRAINED;
                }
                self.upload_params(at);
            }
        }
        Ok(())
    }

    /// Makes slot `to` a copy of slot `from`, with everything that the device holds for it, as a sequence of its own.
    /// Forks are executed in call order.
    ///
    /// # Errors
    /// [`SampleError::NotSet`], [`SampleError::DuplicateSlot`], and those of the device.
    pub fn fork(&mut self, from: u32, to: u32, sequence: u32) -> Result<(), SampleError> {
        let at = self.find(from)?;
        at_most("slots", to as usize + 1, self.limits.max_num_seqs)?;
        if from == to {
            return Err(SampleError::DuplicateSlot(to));
        }
        let Limits { vocab, list_words, .. } = self.limits;
        let (vocab, list_words, tail_tokens) = (vocab as u32, list_words as u32, self.limits.tail_tokens() as u32);
        self.staging.fork(ForkShape { from, to, sequence, vocab, list_words, tail_tokens });
        let params = self.slots[at].params.map(|params| RowParams { sequence, ..params });
        self.slots[to as usize].params = params;
        Ok(())
    }

    /// Frees a slot. What the device holds for it is not read again.
    pub fn clear_row(&mut self, slot: u32) {
        if let Some(slot) = self.slots.get_mut(slot as usize) {
            slot.params = None;
        }
    }

    /// Sends what has changed since the last step, and the rows of this one. `padded` is the number of rows that will
    /// be launched, at least that of `rows`.
    ///
    /// # Errors
    /// [`SampleError::TooMany`], [`SampleError::NotSet`], [`SampleError::DuplicateSlot`], [`SampleError::Drafts`], and those
    /// of the device.
    pub fn stage(&mut self, rows: &[Row], padded: usize) -> Result<(), SampleError> {
        at_most("rows of a step", rows.len().max(padded), self.limits.max_rows)?;
        at_most("rows of a step", rows.len(), padded)?;
        self.staged += 1;
        let mut before = None;
        for row in rows {
            let at = self.find(row.slot)?;
            at_most("drafts of a sequence", row.num_drafts as usize, MAX_DRAFTS)?;
            if !row.follows(before) {
                return Err(SampleError::Drafts(row.slot));
            }
            let is_first = row.num_drafts == 0;
            if is_first && std::mem::replace(&mut self.slots[at].staged, self.staged) == self.staged {
                return Err(SampleError::DuplicateSlot(row.slot));
            }
            before = Some(row);
        }
        if let Some(last) = before.filter(|last| last.draft != Row::NO_DRAFT) {
            return Err(SampleError::Drafts(last.slot));
        }
        self.step += 1;
        let results = &mut self.results[self.step as usize % 2];
        results.step = self.step;
        results.logprobs.clear();
        results.logprobs.extend(rows.iter().map(|row| {
            let params = self.slots[row.slot as usize].params?;
            (params.flags & flag::LOGPROBS != 0).then_some(params.num_top as usize)
        }));
        self.rows.clear();
        self.rows.extend_from_slice(rows);
        self.rows.resize(padded, Row::new(NO_SLOT, 0));
        if !self.sent_rows.starts_with(&self.rows) {
            self.reserve(size_of_val(&self.rows[..]))?;
            self.staging.upload(Array::Rows, 0, &self.rows);
            self.sent_rows.clone_from(&self.rows);
        }
        self.rows.truncate(rows.len());
        let outcome = self.staging.send(&*self.device, &mut self.arrays);
        if outcome.is_err() {
            self.sent_rows.clear();
            self.sent_token_copies.clear();
        }
        Ok(outcome?)
    }

    /// Launches the kernels of a step on the compute queue: four, and one more if a staged row has a draft. A CUDA graph may
    /// capture this call; a step may replay it unless it has drafts and the captured one had none.
    ///
    /// # Errors
    /// [`SampleError::Logits`] if a staged row is not in the buffer, [`SampleError::TooMany`], and those of the device.
    pub fn launch(&self, logits: &Logits<'_>, padded: usize) -> Result<(), SampleError> {
        let limits = &self.limits;
        at_most("rows of a step", padded, self.sent_rows.len())?;
        at_most("tokens of the vocabulary", limits.vocab, logits.stride)?;
        for &Row { logits_row: row, .. } in &self.rows {
            let end = (row as usize * logits.stride + limits.vocab) * logits.dtype.bytes();
            let bytes = logits.buffer.len_bytes();
            if end > bytes {
                return Err(SampleError::Logits { row, end, bytes });
            }
        }
        if padded == 0 {
            return Ok(());
        }
        let splits = limits.splits() as u32;
        let shape = SampleShape {
            logits_stride: logits.stride as u64,
            vocab: limits.vocab as u32,
            splits,
            list_words: limits.list_words as u32,
            tail_tokens: limits.tail_tokens() as u32,
            top_stride: limits.max_logprobs as u32,
            scaled_stride: limits.scaled_stride() as u32,
        };
        let array = |array| Arg::pointer(&self.arrays[array], 0);
        let args = [
            Arg::pointer(logits.buffer, 0),
            array(Array::Rows),
            array(Array::Params),
            array(Array::Lists),
            array(Array::Constraints),
            array(Array::Allowed),
            array(Array::Counts),
            array(Array::State),
            array(Array::Scaled),
            array(Array::Peaks),
            array(Array::Scratch),
            array(Array::Chunks),
            array(Array::Cuts),
            array(Array::Results),
            array(Array::Tops),
            Arg::bytes(&shape),
        ];
        let rows = padded as u32;
        let per_row = ([rows, 1, 1], [ROW_THREADS, 1, 1]);
        let per_chunk = ([splits, rows, 1], [CHUNK_THREADS, 1, 1]);
        let [adjust, filter, draw, finish] = kernels(logits.dtype);
        for (kernel, (grid, block)) in [(adjust, per_chunk), (filter, per_chunk), (draw, per_chunk), (finish, per_row)]
        {
            self.device.launch(&Launch { module: MODULE, kernel, grid, block, shared_bytes: 0, args: &args })?;
        }
        if self.rows.iter().any(|row| row.draft != Row::NO_DRAFT) {
            let shape = AcceptShape { rows, vocab: shape.vocab, tail_tokens: shape.tail_tokens };
            use Array::{Counts, Params, Results, Rows, State};
            let [rows_of, params, results, counts, state] = [Rows, Params, Results, Counts, State].map(array);
            let args = [rows_of, params, results, counts, state, Arg::bytes(&shape)];
            let (grid, block) = ([rows.div_ceil(ROW_THREADS), 1, 1], [ROW_THREADS, 1, 1]);
            let launch = Launch { module: MODULE, kernel: "sample_accept", grid, block, shared_bytes: 0, args: &args };
            self.device.launch(&launch)?;
        }
        Ok(())
    }

    /// Enqueues the copies of the staged step's results to the host: 16 bytes a row, and 8 for each alternative
    /// requested.
    ///
    /// # Errors
    /// The device fails.
    pub fn read(&mut self) -> Result<Pending, SampleError> {
        let (device, arrays) = (&*self.device, &self.arrays);
        let Results { rows, tops, logprobs, .. } = &mut self.results[self.step as usize % 2];
        let bytes = self.rows.len() * size_of::<RowResult>();
        device.download_async(Queue::Compute, &arrays[Array::Results], 0, rows, 0, bytes)?;
        for (row, requested) in logprobs.iter().enumerate() {
            if let Some(alternatives) = requested {
                let at = row * self.limits.max_logprobs * size_of::<Top>();
                let bytes = alternatives * size_of::<Top>();
                device.download_async(Queue::Compute, &arrays[Array::Tops], at, tops, at, bytes)?;
            }
        }
        Ok(Pending { step: self.step, event: device.record(Queue::Compute)? })
    }

    /// Waits for a step and returns the tokens of its rows, in row order. Those behind a wrong draft do not count
    /// ([`Row::with_drafts`]).
    ///
    /// # Errors
    /// [`SampleError::Overwritten`], and those of the device; a fault of a kernel is reported here.
    pub fn collect(&self, pending: &Pending) -> Result<impl Iterator<Item = Sampled>, SampleError> {
        pending.event.synchronize()?;
        let results = &self.results[pending.step as usize % 2];
        if results.step != pending.step {
            return Err(SampleError::Overwritten(pending.step));
        }
        let (rows, tops) = (results.rows.host::<RowResult>()?, results.tops.host::<Top>()?);
        let stride = self.limits.max_logprobs;
        Ok(results.logprobs.iter().zip(rows).enumerate().map(move |(row, (requested, result))| {
            let logprob = requested.map(|_| {
                let top = tops[row * stride..(row + 1) * stride].iter().take(result.num_top as usize);
                TokenLogprobs {
                    logprob: result.logprob,
                    rank: result.rank as usize,
                    top: top.map(|top| (top.token, top.logprob)).collect(),
                }
            });
            Sampled { token: result.token, logprob }
        }))
    }

    /// Performs a whole step: [`stage`](DeviceSampler::stage), [`launch`](DeviceSampler::launch) and
    /// [`read`](DeviceSampler::read).
    ///
    /// # Errors
    /// One of the three calls fails.
    pub fn sample(&mut self, logits: &Logits<'_>, rows: &[Row]) -> Result<Pending, SampleError> {
        self.stage(rows, rows.len())?;
        self.launch(logits, rows.len())?;
        self.read()
    }

    /// Returns the index of a slot that holds a sequence.
    pub(super) fn find(&self, slot: u32) -> Result<usize, SampleError> {
        let at = slot as usize;
        self.slots.get(at).and_then(|slot| slot.params).map(|_| at).ok_or(SampleError::NotSet(slot))
    }

    /// Makes sure that `bytes` more bytes can be staged, by sending what is staged if necessary.
    pub(super) fn reserve(&mut self, bytes: usize) -> Result<(), SampleError> {
        if !self.staging.fits(bytes) {
            self.staging.send(&*self.device, &mut self.arrays)?;
        }
        Ok(())
    }

    fn upload_constraint(&mut self, at: usize, set: &TokenSet) {
        let words = self.limits.mask_words();
        // A larger set is cut, a smaller one filled up with zeros.
        let given = &set.words()[..set.words().len().min(words)];
        self.staging.upload(Array::Constraints, at * words, given);
        if given.len() < words {
            self.staging.upload(Array::Constraints, at * words + given.len(), &vec![0u32; words - given.len()]);
        }
        if let Some(params) = &mut self.slots[at].params {
            params.flags |= flag::CONSTRAINED;
        }
        self.upload_params(at);
    }

    fn upload_params(&mut self, at: usize) {
        if let Some(params) = self.slots[at].params {
            self.staging.upload(Array::Params, at, &[params]);
        }
    }
}

//! The device sampler: its memory, its slots, and a step.

use std::sync::Arc;

use device::{Arg, Buffer, Device, DeviceError, Dtype, Event, Launch, Pinned, Queue};

use super::buffers::{Buffers, Target};
use super::layout::{
    CHUNK_THREADS, MODULE, NONE, PARAM_WORDS, RESULT_WORDS, ROW_THREADS, RowParams, TOP_WORDS, flag, halves,
};
use super::limits::{Limits, SampleError, at_most};
use super::slot::{Slot, Wishes};
use super::stage::Stage;
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
    /// Where they lie, from its first byte on.
    pub buffer: &'a Buffer,
    /// What they are stored as.
    pub dtype: Dtype,
    /// Elements from the beginning of one row to that of the next, at least the vocabulary.
    pub stride: usize,
}

/// A row of a step: who draws, and from which row of the logits. Several may draw from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The sequence's slot.
    pub slot: u32,
    /// The row of the logits.
    pub logits_row: u32,
}

/// Results on their way to the host.
struct Results {
    pinned: Pinned,
    step: u64,
    /// For each row, whether log-probabilities come with it, and how many alternatives at most.
    asked: Vec<Option<usize>>,
}

/// A step that was given to the device; [`DeviceSampler::collect`] gives its tokens.
pub struct Pending {
    step: u64,
    event: Event,
}

/// See the [module](super).
pub struct DeviceSampler {
    pub(super) device: Arc<dyn Device>,
    pub(super) limits: Limits,
    pub(super) buffers: Buffers,
    pub(super) stage: Stage,
    slots: Vec<Slot>,
    /// Steps so far, and those that were refused too.
    step: u64,
    staged: u64,
    /// The rows of the step that is staged: slot and logits row.
    rows: Vec<[u32; 2]>,
    /// What the device has in `rows`.
    sent: Vec<[u32; 2]>,
    /// Those of [`DeviceSampler::announce`], and what the device has in `places`.
    pub(super) places: Vec<[u32; 2]>,
    pub(super) sent_places: Vec<[u32; 2]>,
    /// Of the steps with an even and with an odd number.
    results: [Results; 2],
}

impl DeviceSampler {
    /// Takes the memory, and opens the kernels.
    ///
    /// # Errors
    /// Limits that are out of range, too little memory, or no kernels.
    pub fn new(device: Arc<dyn Device>, limits: Limits) -> Result<DeviceSampler, SampleError> {
        limits.check()?;
        device.load(MODULE)?;
        let results = || {
            let pinned = device.pinned(limits.result_words() * size_of::<u32>())?;
            Ok::<_, DeviceError>(Results { pinned, step: 0, asked: Vec::with_capacity(limits.max_num_seqs) })
        };
        Ok(DeviceSampler {
            buffers: Buffers::new(&*device, &limits)?,
            stage: Stage::new(&*device, limits.stage_words())?,
            slots: vec![Slot::default(); limits.max_num_seqs],
            step: 0,
            staged: 0,
            rows: Vec::with_capacity(limits.max_num_seqs),
            sent: Vec::with_capacity(limits.max_num_seqs),
            places: Vec::with_capacity(limits.max_num_seqs),
            sent_places: Vec::with_capacity(limits.max_num_seqs),
            results: [results()?, results()?],
            device,
            limits,
        })
    }

    /// What it was made for.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Gives a slot a sequence, new or resumed: from now on its tokens are drawn as
    /// [`Sampler::sample`](crate::Sampler::sample) would with these parameters and this context.
    ///
    /// # Errors
    /// [`SampleError::TooMany`], and the device's.
    pub fn set_row(&mut self, slot: u32, params: &SamplingParams, context: &Context<'_>) -> Result<(), SampleError> {
        at_most("slots", slot as usize + 1, self.limits.max_num_seqs)?;
        let wishes = Wishes::of(&self.limits, params, context)?;
        let penalised = wishes.params.flags & flag::PENALISED != 0;
        let (prompt, output) = if penalised {
            (context.prompt, context.output)
        } else {
            (&[][..], &context.output[context.output.len().saturating_sub(self.limits.bad_word_tokens)..])
        };
        at_most("tokens of a sequence with penalties", prompt.len() + output.len(), self.limits.history_tokens)?;

        let limits = self.limits;
        let masks = 2 * limits.mask_words();
        self.make_room(PARAM_WORDS + limits.list_words + masks + prompt.len() + output.len())?;
        let at = slot as usize;
        self.stage.upload(Target::Lists, at * limits.list_words, &wishes.list);
        if let Some(allowed) = &wishes.allowed {
            self.stage.upload(Target::Allowed, at * limits.mask_words(), allowed.words());
        }
        self.stage.upload(Target::History, 0, prompt);
        self.stage.upload(Target::History, prompt.len(), output);
        let [vocab, tail, prompt_len, last] =
            [limits.vocab, limits.tail_tokens(), prompt.len(), output.len()].map(|count| count as u32);
        let output_len = context.output.len() as u32;
        self.stage.history([slot, vocab, tail, u32::from(penalised), prompt_len, last, output_len, 0]);
        self.slots[at].params = Some(wishes.params);
        match context.allowed {
            Some(set) => self.send_mask(at, set),
            None => self.send_params(at),
        }
        Ok(())
    }

    /// Holds a slot to a set of tokens, or lets it go. A set holds until the next call, so a row with a grammar needs one
    /// each step.
    ///
    /// # Errors
    /// [`SampleError::NotSet`], and the device's.
    pub fn constrain(&mut self, slot: u32, set: Option<&TokenSet>) -> Result<(), SampleError> {
        let at = self.find(slot)?;
        self.make_room(PARAM_WORDS + self.limits.mask_words())?;
        match set {
            Some(set) => self.send_mask(at, set),
            None => {
                if let Some(params) = &mut self.slots[at].params {
                    params.flags &= !flag::CONSTRAINED;
                }
                self.send_params(at);
            }
        }
        Ok(())
    }

    /// Makes a slot a copy of another, with all that the device has of it, as a sequence of its own. Forks happen in the
    /// order of the calls.
    ///
    /// # Errors
    /// [`SampleError::NotSet`], [`SampleError::Twice`], and the device's.
    pub fn fork(&mut self, from: u32, to: u32, sequence: u32) -> Result<(), SampleError> {
        let at = self.find(from)?;
        at_most("slots", to as usize + 1, self.limits.max_num_seqs)?;
        if from == to {
            return Err(SampleError::Twice(to));
        }
        let [vocab, list_words, tail] =
            [self.limits.vocab, self.limits.list_words, self.limits.tail_tokens()].map(|count| count as u32);
        self.stage.fork([from, to, sequence, vocab, list_words, tail]);
        let params = self.slots[at].params.map(|params| RowParams { sequence, ..params });
        self.slots[to as usize].params = params;
        Ok(())
    }

    /// Takes a slot's sequence away. What the device has of it is not looked at again.
    pub fn clear_row(&mut self, slot: u32) {
        if let Some(slot) = self.slots.get_mut(slot as usize) {
            slot.params = None;
        }
    }

    /// Sends what has changed since the last step, and which rows this one has. `padded` is the number of rows that will be
    /// launched, at least that of `rows`.
    ///
    /// # Errors
    /// [`SampleError::TooMany`], [`SampleError::NotSet`], [`SampleError::Twice`], and the device's.
    pub fn stage(&mut self, rows: &[Row], padded: usize) -> Result<(), SampleError> {
        at_most("rows of a step", rows.len().max(padded), self.limits.max_num_seqs)?;
        at_most("rows of a step", rows.len(), padded)?;
        self.staged += 1;
        for row in rows {
            let at = self.find(row.slot)?;
            if std::mem::replace(&mut self.slots[at].staged, self.staged) == self.staged {
                return Err(SampleError::Twice(row.slot));
            }
        }
        self.step += 1;
        let step = self.step;
        self.rows.clear();
        self.rows.extend(rows.iter().map(|row| [row.slot, row.logits_row]));
        let Results { step: of, asked, .. } = &mut self.results[step as usize % 2];
        *of = step;
        asked.clear();
        asked.extend(rows.iter().map(|row| {
            let params = self.slots[row.slot as usize].params?;
            (params.flags & flag::LOGPROBS != 0).then_some(params.num_top as usize)
        }));
        let given = self.rows.len();
        self.rows.resize(padded, [NONE, 0]);
        if !self.sent.starts_with(&self.rows) {
            self.make_room(2 * padded)?;
            self.stage.upload(Target::Rows, 0, self.rows.as_flattened());
            self.sent.clear();
            self.sent.extend_from_slice(&self.rows);
        }
        self.rows.truncate(given);
        let outcome = self.stage.send(&*self.device, &mut self.buffers);
        if outcome.is_err() {
            self.sent.clear();
            self.sent_places.clear();
        }
        Ok(outcome?)
    }

    /// Gives the kernels of a step to the compute queue: what a CUDA graph may hold.
    ///
    /// # Errors
    /// [`SampleError::Logits`] if a staged row is not in the buffer, [`SampleError::TooMany`], and the device's.
    pub fn launch(&self, logits: &Logits<'_>, padded: usize) -> Result<(), SampleError> {
        at_most("rows of a step", padded, self.sent.len())?;
        at_most("tokens of the vocabulary", self.limits.vocab, logits.stride)?;
        for &[_, row] in &self.rows {
            let end = (row as usize * logits.stride + self.limits.vocab) * logits.dtype.bytes();
            let bytes = logits.buffer.len_bytes();
            if end > bytes {
                return Err(SampleError::Logits { row, end, bytes });
            }
        }
        if padded == 0 {
            return Ok(());
        }
        let limits = &self.limits;
        let [stride_low, stride_high] = halves(logits.stride as u64);
        let [vocab, splits, list, tail, top] =
            [limits.vocab, limits.splits(), limits.list_words, limits.tail_tokens(), limits.max_logprobs]
                .map(|count| count as u32);
        let shape = [stride_low, stride_high, vocab, splits, list, tail, top, 0];
        let own = &self.buffers;
        let args = [
            Arg::pointer(logits.buffer, 0),
            Arg::pointer(&own.rows, 0),
            Arg::pointer(&own.params, 0),
            Arg::pointer(&own.lists, 0),
            Arg::pointer(&own.constraints, 0),
            Arg::pointer(&own.allowed, 0),
            Arg::pointer(&own.counts, 0),
            Arg::pointer(&own.state, 0),
            Arg::pointer(&own.scaled, 0),
            Arg::pointer(&own.chunks, 0),
            Arg::pointer(&own.cuts, 0),
            Arg::pointer(&own.results, 0),
            Arg::pointer(&own.tops, 0),
            Arg::bytes(&shape),
        ];
        let rows = padded as u32;
        let whole = ([rows, 1, 1], [ROW_THREADS, 1, 1]);
        let chunks = ([splits, rows, 1], [CHUNK_THREADS, 1, 1]);
        let [adjust, filter, draw, finish] = kernels(logits.dtype);
        for (kernel, (grid, block)) in [(adjust, chunks), (filter, whole), (draw, chunks), (finish, whole)] {
            self.device.launch(&Launch { module: MODULE, kernel, grid, block, shared_bytes: 0, args: &args })?;
        }
        Ok(())
    }

    /// Orders the copies of the staged step's results: 16 bytes a row, and 8 for each alternative that was asked for.
    ///
    /// # Errors
    /// The device's.
    pub fn read(&mut self) -> Result<Pending, SampleError> {
        let (device, own) = (&*self.device, &self.buffers);
        let results = &mut self.results[self.step as usize % 2];
        const WORD: usize = size_of::<u32>();
        let bytes = self.rows.len() * RESULT_WORDS * WORD;
        device.download_async(Queue::Compute, &own.results, 0, &mut results.pinned, 0, bytes)?;
        let pair = TOP_WORDS * WORD;
        let tops = self.limits.max_num_seqs * RESULT_WORDS * WORD;
        for (row, asked) in results.asked.iter().enumerate().filter_map(|(row, asked)| Some((row, (*asked)?))) {
            let at = row * self.limits.max_logprobs * pair;
            device.download_async(Queue::Compute, &own.tops, at, &mut results.pinned, tops + at, asked * pair)?;
        }
        Ok(Pending { step: self.step, event: device.record(Queue::Compute)? })
    }

    /// Waits for a step and gives the tokens of its rows, in their order.
    ///
    /// # Errors
    /// [`SampleError::Gone`], and the device's: a kernel's mistake comes to light here.
    pub fn collect(&self, pending: &Pending) -> Result<impl Iterator<Item = Sampled>, SampleError> {
        pending.event.synchronize()?;
        let results = &self.results[pending.step as usize % 2];
        if results.step != pending.step {
            return Err(SampleError::Gone(pending.step));
        }
        let words = results.pinned.host::<u32>()?;
        let (rows, tops) = words.split_at(self.limits.max_num_seqs * RESULT_WORDS);
        let stride = self.limits.max_logprobs * TOP_WORDS;
        Ok(results.asked.iter().zip(rows.as_chunks::<RESULT_WORDS>().0).enumerate().map(
            move |(row, (asked, result))| {
                let [token, logprob, rank, num_top] = *result;
                let logprob = asked.map(|_| {
                    let own = &tops[row * stride..(row + 1) * stride];
                    let pairs = own.as_chunks::<TOP_WORDS>().0.iter().take(num_top as usize);
                    TokenLogprobs {
                        logprob: f32::from_bits(logprob),
                        rank: rank as usize,
                        top: pairs.map(|&[token, logprob]| (token, f32::from_bits(logprob))).collect(),
                    }
                });
                Sampled { token, logprob }
            },
        ))
    }

    /// A step as a whole: [`stage`](DeviceSampler::stage), [`launch`](DeviceSampler::launch), [`read`](DeviceSampler::read).
    ///
    /// # Errors
    /// As theirs.
    pub fn sample(&mut self, logits: &Logits<'_>, rows: &[Row]) -> Result<Pending, SampleError> {
        self.stage(rows, rows.len())?;
        self.launch(logits, rows.len())?;
        self.read()
    }

    /// The index of a slot that holds a sequence.
    pub(super) fn find(&self, slot: u32) -> Result<usize, SampleError> {
        let at = slot as usize;
        self.slots.get(at).and_then(|slot| slot.params).map(|_| at).ok_or(SampleError::NotSet(slot))
    }

    /// Sends what waits where so many words more would be too many.
    pub(super) fn make_room(&mut self, words: usize) -> Result<(), SampleError> {
        if !self.stage.has_room(words) {
            self.stage.send(&*self.device, &mut self.buffers)?;
        }
        Ok(())
    }

    fn send_mask(&mut self, at: usize, set: &TokenSet) {
        let words = self.limits.mask_words();
        // A set of another size is cut, or filled with nothing.
        let given = &set.words()[..set.words().len().min(words)];
        self.stage.upload(Target::Constraints, at * words, given);
        for missing in given.len()..words {
            self.stage.upload(Target::Constraints, at * words + missing, &[0]);
        }
        if let Some(params) = &mut self.slots[at].params {
            params.flags |= flag::CONSTRAINED;
        }
        self.send_params(at);
    }

    fn send_params(&mut self, at: usize) {
        if let Some(params) = self.slots[at].params {
            self.stage.upload(Target::Params, at * PARAM_WORDS, &params.words());
        }
    }
}

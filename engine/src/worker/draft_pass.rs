//! Passes of the draft model: rows of several sequences, and the drafts that are drawn from the last of each.

use std::sync::Arc;

use attention_kernels::KernelError;
use device::{Buffer, Device};
use models::{ForwardBatch, LOGIT_ROWS, Model, States};
use sched::SeqId;

use super::executor::{ForDrafts, Tables};
use super::request::Requests;
use super::rows::{Drawn, HostRow, LogitsRow, draw_rows};

/// Sizes that the draft model shares with its target.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    /// Tokens of the target.
    pub vocab_size: usize,
    /// The group of layers of the target whose block tables are used. It has no window.
    pub group: usize,
    pub num_blocks: usize,
    pub block_size: usize,
    /// Greatest number of rows of a forward pass, and of the rows that a step computes of known text.
    pub max_rows: usize,
    /// Greatest number of tokens of a text that the draft model computes.
    pub max_len: usize,
    /// Greatest number of sequences of a step.
    pub max_seqs: usize,
}

/// The draft model, and the memory of its passes.
pub(super) struct Passes {
    pub device: Arc<dyn Device>,
    model: Model,
    pub sizes: Sizes,
    /// Token of each row of the model's head; `None` if it has a row for every token.
    head_tokens: Option<Vec<u32>>,
    /// `None` for a model that reads tokens alone.
    pub kept: Option<Kept>,
    // Reused.
    batch: ForwardBatch,
    tokens: Vec<u32>,
    slots: Vec<i64>,
    state_rows: Vec<u32>,
    logits: Vec<f32>,
}

/// Hidden states that a predictor reads.
pub(super) struct Kept {
    /// The target's hidden state at each sequence's last token in its latest step.
    pub of_target: Vec<Buffer>,
    /// Outputs of the last pass.
    own: Vec<Buffer>,
}

/// Hidden states that the rows of a pass read.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum InputStates {
    /// No states: the model reads tokens alone.
    Nothing,
    /// The states of all rows of the target's last step.
    Step,
    /// The states kept at the last tokens.
    Kept,
    /// The predictor's own outputs.
    Own,
}

/// The rows of a sequence that are still to be computed, and its drafts.
pub(super) struct SequenceRows {
    pub seq: SeqId,
    /// Position of the next row.
    pub at: usize,
    /// Position after the last row of the known tokens.
    pub end: usize,
    /// Number of drafts to draw.
    pub wanted: usize,
    pub drafts: Vec<u32>,
    /// Row of the hidden state that the next row reads.
    pub state: u32,
}

impl SequenceRows {
    /// Number of rows that can be computed now.
    fn ready(&self) -> usize {
        if self.wanted > 0 && self.drafts.len() == self.wanted { 0 } else { self.end + self.drafts.len() - self.at }
    }
}

/// A sequence's tokens: the prompt, and what was drawn.
pub(super) struct KnownTokens<'a>(&'a [u32], &'a [u32]);

impl<'a> KnownTokens<'a> {
    pub fn of(requests: &'a Requests, seq: SeqId) -> Option<KnownTokens<'a>> {
        let state = requests.get(&seq.request)?;
        Some(KnownTokens(&state.request.prompt, state.outputs.get(seq.index as usize)?.as_deref()?))
    }

    pub fn len(&self) -> usize {
        self.0.len() + self.1.len()
    }

    pub fn token(&self, position: usize) -> Option<u32> {
        self.0.get(position).or_else(|| self.1.get(position - self.0.len())).copied()
    }
}

impl Passes {
    /// Allocates the memory of a model's passes. `head_tokens` are the tokens of its head's rows; `None`: a row for every token.
    ///
    /// # Errors
    /// The device is out of memory.
    pub fn new(
        device: Arc<dyn Device>,
        model: Model,
        sizes: Sizes,
        head_tokens: Option<Vec<u32>>,
    ) -> Result<Passes, KernelError> {
        let kept = match model.decoder().embedding.beside {
            Some(_) => {
                let (of_target, own) = model.alloc_states(sizes.max_seqs)?;
                Some(Kept { of_target, own })
            }
            None => None,
        };
        let (batch, logits) = (ForwardBatch::default(), Vec::new());
        let (tokens, slots, state_rows) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Passes { device, model, sizes, head_tokens, kept, batch, tokens, slots, state_rows, logits })
    }

    /// Computes the rows that are ready and draws the drafts that follow. Returns the index of each sequence that drew, with its
    /// token; `None` if nothing was left to do.
    pub fn pass(
        &mut self,
        work: &mut [SequenceRows],
        requests: &Requests,
        on: &mut ForDrafts<'_>,
        states: InputStates,
    ) -> Result<Option<Vec<(usize, u32)>>, KernelError> {
        let Passes { device, model, batch, tokens, slots, state_rows, sizes, kept, .. } = self;
        let (tables, size) = (on.tables, sizes.block_size);
        // The row of a predictor reads the token behind its position.
        let behind = usize::from(states != InputStates::Nothing);
        batch.clear(1);
        state_rows.clear();
        let mut drawing = Vec::new();
        // The batch begins with what the decode kernel computes.
        let most = model.decode_rows();
        for is_long in [false, true] {
            for (index, work) in work.iter_mut().enumerate() {
                let count = work.ready().min(sizes.max_rows - batch.tokens.len());
                let (text, table) = (KnownTokens::of(requests, work.seq), table_of(tables, work.seq, sizes.group));
                let (Some(text), Some(table)) = (text, table) else { continue };
                if count == 0 || (count > most) != is_long {
                    continue;
                }
                let positions = work.at..work.at + count;
                tokens.clear();
                tokens.extend(positions.clone().filter_map(|position| text.token(position + behind)));
                slots.clear();
                let slot = |position: usize| {
                    let block = table.get(position / size).copied().unwrap_or(-1);
                    i64::from(block) * size as i64 + (position % size) as i64
                };
                slots.extend(positions.map(slot));
                let last = batch.push(work.at, tokens, [(&slots[..], table)]);
                state_rows.extend(work.state..work.state + count as u32);
                work.at += count;
                work.state += count as u32;
                if work.wanted > 0 && work.at == work.end + work.drafts.len() {
                    // Where its output will be.
                    work.state = drawing.len() as u32;
                    drawing.push((index, last));
                }
            }
        }
        if batch.tokens.is_empty() {
            return Ok(None);
        }
        batch.needed.get_or_insert_default().extend(drawing.iter().map(|(_, row)| *row));
        let rows: Vec<u32> = drawing.iter().map(|(_, row)| *row).collect();
        let mut forward = || match (states, &mut *kept) {
            (InputStates::Nothing, _) | (_, None) => model.forward(batch, on.caches),
            (_, Some(Kept { of_target, own, .. })) => {
                let buffers = match states {
                    InputStates::Step => on.target.states(),
                    InputStates::Own => own,
                    InputStates::Kept | InputStates::Nothing => of_target,
                };
                let read = States { buffers, rows: state_rows, are_own: states == InputStates::Own };
                model.forward_after(batch, read, on.caches)?;
                own.first_mut().map_or(Ok(()), |own| model.copy_own(&rows, own))
            }
        };
        match device.features().launches {
            true => forward()?,
            false => device.pool().enter(forward)?,
        }
        self.draw(work, &drawing, requests).map(Some)
    }

    /// Draws from rows of the last pass. Each belongs to the sequence with this index in `work`.
    fn draw(
        &mut self,
        work: &[SequenceRows],
        drawing: &[(usize, u32)],
        requests: &Requests,
    ) -> Result<Vec<(usize, u32)>, KernelError> {
        let Passes { device, model, sizes: Sizes { vocab_size, .. }, head_tokens, logits: scratch, .. } = self;
        let mut drawn = Vec::with_capacity(drawing.len());
        for chunk in drawing.chunks(LOGIT_ROWS) {
            let rows: Vec<u32> = chunk.iter().map(|(_, row)| *row).collect();
            let logits = device.pool().enter(|| model.logits(&rows))?;
            let width = logits.len() / rows.len();
            let logits = of_vocabulary(logits, width, *vocab_size, head_tokens.as_deref(), scratch);
            let row = |((index, _), logits): (&(usize, u32), _)| {
                let seq = work[*index].seq;
                let at = HostRow { span: *index, drafts: 0 };
                Some(LogitsRow::of_draft(requests.get(&seq.request)?, at, seq, logits))
            };
            let rows = chunk.iter().zip(logits.chunks(*vocab_size)).filter_map(row).collect();
            for (at, drawn_of) in draw_rows(device.pool(), rows) {
                if let Drawn::Tokens(tokens) = drawn_of {
                    drawn.extend(tokens.iter().map(|(_, sampled)| (at.span, sampled.token)));
                }
            }
        }
        Ok(drawn)
    }
}

/// The block table of a sequence in a group.
pub(super) fn table_of(tables: &Tables, seq: SeqId, group: usize) -> Option<&[i32]> {
    tables.get(&seq)?.get(group).map(Vec::as_slice)
}

/// Converts rows of `width` logits to rows of `vocab_size`. The head may lack rows of some tokens, and it may have more rows than the
/// tokenizer has tokens.
fn of_vocabulary<'a>(
    logits: &'a [f32],
    width: usize,
    vocab_size: usize,
    head_tokens: Option<&[u32]>,
    scratch: &'a mut Vec<f32>,
) -> &'a [f32] {
    if width == vocab_size && head_tokens.is_none() {
        return logits;
    }
    scratch.clear();
    for row in logits.chunks(width) {
        let first = scratch.len();
        match head_tokens {
            None => scratch.extend_from_slice(&row[..width.min(vocab_size)]),
            Some(tokens) => {
                scratch.resize(first + vocab_size, f32::NEG_INFINITY);
                tokens.iter().zip(row).for_each(|(token, logit)| scratch[first + *token as usize] = *logit);
            }
        }
        scratch.resize(first + vocab_size, f32::NEG_INFINITY);
    }
    scratch
}

//! Predictors: decoders that read hidden states of another model ([`Beside`]), and the states that a model keeps for one.
//!
//! A predictor is a [`Model`] of its own, with a cache of its own; matrices that it declares as its target does are those of the target.

use std::sync::Arc;

use attention_kernels::{Dtype, KernelError, KernelSet, KvCache, Rows};
use device::{Buffer, Device};

use super::linear::Progress;
use super::loaded::Loaded;
use super::op::Register;
use super::ops::{LayerOps, Out};
use super::step::{Extra, States, StepBuffers};
use super::{ForwardBatch, Model};
use crate::decoder::{Beside, Decoder};
use crate::{LoadError, Weights};

/// A batch of a predictor without states.
pub(super) const NO_STATES: KernelError =
    KernelError::NotLoaded { variant: "models", what: "hidden states that a predictor reads" };

impl Model {
    /// Loads a predictor as [`Model::load`] does, for a target on the same device with kernels of the same type.
    ///
    /// # Errors
    /// The errors of [`Model::load`].
    pub fn load_predictor(
        decoder: &Decoder,
        weights: &Weights,
        target: &Model,
        kernels: KernelSet,
        max_rows: usize,
        progress: Progress<'_>,
    ) -> Result<Model, LoadError> {
        let device = Arc::clone(&target.device);
        Model::load_beside(decoder, weights, device, kernels, max_rows, (progress, Some(target)))
    }

    /// Buffers for the states of `rows` rows that a predictor reads, and for as many outputs of its own.
    ///
    /// # Errors
    /// The device is out of memory.
    pub fn alloc_states(&self, rows: usize) -> Result<(Vec<Buffer>, Vec<Buffer>), KernelError> {
        let (of_target, own) = state_widths(&self.decoder);
        let alloc = |width: usize| self.device.alloc(rows * width * self.kernels.format.dtype.bytes());
        Ok((of_target.into_iter().map(alloc).collect::<Result<_, _>>()?, vec![alloc(own)?]))
    }

    /// Bytes of [`Model::alloc_states`], 0 for a decoder that is no predictor.
    pub fn state_bytes(decoder: &Decoder, dtype: Dtype, rows: usize) -> u64 {
        let (of_target, own) = state_widths(decoder);
        let own = if of_target.is_empty() { 0 } else { own };
        (rows * (of_target.iter().sum::<usize>() + own) * dtype.bytes()) as u64
    }

    /// The states of the last step that a predictor reads, one row for each row of the batch, all of which must have been
    /// [needed](ForwardBatch::needed): those of [`Decoder::taps`], or the hidden state after the final norm. Steps that ran as a
    /// graph have none.
    pub fn states(&self) -> &[Buffer] {
        match &self.step.taps[..] {
            [] => std::slice::from_ref(self.step.registers.get(Register::Branch)),
            taps => taps,
        }
    }

    /// Copies rows of [`Model::states`] to the first rows of buffers, at most as many as the sequences of a step.
    ///
    /// # Errors
    /// A buffer is too small, or too many rows.
    pub fn copy_states(&mut self, rows: &[u32], to: &mut [Buffer]) -> Result<(), KernelError> {
        let width = if self.step.taps.is_empty() { self.decoder.output_width() } else { self.decoder.hidden_size() };
        let Model { ops, step, .. } = self;
        let states =
            if step.taps.is_empty() { std::slice::from_ref(step.registers.get(Register::Branch)) } else { &step.taps };
        states.iter().zip(to).try_for_each(|(from, to)| ops.gather_rows(from, rows, width, to))
    }

    /// Computes a batch of a predictor: row i has the token behind the position of its state.
    ///
    /// # Errors
    /// The errors of [`Model::forward`]; or this model is no predictor, or reads other states.
    pub fn forward_after(
        &mut self,
        batch: &ForwardBatch,
        states: States<'_>,
        caches: &mut [KvCache],
    ) -> Result<(), KernelError> {
        let Some(beside) = &self.decoder.embedding.beside else { return Err(NO_STATES) };
        let expected = if states.are_own { 1 } else { beside.states.len() };
        for (what, found, expected) in [
            ("hidden states of a row", states.buffers.len(), expected),
            ("rows of hidden states", states.rows.len(), batch.tokens.len()),
        ] {
            if found != expected {
                return Err(KernelError::Shape { what, found, expected });
            }
        }
        let width = match (states.are_own, beside.states.first()) {
            (false, Some(of_target)) => of_target.inputs,
            _ => self.decoder.hidden_size(),
        };
        let bytes = width.max(1) * self.kernels.format.dtype.bytes();
        let most = states.buffers.iter().map(|buffer| buffer.len_bytes() / bytes).min().unwrap_or(0);
        if let Some(&row) = states.rows.iter().find(|row| **row as usize >= most) {
            return Err(KernelError::Shape { what: "row of hidden states", found: row as usize, expected: most });
        }
        self.forward_extra(batch, caches, Extra { states: Some(states), fill: None })
    }

    /// Copies what the next rows behind these rows of the last step read to the first rows of a buffer `[any, hidden_size]`. The
    /// rows must have been [needed](ForwardBatch::needed), and at most as many as the sequences of a step.
    ///
    /// # Errors
    /// Too many rows, a row that was not needed, or this model is no predictor.
    pub fn copy_own(&mut self, rows: &[u32], to: &mut Buffer) -> Result<(), KernelError> {
        let Some(beside) = &self.decoder.embedding.beside else { return Err(NO_STATES) };
        let from = if beside.continues_normed { Register::Branch } else { Register::Stream };
        self.find_kept(rows)?;
        let Model { ops, step, gathered, decoder, .. } = self;
        ops.gather_rows(step.registers.get(from), gathered, decoder.hidden_size(), to)
    }
}

/// Widths of the states of its target that a predictor reads, and of its own outputs.
fn state_widths(decoder: &Decoder) -> (Vec<usize>, usize) {
    let states = decoder.embedding.beside.iter().flat_map(|beside| &beside.states);
    (states.map(|state| state.inputs).collect(), decoder.hidden_size())
}

/// The tokens of the rows of a head that has rows for some alone ([`Head::tokens`](crate::decoder::Head::tokens)).
///
/// # Errors
/// The tensor is missing, has another type or shape, or names a token that does not exist.
pub fn head_tokens(decoder: &Decoder, weights: &Weights) -> Result<Option<Vec<u32>>, LoadError> {
    let Some(name) = &decoder.head.tokens else { return Ok(None) };
    let rows = decoder.num_logits();
    let raw = weights.raw(name).ok_or_else(|| weights.missing(name, &format!("[{rows}] integers")))?;
    raw.expect(&[rows], Some(safetensors::Dtype::I64))?;
    let (numbers, _) = raw.data.as_chunks::<8>();
    let token = |(row, number): (usize, &[u8; 8])| {
        let token = i64::from_le_bytes(*number).checked_add(row as i64)?;
        u32::try_from(token).ok().filter(|token| (*token as usize) < decoder.vocab_size())
    };
    match numbers.iter().enumerate().map(token).collect::<Option<Vec<u32>>>() {
        Some(tokens) => Ok(Some(tokens)),
        None => Err(raw.wrong_dtype(&format!("differences to token ids below {}", decoder.vocab_size()))),
    }
}

/// The stream of a predictor before the embedding is added ([`Op::States`](super::op::Op::States)).
pub(super) fn stream(
    ops: &mut dyn LayerOps,
    (kernels, device): (&KernelSet, &dyn Device),
    (loaded, step): (&Loaded, &mut StepBuffers),
    (linear, norm): (usize, Option<usize>),
    beside: &Beside,
    states: States<'_>,
) -> Result<(), KernelError> {
    let (dtype, rows) = (kernels.format.dtype, states.rows.len());
    if states.are_own && !beside.projects_own {
        let own = states.buffers.first().ok_or(NO_STATES)?;
        let width = beside.token_norm.width;
        return ops.gather_rows(own, states.rows, width, step.registers.get_mut(Register::Stream));
    }
    for (number, (states_of, product)) in states.buffers.iter().zip(&loaded.linears[linear..]).enumerate() {
        let [stream, branch, mixed] = step.registers.several([Register::Stream, Register::Branch, Register::Mixed])?;
        ops.gather_rows(states_of, states.rows, product.weights.k(), branch)?;
        let (x, y) = match norm {
            Some(norm) => {
                ops.norm(branch, &loaded.norms[norm], rows, Out::Numbers(mixed))?;
                (mixed, branch)
            }
            None => (branch, mixed),
        };
        let to = if number == 0 { &mut *stream } else { &mut *y };
        product.run((kernels, device), Rows::Numbers(x), rows, to, dtype, None)?;
        if number > 0 {
            ops.add(stream, y, 1.0, rows, beside.token_norm.width)?;
        }
    }
    Ok(())
}

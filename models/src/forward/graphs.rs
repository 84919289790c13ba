//! Decode steps as CUDA graphs: one call launches a whole step.
//!
//! A step is padded to the next size of a family of graphs. The first family is for single tokens ([`graph_sizes`]); there is
//! another one for steps in which sequences have up to k + 1 rows, their last token and k drafts ([`draft_graph_sizes`]), and each
//! of them a second time for steps with LoRA adapters. Padding has a context of 0 and slot −1, so every kernel returns from it at
//! once. Tokens, positions, slots, lengths, first rows and block tables lie in persistent device arrays that are written before
//! the replay, and so do the slots of LoRA adapters; a graph fixes the number of rows, the most rows of a sequence, and whether
//! there are adapters.
//!
//! ```text
//! first step of a size     load ─▶ embed … last layer, logits    run kernel by kernel, padded
//!                                  embed … last layer, logits    captured: all code is loaded and all choices are made
//! later steps              load ─▶ replay
//! ```
//!
//! A padded step has as many sequences as rows, whatever its sequences are: a sequence for each row of padding, and sequences
//! without rows. So one graph serves every distribution of rows, here 6 rows of 3 sequences in a graph of 8 rows:
//!
//! ```text
//! rows           a  a  a | b | c  c | -  -        first rows      0  3  4  6  7  8  8  8  8
//! sequences      a         b   c      -  -        and 3 without rows
//! ```
//!
//! [`Model::capture_graphs`] does the first step of every size on padding only, so that no request waits for a capture.
//!
//! A size whose capture fails runs without padding and without a graph from then on. A failed replay fails only its step.
//! Graphs are dropped with the memory that they use: all by [`Model::reserve`], and each one at its next use if the caches have
//! been replaced.

use attention_kernels::{KernelError, KvCache};

use device::Graph;

use super::graph_sizes::{Family, GraphCount, Graphs, State, draft_graph_sizes, graph_sizes};
use super::op::{Op, Register};
use super::step::most_drawn_rows;
use super::{Fill, ForwardBatch, Model};

impl Model {
    /// Runs decode steps of up to `max_num_seqs` sequences as graphs from now on, and with `drafts` those that verify up to as many
    /// drafts of a sequence, if they have at most [`most_drawn_rows`] rows and the decode kernel computes several rows of a
    /// sequence ([`Model::decode_rows`]). Does nothing on a device that launches no kernels.
    ///
    /// Families of graphs: one row for each sequence, and several; each for steps without adapters and, if the decoder takes
    /// adapters, for steps with some.
    pub fn use_graphs(&mut self, max_num_seqs: usize, drafts: usize) {
        if !self.device.features().launches {
            return;
        }
        let max_rows = self.step.max_rows.max(1);
        let mut kinds = vec![(1, graph_sizes(max_num_seqs.clamp(1, max_rows)))];
        let (most_rows, verified) = ((1 + drafts).min(self.decode_rows()), most_drawn_rows(max_num_seqs, drafts));
        // The number of drafts of a sequence, which recurrent layers read, is not among the inputs of a graph.
        if most_rows > 1 && verified.min(max_rows) > 1 && self.decoder.recurrent().next().is_none() {
            kinds.push((most_rows, draft_graph_sizes(verified.min(max_rows))));
        }
        let adapted: &[bool] = if self.adapters.is_some() { &[false, true] } else { &[false] };
        let family = |(most_rows, sizes): &(usize, Vec<usize>)| {
            let family = |adapted: &bool| Family::new(*most_rows, *adapted, sizes.clone());
            adapted.iter().map(family).collect::<Vec<_>>()
        };
        let families = kinds.iter().flat_map(family).collect();
        self.graphs = Some(Graphs { families, padded: ForwardBatch::default() });
    }

    /// Number of graphs by state.
    pub fn graphs(&self) -> GraphCount {
        let families = self.graphs.iter().flat_map(|graphs| &graphs.families);
        let sizes = families.flat_map(|family| &family.sizes);
        sizes.fold(GraphCount::default(), |mut count, (_, state)| {
            count.sizes += 1;
            count.captured += usize::from(matches!(state, State::Captured(_)));
            count.failed += usize::from(matches!(state, State::Failed));
            count
        })
    }

    /// Number of graphs of each family.
    fn family_sizes(&self) -> Vec<usize> {
        self.graphs.iter().flat_map(|graphs| &graphs.families).map(|family| family.sizes.len()).collect()
    }

    /// Captures the largest graph of each family as [`Model::capture_graphs`] does all. Returns an upper bound of the bytes of
    /// device memory that all graphs take: those of the largest, times the number of its family. 0 if the device does not report
    /// them.
    ///
    /// # Errors
    /// As for [`Model::capture_graphs`].
    pub fn measure_graphs(&mut self, caches: &mut [KvCache]) -> Result<u64, KernelError> {
        let mut bytes = 0;
        for (family, count) in self.family_sizes().into_iter().enumerate() {
            bytes += self.capture((family, count - 1), caches)? * count as u64;
        }
        Ok(bytes)
    }

    /// Captures all graphs and runs each once, on padding only, so that memory which a step takes at its first use is taken and
    /// no slot is written. Returns the bytes of device memory that the graphs take, 0 if the device does not report them.
    ///
    /// # Errors
    /// The errors of a step. A failed capture is no error: the size runs without a graph.
    pub fn capture_graphs(&mut self, caches: &mut [KvCache]) -> Result<u64, KernelError> {
        let mut bytes = 0;
        for (family, count) in self.family_sizes().into_iter().enumerate() {
            for index in 0..count {
                bytes += self.capture((family, index), caches)?;
            }
        }
        Ok(bytes)
    }

    fn capture(&mut self, (family, index): (usize, usize), caches: &mut [KvCache]) -> Result<u64, KernelError> {
        let mut nothing = ForwardBatch::default();
        nothing.clear(self.layout.views.len());
        if let (Some(adapters), Some(graphs)) = (&mut self.adapters, &self.graphs) {
            adapters.load(&nothing)?;
            adapters.active = graphs.families[family].adapted;
        }
        for _ in 0..2 {
            self.decode((family, index), &nothing, caches, None)?;
        }
        self.device.synchronize()?;
        match self.graphs.as_ref().map(|graphs| &graphs.families[family].sizes[index]) {
            Some((_, State::Captured(graph))) => Ok(graph.device_bytes().unwrap_or(0)),
            _ => Ok(0),
        }
    }

    /// Family, and place in its sizes, of the graph that runs the batch, if one does.
    pub(super) fn graph_for(&self, batch: &ForwardBatch) -> Option<(usize, usize)> {
        let (rows, graphs) = (batch.tokens.len(), self.graphs.as_ref()?);
        let attention = &batch.groups.first()?.attention;
        let counts = attention.query_starts.windows(2).map(|pair| pair[1].saturating_sub(pair[0]) as usize);
        let (least, most) = counts.fold((usize::MAX, 0), |(least, most), rows| (least.min(rows), most.max(rows)));
        let adapted = self.adapters.as_ref().is_some_and(|adapters| adapters.active);
        let serves = |family: &Family| family.adapted == adapted && most <= family.most_rows;
        let family = graphs.families.iter().position(serves)?;
        let sizes = &graphs.families[family].sizes;
        let index = sizes.partition_point(|(size, _)| *size < rows);
        let (_, state) = sizes.get(index)?;
        let pads = least > 0 && attention.num_rows() == rows;
        // Calibration waits for the device, which a capture cannot record.
        (pads && !self.is_calibrating() && !matches!(state, State::Failed)).then_some((family, index))
    }

    /// Runs a batch with the graph at this place.
    pub(super) fn decode(
        &mut self,
        at: (usize, usize),
        batch: &ForwardBatch,
        caches: &mut [KvCache],
        fill: Option<Fill<'_>>,
    ) -> Result<(), KernelError> {
        let Some(mut graphs) = self.graphs.take() else { return Ok(()) };
        let outcome = self.decode_with(&mut graphs, at, batch, caches, fill);
        self.graphs = Some(graphs);
        outcome
    }

    fn decode_with(
        &mut self,
        Graphs { families, padded }: &mut Graphs,
        (family, index): (usize, usize),
        batch: &ForwardBatch,
        caches: &mut [KvCache],
        fill: Option<Fill<'_>>,
    ) -> Result<(), KernelError> {
        let Family { most_rows, sizes, .. } = &mut families[family];
        let (size, state) = &mut sizes[index];
        padded.pad(batch, *size);
        self.kept_rows = None;
        // A replay runs no `pass`, which would do this and swap them.
        self.step.registers.reset_names();
        self.load_batch(padded, Some(*most_rows), fill)?;
        if let State::Captured(graph) = state
            && caches.iter().all(|cache| cache.buffers().all(|pages| graph.uses(pages)))
        {
            self.device.replay(graph)?;
            // The results are in the buffers whose names the captured pass has swapped.
            for op in &self.program.ops {
                if let Op::Swap { a, b } = *op {
                    self.step.registers.swap(a, b);
                }
            }
        } else {
            self.decode_work(padded, caches)?;
            *state = match self.captured(padded, caches) {
                Ok(graph) => {
                    tracing::debug!(
                        "captured the CUDA graph of decode steps of {size} rows, {most_rows} of a sequence at most"
                    );
                    State::Captured(graph)
                }
                Err(error) => {
                    let steps = format!("decode steps of {size} rows, {most_rows} of a sequence at most,");
                    tracing::warn!("{steps} run without a CUDA graph from now on: {error}");
                    State::Failed
                }
            };
        }
        self.logit_rows = if *size <= self.result_rows { *size } else { 0 };
        Ok(())
    }

    fn captured(&mut self, padded: &ForwardBatch, caches: &mut [KvCache]) -> Result<Graph, KernelError> {
        let device = self.device.clone();
        let mut outcome = Ok(());
        let graph = device.capture(&mut || outcome = self.decode_work(padded, caches));
        outcome?;
        Ok(graph?)
    }

    /// The work that a graph records: all layers, and the logits of all rows if their buffer is large enough.
    fn decode_work(&mut self, padded: &ForwardBatch, caches: &mut [KvCache]) -> Result<(), KernelError> {
        self.pass(padded, caches, None)?;
        let rows = padded.tokens.len();
        if rows <= self.result_rows {
            let (step, on) = (&mut self.step, (&self.kernels, &*self.device));
            let from = step.registers.get(Register::Branch);
            self.loaded.logits(&self.decoder, on, from, rows, &mut step.logits, &mut self.scratch)?;
            self.finish_logits(rows)?;
        }
        Ok(())
    }

    /// Drops all captured graphs; failed sizes get another chance.
    pub(super) fn forget_graphs(&mut self) {
        let families = self.graphs.iter_mut().flat_map(|graphs| &mut graphs.families);
        let sizes = families.flat_map(|family| &mut family.sizes);
        sizes.for_each(|(_, state)| *state = State::New);
    }
}

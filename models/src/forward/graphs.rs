//! Decode steps as CUDA graphs: one call launches a whole step.
//!
//! A step of single tokens is padded to the next of [`graph_sizes`]. Padding has a context of 0 and slot −1, so every kernel
//! returns from it at once. Tokens, positions, slots, lengths and block tables lie in persistent device arrays that are written
//! before the replay, and so do the slots of LoRA adapters; a graph fixes the size of a step and whether it has adapters.
//!
//! ```text
//! first step of a size     load ─▶ embed … last layer, logits    run kernel by kernel, padded
//!                                  embed … last layer, logits    captured: all code is loaded and all choices are made
//! later steps              load ─▶ replay
//! ```
//!
//! [`Model::capture_graphs`] does the first step of every size on padding only, so that no request waits for a capture.
//!
//! A size whose capture fails runs without padding and without a graph from then on. A failed replay fails only its step.
//! Graphs are dropped with the memory that they use: all by [`Model::reserve`], and each one at its next use if the caches have
//! been replaced.

use attention_kernels::{KernelError, KvCache};

use device::Graph;

use super::graph_sizes::{GraphCount, Graphs, State, graph_sizes};
use super::op::Register;
use super::{Fill, ForwardBatch, Model};

impl Model {
    /// Runs decode steps of up to `max_num_seqs` sequences as graphs from now on. Does nothing on a device that launches no
    /// kernels.
    pub fn use_graphs(&mut self, max_num_seqs: usize) {
        if self.device.features().launches {
            let sizes = graph_sizes(max_num_seqs.clamp(1, self.step.max_rows.max(1)));
            let new = || sizes.iter().map(|size| (*size, State::New)).collect();
            let adapted = if self.adapters.is_some() { new() } else { Vec::new() };
            self.graphs = Some(Graphs { sizes: [new(), adapted], padded: ForwardBatch::default() });
        }
    }

    /// Number of graphs by state.
    pub fn graphs(&self) -> GraphCount {
        let sizes = self.graphs.iter().flat_map(|graphs| graphs.sizes.iter().flatten());
        sizes.fold(GraphCount::default(), |mut count, (_, state)| {
            count.sizes += 1;
            count.captured += usize::from(matches!(state, State::Captured(_)));
            count.failed += usize::from(matches!(state, State::Failed));
            count
        })
    }

    /// Captures the largest graph as [`Model::capture_graphs`] does all. Returns the bytes of device memory that it takes, 0 if
    /// the device does not report them.
    ///
    /// # Errors
    /// As for [`Model::capture_graphs`].
    pub fn capture_largest(&mut self, caches: &mut [KvCache]) -> Result<u64, KernelError> {
        let kind = usize::from(self.adapters.is_some());
        match &self.graphs {
            Some(graphs) => self.capture((kind, graphs.sizes[kind].len() - 1), caches),
            None => Ok(0),
        }
    }

    /// Captures all graphs and runs each once, on padding only, so that memory which a step takes at its first use is taken and
    /// no slot is written. Returns the bytes of device memory that the graphs take, 0 if the device does not report them.
    ///
    /// # Errors
    /// The errors of a step. A failed capture is no error: the size runs without a graph.
    pub fn capture_graphs(&mut self, caches: &mut [KvCache]) -> Result<u64, KernelError> {
        let counts = self.graphs.as_ref().map_or([0; 2], |graphs| graphs.sizes.each_ref().map(Vec::len));
        let mut bytes = 0;
        for (kind, count) in counts.into_iter().enumerate() {
            for index in 0..count {
                bytes += self.capture((kind, index), caches)?;
            }
        }
        Ok(bytes)
    }

    fn capture(&mut self, (kind, index): (usize, usize), caches: &mut [KvCache]) -> Result<u64, KernelError> {
        let mut nothing = ForwardBatch::default();
        nothing.clear(self.layout.views.len());
        if let Some(adapters) = &mut self.adapters {
            adapters.load(&nothing)?;
            adapters.active = kind == 1;
        }
        for _ in 0..2 {
            self.decode((kind, index), &nothing, caches, None)?;
        }
        self.device.synchronize()?;
        match self.graphs.as_ref().map(|graphs| &graphs.sizes[kind][index]) {
            Some((_, State::Captured(graph))) => Ok(graph.device_bytes().unwrap_or(0)),
            _ => Ok(0),
        }
    }

    /// Place in [`Graphs::sizes`] of the graph that runs the batch, if one does.
    pub(super) fn graph_for(&self, batch: &ForwardBatch) -> Option<(usize, usize)> {
        let (rows, graphs) = (batch.tokens.len(), self.graphs.as_ref()?);
        let kind = usize::from(self.adapters.as_ref().is_some_and(|adapters| adapters.active));
        let index = graphs.sizes[kind].partition_point(|(size, _)| *size < rows);
        let (_, state) = graphs.sizes[kind].get(index)?;
        let single = batch.num_seqs() == rows;
        // Calibration waits for the device, which a capture cannot record.
        (single && !self.is_calibrating() && !matches!(state, State::Failed)).then_some((kind, index))
    }

    /// Runs a batch of single tokens with the graph at this place.
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
        Graphs { sizes, padded }: &mut Graphs,
        (kind, index): (usize, usize),
        batch: &ForwardBatch,
        caches: &mut [KvCache],
        fill: Option<Fill<'_>>,
    ) -> Result<(), KernelError> {
        let (size, state) = &mut sizes[kind][index];
        padded.pad(batch, *size);
        self.kept_rows = None;
        // A replay runs no `pass`, which would do this.
        self.step.reset_names();
        self.load_batch(padded, true, fill)?;
        if let State::Captured(graph) = state
            && caches.iter().all(|cache| cache.buffers().all(|pages| graph.uses(pages)))
        {
            self.device.replay(graph)?;
        } else {
            self.decode_work(padded, caches)?;
            *state = match self.captured(padded, caches) {
                Ok(graph) => {
                    tracing::debug!("captured the CUDA graph of decode steps with {size} sequences");
                    State::Captured(graph)
                }
                Err(error) => {
                    tracing::warn!("decode steps with {size} sequences run without a CUDA graph from now on: {error}");
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
            let from = &step.registers[step.buffer_of(Register::Branch)];
            self.loaded.logits(&self.decoder, on, from, rows, &mut step.logits, &mut self.scratch)?;
            self.finish_logits(rows)?;
        }
        Ok(())
    }

    /// Drops all captured graphs; failed sizes get another chance.
    pub(super) fn forget_graphs(&mut self) {
        let sizes = self.graphs.iter_mut().flat_map(|graphs| graphs.sizes.iter_mut().flatten());
        sizes.for_each(|(_, state)| *state = State::New);
    }
}

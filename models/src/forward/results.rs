//! What is asked of a step that has run: logits and hidden states of its rows, on the host or left on the device.

use attention_kernels::{Dtype, KernelError, Rows};
use device::Buffer;

use super::clock::clock;
use super::program::Register;
use super::{LOGIT_ROWS, Model};

impl Model {
    /// Logits of up to [`LOGIT_ROWS`] rows of the last step, `[rows, vocab_size]`, on the host.
    ///
    /// # Errors
    /// If there are more, or one is not among [`ForwardBatch::needed`](super::ForwardBatch::needed).
    pub fn logits(&mut self, rows: &[u32]) -> Result<&[f32], KernelError> {
        if !self.has_logits(rows) {
            self.choose(rows, LOGIT_ROWS)?;
            self.compute_logits(rows.len())?;
        }
        let _phase = self.phase("wait");
        self.ops.to_host(&self.step.logits, Dtype::F32, rows.len() * self.decoder.vocab_size())
    }

    /// The same of up to as many rows as [`StepLimits`](super::StepLimits) has sequences, `[rows, vocab_size]` in float32, left on the device for
    /// what is launched before the next call of this, [`Model::logits`] or [`Model::hidden`].
    ///
    /// # Errors
    /// As of [`Model::logits`].
    pub fn device_logits(&mut self, rows: &[u32]) -> Result<&Buffer, KernelError> {
        if !self.has_logits(rows) {
            self.choose(rows, self.result_rows)?;
            self.compute_logits(rows.len())?;
        }
        Ok(&self.step.logits)
    }

    /// Whether a graph has computed the logits of these rows, in this order.
    fn has_logits(&self, rows: &[u32]) -> bool {
        rows.len() <= self.with_logits && rows.iter().copied().eq(0..rows.len() as u32)
    }

    /// Those of the chosen rows.
    fn compute_logits(&mut self, rows: usize) -> Result<(), KernelError> {
        self.with_logits = 0;
        let (head, step) = (self.loaded.head(&self.decoder), &mut self.step);
        head.run(&self.kernels, &*self.device, Rows::Numbers(&step.chosen), rows, &mut step.logits, Dtype::F32)
    }

    /// Hidden states behind the final norm of up to [`LOGIT_ROWS`] rows of the last step, `[rows, hidden_size]`, on the
    /// host.
    ///
    /// # Errors
    /// As of [`Model::logits`].
    pub fn hidden(&mut self, rows: &[u32]) -> Result<&[f32], KernelError> {
        self.choose(rows, LOGIT_ROWS)?;
        let elements = rows.len() * self.decoder.hidden_size();
        let _phase = self.phase("wait");
        self.ops.to_host(&self.step.chosen, self.kernels.format.dtype, elements)
    }

    /// Rows of the last step, behind the final norm, become the first of `chosen`.
    fn choose(&mut self, rows: &[u32], most: usize) -> Result<(), KernelError> {
        if rows.len() > most {
            return Err(KernelError::Shape { what: "rows of results", found: rows.len(), expected: most });
        }
        self.places.clear();
        for row in rows {
            self.places.push(match &self.kept {
                None if (*row as usize) < self.step.max_rows => *row,
                None => {
                    let (found, expected) = (*row as usize, self.step.max_rows);
                    return Err(KernelError::Shape { what: "row of a step", found, expected });
                }
                Some(kept) => kept.binary_search(row).map(|place| place as u32).map_err(|_| KernelError::Shape {
                    what: "a row that the step has not kept",
                    found: *row as usize,
                    expected: kept.len(),
                })?,
            });
        }
        let (step, width, dtype) = (&mut self.step, self.decoder.hidden_size(), self.kernels.format.dtype);
        let _time = clock(&*self.device, "gather", None, 2 * rows.len() * width, dtype);
        self.ops.gather(&step.registers[step.buffer_of(Register::Branch)], &self.places, width, &mut step.chosen)
    }
}

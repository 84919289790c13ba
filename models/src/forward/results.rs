//! Results of a step: logits and hidden states of its rows, on the host or left on the device.

use attention_kernels::{Dtype, KernelError};
use device::Buffer;

use super::clock::clock;
use super::op::Register;
use super::{LOGIT_ROWS, Model, ranks};

impl Model {
    /// Logits of up to [`LOGIT_ROWS`] rows of the last step, `[rows, num_logits]`, copied to the host. There is one for each token, unless
    /// the [head](crate::decoder::Head::tokens) has rows for some alone.
    ///
    /// # Errors
    /// Too many rows, or a row that is not among [`ForwardBatch::needed`](super::ForwardBatch::needed).
    pub fn logits(&mut self, rows: &[u32]) -> Result<&[f32], KernelError> {
        if !self.has_logits(rows) {
            self.gather_results(rows, LOGIT_ROWS)?;
            self.compute_logits(rows.len())?;
        }
        let _phase = self.phase("wait");
        self.ops.to_host(&self.step.logits, Dtype::F32, rows.len() * self.decoder.num_logits())
    }

    /// Logits of up to [`most_drawn_rows`](super::most_drawn_rows) rows, `[rows, num_logits]` in float32, left on the device. They are
    /// valid for work launched before the next call of this, [`Model::logits`] or [`Model::hidden`].
    ///
    /// # Errors
    /// See [`Model::logits`].
    pub fn device_logits(&mut self, rows: &[u32]) -> Result<&Buffer, KernelError> {
        if !self.has_logits(rows) {
            self.gather_results(rows, self.result_rows)?;
            self.compute_logits(rows.len())?;
        }
        Ok(&self.step.logits)
    }

    /// Whether a graph has already computed the logits of these rows, in this order.
    fn has_logits(&self, rows: &[u32]) -> bool {
        rows.len() <= self.logit_rows && rows.iter().copied().eq(0..rows.len() as u32)
    }

    fn compute_logits(&mut self, rows: usize) -> Result<(), KernelError> {
        self.logit_rows = 0;
        let (step, on) = (&mut self.step, (&self.kernels, &*self.device));
        let widths = self.decoder.head.linear.as_ref().map_or(&[][..], |head| &head.gathered_outputs);
        let to = if widths.is_empty() { &mut step.logits } else { &mut step.own_logits };
        self.loaded.logits(&self.decoder, on, &step.results, rows, to, &mut self.scratch)?;
        if !widths.is_empty() {
            let ranks = ranks::needed(&mut self.ranks)?;
            ranks.gather(on.1, &step.own_logits, (rows, widths, size_of::<f32>()), &mut step.logits)?;
        }
        self.finish_logits(rows)
    }

    /// Scales and caps the logits of the first rows, where the model does.
    pub(super) fn finish_logits(&mut self, rows: usize) -> Result<(), KernelError> {
        let (head, count) = (&self.decoder.head, rows * self.decoder.num_logits());
        if head.scale == 1.0 && head.soft_cap.is_none() {
            return Ok(());
        }
        let _time = clock(&*self.device, "finish_logits", None, 2 * count, Dtype::F32);
        self.ops.finish_logits(&mut self.step.logits, count, head.scale, head.soft_cap)
    }

    /// Hidden states after the final norm of up to [`LOGIT_ROWS`] rows of the last step, `[rows, output_width]`, copied to the
    /// host.
    ///
    /// # Errors
    /// See [`Model::logits`].
    pub fn hidden(&mut self, rows: &[u32]) -> Result<&[f32], KernelError> {
        self.gather_results(rows, LOGIT_ROWS)?;
        let elements = rows.len() * self.decoder.output_width();
        let _phase = self.phase("wait");
        self.ops.to_host(&self.step.results, self.kernels.format.dtype, elements)
    }

    /// Gathers rows of the last step, after the final norm, into the first rows of `step.results`.
    fn gather_results(&mut self, rows: &[u32], most: usize) -> Result<(), KernelError> {
        if rows.len() > most {
            return Err(KernelError::Shape { what: "result rows of a step", found: rows.len(), expected: most });
        }
        self.find_kept(rows)?;
        let (step, width, dtype) = (&mut self.step, self.decoder.output_width(), self.kernels.format.dtype);
        let _time = clock(&*self.device, "gather", None, 2 * rows.len() * width, dtype);
        let hidden = step.registers.get(Register::Branch);
        self.ops.gather_rows(hidden, &self.gathered, width, &mut step.results)
    }

    /// Fills `gathered` with the places of rows of the last step among those that were kept.
    pub(super) fn find_kept(&mut self, rows: &[u32]) -> Result<(), KernelError> {
        self.gathered.clear();
        for row in rows {
            self.gathered.push(match &self.kept_rows {
                None if (*row as usize) < self.step.max_rows => *row,
                None => {
                    let (found, expected) = (*row as usize, self.step.max_rows);
                    return Err(KernelError::Shape { what: "row index of a step", found, expected });
                }
                Some(kept) => kept.binary_search(row).map(|place| place as u32).map_err(|_| KernelError::Shape {
                    what: "a row that was not among the needed rows of the step",
                    found: *row as usize,
                    expected: kept.len(),
                })?,
            });
        }
        Ok(())
    }
}

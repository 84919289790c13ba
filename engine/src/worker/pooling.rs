//! Pools the hidden states of a prompt into one vector, as its spans are computed.
//!
//! A mean is summed in float64 in the order of positions, so neither chunk borders nor the batch change a bit of the result.

use std::ops::Range;

use models::Pooling;

/// The rows of one prompt that were added so far.
pub(super) struct Pooled {
    pooling: Pooling,
    /// `[hidden_size]`; empty before the first row.
    sum: Vec<f64>,
    rows: usize,
}

impl Pooled {
    pub fn new(pooling: Pooling) -> Pooled {
        Pooled { pooling, sum: Vec::new(), rows: 0 }
    }

    /// The positions of `span` whose rows are still to be added, for a prompt of `len` tokens. Positions that are recomputed
    /// after a preemption were added before.
    pub fn positions(&self, span: Range<usize>, len: usize) -> Range<usize> {
        let first = match self.pooling {
            Pooling::Last => len - 1 + self.rows,
            Pooling::Mean => self.rows,
        };
        let start = first.max(span.start);
        start..span.end.min(len).max(start)
    }

    /// Adds rows of `width` elements, in the order of positions.
    pub fn add_rows(&mut self, rows: &[f32], width: usize) {
        self.sum.resize(width, 0.0);
        for row in rows.chunks_exact(width) {
            self.rows += 1;
            self.sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
        }
    }

    /// Returns the vector, normalised to length 1 (the sum has the direction of the mean). A vector of zeros stays zero.
    pub fn finish(&mut self) -> Vec<f32> {
        let sum = std::mem::take(&mut self.sum);
        let length = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        let scale = if length > 0.0 { 1.0 / length } else { 0.0 };
        sum.into_iter().map(|x| (x * scale) as f32).collect()
    }
}

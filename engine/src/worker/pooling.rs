//! Hidden states of a prompt, row by row as its spans are computed, become one vector.
//!
//! A mean is summed in float64 in the order of positions, so that neither chunk borders nor the batch change a bit of it.

use std::ops::Range;

use models::Pooling;

/// What has been taken of one prompt.
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

    /// The positions whose rows are wanted of a span of positions of a prompt of `len` tokens. Those computed anew after
    /// a preemption have been taken before.
    pub fn positions(&self, span: Range<usize>, len: usize) -> Range<usize> {
        let first = match self.pooling {
            Pooling::Last => len - 1 + self.rows,
            Pooling::Mean => self.rows,
        };
        let start = first.max(span.start);
        start..span.end.min(len).max(start)
    }

    /// Takes rows of `width` elements, in the order of positions.
    pub fn add_rows(&mut self, rows: &[f32], width: usize) {
        self.sum.resize(width, 0.0);
        for row in rows.chunks_exact(width) {
            self.rows += 1;
            self.sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
        }
    }

    /// The vector, of length 1: the direction of a sum is that of the mean. A vector of zeros stays one.
    pub fn finish(&mut self) -> Vec<f32> {
        let sum = std::mem::take(&mut self.sum);
        let length = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        let scale = if length > 0.0 { 1.0 / length } else { 0.0 };
        sum.into_iter().map(|x| (x * scale) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_takes_every_position_once_whatever_the_spans() {
        let mut pool = Pooled::new(Pooling::Mean);
        assert_eq!(pool.positions(0..3, 5), 0..3);
        pool.add_rows(&[3.0, 0.0, 0.0, 2.0, 0.0, 1.0], 2);
        // Begun anew after a preemption, in other spans.
        assert_eq!(pool.positions(0..2, 5), 3..3);
        assert_eq!(pool.positions(2..6, 5), 3..5);
        pool.add_rows(&[0.0, 1.0, 0.0, 0.0], 2);
        assert_eq!(pool.finish(), [0.6, 0.8]);
    }

    #[test]
    fn the_last_position_is_taken_once() {
        let mut pool = Pooled::new(Pooling::Last);
        assert!(pool.positions(0..4, 5).is_empty());
        assert_eq!(pool.positions(4..5, 5), 4..5);
        pool.add_rows(&[0.0, 0.0], 2);
        assert!(pool.positions(4..6, 5).is_empty());
        assert_eq!(pool.finish(), [0.0, 0.0], "no direction, and no NaN");
    }
}

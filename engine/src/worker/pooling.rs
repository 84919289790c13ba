//! Pools the hidden states of a prompt into one vector, as its spans are computed.
//!
//! Sums are in float64 in the order of positions, so neither chunk borders nor the batch change a bit of the result.

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
        let wanted = match self.pooling {
            Pooling::Last => len - 1 + self.rows..len,
            Pooling::Cls => self.rows..1,
            _ => self.rows..len,
        };
        let start = wanted.start.max(span.start);
        start..span.end.min(wanted.end).max(start)
    }

    /// Adds rows of `width` elements, in the order of positions.
    pub fn add_rows(&mut self, rows: &[f32], width: usize) {
        if self.sum.is_empty() {
            self.sum.resize(width, if self.pooling == Pooling::Max { f64::NEG_INFINITY } else { 0.0 });
        }
        for row in rows.chunks_exact(width) {
            self.rows += 1;
            let weight = if self.pooling == Pooling::WeightedMean { self.rows as f64 } else { 1.0 };
            let each = self.sum.iter_mut().zip(row).map(|(sum, &x)| (sum, f64::from(x)));
            match self.pooling {
                Pooling::Max => each.for_each(|(sum, x)| *sum = sum.max(x)),
                _ => each.for_each(|(sum, x)| *sum += weight * x),
            }
        }
    }

    /// Whether all rows of a prompt of `len` tokens were added.
    pub fn is_complete(&self, len: usize) -> bool {
        self.rows >= if matches!(self.pooling, Pooling::Last | Pooling::Cls) { 1 } else { len }
    }

    /// Returns the vector.
    pub fn finish(&mut self) -> Vec<f64> {
        let (mut vector, rows) = (std::mem::take(&mut self.sum), self.rows as f64);
        let divisor = match self.pooling {
            Pooling::Last | Pooling::Cls | Pooling::Max => return vector,
            Pooling::Mean => rows,
            Pooling::MeanSqrtLen => rows.sqrt(),
            Pooling::WeightedMean => rows * (rows + 1.0) / 2.0,
        };
        vector.iter_mut().for_each(|x| *x /= divisor);
        vector
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pooling_is_that_of_its_definition_in_any_chunks() {
        let rows: Vec<[f32; 2]> = (0..7).map(|i| [(i * i % 5) as f32 - 1.5, 3.0 - i as f32]).collect();
        let column = |c: usize| rows.iter().map(move |row| f64::from(row[c])).collect::<Vec<_>>();
        let weighted = |c: usize| column(c).iter().zip(1..).map(|(x, p)| x * f64::from(p)).sum::<f64>() / 28.0;
        let sum = |c: usize| column(c).iter().sum::<f64>();
        let greatest = |c: usize| column(c).into_iter().fold(f64::NEG_INFINITY, f64::max);
        for (pooling, want) in [
            (Pooling::Last, [column(0)[6], column(1)[6]]),
            (Pooling::Cls, [column(0)[0], column(1)[0]]),
            (Pooling::Mean, [sum(0) / 7.0, sum(1) / 7.0]),
            (Pooling::MeanSqrtLen, [sum(0) / 7.0_f64.sqrt(), sum(1) / 7.0_f64.sqrt()]),
            (Pooling::WeightedMean, [weighted(0), weighted(1)]),
            (Pooling::Max, [greatest(0), greatest(1)]),
        ] {
            for chunk in [1, 3, 7] {
                let mut pooled = Pooled::new(pooling);
                for start in (0..7).step_by(chunk) {
                    let positions = pooled.positions(start..7.min(start + chunk), 7);
                    let flat: Vec<f32> = rows[positions].as_flattened().to_vec();
                    pooled.add_rows(&flat, 2);
                }
                assert!(pooled.is_complete(7), "{pooling:?}");
                let found = pooled.finish();
                assert!(found.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-12), "{pooling:?}: {found:?}, {want:?}");
            }
        }
    }
}

//! Softmax of a row over the partitions of its context, merged in order.

/// State of the partitions merged so far. The values, summed with weights exp(score - greatest), are kept beside it.
#[derive(Clone, Copy, Default)]
pub(super) struct Merged {
    /// Greatest score.
    pub greatest: f32,
    /// Sum of the weights; 0 before the first partition, at least 1 after it.
    pub total: f32,
}

impl Merged {
    /// Returns the natural log of the sum of exp(score).
    pub fn log_of_sum(self) -> f32 {
        self.greatest + self.total.ln()
    }

    /// Merges one partition: `sums` holds the weighted values so far, `part` those of the partition.
    #[inline(always)]
    pub fn merge(&mut self, other: Merged, sums: &mut [f32], part: &[f32]) {
        if self.total == 0.0 {
            *self = other;
            sums.copy_from_slice(part);
            return;
        }
        let after = self.greatest.max(other.greatest);
        let (old, new) = (weight(self.greatest, after), weight(other.greatest, after));
        *self = Merged { greatest: after, total: self.total * old + other.total * new };
        for (sum, part) in sums.iter_mut().zip(part) {
            *sum = *sum * old + part * new;
        }
    }

    /// Adds a logit without a value, after the last partition. Returns the factor of the weighted values.
    #[inline(always)]
    pub fn add_sink(&mut self, sink: f32) -> f32 {
        let after = self.greatest.max(sink);
        let (old, new) = (weight(self.greatest, after), weight(sink, after));
        *self = Merged { greatest: after, total: self.total * old + new };
        old
    }
}

/// Returns exp(score - greatest); usually the two are equal.
#[inline(always)]
fn weight(score: f32, greatest: f32) -> f32 {
    if score == greatest { 1.0 } else { (score - greatest).exp() }
}

//! Rounding of weights to integers with a scale for each group.

use device::Dtype;
use half::{bf16, f16};

/// Fractions of the greatest magnitude, in steps of an integer of 4 bits, that are tried as the scale. A smaller divisor than 8
/// keeps more of the range, a greater one clips the greatest weight and serves the others better.
const STEPS: [f32; 6] = [7.0, 7.3, 7.6, 8.0, 8.4, 8.8];

/// A symmetric form: integers from `-2^(bits-1)` to `2^(bits-1) - 1` with one positive scale for each `group` inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntegerForm {
    /// At most 8.
    pub bits: u32,
    /// Inputs of a group.
    pub group: usize,
    /// Type of the scales.
    pub scale: Dtype,
}

impl IntegerForm {
    fn half(self) -> f32 {
        (1u32 << (self.bits - 1)) as f32
    }

    /// Rounds a scale to its type.
    fn stored(self, scale: f32) -> f32 {
        match self.scale {
            Dtype::F32 => scale,
            Dtype::F16 => f16::from_f32(scale).to_f32(),
            Dtype::Bf16 => bf16::from_f32(scale).to_f32(),
        }
    }

    /// The nearest integer, clamped to the range.
    pub fn integer(self, weight: f32, scale: f32) -> f32 {
        let quotient = if scale == 0.0 { 0.0 } else { weight / scale };
        quotient.round_ties_even().clamp(-self.half(), self.half() - 1.0)
    }

    /// The scale that leaves the smallest squared error of those that are tried: for each step, the best one for the integers of
    /// that step, Σwq / Σq².
    pub fn scale(self, weights: &[f32]) -> f32 {
        let greatest = weights.iter().fold(0.0f32, |m, w| m.max(w.abs()));
        if greatest == 0.0 {
            return 0.0;
        }
        let whole = [self.half() - 1.0];
        let steps: &[f32] = if self.bits == 4 { &STEPS } else { &whole };
        let mut best = (f64::INFINITY, 0.0);
        for step in steps {
            let tried = greatest / step;
            let (mut wq, mut qq) = (0.0f64, 0.0f64);
            for w in weights {
                let q = self.integer(*w, tried);
                (wq, qq) = (wq + f64::from(*w) * f64::from(q), qq + f64::from(q) * f64::from(q));
            }
            let scale = self.stored((wq / qq) as f32);
            if !scale.is_finite() || scale <= 0.0 {
                continue;
            }
            let error = |w: &f32| f64::from(*w - scale * self.integer(*w, scale)).powi(2);
            let error = weights.iter().map(error).sum();
            if error < best.0 {
                best = (error, scale);
            }
        }
        best.1
    }

    /// Rounds each weight of a row to the nearest value; writes the values and the scales of the groups.
    pub fn nearest(self, row: &mut [f32], scales: &mut [f32]) {
        for (group, stored) in row.chunks_mut(self.group).zip(scales) {
            let scale = self.scale(group);
            group.iter_mut().for_each(|w| *w = scale * self.integer(*w, scale));
            *stored = scale;
        }
    }

    /// The code of a value that is an integer times a scale.
    pub fn code(self, value: f32, scale: f32) -> u32 {
        (self.integer(value, scale) + self.half()) as u32
    }

    /// The little-endian bytes of a scale.
    pub fn bytes(self, scale: f32) -> Vec<u8> {
        match self.scale {
            Dtype::F32 => scale.to_le_bytes().to_vec(),
            Dtype::F16 => f16::from_f32(scale).to_le_bytes().to_vec(),
            Dtype::Bf16 => bf16::from_f32(scale).to_le_bytes().to_vec(),
        }
    }
}

//! Rotary position embedding (Su et al., "RoFormer", 2021): the angular frequency of each pair of elements.
//!
//! Pairs are (i, i + head_dim / 2), as in the Hugging Face layout of Llama weights.

use std::f64::consts::TAU;

use crate::decoder::{Rope, RopeScaling};

/// Angle per position of each of the `head_dim / 2` pairs, in float32 as in training.
pub(super) fn frequencies(rope: &Rope, head_dim: usize) -> Vec<f32> {
    let half = head_dim / 2;
    let plain = |i: usize| rope.theta.powf(-((2 * i) as f64) / head_dim as f64);
    (0..half).map(|i| scale(&rope.scaling, plain(i)) as f32).collect()
}

fn scale(scaling: &RopeScaling, frequency: f64) -> f64 {
    match *scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        // As in the Llama 3.1 release: long wavelengths are scaled in full, short ones not at all, with a ramp between.
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: original,
        } => {
            let wavelength = TAU / frequency;
            if wavelength > original / low_freq_factor {
                frequency / factor
            } else if wavelength < original / high_freq_factor {
                frequency
            } else {
                let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_short_wavelengths_scales_long_ones_and_ramps_between() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64.0,
        };
        let at = |wavelength: f64| TAU / scale(&scaling, TAU / wavelength);
        assert!((at(10.0) - 10.0).abs() < 1e-9);
        assert!((at(100.0) - 800.0).abs() < 1e-9);
        let middle = at(32.0);
        assert!(middle > 32.0 && middle < 256.0, "{middle}");
    }

    #[test]
    fn frequencies_fall_from_one_and_linear_scaling_divides_them() {
        let plain = frequencies(&Rope { theta: 10000.0, scaling: RopeScaling::None }, 8);
        assert_eq!(plain.len(), 4);
        for (found, want) in plain.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((found - want).abs() < 1e-7);
        }
        let linear = frequencies(&Rope { theta: 10000.0, scaling: RopeScaling::Linear { factor: 4.0 } }, 8);
        assert!((linear[1] - 0.025).abs() < 1e-8);
    }
}

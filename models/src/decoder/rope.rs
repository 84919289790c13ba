//! The angular frequencies of a rotary embedding.

use std::f64::consts::TAU;

use super::{Rope, RopeScaling};

impl Rope {
    /// Angle per position of each of the `head_dim / 2` pairs (i, i + head_dim / 2), in float32 as in training.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let plain = |i: usize| self.theta.powf(-((2 * i) as f64) / head_dim as f64);
        (0..head_dim / 2).map(|i| scale(&self.scaling, plain(i)) as f32).collect()
    }
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

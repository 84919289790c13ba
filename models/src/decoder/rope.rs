//! Rotary embeddings and the angular frequencies of their pairs.

use std::f64::consts::TAU;

use serde::Serialize;

/// Rotary position embedding (Su et al., "RoFormer", 2021) of the first `dims` elements of a head.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rope {
    /// Base of the geometric series of wavelengths (`rope_theta`).
    pub theta: f64,
    /// Number of rotated elements; even.
    pub dims: usize,
    /// Whether pairs are neighbours, (2i, 2i + 1). Otherwise they are (i, i + dims / 2).
    pub interleaved: bool,
    /// Scaling of the frequencies for contexts longer than those of the pre-training.
    pub scaling: RopeScaling,
}

/// Supported frequency scalings of `rope_scaling` / `rope_parameters`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Divides all frequencies by `factor`.
    Linear {
        /// Divisor, at least 1.
        factor: f64,
    },
    /// Rotates the first `pairs` pairs alone, with the frequencies that they have among all pairs of the head.
    Proportional {
        /// Number of pairs that are rotated.
        pairs: usize,
        /// Divisor, at least 1.
        factor: f64,
    },
    /// Llama 3.1: divides low frequencies by `factor`, keeps high ones, and interpolates between them.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are scaled in full.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of the pre-training.
        original_max_position_embeddings: f64,
    },
    /// NTK-aware scaling: a greater base for contexts longer than the pre-training's. The context is the greatest that the engine
    /// serves, so that keys in the cache stay valid.
    Dynamic {
        /// Growth of the base.
        factor: f64,
        /// Context length of the pre-training.
        max_position_embeddings: f64,
        /// Context length that the base is chosen for.
        context: f64,
    },
    /// YaRN (Peng et al., 2023): divides low frequencies by `factor`, keeps high ones, with a linear ramp between.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Context length of the pre-training.
        original_max_position_embeddings: f64,
        /// Rotations within that context above which a frequency is kept.
        beta_fast: f64,
        /// Rotations within that context below which a frequency is scaled in full.
        beta_slow: f64,
        /// Whether the ends of the ramp are rounded to whole pairs.
        truncate: bool,
        /// Factor of all cosines and sines.
        attention_factor: f64,
    },
    /// LongRoPE (Ding et al., 2024): a divisor per frequency, from one of two lists. The list depends on the greatest context
    /// that the engine serves, so that keys in the cache stay valid.
    LongRope {
        /// Divisors for contexts of up to `original_max_position_embeddings`, one per pair.
        short_factor: Vec<f64>,
        /// Divisors for longer contexts.
        long_factor: Vec<f64>,
        /// Context length of the pre-training.
        original_max_position_embeddings: f64,
        /// Factor of all cosines and sines with the short list.
        short_attention_factor: f64,
        /// The same with the long list.
        long_attention_factor: f64,
        /// Context length that the list is chosen for.
        context: f64,
    },
}

impl Rope {
    /// Angle per position of each of the `dims / 2` pairs, in float32 as in training.
    pub fn frequencies(&self) -> Vec<f32> {
        let dims = self.dims as f64;
        let theta = match self.scaling {
            RopeScaling::Dynamic { factor, max_position_embeddings: most, context } if context > most => {
                self.theta * (factor * context / most - (factor - 1.0)).powf(dims / (dims - 2.0))
            }
            _ => self.theta,
        };
        let plain = |i: usize| theta.powf(-((2 * i) as f64) / dims);
        (0..self.dims / 2).map(|i| self.scale(i, plain(i)) as f32).collect()
    }

    /// Factor of all cosines and sines.
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor as f32,
            RopeScaling::LongRope {
                short_attention_factor: short,
                long_attention_factor: long,
                original_max_position_embeddings: original,
                context,
                ..
            } => (if context > original { long } else { short }) as f32,
            _ => 1.0,
        }
    }

    /// Chooses what depends on the greatest context that is served.
    pub(super) fn set_context(&mut self, len: usize) {
        if let RopeScaling::Dynamic { context, .. } | RopeScaling::LongRope { context, .. } = &mut self.scaling {
            *context = len as f64;
        }
    }

    fn scale(&self, pair: usize, frequency: f64) -> f64 {
        match &self.scaling {
            RopeScaling::None | RopeScaling::Dynamic { .. } => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Proportional { pairs, factor } => {
                if pair < *pairs {
                    frequency / factor
                } else {
                    0.0
                }
            }
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
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                // The pair that completes this many rotations within the original context.
                let dims = self.dims as f64;
                let pair_of = |turns: f64| dims * (original / (turns * TAU)).ln() / (2.0 * self.theta.ln());
                let (mut low, mut high) = (pair_of(*beta_fast), pair_of(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(dims - 1.0));
                if low == high {
                    high += 0.001;
                }
                let ramp = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                frequency / factor * ramp + frequency * (1.0 - ramp)
            }
            RopeScaling::LongRope {
                short_factor,
                long_factor,
                original_max_position_embeddings: original,
                context,
                ..
            } => {
                let factors = if context > original { long_factor } else { short_factor };
                frequency / factors.get(pair).copied().unwrap_or(1.0)
            }
        }
    }
}

//! The other operations of a layer on a CPU, row by row: norms, rotation, activations, and the recurrence of gated delta nets. They are
//! here so that all loops over numbers are compiled with full optimisation; what calls them need not be.

mod delta_rule;
mod rows;

use serde::Serialize;

pub use delta_rule::{convolve, delta_rule};
pub use rows::{
    Activate, NormRow, activate, activate_by, activate_q8, add, gate, norm, norm_heads, norm_q8, rotate_heads, scale,
};

/// Activation function of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// Gaussian error linear unit (Hendrycks & Gimpel, 2016), by the error function.
    Gelu,
    /// The same, approximated with tanh.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)²`.
    Relu2,
    /// gpt-oss: `(u + 1) * g * sigmoid(1.702 * g)` where g is the gate, at most `limit`, and u is up, clamped to -limit..=limit.
    ClampedSwiglu {
        /// The bound.
        limit: f32,
    },
    /// Expanded integral of ELU (Huang & Schlag, "Deriving Activation Functions Using Integration", 2024):
    /// `positive * x² + beta * x` for x > 0, else `negative * (e^min(x, eps) - 1 - x) + beta * x`.
    Xielu {
        /// Factor of the square.
        positive: f32,
        /// Factor of the integral of the exponential.
        negative: f32,
        /// Slope at 0.
        beta: f32,
        /// Greatest exponent.
        eps: f32,
    },
}

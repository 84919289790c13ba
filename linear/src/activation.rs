//! Activation functions of feed-forward networks, sixteen elements at a time.

use serde::Serialize;
use simd::Lanes;

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

impl Activation {
    /// Returns the function of a gate times `up`, 1 if there is no gate.
    #[inline(always)]
    pub fn apply<L: Lanes>(self, gate: L, up: L) -> L {
        match self {
            Activation::Silu => gate.div(exp_of_negative(gate).add(L::splat(1.0))).mul(up),
            Activation::Gelu => gelu(gate).mul(up),
            Activation::GeluTanh => gelu_tanh(gate).mul(up),
            Activation::Relu => gate.max(L::splat(0.0)).mul(up),
            Activation::Relu2 => {
                let positive = gate.max(L::splat(0.0));
                positive.mul(positive).mul(up)
            }
            Activation::ClampedSwiglu { limit } => {
                let gate = least(gate, L::splat(limit));
                let up = least(up.max(L::splat(-limit)), L::splat(limit));
                sigmoid(gate.mul(L::splat(1.702))).mul(gate).mul(up.add(L::splat(1.0)))
            }
            Activation::Xielu { positive, negative, beta, eps } => {
                let (above, below) = (gate.max(L::splat(0.0)), least(gate, L::splat(0.0)));
                let exponential = exp_of_negative(least(below, L::splat(eps)).mul(L::splat(-1.0)));
                let integral = below.mul_add(L::splat(-1.0), exponential.add(L::splat(-1.0)));
                // 1 below 0, where the integral counts, else 0.
                let counts = below.div(below.add(L::splat(-f32::MIN_POSITIVE)));
                let square = above.mul(above).mul(L::splat(positive));
                let sum = square.add(integral.mul(counts).mul(L::splat(negative)));
                gate.mul_add(L::splat(beta), sum).mul(up)
            }
        }
    }
}

#[inline(always)]
fn least<L: Lanes>(a: L, b: L) -> L {
    let minus = L::splat(-1.0);
    a.mul(minus).max(b.mul(minus)).mul(minus)
}

/// `e^-x`, at most e^87.3, which is finite and which adding 1 does not change.
#[inline(always)]
fn exp_of_negative<L: Lanes>(x: L) -> L {
    x.max(L::splat(-87.3)).mul(L::splat(-1.0)).exp()
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid<L: Lanes>(x: L) -> L {
    L::splat(1.0).div(exp_of_negative(x).add(L::splat(1.0)))
}

/// `x/2 * (1 + tanh(u))` = `x * sigmoid(2u)` with u = sqrt(2/π) (x + 0.044715 x³) (Hendrycks & Gimpel, 2016).
#[inline(always)]
fn gelu_tanh<L: Lanes>(x: L) -> L {
    let cube = x.mul(x).mul(x);
    let u = cube.mul_add(L::splat(0.044_715), x).mul(L::splat(0.797_884_6));
    x.div(exp_of_negative(u.add(u)).add(L::splat(1.0)))
}

/// `x/2 * (1 + erf(x / sqrt(2)))`. The error function is approximation 7.1.26 of Abramowitz & Stegun, "Handbook of Mathematical
/// Functions", whose error is at most 1.5e-7.
#[inline(always)]
fn gelu<L: Lanes>(x: L) -> L {
    let magnitude = x.max(x.mul(L::splat(-1.0)));
    let z = magnitude.mul(L::splat(std::f32::consts::FRAC_1_SQRT_2));
    let t = L::splat(1.0).div(z.mul_add(L::splat(0.327_591_1), L::splat(1.0)));
    let mut p = L::splat(1.061_405_4);
    for c in [-1.453_152, 1.421_413_8, -0.284_496_74, 0.254_829_6] {
        p = p.mul_add(t, L::splat(c));
    }
    let erf = p.mul(t).mul(exp_of_negative(z.mul(z))).mul_add(L::splat(-1.0), L::splat(1.0));
    magnitude.mul_add(erf, x).mul(L::splat(0.5))
}

//! The quantised weight formats.

use std::fmt;
use std::str::FromStr;

/// Format that weights are quantised to while they are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// 8-bit integers in blocks of 32 along k that share a half-precision scale: 8.5 bits per weight, as Q8_0 of GGUF files,
    /// with at most the squared error of Q8_0. Activations are quantised to 8 bits in the same blocks before each product.
    Q8,
    /// 4-bit integers in the same blocks: 4.5 bits per weight, as Q4_0 of GGUF files, with at most the squared error of Q4_0.
    /// Activations as for [`Quantization::Q8`].
    Q4,
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Quantization::Q8 => "q8",
            Quantization::Q4 => "q4",
        })
    }
}

impl FromStr for Quantization {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Quantization, &'static str> {
        let known = [Quantization::Q8, Quantization::Q4].into_iter().find(|form| form.to_string() == name);
        known.ok_or("expected q8 or q4: weights in 8 or 4 bits with one scale per 32")
    }
}

//! Forms in fewer bits.

use std::fmt;
use std::str::FromStr;

/// What weights are made into while they are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// 8 bits in blocks of 32 along k, which share a scale in half precision: 8.5 bits a weight, as Q8_0 of GGUF files,
    /// with at most its squared error. Activations are brought to 8 bits in the same blocks before each product.
    Q8,
    /// 4 bits in the same blocks: 4.5 bits a weight, as Q4_0 of GGUF files, with at most its squared error. Activations as
    /// with [`Quantization::Q8`].
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
        known.ok_or("expected q8 or q4: weights in 8 or 4 bits with a scale for every 32")
    }
}

//! Number types that layers compute in, and conversions between them.

use std::fmt;

use simd::small_float::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// Type of the elements of weights, activations and logits (little endian).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Dtype {
    /// IEEE 754 single precision.
    #[default]
    F32,
    /// IEEE 754 half precision.
    F16,
    /// bfloat16: the upper half of a single-precision number.
    Bf16,
}

impl Dtype {
    /// Every type.
    pub const ALL: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

    /// Returns the name as it appears in kernel names: `f32`, `f16` or `bf16`.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        }
    }

    /// Size of an element in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// Widens the numbers in `data` to f32; as many as both have.
    pub fn read_row(self, data: &[u8], row: &mut [f32]) {
        let halves = data.as_chunks().0;
        match self {
            Dtype::F32 => {
                row.iter_mut().zip(data.as_chunks().0).for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
            }
            Dtype::Bf16 => {
                row.iter_mut().zip(halves).for_each(|(x, bytes)| *x = bf16_to_f32(u16::from_le_bytes(*bytes)))
            }
            Dtype::F16 => row.iter_mut().zip(halves).for_each(|(x, bytes)| *x = f16_to_f32(u16::from_le_bytes(*bytes))),
        }
    }

    /// Rounds `row` to this type, to nearest even.
    pub fn write_row(self, row: &[f32], data: &mut [u8]) {
        match self {
            Dtype::F32 => data.as_chunks_mut().0.iter_mut().zip(row).for_each(|(to, x)| *to = x.to_le_bytes()),
            Dtype::Bf16 => {
                data.as_chunks_mut().0.iter_mut().zip(row).for_each(|(to, x)| *to = f32_to_bf16(*x).to_le_bytes())
            }
            Dtype::F16 => {
                data.as_chunks_mut().0.iter_mut().zip(row).for_each(|(to, x)| *to = f32_to_f16(*x).to_le_bytes())
            }
        }
    }

    /// Converts numbers of type `from` to this type, rounding to nearest even. `to` has room for exactly as many numbers.
    pub fn convert(self, from: Dtype, data: &[u8], to: &mut [u8]) {
        if self == from {
            return to.copy_from_slice(data);
        }
        let mut wide = [0.0; 256];
        for (data, to) in data.chunks(wide.len() * from.bytes()).zip(to.chunks_mut(wide.len() * self.bytes())) {
            let wide = &mut wide[..to.len() / self.bytes()];
            from.read_row(data, wide);
            self.write_row(wide, to);
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

//! Weight matrices of devices that launch kernels, for products whose activations are rounded to 8 bits too.
//!
//! ```text
//! codes    [n, k]   int8 or e4m3, row-major: a factor of `Device::product`
//! scales   [n]      float32
//! ```
//!
//! `y[r][o] = (Σ codes of x[r] · codes of W[o]) · scale of W[o] · scale of x[r] + bias[o]`. The scale of a row of x is its own, or one that
//! the checkpoint states. Sums of integers are exact, so their order does not matter.

use device::{Buffer, Dtype, Factor, FactorType, Features};

use super::pack::{PartForm, Purpose, StoredPart, WeightRows};
use super::stored::{Codes, Offset, Rounding, StoredRow};

/// Most inputs, so that a row fits a staging buffer and its sum of integers 32 bits: 2^31 / 127^2 is 133,144.
const MOST_INPUTS: usize = 1 << 17;
/// Tensor cores of 8 bits take matrices whose sides are multiples of this.
const STEP: usize = 16;

/// How activations are rounded for a [`ByteMatrix`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RowRounding {
    /// To integers, `round(x / s)` where s = max |x| / 127 of a row.
    Int8,
    /// To e4m3, with s = max |x| / 448 of a row.
    E4m3,
    /// To e4m3 with this scale.
    Static(f32),
}

impl RowRounding {
    /// Type of the codes.
    pub fn format(self) -> FactorType {
        match self {
            RowRounding::Int8 => FactorType::Int8,
            RowRounding::E4m3 | RowRounding::Static(_) => FactorType::E4m3,
        }
    }
}

/// Weights of 8 bits with a scale for each output.
pub struct ByteMatrix {
    pub(crate) codes: Buffer,
    /// Float32 `[n]`.
    pub(crate) scales: Buffer,
    pub(crate) rounding: RowRounding,
    /// Type of the inputs of products, before they are rounded.
    pub(crate) dtype: Dtype,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

impl ByteMatrix {
    /// The codes as a factor of a product.
    pub fn factor(&self) -> Factor<'_> {
        Factor { elements: &self.codes, format: self.rounding.format(), n: self.n, k: self.k }
    }

    /// Float32 `[n]`.
    pub fn scales(&self) -> &Buffer {
        &self.scales
    }

    /// How products round their inputs.
    pub fn rounding(&self) -> RowRounding {
        self.rounding
    }

    /// Bytes of a matrix of these parts, which [`ByteMatrix::rounding_of`] accepts.
    pub(crate) fn stored_bytes(k: usize, parts: &[(usize, PartForm<'_>)]) -> usize {
        parts.iter().map(|(rows, _)| rows * (k + size_of::<f32>())).sum()
    }

    /// How products with a matrix of these parts round their inputs; `None` if it is stored in another form: a part has weights of
    /// another kind or with scales of groups, parts are rounded for differently, or the device has no such products.
    pub fn rounding_of(
        features: Features,
        purpose: Purpose,
        k: usize,
        parts: &[(usize, PartForm<'_>)],
    ) -> Option<RowRounding> {
        let of = |form: &PartForm<'_>| match form {
            PartForm::Stored(StoredPart { format, order: None, rounding, .. }) if format.group >= k => {
                match (format.codes, rounding) {
                    (Codes::Integers { bits: 8, zero: 128 }, Rounding::Row) if format.offset == Offset::None => {
                        Some(RowRounding::Int8)
                    }
                    (Codes::E4m3, Rounding::Floats(group)) if *group >= k => Some(RowRounding::E4m3),
                    (Codes::E4m3, Rounding::Static(scale)) if *scale > 0.0 && scale.is_finite() => {
                        Some(RowRounding::Static(*scale))
                    }
                    _ => None,
                }
            }
            _ => None,
        };
        let rounding = of(&parts.first()?.1)?;
        let n: usize = parts.iter().map(|(rows, _)| rows).sum();
        let is_fit =
            purpose == Purpose::Product && n.is_multiple_of(STEP) && k.is_multiple_of(STEP) && k <= MOST_INPUTS;
        let has_products = rounding == RowRounding::Int8 || features.multiplies_e4m3;
        let is_one = parts.iter().all(|(_, form)| of(form) == Some(rounding));
        (is_fit && has_products && is_one).then_some(rounding)
    }
}

/// Rows of the parts of a [`ByteMatrix`].
pub(crate) struct ByteRows<'a> {
    parts: Vec<StoredPart<'a>>,
    k: usize,
}

impl<'a> ByteRows<'a> {
    pub fn new(parts: &[WeightRows<'a>], k: usize) -> ByteRows<'a> {
        let stored = |part: &WeightRows<'a>| match part {
            WeightRows::Stored(part) => Some(*part),
            WeightRows::Numbers(..) => None,
        };
        ByteRows { parts: parts.iter().filter_map(stored).collect(), k }
    }

    /// Writes the codes of a row and returns its scale; `None` if a weight is not finite.
    pub fn read(&self, mut row: usize, codes: &mut [u8]) -> Option<f32> {
        for part in &self.parts {
            if let Some(behind) = row.checked_sub(part.rows) {
                row = behind;
                continue;
            }
            let mut stored = StoredRow::new(&part.format, self.k);
            part.source.read(row, &mut stored);
            // Integers lose their zero point of 128.
            let flip = if part.format.codes == Codes::E4m3 { 0 } else { 0x80 };
            codes.iter_mut().zip(&stored.codes).for_each(|(to, code)| *to = code ^ flip);
            let bits = stored.scales.first().copied().unwrap_or_default();
            return stored.is_finite(&part.format).then(|| part.format.scale.value(bits, 0));
        }
        None
    }
}

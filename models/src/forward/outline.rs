//! The matrix of linear layers before it is loaded: its shape, and the form of its parts.

use device::Dtype;
use linear::{
    Arithmetic, Matrix, PackedMatrix, PartForm, Purpose, Quantization, StoredPart, StoredRow, StoredRows, Uploader,
    WeightRows,
};

use crate::checkpoint::quantized::{self, Module};
use crate::decoder;
use crate::{LoadError, Weights};

/// What the headers of a checkpoint say of the matrix of stacked linear layers.
pub struct MatrixOutline<'w> {
    inputs: usize,
    quantization: Option<Quantization>,
    /// Rows of each part with the type of its numbers, and its module if rows of codes are read from one.
    parts: Vec<(usize, Dtype, Option<Module<'w>>)>,
}

/// Rows whose codes and scales are zero.
struct Zeros;

impl StoredRows for Zeros {
    fn read(&self, _row: usize, _out: &mut StoredRow) {}
}

impl<'w> MatrixOutline<'w> {
    /// Reads the headers of layers that have the same inputs.
    ///
    /// # Errors
    /// The first matrix that is missing or has an unexpected shape or type.
    pub fn of(linears: &[&decoder::Linear], weights: &'w Weights) -> Result<MatrixOutline<'w>, LoadError> {
        let mut parts = Vec::new();
        for linear in linears {
            for part in linear.parts.iter().map(|part| weights.stored_part(part)) {
                let module = quantized::find(weights, &part, linear.inputs)?;
                let dtype = match module {
                    Some(_) => Dtype::F32,
                    None => weights.expect(&part.weight(), &part.pick.shape(linear.inputs))?.dtype,
                };
                parts.push((part.rows, dtype, module.filter(|module| module.in_rows)));
            }
        }
        let first = linears.first();
        Ok(MatrixOutline {
            inputs: first.map_or(0, |linear| linear.inputs),
            quantization: first.and_then(|linear| linear.form.quantization()),
            parts,
        })
    }

    /// Rows and inputs.
    pub fn shape(&self) -> [usize; 2] {
        [self.parts.iter().map(|(rows, ..)| rows).sum(), self.inputs]
    }

    /// Rows and form of each part.
    pub(super) fn forms(&self) -> Vec<(usize, PartForm<'_>)> {
        let mut forms = Vec::new();
        for (rows, dtype, module) in &self.parts {
            let form = module.as_ref().map_or(PartForm::Numbers(*dtype), |module| PartForm::Stored(module.part()));
            forms.push((*rows, form));
        }
        forms
    }

    /// Bytes of the matrix on a device that packs matrices.
    pub fn packed_bytes(&self, arithmetic: Arithmetic) -> usize {
        PackedMatrix::packed_bytes(arithmetic, self.inputs, self.quantization, &self.forms())
    }

    /// Returns a matrix of zeros in this form, for measurements. It has `share` of the rows of each part, at least one.
    ///
    /// # Errors
    /// The errors of [`Uploader::matrix`].
    pub fn zeros(&self, share: f64, uploader: &mut Uploader<'_>, dtype: Dtype) -> Result<Matrix, LoadError> {
        let part_of = |rows: usize| ((rows as f64 * share).ceil() as usize).clamp(1, rows.max(1));
        let forms = self.forms();
        let most = self.parts.iter().map(|(rows, dtype, _)| part_of(*rows) * dtype.bytes()).max();
        let zeros = vec![0; most.unwrap_or(0) * self.inputs];
        let parts = forms.iter().map(|(rows, form)| match form {
            PartForm::Numbers(dtype) => {
                WeightRows::Numbers(*dtype, &zeros[..part_of(*rows) * self.inputs * dtype.bytes()])
            }
            PartForm::Stored(part) => WeightRows::Stored(StoredPart { rows: part_of(*rows), source: &Zeros, ..*part }),
        });
        let parts: Vec<_> = parts.collect();
        let rows = forms.iter().map(|(rows, _)| part_of(*rows)).sum();
        Ok(uploader.matrix(self.quantization, dtype, [rows, self.inputs], &parts, Purpose::Product)?)
    }
}

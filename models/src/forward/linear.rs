//! Loading of linear layers and norms from the checkpoint to the device, and their size there.

use attention_kernels::{Dtype, KernelError, KernelSet, LinearArgs, Rows};
use device::gemm::PackedMatrix;
use device::{Buffer, Device, Features, Matrix, Uploader};

use super::ops;
use crate::decoder::{self, Decoder, Part};
use crate::{LoadError, WeightView, Weights};

/// `y = x·Wᵀ + bias`, one or several fused projections.
pub(super) struct Linear {
    pub weights: Matrix,
    bias: Option<Buffer>,
}

impl Linear {
    /// Applies the layer to the first `rows` rows of `x`. `output` is the type of `y`.
    pub fn run(
        &self,
        kernels: &KernelSet,
        device: &dyn Device,
        x: Rows<'_>,
        rows: usize,
        y: &mut Buffer,
        output: Dtype,
    ) -> Result<(), KernelError> {
        kernels
            .linear
            .linear(device, LinearArgs { x, rows, weights: &self.weights, bias: self.bias.as_ref(), y, output })
    }
}

/// Uploads weights of a checkpoint after checking their shapes.
pub(super) struct Loader<'a> {
    weights: &'a Weights,
    uploader: Uploader<'a>,
    /// Type of the computation: that of biases, and of matrices that are not packed.
    dtype: Dtype,
    progress: &'a dyn Fn(u64, u64),
    done: u64,
}

impl<'a> Loader<'a> {
    pub fn new(
        weights: &'a Weights,
        device: &'a dyn Device,
        dtype: Dtype,
        progress: &'a dyn Fn(u64, u64),
    ) -> Result<Loader<'a>, LoadError> {
        let uploader = Uploader::new(device)?;
        Ok(Loader { weights, uploader, dtype, progress, done: 0 })
    }

    /// A linear layer in its declared form.
    pub fn linear(&mut self, linear: &decoder::Linear) -> Result<Linear, LoadError> {
        let mut views = Vec::with_capacity(linear.parts.len());
        let mut biases = Vec::new();
        for Part { name, rows } in &linear.parts {
            views.push(self.view(&format!("{name}.weight"), &[*rows, linear.inputs])?);
            if linear.bias {
                biases.push(self.view(&format!("{name}.bias"), &[*rows])?);
            }
        }
        let shape = [linear.rows(), linear.inputs];
        let weights = self.uploader.matrix(linear.form.quantization(), self.dtype, shape, &parts(&views))?;
        // Do not keep the checkpoint's pages in memory in addition to the packed copy.
        views.iter().for_each(|view| self.weights.release(view));
        let bias = if linear.bias { Some(self.upload(self.dtype, &biases)?) } else { None };
        Ok(Linear { weights, bias })
    }

    /// A norm; its weight is float32.
    pub fn norm(&mut self, norm: &decoder::Norm) -> Result<ops::Norm, LoadError> {
        let values = self.view(&norm.name, &[norm.width])?;
        Ok(ops::Norm { weight: self.upload(Dtype::F32, &[values])?, eps: norm.eps })
    }

    fn view(&mut self, name: &str, shape: &[usize]) -> Result<WeightView<'a>, LoadError> {
        let view = self.weights.expect(name, shape)?;
        self.done += view.data.len() as u64;
        (self.progress)(self.done, self.weights.total_bytes());
        Ok(view)
    }

    /// Uploads vectors, concatenated.
    fn upload(&mut self, dtype: Dtype, views: &[WeightView<'_>]) -> Result<Buffer, LoadError> {
        Ok(self.uploader.numbers(dtype, &parts(views))?)
    }
}

fn parts<'a>(views: &[WeightView<'a>]) -> Vec<(Dtype, &'a [u8])> {
    views.iter().map(|view| (view.dtype, view.data)).collect()
}

/// Type in which the checkpoint stores its embedding, for a model that computes in the checkpoint's type; `None` if the tensor
/// is missing.
pub fn checkpoint_dtype(decoder: &Decoder, weights: &Weights) -> Option<Dtype> {
    let part = decoder.embedding.parts.first()?;
    weights.get(&format!("{}.weight", part.name)).map(|view| view.dtype)
}

/// Bytes of the weights on a device with these features that computes in `dtype`. Reads only the headers of the checkpoint.
///
/// # Errors
/// The first matrix that is missing or has an unexpected shape or type.
pub fn weight_bytes(decoder: &Decoder, weights: &Weights, features: Features, dtype: Dtype) -> Result<u64, LoadError> {
    let norms: usize = decoder.norms().map(|norm| norm.width * size_of::<f32>()).sum();
    let mut bytes = norms;
    for linear in decoder.linears() {
        let view = |part: &Part| weights.expect(&format!("{}.weight", part.name), &[part.rows, linear.inputs]);
        let dtypes = linear.parts.iter().map(|part| Ok(view(part)?.dtype)).collect::<Result<Vec<_>, LoadError>>()?;
        bytes += match features.packs_matrices {
            true => PackedMatrix::packed_bytes(linear.rows(), linear.inputs, dtypes, linear.form.quantization()),
            false => linear.rows() * linear.inputs * dtype.bytes(),
        };
        bytes += if linear.bias { linear.rows() * dtype.bytes() } else { 0 };
    }
    Ok(bytes as u64)
}

/// Checks that the checkpoint has every tensor that the model reads, in a usable type and shape. Reads only the headers of the
/// checkpoint.
///
/// # Errors
/// The first tensor that is missing or has an unexpected shape or type.
pub fn check_weights(decoder: &Decoder, weights: &Weights) -> Result<(), LoadError> {
    decoder.tensors().try_for_each(|(name, shape)| weights.expect(&name, &shape).map(drop))
}

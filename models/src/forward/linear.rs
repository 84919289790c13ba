//! Linear layers and norms: how their weights get from the checkpoint to the device, and how many bytes they take there.

use attention_kernels::{Dtype, KernelError, KernelSet, LinearArgs, Rows};
use device::gemm::{PackedMatrix, WeightFormat};
use device::{Buffer, Device, DeviceError, Matrix, Uploader};

use super::ops;
use crate::decoder::{self, Decoder, Form, Part};
use crate::{LoadError, WeightDtype, WeightView, Weights};

/// `y = x·Wᵀ + bias`, possibly of several fused parts.
pub(super) struct Linear {
    pub weights: Matrix,
    bias: Option<Buffer>,
}

impl Linear {
    /// Applies the layer to the first `rows` rows of `x`; `output` is the type of `y`.
    pub fn run(
        &self,
        kernels: &KernelSet,
        device: &dyn Device,
        x: Rows<'_>,
        rows: usize,
        y: &mut Buffer,
        output: Dtype,
    ) -> Result<(), KernelError> {
        kernels.linear(device, LinearArgs { x, rows, weights: &self.weights, bias: self.bias.as_ref(), y, output })
    }
}

/// Takes weights out of a checkpoint, checked against the expected shapes.
pub(super) struct Loader<'a> {
    weights: &'a Weights,
    device: &'a dyn Device,
    /// For devices that launch kernels: the type of their matrices and biases, and the way there.
    dense: Option<(WeightFormat, Uploader<'a>)>,
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
        let dense = match device.is_host() {
            true => None,
            false => Some((format_of(dtype), Uploader::new(device).map_err(on_device)?)),
        };
        Ok(Loader { weights, device, dense, progress, done: 0 })
    }

    /// A linear layer in its declared form.
    pub fn linear(&mut self, linear: &decoder::Linear) -> Result<Linear, LoadError> {
        let mut views = Vec::with_capacity(linear.parts.len());
        let mut biases = Vec::new();
        for Part { name, rows } in &linear.parts {
            views.push(self.take(&format!("{name}.weight"), &[*rows, linear.inputs])?);
            if linear.bias {
                biases.push(self.take(&format!("{name}.bias"), &[*rows])?);
            }
        }
        let parts = parts(&views);
        let weights = match (&mut self.dense, linear.form) {
            (Some((format, uploader)), Form::Dense) => {
                let numbers = uploader.numbers(*format, &parts);
                numbers.and_then(|numbers| Matrix::dense(*format, linear.rows(), linear.inputs, numbers))
            }
            (Some(_), Form::Quantized(quantization)) => {
                Err(DeviceError::NoQuantization { device: self.device.name(), quantization })
            }
            (None, Form::Quantized(quantization)) => self.device.quantized_matrix(quantization, linear.inputs, &parts),
            (None, Form::Dense) => self.device.matrix(linear.inputs, &parts),
        };
        let weights = weights.map_err(on_device)?;
        // A checkpoint should not stand in memory beside its packed copy.
        views.iter().for_each(|view| self.weights.release(view));
        let format = self.dense.as_ref().map_or(WeightFormat::F32, |(format, _)| *format);
        let bias = if linear.bias { Some(self.upload(format, &biases)?) } else { None };
        Ok(Linear { weights, bias })
    }

    /// A norm; its weight is float32.
    pub fn norm(&mut self, norm: &decoder::Norm) -> Result<ops::Norm, LoadError> {
        let values = self.take(&norm.name, &[norm.width])?;
        Ok(ops::Norm { weight: self.upload(WeightFormat::F32, &[values])?, eps: norm.eps })
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<WeightView<'a>, LoadError> {
        let view = self.weights.expect(name, shape)?;
        self.done += view.data.len() as u64;
        (self.progress)(self.done, self.weights.total_bytes());
        Ok(view)
    }

    /// Vectors, one behind the other. A CPU's are float32.
    fn upload(&mut self, format: WeightFormat, views: &[WeightView<'_>]) -> Result<Buffer, LoadError> {
        if let Some((_, uploader)) = &mut self.dense {
            return uploader.numbers(format, &parts(views)).map_err(on_device);
        }
        let values: Vec<f32> = views.iter().flat_map(WeightView::to_f32).collect();
        let mut buffer = self.device.alloc(size_of_val(&values[..])).map_err(on_device)?;
        buffer.host_mut::<f32>().map_err(on_device)?.copy_from_slice(&values);
        Ok(buffer)
    }
}

fn parts<'a>(views: &[WeightView<'a>]) -> Vec<(WeightFormat, &'a [u8])> {
    views.iter().map(|view| (format(view.dtype), view.data)).collect()
}

/// The type of a model's matrices on a device that launches kernels.
fn format_of(dtype: Dtype) -> WeightFormat {
    match dtype {
        Dtype::F32 => WeightFormat::F32,
        Dtype::F16 => WeightFormat::F16,
        Dtype::Bf16 => WeightFormat::Bf16,
    }
}

fn format(dtype: WeightDtype) -> WeightFormat {
    match dtype {
        WeightDtype::F32 => WeightFormat::F32,
        WeightDtype::F16 => WeightFormat::F16,
        WeightDtype::BF16 => WeightFormat::Bf16,
    }
}

fn on_device(error: DeviceError) -> LoadError {
    LoadError::Device(error.to_string())
}

/// Type that the checkpoint stores its embedding in, for a model that is computed in the checkpoint's type; `None` where the
/// tensor is missing.
pub fn checkpoint_dtype(decoder: &Decoder, weights: &Weights) -> Option<WeightDtype> {
    let part = decoder.embedding.parts.first()?;
    weights.get(&format!("{}.weight", part.name)).map(|view| view.dtype)
}

/// Bytes that the weights take on a CPU. Reads headers alone.
///
/// # Errors
/// The first matrix that is missing or of another shape or type.
pub fn weight_bytes(decoder: &Decoder, weights: &Weights) -> Result<u64, LoadError> {
    let norms: usize = decoder.norms().map(|norm| norm.width).sum();
    let mut bytes = (norms * size_of::<f32>()) as u64;
    for linear in decoder.linears() {
        let view = |part: &Part| weights.expect(&format!("{}.weight", part.name), &[part.rows, linear.inputs]);
        let formats = linear.parts.iter().map(|part| Ok(format(view(part)?.dtype)));
        let formats = formats.collect::<Result<Vec<_>, LoadError>>()?;
        let biases = if linear.bias { linear.rows() * size_of::<f32>() } else { 0 };
        bytes += (PackedMatrix::packed_bytes(linear.rows(), linear.inputs, formats, linear.form.quantization())
            + biases) as u64;
    }
    Ok(bytes)
}

/// Bytes of the weights on a device that launches kernels: matrices and biases of that type, norms in float32.
pub fn dense_weight_bytes(decoder: &Decoder, dtype: Dtype) -> u64 {
    let linear = |linear: &decoder::Linear| linear.rows() * (linear.inputs + usize::from(linear.bias)) * dtype.bytes();
    let linears: usize = decoder.linears().map(linear).sum();
    let norms: usize = decoder.norms().map(|norm| norm.width * size_of::<f32>()).sum();
    (linears + norms) as u64
}

/// Whether the checkpoint has every tensor that the model reads, in a type and shape that will do. Reads headers alone.
///
/// # Errors
/// The first tensor that is missing or of another shape or type.
pub fn check_weights(decoder: &Decoder, weights: &Weights) -> Result<(), LoadError> {
    decoder.tensors().try_for_each(|(name, shape)| weights.expect(&name, &shape).map(drop))
}

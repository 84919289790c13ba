//! A linear layer and how its weights get from the checkpoint to the device.

use attention_kernels::{Dtype, KernelError, KernelSet, LinearArgs, Rows};
use device::gemm::{Quantization, WeightFormat};
use device::{Buffer, Device, DeviceError, Matrix, Uploader};

use super::declare::LinearNames;
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
    quantization: Option<Quantization>,
    /// For devices that launch kernels: the type of their matrices and biases, and the way there.
    dense: Option<(WeightFormat, Uploader<'a>)>,
    progress: &'a dyn Fn(u64, u64),
    done: u64,
}

impl<'a> Loader<'a> {
    pub fn new(
        weights: &'a Weights,
        device: &'a dyn Device,
        quantization: Option<Quantization>,
        dtype: Dtype,
        progress: &'a dyn Fn(u64, u64),
    ) -> Result<Loader<'a>, LoadError> {
        let dense = match (device.is_host(), quantization) {
            (true, _) => None,
            (false, None) => Some((format_of(dtype), Uploader::new(device).map_err(on_device)?)),
            (false, Some(quantization)) => {
                return Err(on_device(DeviceError::NoQuantization { device: device.name(), quantization }));
            }
        };
        Ok(Loader { weights, device, quantization, dense, progress, done: 0 })
    }

    /// A linear layer with `inputs` columns.
    pub fn linear(&mut self, names: &LinearNames, inputs: usize) -> Result<Linear, LoadError> {
        let mut views = Vec::with_capacity(names.parts.len());
        let mut biases = Vec::new();
        for (name, rows) in &names.parts {
            views.push(self.take(&format!("{name}.weight"), &[*rows, inputs])?);
            if names.bias {
                biases.push(self.take(&format!("{name}.bias"), &[*rows])?);
            }
        }
        let parts = parts(&views);
        let weights = match (&mut self.dense, self.quantization) {
            (Some((format, uploader)), _) => {
                let rows = names.parts.iter().map(|(_, rows)| rows).sum();
                let numbers = uploader.numbers(*format, &parts);
                numbers.and_then(|numbers| Matrix::dense(*format, rows, inputs, numbers))
            }
            (None, Some(quantization)) => self.device.quantized_matrix(quantization, inputs, &parts),
            (None, None) => self.device.matrix(inputs, &parts),
        };
        let weights = weights.map_err(on_device)?;
        // A checkpoint should not stand in memory beside its packed copy.
        views.iter().for_each(|view| self.weights.release(view));
        let format = self.dense.as_ref().map_or(WeightFormat::F32, |(format, _)| *format);
        let bias = if names.bias { Some(self.upload(format, &biases)?) } else { None };
        Ok(Linear { weights, bias })
    }

    /// A vector of `len` numbers as float32.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Buffer, LoadError> {
        let values = self.take(name, &[len])?;
        self.upload(WeightFormat::F32, &[values])
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

pub(super) fn format(dtype: WeightDtype) -> WeightFormat {
    match dtype {
        WeightDtype::F32 => WeightFormat::F32,
        WeightDtype::F16 => WeightFormat::F16,
        WeightDtype::BF16 => WeightFormat::Bf16,
    }
}

fn on_device(error: DeviceError) -> LoadError {
    LoadError::Device(error.to_string())
}

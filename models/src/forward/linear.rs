//! A linear layer and how its weights get from the checkpoint to the device.

use attention_kernels::{KernelError, KernelSet, LinearArgs};
use device::gemm::{Quantization, WeightFormat};
use device::{Buffer, Device, DeviceError, Matrix};

use super::declare::LinearNames;
use crate::{LoadError, WeightDtype, WeightView, Weights};

/// `y = x·Wᵀ + bias`, possibly of several fused parts.
pub(super) struct Linear {
    pub weights: Matrix,
    bias: Option<Buffer>,
}

impl Linear {
    /// Applies the layer to the first `rows` rows of `x`.
    pub fn run(
        &self,
        kernels: &KernelSet,
        device: &dyn Device,
        x: &Buffer,
        rows: usize,
        y: &mut Buffer,
    ) -> Result<(), KernelError> {
        kernels.linear(device, LinearArgs { x, rows, weights: &self.weights, bias: self.bias.as_ref(), y })
    }
}

/// Takes weights out of a checkpoint, checked against the expected shapes.
pub(super) struct Loader<'a> {
    weights: &'a Weights,
    device: &'a dyn Device,
    quantization: Option<Quantization>,
    progress: &'a dyn Fn(u64, u64),
    done: u64,
}

impl<'a> Loader<'a> {
    pub fn new(
        weights: &'a Weights,
        device: &'a dyn Device,
        quantization: Option<Quantization>,
        progress: &'a dyn Fn(u64, u64),
    ) -> Loader<'a> {
        Loader { weights, device, quantization, progress, done: 0 }
    }

    /// A linear layer with `inputs` columns.
    pub fn linear(&mut self, names: &LinearNames, inputs: usize) -> Result<Linear, LoadError> {
        let mut views = Vec::with_capacity(names.parts.len());
        let mut bias = Vec::new();
        for (name, rows) in &names.parts {
            views.push(self.take(&format!("{name}.weight"), &[*rows, inputs])?);
            if names.bias {
                bias.extend(self.take(&format!("{name}.bias"), &[*rows])?.to_f32());
            }
        }
        let parts: Vec<(WeightFormat, &[u8])> = views.iter().map(|view| (format(view.dtype), view.data)).collect();
        let weights = match self.quantization {
            Some(quantization) => self.device.quantized_matrix(quantization, inputs, &parts),
            None => self.device.matrix(inputs, &parts),
        };
        let weights = weights.map_err(on_device)?;
        // A checkpoint should not stand in memory beside its packed copy.
        views.iter().for_each(|view| self.weights.release(view));
        let bias = if names.bias { Some(self.upload(&bias)?) } else { None };
        Ok(Linear { weights, bias })
    }

    /// A vector of `len` numbers as float32.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Buffer, LoadError> {
        let values = self.take(name, &[len])?.to_f32();
        self.upload(&values)
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<WeightView<'a>, LoadError> {
        let view = self.weights.expect(name, shape)?;
        self.done += view.data.len() as u64;
        (self.progress)(self.done, self.weights.total_bytes());
        Ok(view)
    }

    fn upload(&self, values: &[f32]) -> Result<Buffer, LoadError> {
        let mut buffer = self.device.alloc(size_of_val(values)).map_err(on_device)?;
        buffer.host_mut::<f32>().map_err(on_device)?.copy_from_slice(values);
        Ok(buffer)
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

//! The scales of 8-bit keys and values that a checkpoint brings, under the names that vLLM reads
//! (`maybe_remap_kv_scale_name` in `vllm/model_executor/model_loader/weight_utils.py`): one number for a layer, or one for
//! each key/value head. Or, where it brings none and that is asked for (`--calculate-kv-scales`), they are made in the first
//! step that computes tokens, of what it computes, and stay: each layer's before its first key is written, so that no page
//! holds numbers of other scales.

use std::sync::Arc;

use attention_kernels::{Dtype, KernelError, KvCache, KvScales};
use device::{Buffer, Device, DeviceError};

use crate::decoder::{Attention, Decoder};
use crate::{LoadError, Weights};

/// Of the keys and of the values of one layer, `[1]` or `[num_kv_heads]` each.
type Scales = [Vec<f32>; 2];

/// The scales of a layer; `None` if the checkpoint has none.
fn of_layer(layer: &Attention, weights: &Weights) -> Result<Option<Scales>, LoadError> {
    let first = |names: &[&str]| {
        for name in names {
            if let Some(scales) = tensor(layer, weights, &format!("{}.{name}", layer.name))? {
                return Ok(Some(scales));
            }
        }
        Ok(None)
    };
    let keys = first(&["k_scale", "attn.k_scale", "k_proj.k_scale", "kv_scale"])?;
    let values = first(&["v_scale", "attn.v_scale", "v_proj.v_scale", "kv_scale"])?;
    match (keys, values) {
        (None, None) => Ok(None),
        (Some(keys), Some(values)) if keys.len() == values.len() => Ok(Some([keys, values])),
        // The one that is missing, or of another length, is asked for by its name.
        (keys, values) => {
            let (name, len) = match (keys, values) {
                (Some(keys), _) => ("v_scale", keys.len()),
                (None, values) => ("k_scale", values.map_or(1, |values| values.len())),
            };
            weights.expect(&format!("{}.{name}", layer.name), &[len])?;
            Ok(None)
        }
    }
}

/// One tensor of scales; `None` if it is not there.
fn tensor(layer: &Attention, weights: &Weights, name: &str) -> Result<Option<Vec<f32>>, LoadError> {
    let mut found = weights.expect(name, &[]);
    for len in [1, layer.heads.num_kv_heads] {
        if matches!(found, Err(LoadError::WrongShape { .. })) {
            found = weights.expect(name, &[len]);
        }
    }
    let view = match found {
        Err(LoadError::MissingTensor { .. }) => return Ok(None),
        other => other?,
    };
    let scales = view.to_f32();
    match scales.iter().find(|scale| !(scale.is_finite() && **scale > 0.0)) {
        None => Ok(Some(scales)),
        Some(scale) => Err(LoadError::Setting {
            file: view.file,
            key: name.to_string(),
            found: scale.to_string(),
            expected: "a scale: finite and above 0".to_string(),
        }),
    }
}

/// How many layers of a checkpoint bring scales for 8-bit keys and values.
///
/// # Errors
/// A scale of another shape or type, that is not above 0, or of keys or values alone.
pub fn layers_with_kv_scales(decoder: &Decoder, weights: &Weights) -> Result<usize, LoadError> {
    let mut layers = 0;
    for layer in decoder.attention() {
        layers += usize::from(of_layer(layer, weights)?.is_some());
    }
    Ok(layers)
}

/// Bytes of device memory that the scales of all layers take, in a cache that takes scales; with `calculate`, those of
/// layers for which the checkpoint has none too ([`Model::calculate_kv_scales`](super::Model::calculate_kv_scales)).
///
/// # Errors
/// As [`layers_with_kv_scales`].
pub fn kv_scale_bytes(decoder: &Decoder, weights: &Weights, calculate: bool) -> Result<u64, LoadError> {
    let mut numbers = 0;
    for layer in decoder.attention() {
        let rest = if calculate { 2 * layer.heads.num_kv_heads } else { 0 };
        numbers += of_layer(layer, weights)?.map_or(rest, |[keys, values]| keys.len() + values.len());
    }
    Ok((numbers * size_of::<f32>()) as u64)
}

/// The checkpoint's scales of a layer on a device; `None` if it has none.
pub(super) fn load(layer: &Attention, weights: &Weights, device: &dyn Device) -> Result<Option<KvScales>, LoadError> {
    let scales = of_layer(layer, weights)?.map(|scales| upload(device, &scales));
    scales.transpose().map_err(|error| LoadError::Device(error.to_string()))
}

/// Scales of 1, one for each head.
pub(super) fn ones(layer: &Attention, device: &dyn Device) -> Result<KvScales, DeviceError> {
    let ones = vec![1.0; layer.heads.num_kv_heads];
    upload(device, &[ones.clone(), ones])
}

fn upload(device: &dyn Device, scales: &Scales) -> Result<KvScales, DeviceError> {
    let upload = |scales: &[f32]| -> Result<Buffer, DeviceError> {
        let mut buffer = device.alloc(size_of_val(scales))?;
        device.upload(&mut buffer, 0, &bytes(scales))?;
        Ok(buffer)
    };
    let [keys, values] = scales;
    Ok(KvScales { keys: upload(keys)?, values: upload(values)?, per_head: keys.len() > 1 })
}

fn bytes(scales: &[f32]) -> Vec<u8> {
    scales.iter().flat_map(|scale| scale.to_ne_bytes()).collect()
}

/// How many times the greatest magnitude of the first step a cache of 8-bit floats can hold: what comes later may be greater,
/// and such a float keeps its precision at every size.
const HEADROOM: f32 = 4.0;

/// Rows of fused QKV, `[rows, num_heads + 2 * num_kv_heads, head_dim]`, keys already rotated, of which scales are made.
pub(super) struct Calibration<'a> {
    /// On the device, of the model's type.
    pub qkv: &'a Buffer,
    /// Query heads.
    pub num_heads: usize,
    /// Of the layer; rows without a slot are padding and do not count.
    pub slots: &'a [i64],
    /// The cache that they are for. It gets them.
    pub cache: &'a mut KvCache,
}

impl Calibration<'_> {
    /// Overwrites the scales, one for each KV head, in place: [`HEADROOM`] × greatest magnitude / greatest number of the type;
    /// 1 where there is no magnitude to go by. It waits for the device, and is for one step of a process.
    ///
    /// # Errors
    /// Scales that somebody else holds, and those of the copies.
    pub fn run(self, device: &dyn Device, scales: &mut Arc<KvScales>) -> Result<(), KernelError> {
        let (dim, kv_heads) = (self.cache.shape.head_dim, self.cache.shape.num_kv_heads);
        let dtype = self.cache.format.dtype;
        let row = (self.num_heads + 2 * kv_heads) * dim * dtype.bytes();
        let mut raw = vec![0; self.slots.len() * row];
        device.download(self.qkv, 0, &mut raw)?;
        let mut greatest = vec![0.0f32; 2 * kv_heads];
        for (row, _) in raw.chunks(row).zip(self.slots).filter(|(_, slot)| **slot >= 0) {
            let heads = row.chunks(dim * dtype.bytes()).skip(self.num_heads);
            for (greatest, head) in greatest.iter_mut().zip(heads) {
                *greatest = numbers(dtype, head).filter(|x| x.is_finite()).fold(*greatest, |m, x| m.max(x.abs()));
            }
        }
        let most = self.cache.format.kv_dtype.greatest().unwrap_or(1.0);
        let scale = |greatest: &f32| match HEADROOM * greatest / most {
            scale if scale.is_normal() => scale,
            _ => 1.0,
        };
        let of: Vec<f32> = greatest.iter().map(scale).collect();
        let (keys, values) = of.split_at(kv_heads);
        let shared =
            || KernelError::Unsupported { variant: "calibration", found: "scales that are in use".to_string() };
        let mine = Arc::get_mut(scales).ok_or_else(shared)?;
        device.upload(&mut mine.keys, 0, &bytes(keys))?;
        device.upload(&mut mine.values, 0, &bytes(values))?;
        self.cache.scales = Some(Arc::clone(scales));
        Ok(())
    }
}

/// Elements as they lie in a device's memory, which is little-endian.
fn numbers(dtype: Dtype, raw: &[u8]) -> impl Iterator<Item = f32> {
    raw.chunks_exact(dtype.bytes()).map(move |raw| match (dtype, raw) {
        (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (Dtype::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f32(),
        (_, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f32(),
        _ => f32::NAN,
    })
}

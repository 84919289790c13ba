//! Scales of 8-bit keys and values.
//!
//! A checkpoint may bring them, under the names that vLLM reads (`maybe_remap_kv_scale_name` in
//! `vllm/model_executor/model_loader/weight_utils.py`): one number per layer, or one per key/value head. With
//! `--calculate-kv-scales`, layers without scales get theirs from the first step that computes tokens: each layer's are computed
//! before its first key is written and never change, so no page holds numbers with other scales.

use std::sync::Arc;

use attention_kernels::{CacheFormat, Dtype, KernelError, KvScales};
use device::{Buffer, Device, DeviceError};

use crate::decoder::{Attention, Decoder, Heads};
use crate::{LoadError, Weights};

/// Scales of the keys and of the values of one layer, `[1]` or `[num_kv_heads]` each.
type Scales = [Vec<f32>; 2];

/// The checkpoint's scales of a layer; `None` if it has none.
fn of_layer(layer: &Attention, weights: &Weights) -> Result<Option<Scales>, LoadError> {
    let first = |names: &[&str]| -> Result<_, LoadError> {
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
        // `expect` reports the one that is missing or has another length.
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

/// One tensor of scales; `None` if it does not exist.
fn tensor(layer: &Attention, weights: &Weights, name: &str) -> Result<Option<Vec<f32>>, LoadError> {
    let mut found = weights.expect(name, &[]);
    let heads = layer.heads.num_kv_heads;
    let (first, all) = layer.shard.map_or((0, heads), |shard| (shard.first_kv, shard.num_kv_heads));
    for len in [1, all] {
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
        None if scales.len() == all => Ok(Some(scales[first..first + heads].to_vec())),
        None => Ok(Some(scales)),
        Some(scale) => Err(LoadError::Setting {
            file: view.file,
            key: name.to_string(),
            found: scale.to_string(),
            expected: "a scale: finite and above 0".to_string(),
        }),
    }
}

/// Number of layers for which a checkpoint brings scales of 8-bit keys and values.
///
/// # Errors
/// A scale with an unexpected shape or type, one that is not above 0, or scales of keys or values alone.
pub fn layers_with_kv_scales(decoder: &Decoder, weights: &Weights) -> Result<usize, LoadError> {
    let mut layers = 0;
    for layer in decoder.attention().filter(|layer| layer.shares.is_none()) {
        layers += usize::from(of_layer(layer, weights)?.is_some());
    }
    Ok(layers)
}

/// Bytes of device memory for the scales of all layers, in a cache that takes scales. With `calculate`, layers for which the
/// checkpoint has none count too ([`Model::calculate_kv_scales`](super::Model::calculate_kv_scales)).
///
/// # Errors
/// See [`layers_with_kv_scales`].
pub fn kv_scale_bytes(decoder: &Decoder, weights: &Weights, calculate: bool) -> Result<u64, LoadError> {
    let mut numbers = 0;
    for layer in decoder.attention().filter(|layer| layer.shares.is_none()) {
        let calculated = if calculate { 2 * layer.heads.num_kv_heads } else { 0 };
        numbers += of_layer(layer, weights)?.map_or(calculated, |[keys, values]| keys.len() + values.len());
    }
    Ok((numbers * size_of::<f32>()) as u64)
}

/// The checkpoint's scales of a layer on a device; `None` if it has none.
pub(super) fn load(layer: &Attention, weights: &Weights, device: &dyn Device) -> Result<Option<KvScales>, LoadError> {
    Ok(of_layer(layer, weights)?.map(|scales| upload(device, &scales)).transpose()?)
}

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

/// Range of a calibrated cache as a multiple of the greatest magnitude in the first step. Later magnitudes may be greater, and
/// an 8-bit float has the same precision at every size.
const HEADROOM: f32 = 4.0;

/// Overwrites `scales`, one per KV head, in place: [`HEADROOM`] × greatest magnitude / greatest number of the cache's type, or 1
/// where that is no normal number. `qkv` holds rows of `stride` elements that begin with
/// `[num_heads + 2 * num_kv_heads, head_dim]`, with rotated keys. Rows without a
/// slot are padding and do not count. Waits for the device. Fails if `scales` is shared.
pub(super) fn calibrate(
    device: &dyn Device,
    qkv: &Buffer,
    (heads, stride): (Heads, usize),
    slots: &[i64],
    format: CacheFormat,
    scales: &mut Arc<KvScales>,
) -> Result<(), KernelError> {
    let (head, row) = (heads.head_dim * format.dtype.bytes(), stride * format.dtype.bytes());
    let mut raw = vec![0; slots.len() * row];
    device.download(qkv, 0, &mut raw)?;
    let mut greatest = vec![0.0f32; 2 * heads.num_kv_heads];
    for (row, _) in raw.chunks(row).zip(slots).filter(|(_, slot)| **slot >= 0) {
        for (greatest, head) in greatest.iter_mut().zip(row.chunks(head).skip(heads.num_heads)) {
            *greatest = numbers(format.dtype, head).filter(|x| x.is_finite()).fold(*greatest, |m, x| m.max(x.abs()));
        }
    }
    let most = format.kv_dtype.greatest().unwrap_or(1.0);
    let scale = |greatest: &f32| match HEADROOM * greatest / most {
        scale if scale.is_normal() => scale,
        _ => 1.0,
    };
    let calibrated: Vec<f32> = greatest.iter().map(scale).collect();
    let (keys, values) = calibrated.split_at(heads.num_kv_heads);
    let shared = || KernelError::Unsupported { variant: "calibration", found: "scales that are in use".to_string() };
    let scales = Arc::get_mut(scales).ok_or_else(shared)?;
    device.upload(&mut scales.keys, 0, &bytes(keys))?;
    Ok(device.upload(&mut scales.values, 0, &bytes(values))?)
}

/// Elements in a device's memory, which is little-endian.
fn numbers(dtype: Dtype, raw: &[u8]) -> impl Iterator<Item = f32> {
    raw.chunks_exact(dtype.bytes()).map(move |raw| match (dtype, raw) {
        (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (Dtype::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f32(),
        (_, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f32(),
        _ => f32::NAN,
    })
}

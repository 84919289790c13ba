//! The scales of 8-bit keys and values that a checkpoint brings, under the names that vLLM reads
//! (`maybe_remap_kv_scale_name` in `vllm/model_executor/model_loader/weight_utils.py`): one number for a layer, or one for
//! each key/value head.

use attention_kernels::KvScales;
use device::{Buffer, Device, DeviceError};

use crate::{LoadError, ModelConfig, Weights};

/// Of the keys and of the values of one layer, `[1]` or `[num_kv_heads]` each.
type Scales = [Vec<f32>; 2];

/// The scales of a layer; `None` if the checkpoint has none.
fn of_layer(config: &ModelConfig, weights: &Weights, layer: usize) -> Result<Option<Scales>, LoadError> {
    let first = |names: &[&str]| {
        for name in names {
            let name = format!("model.layers.{layer}.self_attn.{name}");
            if let Some(scales) = tensor(config, weights, &name)? {
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
            weights.expect(&format!("model.layers.{layer}.self_attn.{name}"), &[len])?;
            Ok(None)
        }
    }
}

/// One tensor of scales; `None` if it is not there.
fn tensor(config: &ModelConfig, weights: &Weights, name: &str) -> Result<Option<Vec<f32>>, LoadError> {
    let mut found = weights.expect(name, &[]);
    for len in [1, config.num_kv_heads] {
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
pub fn layers_with_kv_scales(config: &ModelConfig, weights: &Weights) -> Result<usize, LoadError> {
    let mut layers = 0;
    for layer in 0..config.num_layers {
        layers += usize::from(of_layer(config, weights, layer)?.is_some());
    }
    Ok(layers)
}

/// The scales of a layer on a device.
pub(super) fn load(
    config: &ModelConfig,
    weights: &Weights,
    device: &dyn Device,
    layer: usize,
) -> Result<Option<KvScales>, LoadError> {
    let Some([keys, values]) = of_layer(config, weights, layer)? else { return Ok(None) };
    let upload = |scales: &[f32]| -> Result<Buffer, DeviceError> {
        let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_ne_bytes()).collect();
        let mut buffer = device.alloc(bytes.len())?;
        device.upload(&mut buffer, 0, &bytes)?;
        Ok(buffer)
    };
    let on_device = |error: DeviceError| LoadError::Device(error.to_string());
    let per_head = keys.len() > 1;
    Ok(Some(KvScales {
        keys: upload(&keys).map_err(on_device)?,
        values: upload(&values).map_err(on_device)?,
        per_head,
    }))
}

//! A checkpoint's small files, the device and the kernels: all that is known before a weight is read.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use attention_kernels::{Dtype, KernelSet, Needs, select, serves_cache};
use device::{Device, DeviceError, MemoryInfo};
use models::decoder::Form;
use models::{ModelConfig, ModelFiles, Weights};
use siphasher::sip::SipHasher13;

use crate::api::{EngineConfig, ModelSource};
use crate::error::EngineError;

/// A checkpoint's small files and the device, before any weight is read.
pub(crate) struct Opened {
    pub files: ModelFiles,
    pub config: ModelConfig,
    pub weights: Weights,
    pub device: Arc<dyn Device>,
    pub dtype: Dtype,
    pub kernels: KernelSet,
    /// Of the device, before anything was loaded.
    pub memory: MemoryInfo,
    /// Why `auto` took no GPU.
    pub no_gpu: Option<String>,
}

impl Opened {
    /// A number that two checkpoints share only if they declare the same decoder and their tensors begin alike.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = SipHasher13::new();
        self.config.decoder.to_string().hash(&mut hasher);
        self.weights.hash(&mut hasher);
        hasher.finish()
    }
}

/// Reads `config.json`, opens the device and chooses kernels.
pub(crate) fn open(engine: &EngineConfig) -> Result<Opened, EngineError> {
    open_on(engine, open_device(engine)?)
}

/// The same with a device that is open, and why it is no GPU.
pub(crate) fn open_on(
    engine: &EngineConfig,
    (device, no_gpu): (Arc<dyn Device>, Option<String>),
) -> Result<Opened, EngineError> {
    let (files, config) = declared(engine)?;
    let weights = Weights::open(&files)?;
    let dtype = dtype(engine, &*device, &config, &weights)?;
    let kernels = select(&engine.kernels, &needs(engine, &config, &*device, dtype)?)?;
    let memory = device.memory();
    Ok(Opened { files, config, weights, device, dtype, kernels, memory, no_gpu })
}

/// The files of the checkpoint and what they declare, in the form in which the weights will be kept.
fn declared(engine: &EngineConfig) -> Result<(ModelFiles, ModelConfig), EngineError> {
    let files = match &engine.model {
        ModelSource::Demo => models::demo(),
        ModelSource::Folder(path) => ModelFiles::open(path)?,
    };
    let mut config = ModelConfig::load(&files)?;
    config.decoder = config.decoder.in_form(engine.quantization.map_or(Form::Dense, Form::Quantized));
    Ok((files, config))
}

/// What the checkpoint of this configuration declares. Reads `config.json` alone.
///
/// # Errors
/// The folder does not exist, or its `config.json` is broken or declares what is not supported.
pub fn declare(engine: &EngineConfig) -> Result<ModelConfig, EngineError> {
    declared(engine).map(|(_, config)| config)
}

/// The device that was asked for. `auto` looks for a GPU and says why it takes the CPU instead.
pub(crate) fn open_device(engine: &EngineConfig) -> Result<(Arc<dyn Device>, Option<String>), DeviceError> {
    let options = device::Options {
        threads: engine.threads,
        kernels: engine.kernels_dir.clone(),
        deterministic: engine.deterministic,
        profile: engine.profile.clone(),
        ..Default::default()
    };
    if engine.device != "auto" {
        return Ok((device::open_with(&engine.device, &options)?, None));
    }
    let why = match device::open_with("cuda", &options) {
        // As with kernels: what has not been proven on a card is taken by its name alone.
        Ok(gpu) => format!("{}: models are not proven on a GPU yet, --device cuda takes it", gpu.description()),
        Err(missing) => missing.to_string().trim_start_matches("--device cuda: ").to_string(),
    };
    Ok((device::open_with("cpu", &options)?, Some(why)))
}

/// What the model is computed in.
fn dtype(
    engine: &EngineConfig,
    device: &dyn Device,
    config: &ModelConfig,
    weights: &Weights,
) -> Result<Dtype, EngineError> {
    let computes = |dtype: &Dtype| device.features().compute.contains(dtype);
    match engine.dtype {
        None => Ok(models::checkpoint_dtype(&config.decoder, weights).filter(computes).unwrap_or_default()),
        Some(dtype) if computes(&dtype) => Ok(dtype),
        Some(other) => Err(EngineError::Config {
            flag: "--dtype",
            found: if other == Dtype::F16 { "float16" } else { "bfloat16" }.to_string(),
            expected: "auto or float32: a CPU computes with weights of every type in float32; or use --device cuda"
                .to_string(),
        }),
    }
}

pub(crate) fn needs(
    engine: &EngineConfig,
    config: &ModelConfig,
    device: &dyn Device,
    dtype: Dtype,
) -> Result<Needs, EngineError> {
    let refused =
        |expected| EngineError::Config { flag: "--kv-cache-dtype", found: engine.kv_cache_dtype.to_string(), expected };
    let kv_dtype = engine.kv_cache_dtype.stored(dtype);
    let kv_dtype =
        kv_dtype.ok_or_else(|| refused(format!("at most the {dtype} that the model computes in; leave it at auto")))?;
    if !serves_cache(device, kv_dtype) {
        let name = device.name();
        return Err(refused(format!(
            "auto, fp8_e4m3, fp8_e5m2 or int8, which {name} has kernels for; or use --device cpu"
        )));
    }
    if engine.calculate_kv_scales && !kv_dtype.takes_scales() {
        return Err(EngineError::Config {
            flag: "--calculate-kv-scales",
            found: format!("--kv-cache-dtype {}", engine.kv_cache_dtype),
            expected: "fp8_e4m3 or fp8_e5m2, which have scales to be made; leave it out".to_string(),
        });
    }
    Ok(Needs {
        dtype,
        kv_dtype,
        head_dim: config.decoder.heads().head_dim,
        block_size: engine.block_size,
        window: config.decoder.attention().any(|attention| attention.window.is_some()),
        row_invariant: engine.deterministic,
        ..Needs::on(device)
    })
}

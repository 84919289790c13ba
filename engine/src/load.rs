//! From a configuration to a running engine: read, check, choose, size, allocate.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use attention_kernels::{CacheFormat, Dtype, KernelSet, KvDtype, Needs, SwapSpace, select};
use device::{Device, DeviceError, MemoryInfo};
use models::decoder::Form;
use models::{
    ChatTemplate, Decoder, GenerationDefaults, Model, ModelConfig, ModelFiles, Pooling, Tokenizer, WeightDtype, Weights,
};
use sampling::device::Limits;
use sched::{SchedConfig, Scheduler};
use siphasher::sip::SipHasher13;

use crate::api::{EngineConfig, ModelInfo, ModelSource};
use crate::core::Engine;
use crate::error::EngineError;
use crate::graphs;
use crate::plan::Plan;
use crate::worker::record::Recorder;
use crate::worker::{LocalWorker, Worker, WorkerInfo};

/// Loading progress: how many of how many bytes are in place.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

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

/// Everything a handle needs.
pub(crate) struct Loaded {
    pub engine: Engine,
    pub tokenizer: Arc<Tokenizer>,
    pub chat_template: Option<ChatTemplate>,
    pub defaults: GenerationDefaults,
    pub info: ModelInfo,
}

/// Reads `config.json`, opens the device and chooses kernels.
pub(crate) fn open(engine: &EngineConfig) -> Result<Opened, EngineError> {
    open_on(engine, open_device(engine)?)
}

/// The same with a device that is open, and why it is no GPU.
fn open_on(engine: &EngineConfig, (device, no_gpu): (Arc<dyn Device>, Option<String>)) -> Result<Opened, EngineError> {
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
fn open_device(engine: &EngineConfig) -> Result<(Arc<dyn Device>, Option<String>), DeviceError> {
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
    match (device.is_host(), engine.dtype) {
        (true, None | Some(Dtype::F32)) => Ok(Dtype::F32),
        (true, Some(other)) => Err(EngineError::Config {
            flag: "--dtype",
            found: if other == Dtype::F16 { "float16" } else { "bfloat16" }.to_string(),
            expected: "auto or float32: a CPU computes with weights of every type in float32; or use --device cuda"
                .to_string(),
        }),
        (false, Some(dtype)) => Ok(dtype),
        (false, None) => Ok(match models::checkpoint_dtype(&config.decoder, weights) {
            Some(WeightDtype::F16) => Dtype::F16,
            Some(WeightDtype::BF16) => Dtype::Bf16,
            Some(WeightDtype::F32) | None => Dtype::F32,
        }),
    }
}

fn needs(engine: &EngineConfig, config: &ModelConfig, device: &dyn Device, dtype: Dtype) -> Result<Needs, EngineError> {
    let refused =
        |expected| EngineError::Config { flag: "--kv-cache-dtype", found: engine.kv_cache_dtype.to_string(), expected };
    let kv_dtype = engine.kv_cache_dtype.stored(dtype);
    let kv_dtype =
        kv_dtype.ok_or_else(|| refused(format!("at most the {dtype} that the model computes in; leave it at auto")))?;
    if !device.is_host() && !KvDtype::ON_GPU.contains(&kv_dtype) {
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

/// The kernel registry for this configuration: what each variant can do here, what was chosen and why.
///
/// # Errors
/// A checkpoint or a device that cannot be opened, and a chosen kernel that does not exist or cannot serve.
pub fn describe_kernels(engine: &EngineConfig) -> Result<attention_kernels::Description, EngineError> {
    let Opened { config, device, dtype, .. } = open(engine)?;
    Ok(attention_kernels::describe(&engine.kernels, &needs(engine, &config, &*device, dtype)?)?)
}

/// What a start with this configuration would take. Reads no weight, but all that can be wrong with the folder is found.
pub fn plan(engine: &EngineConfig) -> Result<Plan, EngineError> {
    let opened = open(engine)?;
    Tokenizer::load(&opened.files)?.check(opened.config.decoder.vocab_size())?;
    models::check_weights(&opened.config.decoder, &opened.weights)?;
    Plan::new(engine, &opened, 0)
}

pub(crate) fn load(engine: &EngineConfig, progress: Progress<'_>) -> Result<Loaded, EngineError> {
    load_on(engine, open_device(engine)?, progress)
}

/// The same on a device that is open, with why it is no GPU.
pub(crate) fn load_on(
    engine: &EngineConfig,
    device: (Arc<dyn Device>, Option<String>),
    progress: Progress<'_>,
) -> Result<Loaded, EngineError> {
    let opened = open_on(engine, device)?;
    let defaults = GenerationDefaults::load(&opened.files, &opened.config)?;
    let tokenizer = Arc::new(Tokenizer::load(&opened.files)?);
    tokenizer.check(opened.config.decoder.vocab_size())?;
    let chat_template = ChatTemplate::load(&opened.files)?;
    let Started { worker, info: worker_info, plan, notes } = start(engine, &opened, progress)?;
    let max_in_flight = worker_info.max_in_flight;
    let scheduler = Scheduler::new(SchedConfig { max_in_flight, ..plan.sched.clone() })?;
    let Opened { files, config, device, .. } = &opened;
    let info = ModelInfo {
        name: files.name(),
        architecture: config.architecture.to_string(),
        num_parameters: config.decoder.num_parameters(),
        max_model_len: plan.max_model_len,
        vocab_size: config.decoder.vocab_size(),
        hidden_size: config.decoder.hidden_size(),
        pooling: Pooling::load(files)?,
        eos_token_ids: defaults.eos_token_ids.clone(),
        num_blocks: plan.num_blocks,
        block_size: engine.block_size,
        notes,
    };
    let mut worker: Box<dyn Worker> = Box::new(worker);
    if let Some(path) = &engine.record {
        worker = Box::new(Recorder::new(worker, path, &plan.resolve(engine, &**device), opened.fingerprint())?);
    }
    let seed = engine.seed.unwrap_or_else(random_seed);
    let engine = Engine::new(scheduler, (worker, worker_info), info.eos_token_ids.clone(), plan.max_model_len, seed);
    Ok(Loaded { engine, tokenizer, chat_template, defaults, info })
}

/// A worker, and what was chosen for it.
pub(crate) struct Started {
    pub worker: LocalWorker,
    pub info: WorkerInfo,
    pub plan: Plan,
    /// The choices, one line each.
    pub notes: Vec<String>,
}

/// Loads the weights and takes the memory for pages and steps.
pub(crate) fn start(engine: &EngineConfig, opened: &Opened, progress: Progress<'_>) -> Result<Started, EngineError> {
    let mut plan = Plan::new(engine, opened, 0)?;
    let Opened { config, weights, device, kernels, no_gpu, .. } = opened;
    let kv_scales = kv_scales_line(engine, &config.decoder, weights, kernels.format)?;
    let available = device.memory().available;
    let (decoder, max_rows) = (&config.decoder, engine.max_num_batched_tokens);
    let progress = |done, total| progress(done, total);
    let mut model = Model::load(decoder, weights, device.clone(), *kernels, max_rows, &progress)?;
    if engine.calculate_kv_scales {
        model.calculate_kv_scales()?;
    }
    let graphs = graphs::measure(engine, &mut model, &**device, &plan.step_limits)?;
    if graphs > 0 {
        plan = Plan::new(engine, opened, graphs)?;
    }
    model.reserve(&plan.step_limits)?;
    let mut caches = model.new_cache(plan.num_blocks, engine.block_size)?;
    if device.compute_capability().is_some() {
        // The plan, confirmed by the greatest step.
        model.warm_up(&mut caches)?;
        model.capture_largest(&mut caches)?;
        plan.compare(available, device.memory());
    }
    let lines = kv_scales.into_iter().chain(graphs::line(&model, &plan));
    let notes = notes(&**device, kernels, engine.deterministic, &plan, lines, no_gpu.clone());
    let limits =
        (!device.is_host()).then(|| Limits::new(engine.max_num_seqs, decoder.vocab_size(), plan.max_model_len));
    let swap_space = SwapSpace::new(&**device, &caches, plan.host_blocks)?;
    let (worker, info) = LocalWorker::new(device.clone(), model, caches, swap_space, limits)?;
    Ok(Started { worker, info, plan, notes })
}

/// The choices made for the user, one line each.
fn notes(
    device: &dyn Device,
    kernels: &KernelSet,
    deterministic: bool,
    plan: &Plan,
    more: impl IntoIterator<Item = String>,
    no_gpu: Option<String>,
) -> Vec<String> {
    let chosen: Vec<String> = kernels.all().iter().map(|v| format!("{} {}", v.operation, v.name)).collect();
    let mut notes = vec![
        format!("device: {}, {}", device.name(), device.description()),
        format!("kernels: {}", chosen.join(", ")),
        plan.weights_line(),
        plan.step_line(),
        plan.cache_line(),
    ];
    if let Some(family) = kernels.decode.capabilities.row_invariant.filter(|_| deterministic) {
        notes.insert(
            2,
            format!("deterministic: attention of the family {family}, products with one order of summation"),
        );
    }
    // With the table of sequence length against concurrency.
    tracing::info!("\n{plan}");
    notes.extend(more);
    if let Some(why) = no_gpu {
        notes.insert(1, format!("no GPU is used: {why}"));
    }
    notes
}

/// Where the scales of a cache come from that takes some, in one line.
fn kv_scales_line(
    engine: &EngineConfig,
    decoder: &Decoder,
    weights: &Weights,
    format: CacheFormat,
) -> Result<Option<String>, EngineError> {
    if !format.kv_dtype.takes_scales() {
        return Ok(None);
    }
    let rest = if engine.calculate_kv_scales { "calibrated in the first step" } else { "1" };
    let found = match models::layers_with_kv_scales(decoder, weights)? {
        0 => format!("{rest}, the checkpoint has none"),
        layers if layers == decoder.attention().count() => "those of the checkpoint".to_string(),
        layers => format!("those of the checkpoint in {layers} of {} layers, else {rest}", decoder.attention().count()),
    };
    Ok(Some(format!("scales of the cache: {found}")))
}

/// A seed from the operating system's randomness, by way of the standard library's hash keys.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

//! From a configuration to a running engine: read, check, choose, size, allocate.

use std::sync::Arc;

use attention_kernels::{KernelSet, Needs, SwapSpace, select};
use device::Device;
use models::{
    ChatTemplate, GenerationDefaults, LayerGroup, Model, ModelConfig, ModelFiles, Pooling, Tokenizer, Weights,
};
use sched::{CacheGroup, SchedConfig, Scheduler};

use crate::api::{EngineConfig, ModelInfo, ModelSource};
use crate::core::Engine;
use crate::error::EngineError;
use crate::executor::Executor;
use crate::plan::Plan;

/// Loading progress: how many of how many bytes are in place.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// A checkpoint's small files and the device, before any weight is read.
pub(crate) struct Opened {
    pub files: ModelFiles,
    pub config: ModelConfig,
    pub device: Arc<dyn Device>,
    pub kernels: KernelSet,
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
    let files = match &engine.model {
        ModelSource::Demo => models::demo(),
        ModelSource::Folder(path) => ModelFiles::open(path)?,
    };
    let config = ModelConfig::load(&files)?;
    let options =
        device::Options { threads: engine.threads, kernels: engine.kernels_dir.clone(), ..Default::default() };
    let device = device::open_with(&engine.device, &options)?;
    let kernels = select(&engine.kernels, &needs(engine, &config, &*device))?;
    Ok(Opened { files, config, device, kernels })
}

fn needs(engine: &EngineConfig, config: &ModelConfig, device: &dyn Device) -> Needs {
    Needs {
        head_dim: config.head_dim,
        block_size: engine.block_size,
        window: config.layer_windows.iter().any(Option::is_some),
        ..Needs::on(device)
    }
}

/// The kernel registry as a table for this configuration: what each variant can do here, what was chosen and why.
pub fn describe_kernels(engine: &EngineConfig) -> Result<String, EngineError> {
    let opened = open(engine)?;
    Ok(attention_kernels::describe(&engine.kernels, &needs(engine, &opened.config, &*opened.device))?)
}

/// What a start with this configuration would take. Reads no weight, but all that can be wrong with the folder is found.
pub fn plan(engine: &EngineConfig) -> Result<Plan, EngineError> {
    let opened = open(engine)?;
    Tokenizer::load(&opened.files)?.check(opened.config.vocab_size)?;
    let weights = Weights::open(&opened.files)?;
    models::check_weights(&opened.config, &weights)?;
    let weight_bytes = models::weight_bytes(&opened.config, &weights, engine.quantization)?;
    Plan::new(engine, &opened.config, &*opened.device, &opened.files.name(), weight_bytes)
}

pub(crate) fn load(engine: &EngineConfig, progress: Progress<'_>) -> Result<Loaded, EngineError> {
    let Opened { files, config, device, kernels } = open(engine)?;
    let defaults = GenerationDefaults::load(&files, &config)?;
    let tokenizer = Arc::new(Tokenizer::load(&files)?);
    tokenizer.check(config.vocab_size)?;
    let chat_template = ChatTemplate::load(&files)?;
    let weights = Weights::open(&files)?;
    let weight_bytes = models::weight_bytes(&config, &weights, engine.quantization)?;
    let plan = Plan::new(engine, &config, &*device, &files.name(), weight_bytes)?;
    let (quantization, max_rows) = (engine.quantization, engine.max_num_batched_tokens);
    let progress = |done, total| progress(done, total);
    let model = Model::load(&config, &weights, device.clone(), kernels, quantization, max_rows, &progress)?;
    let scheduler = Scheduler::new(SchedConfig {
        max_num_seqs: engine.max_num_seqs,
        max_num_batched_tokens: engine.max_num_batched_tokens,
        max_model_len: plan.max_model_len,
        enable_prefix_caching: engine.enable_prefix_caching,
        enable_chunked_prefill: engine.enable_chunked_prefill,
        policy: engine.policy,
        groups: model.layout().groups.iter().map(cache_group).collect(),
        host_blocks: plan.host_blocks,
        preemption_mode: engine.preemption_mode,
        ..SchedConfig::new(plan.num_blocks, engine.block_size)
    })?;
    let caches = model.new_cache(plan.num_blocks, engine.block_size)?;
    let swap_space = SwapSpace::new(&*device, &caches, plan.host_blocks)?;
    let info = ModelInfo {
        name: files.name(),
        architecture: format!("{:?}ForCausalLM", config.architecture),
        num_parameters: models::parameters(&config),
        max_model_len: plan.max_model_len,
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        pooling: Pooling::load(&files)?,
        eos_token_ids: defaults.eos_token_ids.clone(),
        num_blocks: plan.num_blocks,
        block_size: engine.block_size,
        notes: notes(&*device, &kernels, &plan),
    };
    let executor = Executor::new(device, kernels, model, caches, swap_space);
    let seed = engine.seed.unwrap_or_else(random_seed);
    let engine = Engine::new(scheduler, executor, defaults.eos_token_ids.clone(), plan.max_model_len, seed);
    Ok(Loaded { engine, tokenizer, chat_template, defaults, info })
}

/// Whose positions a group of layers looks at.
fn cache_group(group: &LayerGroup) -> CacheGroup {
    group.window.map_or(CacheGroup::Full, |window| CacheGroup::Sliding { window })
}

/// The choices made for the user, one line each.
fn notes(device: &dyn Device, kernels: &KernelSet, plan: &Plan) -> Vec<String> {
    let chosen: Vec<String> = kernels.all().iter().map(|v| format!("{} {}", v.operation, v.name)).collect();
    vec![
        format!("device: {}, {}", device.name(), device.description()),
        format!("kernels: {}", chosen.join(", ")),
        plan.weights_line(),
        plan.cache_line(),
    ]
}

/// A seed from the operating system's randomness, by way of the standard library's hash keys.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

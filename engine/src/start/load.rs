//! Starts an engine: reads and checks the checkpoint, chooses kernels, plans the memory, loads the weights.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use attention_kernels::{CacheFormat, KernelSet, SwapSpace};
use collective::Collective;
use device::Device;
use models::lora::AdapterStore;
use models::{Decoder, GenerationDefaults, LoadError, Model, ModelConfig, Pooler, Task, Weights};
use sha2::{Digest, Sha256};
use text::{ChatTemplate, Tokenizer};

use super::draft::OpenedDraft;
use super::graphs;
use super::open::{Opened, needs, open, open_device, open_on};
use super::texts::TextFiles;
use crate::api::{EngineConfig, ModelInfo};
use crate::connector::{Connector, KvTransferConfig, Limits, Naming, SharedFolder};
use crate::error::{EngineError, bad};
use crate::memory::{Plan, sampler_limits};
use crate::parallel::{EndOnPanic, Group, GroupWorker, Rank, obey, together};
use crate::speculate::SpeculativeConfig;
use crate::step::{Engine, EngineParts, KvTransferParts};
use crate::worker::record::Recorder;
use crate::worker::{LocalWorker, Worker, WorkerInfo};

/// Callback for the progress of loading: bytes loaded, and bytes in total.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

impl Engine {
    /// Loads a model, for a caller that works with token ids and runs the steps itself.
    ///
    /// ```
    /// use engine::{Engine, EngineConfig, GenerationRequest, TokenEvent};
    /// let mut engine = Engine::load(&EngineConfig::default(), &|_, _| {})?;
    /// engine.submit(GenerationRequest { prompt: vec![0, 300, 301], ..Default::default() })?;
    /// let mut tokens = Vec::new();
    /// while engine.has_work() {
    ///     engine.step(|_, event| {
    ///         if let TokenEvent::Token { token: Some(token), .. } = event {
    ///             tokens.push(token.token);
    ///         }
    ///     });
    /// }
    /// assert!(!tokens.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The configuration cannot be used, or the model cannot be loaded.
    pub fn load(config: &EngineConfig, progress: Progress<'_>) -> Result<Engine, EngineError> {
        Engine::new(load(config, LoadOn::Configured, progress)?.parts)
    }
}

/// The device and the ranks that a model is loaded on.
pub enum LoadOn {
    /// The device and the ranks of the configuration.
    Configured,
    /// A group of ranks, of which this process is rank 0.
    Group(Group),
    /// A device that the caller has opened. [`EngineConfig::device`] is ignored.
    Device(Arc<dyn Device>),
}

/// A loaded model with everything that a handle needs.
pub struct Loaded {
    /// What [`Engine::new`] takes. A caller may wrap the worker before.
    pub parts: EngineParts,
    /// The ranks that compute the model; `None`: this one alone.
    pub(crate) ranks: Option<Arc<dyn Collective>>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) chat_template: Option<ChatTemplate>,
    pub(crate) defaults: GenerationDefaults,
    pub(crate) info: ModelInfo,
}

/// Describes the kernel registry for this configuration: what each variant supports here, which one was chosen, and why.
///
/// # Errors
/// The checkpoint or the device cannot be opened, or a kernel named in `[kernels]` does not exist or cannot serve the model.
pub fn describe_kernels(engine: &EngineConfig) -> Result<attention_kernels::Description, EngineError> {
    let Opened { config, device, dtype, .. } = open(engine)?;
    Ok(attention_kernels::describe(&engine.kernels, &needs(engine, &config, &*device, dtype)?)?)
}

/// Plans the memory of a start with this configuration. Reads no weights, but reports every error of the checkpoint folder.
///
/// # Errors
/// The errors of [`Engine::load`].
pub fn plan(engine: &EngineConfig) -> Result<Plan, EngineError> {
    let opened = open(engine)?;
    opened.tokenizer()?;
    models::check_weights(&opened.whole, &opened.weights)?;
    Plan::new(engine, &opened, 0)
}

/// Opens a rank's device, unless the caller has opened it, and its part of the model.
fn open_rank(engine: &EngineConfig, device: Option<Arc<dyn Device>>, rank: &Rank) -> Result<Opened, EngineError> {
    let device = device.map_or_else(|| open_device(engine, rank), |device| Ok((device, None)))?;
    open_on(engine, device, rank)
}

/// What rank 0 has to tell its clients that the group has failed.
const GRACE: Duration = Duration::from_secs(2);

/// Computes as a rank other than 0 of a group, until the engine of rank 0 has ended.
///
/// # Errors
/// The model cannot be loaded on one of the ranks; rank 0 gets the same error. The group was ended by a failure.
pub fn follow(engine: &EngineConfig, group: Group) -> Result<(), EngineError> {
    follow_in(engine, group.into_world())
}

fn follow_in(engine: &EngineConfig, world: Arc<dyn Collective>) -> Result<(), EngineError> {
    let _guard = EndOnPanic(world.clone());
    let rank = Rank::new(world, &engine.parallel, Vec::new())?;
    let Started { mut worker, adapters, .. } = load_rank(engine, &rank)?;
    obey(&rank, &mut worker, adapters.as_deref()).map_err(|message| {
        // With processes, the end of this rank is that of rank 0, which first tells its clients.
        if rank.world.carrier() != "threads" {
            std::thread::sleep(GRACE);
        }
        rank.world.abort(&message);
        EngineError::Rank { rank: rank.world.rank(), message }
    })
}

/// Plans the memory such that all ranks have as many blocks. Returns the configuration that leads to this plan.
fn plan_together(engine: &EngineConfig, opened: &Opened, rank: &Rank) -> Result<(EngineConfig, Plan), EngineError> {
    let plan = together(&*rank.world, Plan::new(engine, opened, 0))?;
    if rank.is_alone() {
        return Ok((engine.clone(), plan));
    }
    let [kv_cache, host_bytes] =
        [rank.min(plan.num_blocks)?, rank.min(plan.host_blocks)?].map(|blocks| blocks * plan.block_bytes());
    let engine = EngineConfig {
        kv_cache_memory_bytes: Some(kv_cache),
        swap_space_bytes: if plan.host_caching { 0 } else { host_bytes },
        kv_offloading_bytes: if plan.host_caching { host_bytes } else { 0 },
        ..engine.clone()
    };
    let plan = together(&*rank.world, Plan::new(&engine, opened, 0))?;
    Ok((engine, plan))
}

/// Loads the part of a rank other than 0.
fn load_rank(engine: &EngineConfig, rank: &Rank) -> Result<Started, EngineError> {
    let opened = together(&*rank.world, open_rank(engine, None, rank))?;
    rank.agree(engine, opened.fingerprint())?;
    let started = start(engine, &opened, rank, &|_, _| Ok(()));
    together(&*rank.world, started)
}

/// What of a checkpoint is not used.
fn unused_lines(config: &ModelConfig, template: Option<&ChatTemplate>, task: &Task) -> Vec<String> {
    let chat = template.and_then(ChatTemplate::problem).map(|problem| format!("no chat: {problem}"));
    let unread = (!config.unread.is_empty())
        .then(|| format!("config.json: not read, but perhaps of effect: {}", config.unread.join(", ")));
    let served = match task {
        Task::Embed { .. } => "embeddings".to_string(),
        Task::Classify { labels, .. } => format!("scores of {} labels", labels.len()),
    };
    let head =
        config.is_headless.then(|| format!("no output layer for tokens in the checkpoint: {served} alone are served"));
    chat.into_iter().chain(unread).chain(head).collect()
}

/// Loads a model, for [`Engine::new`], [`AsyncEngine::run`](crate::AsyncEngine::run) or [`Llm::of`](crate::Llm::of).
///
/// # Errors
/// As [`Engine::load`], and what any rank of the group reports.
pub fn load(engine: &EngineConfig, on: LoadOn, progress: Progress<'_>) -> Result<Loaded, EngineError> {
    let (device, group) = match on {
        LoadOn::Configured => (None, Group::open(&engine.parallel)?),
        LoadOn::Group(group) => (None, group),
        LoadOn::Device(device) => (Some(device), Group::open(&engine.parallel)?),
    };
    let rank = group.enter(engine, follow_in)?;
    let opened = open_rank(engine, device, &rank).and_then(|opened| {
        if engine.record.is_some() && engine.parallel.splits_sums() {
            let expected = "gather: a recording is replayed by one rank, which computes the same bits only then";
            return Err(bad("--tp-reduce", "sum with --record", expected));
        }
        // Before the weights, which take long to load, if a port is in use.
        let kv_events = engine.enabled_kv_events().map(kvevents::Sockets::open).transpose()?;
        let connector = engine.kv_transfer.as_ref().map(|config| connector(engine, config)).transpose()?;
        let defaults = engine.generation_config.load(&opened.files, &opened.config.eos_token_ids)?;
        let chat_template = ChatTemplate::load_for_serving(&TextFiles(&opened.texts), engine.chat_template.as_deref())?;
        Ok((opened, kv_events, connector, defaults, chat_template))
    });
    let (opened, kv_events, connector, defaults, chat_template) = together(&*rank.world, opened)?;
    rank.agree(engine, opened.fingerprint())?;
    let started = with_tokenizer(&opened, |check| {
        start(engine, &opened, &rank, &|done, total| {
            progress(done, total);
            check()
        })
    });
    let (tokenizer, started) = together(&*rank.world, started)?;
    let Started { worker, info: worker_info, plan, adapters, pooler, mut notes } = started;
    notes.extend((!rank.is_alone()).then(|| rank.line()));
    notes.extend(unused_lines(&opened.config, chat_template.as_ref(), &pooler.task));
    notes.extend(engine.parallel.splits_sums().then(|| sums_line(&opened.config.decoder)));
    notes.extend(kv_events.as_ref().map(kvevents::Sockets::line));
    notes.extend(engine.itl_target.map(|target| format!("target between tokens: {target}")));
    let Opened { files, config, whole, draft, .. } = &opened;
    let draft_len = draft.as_ref().map_or(usize::MAX, |draft| draft.max_len);
    let info = ModelInfo {
        name: files.name(),
        architecture: config.architecture.to_string(),
        num_parameters: whole.num_parameters(),
        stored_as: models::stored_as(files, &opened.weights),
        max_model_len: plan.max_model_len,
        vocab_size: config.decoder.vocab_size(),
        longest_prompt: plan.max_model_len - usize::from(!config.is_headless),
        generates: !config.is_headless,
        reranker_prompt: engine.hf_overrides.is_original_qwen3_reranker,
        pooler,
        eos_token_ids: defaults.eos_token_ids.clone(),
        num_blocks: plan.num_blocks,
        block_size: plan.block_size,
        max_num_seqs: plan.max_num_seqs,
        max_loras: engine.lora.map(|lora| lora.max_loras),
        tensor_parallel_size: engine.parallel.tensor_parallel_size,
        pipeline_parallel_size: engine.parallel.pipeline_parallel_size,
        kv_engine_id: engine.kv_transfer.as_ref().map(|config| config.engine_id.clone().unwrap_or_else(random_id)),
        fingerprint: opened.fingerprint(),
        arithmetic: arithmetic(engine, &opened),
        notes,
    };
    let mut worker: Box<dyn Worker> = Box::new(worker);
    let ranks = (!rank.is_alone()).then(|| rank.world.clone());
    if !rank.is_alone() {
        worker = Box::new(GroupWorker::new(rank, worker));
    }
    if let Some(path) = &engine.record {
        worker = Box::new(Recorder::new(worker, path, &plan.resolve(engine, &opened), opened.fingerprint())?);
    }
    let kv_transfer = connector.zip(engine.kv_transfer.clone()).map(|(connector, config)| {
        let naming = Naming::new(replica_digest(engine, &opened, &plan), plan.block_size);
        KvTransferParts { config, naming, connector, limits: Limits::default() }
    });
    let parts = EngineParts {
        worker,
        info: worker_info,
        sched: plan.sched,
        eos_token_ids: info.eos_token_ids.clone(),
        is_headless: config.is_headless,
        seed: engine.seed.unwrap_or_else(random_seed),
        adapters,
        itl_target: engine.itl_target,
        speculation: engine.speculative.as_ref().map(|config| config.speculation(draft_len)),
        kv_events,
        kv_transfer,
    };
    Ok(Loaded { parts, ranks, tokenizer, chat_template, defaults, info })
}

/// Reads the tokenizer while `load` loads the weights: a large vocabulary takes as long as a gigabyte of weights. `load` gets a
/// function that fails once the tokenizer has turned out to be wrong.
fn with_tokenizer<T>(
    opened: &Opened,
    load: impl FnOnce(&dyn Fn() -> Result<(), LoadError>) -> Result<T, EngineError>,
) -> Result<(Arc<Tokenizer>, T), EngineError> {
    let wrong = AtomicBool::new(false);
    let check = || match wrong.load(Ordering::Relaxed) {
        true => Err(LoadError::Stopped),
        false => Ok(()),
    };
    std::thread::scope(|scope| {
        let tokenizer = scope.spawn(|| opened.tokenizer().inspect_err(|_| wrong.store(true, Ordering::Relaxed)));
        let loaded = load(&check);
        let tokenizer = tokenizer.join().unwrap_or_else(|panic| resume_unwind(panic))?;
        Ok((Arc::new(tokenizer), loaded?))
    })
}

/// A worker and the choices made for it.
pub(crate) struct Started {
    pub worker: LocalWorker,
    pub info: WorkerInfo,
    pub plan: Plan,
    /// Where the worker finds adapters.
    pub adapters: Option<Arc<AdapterStore>>,
    /// From hidden states to embeddings or to labels.
    pub pooler: Arc<Pooler>,
    /// The choices, one line each, for the log.
    pub notes: Vec<String>,
}

/// Loads the weights and allocates the memory for pages and steps.
pub(crate) fn start(
    engine: &EngineConfig,
    opened: &Opened,
    rank: &Rank,
    progress: models::Progress<'_>,
) -> Result<Started, EngineError> {
    let (engine, mut plan) = plan_together(engine, opened, rank)?;
    let engine = &engine;
    let Opened { config, weights, device, kernels, no_gpu, .. } = opened;
    let kv_scales = kv_scales_line(engine, &config.decoder, weights, kernels.format)?;
    let available = device.memory().available;
    let (decoder, max_rows) = (&config.decoder, plan.step_limits.max_rows);
    let odds = engine.hf_overrides.odds(|| opened.tokenizer())?;
    let mut pooler = Pooler::load(&opened.files, config, weights, odds)?;
    pooler.set_dimensions(engine.hf_overrides.is_matryoshka, engine.hf_overrides.matryoshka_dimensions.clone());
    let pooler = Arc::new(pooler);
    let mut model = Model::load(decoder, weights, device.clone(), *kernels, max_rows, progress)?;
    model.join(rank.tensor.clone());
    model.connect(rank.pipeline.clone());
    if engine.calculate_kv_scales {
        model.calculate_kv_scales()?;
    }
    // A graph does not wait for other ranks.
    let graphs = match rank.is_alone() {
        true => graphs::measure(engine, opened.draft.as_ref(), &mut model, &**device, &plan.step_limits)?,
        false => 0,
    };
    if graphs > 0 {
        plan = Plan::new(engine, opened, graphs)?;
    }
    model.reserve(&plan.step_limits)?;
    let mut caches = model.new_cache(plan.num_blocks, plan.block_size)?;
    let load_draft = |draft: &OpenedDraft| draft.load(&plan.step_limits, device, (&model, weights), progress);
    let draft = opened.draft.as_ref().map(load_draft).transpose()?;
    let mut warmed = None;
    if device.compute_capability().is_some() {
        // Confirms the plan with the largest step.
        let start = Instant::now();
        model.warm_up(&mut caches)?;
        let seconds = start.elapsed().as_secs_f64();
        warmed = Some(format!(
            "warm-up: products of up to {max_rows} rows planned and a step of that size run in {seconds:.1} s"
        ));
    }
    let captured = graphs::capture(&mut model, &mut caches, &**device, engine)?;
    if opened.memory.is_own {
        plan.compare(available, device.memory());
    }
    let drafts = engine.speculative.as_ref().map(SpeculativeConfig::line);
    let lines = kv_scales.into_iter().chain(warmed).chain(captured).chain(drafts);
    let notes = notes(&**device, kernels, engine.deterministic, &plan, lines, no_gpu.clone());
    let (drafter, of_drafts) = draft.map_or((None, Vec::new()), |(drafter, caches)| (Some(drafter), caches));
    caches.extend(of_drafts);
    let limits = device.features().launches.then(|| sampler_limits(engine, decoder.vocab_size(), plan.max_model_len));
    let swap_space = SwapSpace::new(&**device, &caches, plan.host_blocks)?;
    let adapters = decoder.adapters.zip(engine.lora);
    let adapters = adapters.map(|(limits, lora)| {
        Arc::new(AdapterStore::new(decoder.clone(), limits, kernels.arithmetic, lora.num_cpu_loras()))
    });
    let (worker, mut info) = LocalWorker::new(
        device.clone(),
        model,
        caches,
        swap_space,
        limits,
        (adapters.clone(), drafter, pooler.clone()),
    )?;
    if !rank.is_alone() {
        info.max_in_flight = rank.stages();
    }
    Ok(Started { worker, info, plan, adapters, pooler, notes })
}

/// Lists the choices made for the user, one line each.
fn notes(
    device: &dyn Device,
    kernels: &KernelSet,
    deterministic: bool,
    plan: &Plan,
    more: impl IntoIterator<Item = String>,
    no_gpu: Option<String>,
) -> Vec<String> {
    let chosen: Vec<String> = kernels.all().iter().map(|v| format!("{} {}", v.operation, v.name)).collect();
    let family = kernels.decode.capabilities.row_invariant.filter(|_| deterministic);
    let mut notes = vec![format!("device: {}, {}", device.name(), device.description())];
    notes.extend(no_gpu.map(|why| format!("no GPU is used: {why}")));
    notes.push(format!("kernels: {}", chosen.join(", ")));
    notes.extend(family.map(|family| {
        format!("deterministic: attention of the family {family}, products with one order of summation")
    }));
    notes.push(plan.weights_line());
    // docs/benchmarks/gpu-h200-2026-11-27.md
    notes.extend((device.features().launches && plan.code_bytes > 0).then(|| {
        "quantised weights: on a GPU, steps of 64 tokens and more are slower with them than in bfloat16".to_string()
    }));
    notes.extend([plan.step_line(), plan.cache_line()]);
    notes.extend(plan.adapters_line());
    notes.extend(plan.draft_line());
    notes.extend(more);
    // Includes the table of sequence lengths and concurrency.
    tracing::info!("\n{plan}");
    notes
}

/// One line about the origin of the cache's scales, if its type has scales.
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
    let all = decoder.attention().filter(|layer| layer.shares.is_none()).count();
    let found = match models::layers_with_kv_scales(decoder, weights)? {
        0 => format!("{rest}, the checkpoint has none"),
        layers if layers == all => "those of the checkpoint".to_string(),
        layers => format!("those of the checkpoint in {layers} of {all} layers, else {rest}"),
    };
    Ok(Some(format!("scales of the cache: {found}")))
}

/// One line about the products of this rank that are summed over the ranks.
fn sums_line(decoder: &Decoder) -> String {
    let (summed, gathered) = decoder.joins();
    let rest = match gathered {
        0 => String::new(),
        _ => format!(", {gathered} gathered, whose stored form cannot be cut between the inputs of the ranks"),
    };
    format!("sums over ranks: {summed} products{rest}")
}

/// Opens the connector to other replicas.
fn connector(engine: &EngineConfig, config: &KvTransferConfig) -> Result<Box<dyn Connector>, EngineError> {
    let refused = |found: &str, expected: &str| Err(bad("--kv-transfer-config", found, expected.to_string()));
    if engine.kv_offloading_bytes == 0 || !engine.enable_prefix_caching {
        return refused("no host tier", "--kv-offloading-size above 0: blocks pass through host memory");
    }
    if engine.record.is_some() {
        return refused("--record", "no recording: it would lack the blocks of other replicas");
    }
    if engine.parallel.ranks() > 1 {
        return refused("several ranks", "one rank: blocks are exchanged with the host memory of one");
    }
    if engine.calculate_kv_scales {
        return refused(
            "--calculate-kv-scales",
            "scales of the checkpoint: those of the first step differ between replicas",
        );
    }
    match SharedFolder::open(&config.path, config.max_bytes) {
        Ok(folder) => Ok(Box::new(folder)),
        Err(error) => {
            let found = format!("{} ({error})", config.path.display());
            Err(bad("--kv-transfer-config", found, "a shared_storage_path that can be created, read and written"))
        }
    }
}

/// The family of bits in which an engine computes. Every instruction set of a CPU has those of its arithmetic; a GPU has its own, and
/// without `--deterministic` none that it keeps.
fn arithmetic(engine: &EngineConfig, opened: &Opened) -> String {
    let Opened { device, kernels, dtype, .. } = opened;
    let computes = match device.features().launches {
        false => {
            let attention = [kernels.decode, kernels.prefill].map(|variant| variant.capabilities.arithmetic);
            format!("cpu, products {:?}, attention {attention:?}", kernels.arithmetic)
        }
        true => {
            let variants: Vec<&str> = kernels.all().iter().map(|variant| variant.name).collect();
            let fixed = if engine.deterministic { "deterministic" } else { "of each batch" };
            format!("{} {}, {}, {fixed}", device.name(), device.description(), variants.join(" "))
        }
    };
    let EngineConfig { quantization, activations, .. } = engine;
    let sums = if engine.parallel.splits_sums() { engine.parallel.ranks() } else { 1 };
    let stored = format!("weights {quantization:?}, activations {activations:?}, cache {:?}", kernels.format.kv_dtype);
    format!("{computes}, {dtype:?}, {stored}, sums over {sums}")
}

/// Digest of everything that the bytes of a block depend on, besides its tokens, salt and adapter.
fn replica_digest(engine: &EngineConfig, opened: &Opened, plan: &Plan) -> [u8; 32] {
    let Opened { config, weights, device, kernels, dtype, .. } = opened;
    let variants: Vec<&str> = kernels.all().iter().map(|variant| variant.name).collect();
    let computes = (device.name(), device.description(), variants, kernels.format, dtype, engine.quantization);
    let layout = (plan.block_size, plan.groups, plan.kv_bytes_per_token, engine.activations, engine.deterministic);
    // A draft model has its keys and values in the same blocks.
    let speculative = engine.speculative.as_ref();
    let text = format!("{} {:?} {computes:?} {layout:?} {speculative:?}", env!("CARGO_PKG_VERSION"), config.decoder);
    let weights = weights.digest();
    Sha256::new().chain_update(weights).chain_update(text).finalize().into()
}

/// Returns a random name for this process.
fn random_id() -> String {
    format!("quire-{:016x}", random_seed())
}

/// Returns a random seed, derived from the standard library's hash keys.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

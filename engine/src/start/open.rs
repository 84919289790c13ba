//! Opens a checkpoint's small files and the device, and chooses the kernels: everything before the weights are read.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use attention_kernels::{CacheFormat, Dtype, KernelSet, KvDtype, Layout, Needs, select, serves_cache};
use device::{Device, DeviceError, MemoryInfo};
use models::decoder::{Form, ShardError};
use models::lora::AdapterLimits;
use models::{Decoder, Model, ModelConfig, ModelFiles, PageLayout, RoundActivations, StageError, Weights};
use simd::{Isa, pairs};
use siphasher::sip::SipHasher13;
use text::Tokenizer;

use super::draft::{OpenedDraft, Target};
use super::texts::TextFiles;
use crate::api::{EngineConfig, KvCacheDtype, ModelSource};
use crate::error::{EngineError, bad};
use crate::parallel::Rank;

/// An opened checkpoint and device, before any weight is read.
pub struct Opened {
    /// Files of the checkpoint.
    pub files: ModelFiles,
    /// Files of the tokenizer and the chat template, which are mostly those of the checkpoint.
    pub(crate) texts: ModelFiles,
    /// Declaration of the model, with the part of the decoder that this rank computes.
    pub config: ModelConfig,
    /// The part that all ranks together compute.
    pub(crate) whole: Decoder,
    /// Weights of the checkpoint.
    pub weights: Weights,
    /// The device.
    pub device: Arc<dyn Device>,
    /// Type of the computation.
    pub(crate) dtype: Dtype,
    /// The chosen kernels.
    pub kernels: KernelSet,
    /// Tokens per block.
    pub(crate) block_size: usize,
    /// The draft model, if there is one.
    pub(crate) draft: Option<OpenedDraft>,
    /// The device's memory before anything was loaded.
    pub(crate) memory: MemoryInfo,
    /// Why `auto` chose no GPU.
    pub(crate) no_gpu: Option<String>,
}

impl Opened {
    /// Reads the tokenizer and checks that the model has a row for each of its tokens.
    ///
    /// # Errors
    /// The tokenizer's files are missing or broken, or do not belong to the model.
    pub fn tokenizer(&self) -> Result<Tokenizer, text::LoadError> {
        let tokenizer = Tokenizer::load(&TextFiles(&self.texts))?;
        tokenizer.check(self.config.decoder.vocab_size())?;
        Ok(tokenizer)
    }

    /// Hash of the decoder's declaration and of the beginnings of all tensors, to tell checkpoints apart.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut hasher = SipHasher13::new();
        format!("{:?}", self.whole).hash(&mut hasher);
        self.weights.hash(&mut hasher);
        hasher.finish()
    }
}

/// Reads `config.json` and the headers of the weights, opens the device and chooses kernels.
///
/// # Errors
/// The checkpoint or the device cannot be opened, or a setting does not fit them.
pub fn open(engine: &EngineConfig) -> Result<Opened, EngineError> {
    open_on(engine, open_device(engine, &Rank::alone())?, &Rank::alone())
}

/// Like [`open`], with an opened device and the reason why it is not a GPU, for one rank of a group.
pub(crate) fn open_on(
    engine: &EngineConfig,
    (device, no_gpu): (Arc<dyn Device>, Option<String>),
    rank: &Rank,
) -> Result<Opened, EngineError> {
    if device.features().launches && engine.activations == RoundActivations::Int8 {
        return Err(EngineError::Config {
            flag: "--activations",
            found: format!("int8 on {}", device.name()),
            expected: "auto or float: only a CPU rounds activations in blocks".to_string(),
        });
    }
    let (files, mut config) = declared(engine)?;
    check_encoder(engine, &config)?;
    let mut weights = Weights::open(&files)?;
    config.drop_missing_head(&files, &weights);
    weights.round_activations(engine.activations);
    config.decoder = models::in_stored_forms(config.decoder, &weights)?;
    let dtype = dtype(engine, &*device, &config, &weights)?;
    let needs = needs(engine, &config, &*device, dtype)?;
    let kernels = select(&engine.kernels, &needs)?;
    let target = Target { files: &files, config: &config, weights: &weights, device: &*device, needs: &needs };
    // Only rank 0 proposes drafts.
    let draft = if rank.world.rank() == 0 { OpenedDraft::open(engine, &target)? } else { None };
    let part = part_of(engine, &config.decoder, rank)?;
    let whole = std::mem::replace(&mut config.decoder, part);
    let stages = engine.parallel.pipeline_parallel_size;
    if engine.speculative.is_some() && stages > 1 {
        let expected =
            "one stage (--pipeline-parallel-size 1): drafts follow the last token, which other stages still compute";
        return Err(bad("--speculative-config", format!("speculation with {stages} stages"), expected));
    }
    if let Some(draft) = &draft {
        if draft.is_predictor() && engine.parallel.ranks() > 1 {
            let expected =
                "ngram, suffix or a draft model: predictors read states of the whole model, which no rank has";
            return Err(bad(
                "--speculative-config",
                format!("mtp or eagle3 on {} ranks", engine.parallel.ranks()),
                expected,
            ));
        }
        config.decoder.taps.clone_from(&draft.taps);
    }
    let (block_size, mut memory) = (needs.block_size, device.memory());
    if !memory.is_own {
        memory.available /= rank.local_ranks as u64;
    }
    let texts = engine.tokenizer.clone().map_or_else(|| files.clone(), ModelFiles::Folder);
    Ok(Opened { files, texts, config, whole, weights, device, dtype, kernels, block_size, draft, memory, no_gpu })
}

/// Refuses what an encoder does not take.
fn check_encoder(engine: &EngineConfig, config: &ModelConfig) -> Result<(), EngineError> {
    if !config.decoder.is_encoder() {
        return Ok(());
    }
    let (ranks, class) = (engine.parallel.ranks(), config.architecture);
    if ranks > 1 {
        let flag = if engine.parallel.pipeline_parallel_size > 1 {
            "--pipeline-parallel-size"
        } else {
            "--tensor-parallel-size"
        };
        return Err(bad(flag, format!("{ranks} ranks"), format!("one rank for an encoder ({class})")));
    }
    if engine.speculative.is_some() {
        let expected = format!("no drafts for an encoder ({class}), which generates no tokens");
        return Err(bad("--speculative-config", "a configuration", expected));
    }
    if engine.kv_transfer.is_some() {
        let expected = format!("nothing for an encoder ({class}), which keeps no keys and values");
        return Err(bad("--kv-transfer-config", "a configuration", expected));
    }
    Ok(())
}

/// The part of a decoder that a rank computes.
fn part_of(engine: &EngineConfig, decoder: &Decoder, rank: &Rank) -> Result<Decoder, EngineError> {
    let ranks = engine.parallel.tensor_parallel_size;
    let refused = |error: ShardError| {
        let expected = format!("at most {}: {}", error.most, error.what);
        bad("--tensor-parallel-size", ranks, expected)
    };
    let part = |rank| decoder.shard(rank, ranks, engine.parallel.tp_reduce).map_err(refused);
    let own = part(rank.world.rank() % ranks.max(1))?;
    // One scheduler serves all ranks, so their layers must be in the same groups.
    let groups = PageLayout::new(&own).groups;
    for rank in 0..ranks {
        if PageLayout::new(&part(rank)?).groups != groups {
            let expected =
                "a number of ranks that divides the heads of this model, whose layers have several kinds of heads";
            return Err(bad("--tensor-parallel-size", ranks, expected));
        }
    }
    let partition = partition(engine, decoder)?;
    let stage = rank.pipeline.rank();
    let first = partition[..stage].iter().sum();
    let refused = |error: StageError| bad("--pipeline-parallel-size", error.found, error.expected);
    own.stage(first..first + partition[stage]).map_err(refused)
}

/// The number of layers of each stage.
fn partition(engine: &EngineConfig, decoder: &Decoder) -> Result<Vec<usize>, EngineError> {
    let (stages, layers) = (engine.parallel.pipeline_parallel_size, decoder.layers.len());
    let by_cost = || {
        let refused = |error: StageError| bad("--pipeline-parallel-size", error.found, error.expected);
        models::partition(decoder, stages).map_err(refused)
    };
    let Some(wanted) = &engine.parallel.pipeline_partition else { return by_cost() };
    if wanted.len() != stages || wanted.contains(&0) || wanted.iter().sum::<usize>() != layers {
        let found: Vec<String> = wanted.iter().map(usize::to_string).collect();
        let expected =
            format!("{stages} numbers above 0 (--pipeline-parallel-size) with the sum {layers}, the number of layers");
        return Err(bad("--pipeline-partition", found.join(","), expected));
    }
    Ok(wanted.clone())
}

/// Opens the checkpoint's files and reads its declaration, with the weights in the configured form.
fn declared(engine: &EngineConfig) -> Result<(ModelFiles, ModelConfig), EngineError> {
    let files = match &engine.model {
        ModelSource::Demo => models::demo(),
        ModelSource::Folder(path) => ModelFiles::open(path)?,
    };
    let mut config = ModelConfig::load(&files)?;
    let context = engine.max_model_len.unwrap_or(config.max_position_embeddings);
    let form = engine.quantization.map_or(Form::Dense, Form::Quantized);
    let adapters = engine.lora.map(|lora| AdapterLimits { slots: lora.max_loras, rank: lora.max_lora_rank });
    config.decoder = config.decoder.in_form(form).for_context(context).with_adapters(adapters);
    Ok((files, config))
}

/// Returns what the checkpoint of this configuration declares. Reads only `config.json`.
///
/// # Errors
/// The folder does not exist, or its `config.json` is invalid or declares something unsupported.
pub fn declare(engine: &EngineConfig) -> Result<ModelConfig, EngineError> {
    declared(engine).map(|(_, config)| config)
}

/// Compute capability of the GPUs that have passed the tests: H100 and H200.
const PROVEN: (u32, u32) = (9, 0);

/// Returns what of this start no GPU has passed the tests with.
fn unproven(engine: &EngineConfig, gpu: &dyn Device) -> Option<String> {
    let found = gpu.compute_capability().filter(|found| *found != PROVEN);
    if declare(engine).is_ok_and(|config| config.decoder.is_encoder()) {
        return Some("encoders have not passed the tests on a GPU".to_string());
    }
    if let Some((major, minor)) = found {
        return Some(format!("no GPU of compute capability {major}.{minor} has passed the tests"));
    }
    (engine.parallel.ranks() > 1).then(|| "several ranks have not passed the tests on GPUs".to_string())
}

/// Opens the configured device. `auto` takes a GPU for what has passed the tests on one, and returns why it uses the CPU instead.
pub(crate) fn open_device(
    engine: &EngineConfig,
    rank: &Rank,
) -> Result<(Arc<dyn Device>, Option<String>), DeviceError> {
    let options = device::Options {
        threads: rank.threads_of(engine),
        kernels: engine.kernels_dir.clone(),
        deterministic: engine.deterministic,
        profile: engine.profile.clone(),
        ..Default::default()
    };
    if engine.device != "auto" {
        return Ok((device::open_with(&engine.device, &options)?, None));
    }
    let why = match device::open_with("cuda", &options) {
        Ok(gpu) => match unproven(engine, &*gpu) {
            None => return Ok((gpu, None)),
            Some(what) => format!("{}: {what}; use --device cuda to select it", gpu.description()),
        },
        Err(missing) => missing.to_string().trim_start_matches("--device cuda: ").to_string(),
    };
    Ok((device::open_with("cpu", &options)?, Some(why)))
}

/// Returns the type of the computation.
fn dtype(
    engine: &EngineConfig,
    device: &dyn Device,
    config: &ModelConfig,
    weights: &Weights,
) -> Result<Dtype, EngineError> {
    let features = device.features();
    let computes = |dtype: &Dtype| features.compute.contains(dtype);
    let stored = models::checkpoint_dtype(&config.decoder, weights);
    // The fastest unit for bfloat16, if one is faster than float32. Of a model with quantised weights it computes the attention.
    let tiles = ["auto", "cpu.amx_bf16"].contains(&&*engine.kernels.linear);
    let fast = match (tiles && Isa::Amx.is_available(), pairs::are_fast()) {
        (true, _) => Some(Isa::Amx),
        (false, fast) => fast.then_some(Isa::Avx512Bf16),
    };
    match engine.dtype {
        // Codes are multiplied with numbers of 16 bits.
        None if features.launches => {
            let types = [stored, Some(Dtype::Bf16).filter(|_| stored.is_none())];
            Ok(types.into_iter().flatten().find(computes).unwrap_or_default())
        }
        None => {
            // Tiles multiply codes too.
            let unit =
                fast.filter(|unit| stored == Some(Dtype::Bf16) || *unit == Isa::Amx && stored != Some(Dtype::F32));
            let Some(unit) = unit else { return Ok(Dtype::F32) };
            let stored = stored.map_or("quantised weights".to_string(), |stored| stored.to_string());
            tracing::info!(
                "--dtype auto: bfloat16 for a checkpoint in {stored}, because this CPU is fast in it ({unit}); float32 is more accurate"
            );
            Ok(Dtype::Bf16)
        }
        Some(dtype) if computes(&dtype) => {
            if dtype == Dtype::Bf16 && !features.launches && fast.is_none() {
                tracing::warn!(
                    "--dtype bfloat16 is slower than float32 on this CPU ({}): it is emulated, or its instructions are slow",
                    Isa::best()
                );
            }
            Ok(dtype)
        }
        Some(other) => Err(EngineError::Config {
            flag: "--dtype",
            found: if other == Dtype::F16 { "float16" } else { "bfloat16" }.to_string(),
            expected: "float32 or bfloat16, in which a CPU computes with weights of any type; or use --device cuda"
                .to_string(),
        }),
    }
}

const DEFAULT_BLOCK_SIZE: usize = 16;

/// Returns the number of tokens per block. The states of recurrent layers must fit into a block.
fn block_size(engine: &EngineConfig, decoder: &Decoder, format: CacheFormat) -> Result<usize, EngineError> {
    let ranks = engine.parallel.tensor_parallel_size;
    let least_of = |rank| {
        let part = decoder.shard(rank, ranks, engine.parallel.tp_reduce).ok()?;
        Some(PageLayout::least_block_size(&part, &format))
    };
    let least = (0..ranks).filter_map(least_of).max().unwrap_or(1);
    let (smallest, greatest) = if least > 1 { (least.max(8), 4096) } else { (8, 128) };
    let expected = || match least > 1 {
        true => format!("a power of two from {smallest}, which holds the states of recurrent layers, to {greatest}"),
        false => format!("a power of two from {smallest} to {greatest}"),
    };
    let size = engine.block_size.unwrap_or(DEFAULT_BLOCK_SIZE.max(least));
    if !size.is_power_of_two() || !(smallest..=greatest).contains(&size) {
        return Err(bad("--block-size", size, expected()));
    }
    if engine.block_size.is_none() && size > DEFAULT_BLOCK_SIZE {
        tracing::info!(
            "blocks of {size} tokens instead of {DEFAULT_BLOCK_SIZE}, to hold the states of recurrent layers"
        );
    }
    Ok(size)
}

/// Returns the model's requirements on kernels, after checking the type of the cache.
pub(crate) fn needs(
    engine: &EngineConfig,
    config: &ModelConfig,
    device: &dyn Device,
    dtype: Dtype,
) -> Result<Needs, EngineError> {
    // A CPU holds activations in float32, and rounds them where it multiplies.
    let (dtype, arithmetic) = match device.features().packs_matrices {
        true => (Dtype::F32, dtype),
        false => (dtype, Dtype::F32),
    };
    let refused =
        |expected| EngineError::Config { flag: "--kv-cache-dtype", found: engine.kv_cache_dtype.to_string(), expected };
    let kv_dtype = engine.kv_cache_dtype.stored(dtype);
    let kv_dtype =
        kv_dtype.ok_or_else(|| refused(format!("at most the {dtype} that the model computes in; leave it at auto")))?;
    let kv_dtype = match engine.kv_cache_dtype {
        KvCacheDtype::Auto if arithmetic == Dtype::Bf16 => KvDtype::Bf16,
        _ => kv_dtype,
    };
    if !serves_cache(device, kv_dtype) {
        let name = device.name();
        return Err(refused(format!(
            "auto, fp8_e4m3, fp8_e5m2 or int8, which {name} has kernels for; or use --device cpu"
        )));
    }
    if engine.calculate_kv_scales && config.decoder.latent_dim().is_some() {
        return Err(EngineError::Config {
            flag: "--calculate-kv-scales",
            found: "a model with latent attention".to_string(),
            expected: "another model; leave it out: latents have the checkpoint's scale for keys, or 1".to_string(),
        });
    }
    if engine.calculate_kv_scales && !kv_dtype.takes_scales() {
        return Err(EngineError::Config {
            flag: "--calculate-kv-scales",
            found: format!("--kv-cache-dtype {}", engine.kv_cache_dtype),
            expected: "fp8_e4m3 or fp8_e5m2, which have scales; leave it out".to_string(),
        });
    }
    Ok(Needs {
        dtype,
        arithmetic,
        kv_dtype,
        block_size: block_size(engine, &config.decoder, CacheFormat { dtype, kv_dtype, layout: Layout::default() })?,
        row_invariant: engine.deterministic,
        codes: engine.quantization.is_some() && device.features().launches,
        ..Model::needs(&config.decoder, device)
    })
}

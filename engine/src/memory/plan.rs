//! The plan of an engine's memory: weights, step buffers, and cache pages.

use std::fmt;

use device::{Dtype, MemoryInfo};
use linear::{LinearError, Quantization};
use models::decoder::{Form, LayerGroup};
use models::lora::{adapter_slot_bytes, most_adapter_bytes};
use models::{Decoder, Model, PageLayout, StepLimits, WeightBytes, most_drawn_rows};
use sampling::device::{Limits, MAX_SLOTS};
use sched::{CacheGroup, SchedConfig};

use super::budget::Budget;
use super::bytes::Bytes;
use super::encoder;
use crate::api::{EngineConfig, KvCacheDtype, LoraConfig, ModelSource};
use crate::error::{EngineError, bad};
use crate::start::draft::OpenedDraft;
use crate::start::open::Opened;

/// Greatest `--max-loras`, `--max-lora-rank` and `--max-cpu-loras`.
const MOST_LORAS: usize = 1024;
const MOST_RANK: usize = 512;
const MOST_CPU_LORAS: usize = 1 << 16;

/// The memory that a start will use, computed without reading a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Name of the checkpoint folder.
    pub model: String,
    /// Bytes of the weights in memory.
    pub weight_bytes: u64,
    /// Bytes of the weights of the draft model, and of a token's keys and values of it in a page, if there is one.
    pub draft: Option<(u64, u64)>,
    /// Bytes of matrices in fewer than 16 bits that the device multiplies as codes.
    pub code_bytes: u64,
    /// Bytes of matrices that the checkpoint stores in fewer bits and that the device unpacks to numbers.
    pub unpacked_bytes: u64,
    /// Quantisation of the matrices, if any.
    pub quantization: Option<Quantization>,
    /// Whether the checkpoint stores matrices in fewer bits.
    pub stored: bool,
    /// Type of the matrices, if it is not the checkpoint's.
    pub dtype: Option<attention_kernels::Dtype>,
    /// Bytes of the adapters in the device's memory, if all have the greatest rank. Those in host memory, which counts unless the
    /// device is a GPU, are float32.
    pub adapter_bytes: u64,
    /// The sizes that they follow from.
    pub lora: Option<LoraConfig>,
    /// Bytes of the scales of the cache, if its type has scales.
    pub kv_scale_bytes: u64,
    /// Bytes of the buffers for the largest step, including those for sampling on the device.
    pub step_bytes: u64,
    /// Bytes of all CUDA graphs of decode steps, estimated from one; 0 before that was measured.
    pub graph_bytes: u64,
    /// Bytes of the keys and values of a token in all layers, with those of the draft model.
    pub kv_bytes_per_token: u64,
    /// What they would be if each head had keys and values of its own, for a model whose cache holds latents.
    pub expanded_kv_bytes_per_token: Option<u64>,
    /// Type in which keys and values are stored.
    pub kv_cache_dtype: KvCacheDtype,
    /// Tokens per block.
    pub block_size: usize,
    /// Bytes of the recurrent states of a sequence, in all layers; 0 without such layers.
    pub state_bytes: u64,
    /// Number of groups of layers. A sequence has a block table, and blocks, for each group.
    pub groups: usize,
    /// Number of blocks in the pool.
    pub num_blocks: usize,
    /// Number of blocks of host memory, for swapped requests and evicted prefixes.
    pub host_blocks: usize,
    /// Whether evicted prefixes stay in host memory.
    pub host_caching: bool,
    /// Greatest number of prompt and output tokens.
    pub max_model_len: usize,
    /// The pool, not the model, limits `max_model_len`.
    pub limited_by_pool: bool,
    /// Greatest number of sequences in a step.
    pub max_num_seqs: usize,
    /// Limits of a step, for which the buffers are allocated.
    pub step_limits: StepLimits,
    /// What determined the size of the pool.
    pub reason: String,
    /// The scheduler's configuration, for one step in flight.
    pub(crate) sched: SchedConfig,
}

/// Limits of the device's sampler.
pub(crate) fn sampler_limits(engine: &EngineConfig, vocab_size: usize, max_model_len: usize) -> Limits {
    let max_rows = most_drawn_rows(engine.max_num_seqs, engine.most_drafts());
    Limits { max_rows, ..Limits::new(engine.max_num_seqs, vocab_size, max_model_len) }
}

impl Plan {
    /// Computes the plan. `graphs` is [`Plan::graph_bytes`].
    pub(crate) fn new(engine: &EngineConfig, opened: &Opened, graphs: u64) -> Result<Plan, EngineError> {
        let Opened { config, device, dtype, kernels, .. } = opened;
        let engine = &*encoder::adapted(engine, config)?;
        let block_size = opened.block_size;
        let decoder = &config.decoder;
        for (flag, value) in
            [("--max-num-seqs", engine.max_num_seqs), ("--max-num-batched-tokens", engine.max_num_batched_tokens)]
        {
            if value == 0 || value > 1 << 20 {
                return Err(bad(flag, value, "1 to 1048576"));
            }
        }
        engine.itl_target.map_or(Ok(()), |target| target.check(engine.enable_chunked_prefill))?;
        let features = device.features();
        if let Some(lora) = &engine.lora {
            check_lora(lora)?;
        }
        if features.launches {
            if engine.max_num_seqs > MAX_SLOTS {
                let expected = format!("at most {MAX_SLOTS} on {}, which is the size of its sampler", device.name());
                return Err(bad("--max-num-seqs", engine.max_num_seqs, expected));
            }
            sampler_limits(engine, decoder.vocab_size(), 1).check()?;
        }
        if let Some(share) = engine.gpu_memory_utilization.filter(|share| !(*share > 0.0 && *share <= 1.0)) {
            return Err(bad("--gpu-memory-utilization", share, "a share above 0 and at most 1"));
        }
        let has_codes = features.packs_matrices || *dtype != Dtype::F32;
        if let Some(quantization) = engine.quantization.filter(|_| !has_codes) {
            return Err(LinearError::NoQuantization { device: device.name(), quantization }.into());
        }
        let context = config.max_position_embeddings;
        if let Some(wanted) = engine.max_model_len
            && (wanted == 0 || wanted > context)
        {
            return Err(bad("--max-model-len", wanted, format!("1 to {context}, the context length of the model")));
        }
        let layout = PageLayout::new(decoder);
        let groups = layout.groups.len();
        // The draft model has its keys and values in the same pages.
        let draft = opened.draft.as_ref();
        let draft_bytes_per_token = draft.map_or(0, OpenedDraft::page_bytes_per_token);
        let page_bytes_per_token = layout.page_bytes_per_token(decoder, &kernels.format) + draft_bytes_per_token;
        let kv_bytes_per_token = page_bytes_per_token * groups as u64;
        let block_bytes = page_bytes_per_token * block_size as u64;
        let wanted_len = engine.max_model_len.unwrap_or(context);
        let cache_group = |group: &LayerGroup| match group.window {
            Some(window) => CacheGroup::Sliding { window },
            None => CacheGroup::Full,
        };
        let mut sched = SchedConfig {
            max_num_seqs: engine.max_num_seqs,
            max_num_batched_tokens: engine.max_num_batched_tokens,
            enable_prefix_caching: engine.enable_prefix_caching,
            enable_chunked_prefill: engine.enable_chunked_prefill,
            policy: engine.policy,
            max_loras: engine.lora.map_or(usize::MAX, |lora| lora.max_loras),
            groups: layout.groups.iter().map(cache_group).collect(),
            preemption_mode: engine.preemption_mode,
            recompute_drafts: decoder.recurrent().next().is_some(),
            max_in_flight: engine.parallel.pipeline_parallel_size.max(1),
            pipeline: engine.parallel.pipeline_parallel_size > 1,
            ..SchedConfig::new(0, block_size)
        };
        let limits = |max_rows, max_model_len, num_blocks| {
            let max_seqs = engine.max_num_seqs;
            StepLimits { max_rows, max_seqs, max_model_len, block_size, num_blocks }
        };
        let step_bytes = |rows, len| {
            let sampling = match features.launches {
                true => sampler_limits(engine, decoder.vocab_size(), len).device_bytes() as u64,
                false => 0,
            };
            let step = |decoder, kernels| Model::step_bytes(&**device, decoder, kernels, &limits(rows, len, 0));
            let of_draft = draft.map_or(0, |draft| {
                let states = Model::state_bytes(&draft.decoder, draft.kernels.format.dtype, engine.max_num_seqs);
                step(&draft.decoder, &draft.kernels) + states
            });
            step(decoder, kernels) + of_draft + device.product_bytes() + sampling
        };
        let WeightBytes { all: weight_bytes, codes: code_bytes, unpacked: unpacked_bytes } =
            models::weight_bytes(decoder, &opened.weights, features, kernels)?;
        let draft_weight_bytes = match draft {
            Some(draft) => draft.weight_bytes(&**device, (decoder, &opened.weights))?,
            None => 0,
        };
        let kv_scale_bytes = match kernels.format.kv_dtype.takes_scales() {
            true => models::kv_scale_bytes(decoder, &opened.weights, engine.calculate_kv_scales)?,
            false => 0,
        };
        let memory = opened.memory;
        let adapter_bytes = match (&engine.lora, &decoder.adapters) {
            (Some(lora), Some(limits)) => {
                // One more while it is read.
                let host = |more: usize| most_adapter_bytes(decoder, limits) * (lora.num_cpu_loras() + 1 + more) as u64;
                match features.launches {
                    true => adapter_slot_bytes(decoder, limits, *dtype) + if memory.is_own { 0 } else { host(0) },
                    false => host(lora.max_loras),
                }
            }
            _ => 0,
        };
        let budget = Budget {
            memory,
            share: engine.gpu_memory_utilization,
            weights: weight_bytes + draft_weight_bytes + kv_scale_bytes + adapter_bytes,
            step: &|rows| step_bytes(rows, wanted_len),
            graphs,
            max_num_batched_tokens: engine.max_num_batched_tokens,
            max_num_seqs: engine.max_num_seqs,
            min_cache: block_bytes * groups as u64,
        };
        let (bytes, reason) = match engine.kv_cache_memory_bytes {
            Some(_) if decoder.is_encoder() => (0, encoder::REASON.to_string()),
            Some(bytes) => (bytes, "--kv-cache-memory-bytes".to_string()),
            None => {
                let (bytes, reason) = budget.cache()?;
                // More blocks than all sequences at full length can own would never be in use at the same time.
                let useful = (engine.max_num_seqs as u64)
                    .saturating_mul(sched.most_blocks(wanted_len) as u64)
                    .saturating_mul(block_bytes);
                if useful < bytes {
                    (useful, format!("enough for {} sequences at full length", engine.max_num_seqs))
                } else {
                    (bytes, reason)
                }
            }
        };
        let num_blocks = bytes.checked_div(block_bytes).unwrap_or_else(|| encoder::blocks(engine, block_size));
        if num_blocks < groups as u64 {
            let least = block_bytes * groups as u64;
            let expected = format!("at least {least} bytes, one block of {block_size} tokens");
            return Err(bad("--kv-cache-memory-bytes", bytes, expected));
        }
        let total = memory.total;
        if bytes > total {
            let expected = format!("at most {total} bytes, the memory of the device");
            return Err(bad("--kv-cache-memory-bytes", bytes, expected));
        }
        budget.check(bytes)?;
        let num_blocks = usize::try_from(num_blocks.min(u64::from(u32::MAX / 2))).unwrap_or(usize::MAX);
        sched.num_blocks = num_blocks;
        let longest = sched.longest_sequence();
        if let Some(wanted) = engine.max_model_len
            && wanted > longest
        {
            let needed = sched.least_blocks(wanted) as u64 * block_bytes;
            let expected = format!(
                "at most {longest} tokens, which is what {bytes} bytes of cache hold; lower it or set --kv-cache-memory-bytes {needed}"
            );
            return Err(bad("--max-model-len", wanted, expected));
        }
        // The cache of a CPU takes host memory too.
        let host_free = if memory.is_own { device::host_memory().available } else { total.saturating_sub(bytes) };
        let expected = format!("at most {host_free} bytes, the host memory that is left beside the cache");
        if engine.swap_space_bytes > host_free {
            return Err(bad("--swap-space", engine.swap_space_bytes, expected));
        }
        let host_bytes = engine.swap_space_bytes.saturating_add(engine.kv_offloading_bytes);
        if host_bytes > host_free {
            let found = format!("{} bytes", engine.kv_offloading_bytes);
            return Err(bad("--kv-offloading-size", found, format!("{expected} and --swap-space")));
        }
        if engine.kv_offloading_bytes > 0 && !engine.enable_prefix_caching {
            let found = format!("{} bytes", engine.kv_offloading_bytes);
            return Err(bad("--kv-offloading-size", found, "0 without prefix caching, whose blocks it keeps"));
        }
        if engine.kv_offloading_bytes > 0 && host_bytes < block_bytes {
            let found = format!("{} bytes", engine.kv_offloading_bytes);
            let expected = format!("0, or at least {block_bytes} bytes, one block of {block_size} tokens");
            return Err(bad("--kv-offloading-size", found, expected));
        }
        let host_blocks =
            usize::try_from(host_bytes.checked_div(block_bytes).unwrap_or(0).min(u64::from(u32::MAX / 2)));
        sched.host_caching = engine.kv_offloading_bytes > 0;
        let max_model_len = wanted_len.min(longest);
        // Every request takes a step of its prompt, as if it drew a token; without an output layer a prompt may be that long.
        sched.max_model_len = max_model_len + usize::from(config.is_headless);
        sched.host_blocks = host_blocks.unwrap_or(usize::MAX);
        Ok(Plan {
            model: match engine.parallel.ranks() {
                1 => opened.files.name(),
                ranks => format!("{}, one of {ranks} ranks", opened.files.name()),
            },
            weight_bytes,
            draft: draft.map(|_| (draft_weight_bytes, draft_bytes_per_token)),
            code_bytes,
            unpacked_bytes,
            adapter_bytes,
            lora: engine.lora,
            kv_scale_bytes,
            dtype: (!features.packs_matrices).then_some(*dtype),
            quantization: engine.quantization,
            stored: decoder.all_linears().any(|linear| matches!(linear.form, Form::Stored { .. })),
            step_bytes: step_bytes(engine.max_num_batched_tokens, max_model_len),
            graph_bytes: graphs,
            step_limits: limits(engine.max_num_batched_tokens, max_model_len, num_blocks),
            kv_bytes_per_token,
            expanded_kv_bytes_per_token: layout.expanded_bytes_per_token(decoder, &kernels.format),
            kv_cache_dtype: engine.kv_cache_dtype,
            block_size,
            state_bytes: decoder.recurrent().map(|layer| layer.state_bytes() as u64).sum(),
            groups,
            num_blocks,
            host_blocks: sched.host_blocks,
            host_caching: sched.host_caching,
            max_model_len,
            limited_by_pool: wanted_len > longest,
            max_num_seqs: engine.max_num_seqs,
            reason,
            sched,
        })
    }

    /// Logs how much GPU memory a start used, compared with the plan.
    pub(crate) fn compare(&self, available_before: u64, after: MemoryInfo) {
        let cache = self.kv_bytes_per_token / self.groups as u64 * (self.num_blocks * self.block_size) as u64;
        let draft = self.draft.map_or(0, |(weights, _)| weights);
        let planned = self.weight_bytes + draft + self.kv_scale_bytes + self.adapter_bytes + self.step_bytes + cache;
        let taken = available_before.saturating_sub(after.available);
        // The driver allocates memory in large pieces, and needs some for code.
        if taken > planned + planned / 50 + (256 << 20) {
            tracing::warn!("the start used {} of GPU memory; {} were planned", Bytes(taken), Bytes(planned));
        } else {
            tracing::info!("the start used {} of GPU memory; {} were planned", Bytes(taken), Bytes(planned));
        }
    }

    /// Bytes of a block in all layers of its group.
    pub fn block_bytes(&self) -> u64 {
        self.kv_bytes_per_token / self.groups as u64 * self.block_size as u64
    }

    /// Number of tokens that the pool can hold in all groups.
    pub fn pool_tokens(&self) -> usize {
        self.num_blocks / self.groups * self.block_size
    }

    /// One line about the weights.
    pub fn weights_line(&self) -> String {
        let quantised = match (self.quantization, self.stored) {
            (None, false) => None,
            (None, true) => Some("the checkpoint's quantised form".to_string()),
            (Some(quantization), false) => Some(quantization.to_string()),
            (Some(quantization), true) => Some(format!("the checkpoint's quantised form, others in {quantization}")),
        };
        let form = match (self.dtype, quantised) {
            (None, quantised) => quantised.unwrap_or_else(|| "the checkpoint's type".to_string()),
            (Some(dtype), None) => dtype.to_string(),
            (Some(dtype), Some(quantised)) => {
                let [codes, unpacked] = [self.code_bytes, self.unpacked_bytes].map(Bytes);
                match (self.code_bytes, self.unpacked_bytes) {
                    (0, _) => format!("{dtype}, unpacked from {quantised}"),
                    (_, 0) => format!("{dtype} and {codes} in {quantised}"),
                    _ => format!("{dtype} and {codes} in {quantised}; {unpacked} unpacked from it"),
                }
            }
        };
        format!("weights: {}, matrices in {form}", Bytes(self.weight_bytes))
    }

    /// One line about the memory for adapters, if there is any.
    pub fn adapters_line(&self) -> Option<String> {
        let lora = self.lora.as_ref()?;
        Some(format!(
            "adapters: at most {}, {} in a step and {} in host memory, of rank {} at most",
            Bytes(self.adapter_bytes),
            lora.max_loras,
            lora.num_cpu_loras(),
            lora.max_lora_rank
        ))
    }

    /// One line about the draft model, if there is one.
    pub fn draft_line(&self) -> Option<String> {
        let (weights, cache) = self.draft?;
        Some(format!("draft model: {} of weights, {} of cache per token of a page", Bytes(weights), Bytes(cache)))
    }

    /// One line about the buffers of a step.
    pub fn step_line(&self) -> String {
        format!("activations: {}, for steps of {} tokens", Bytes(self.step_bytes), self.step_limits.max_rows)
    }

    /// One line about the cache.
    pub fn cache_line(&self) -> String {
        let [blocks, context] = self.cache_parts();
        let host = match (self.host_blocks, self.host_caching) {
            (0, _) => String::new(),
            (blocks, false) => format!("; {blocks} host blocks to swap to"),
            (blocks, true) => format!("; {blocks} host blocks for evicted prefixes and swapped requests"),
        };
        format!("cache: {blocks} ({}); context {context}{host}", self.reason)
    }

    /// Texts about the size of the cache and about the context length.
    fn cache_parts(&self) -> [String; 2] {
        let tokens = self.pool_tokens();
        let bytes = Bytes(self.kv_bytes_per_token * tokens as u64);
        let groups = if self.groups > 1 { format!(" in {} groups of layers", self.groups) } else { String::new() };
        let form = match self.kv_cache_dtype {
            KvCacheDtype::Auto => String::new(),
            KvCacheDtype::Int8 => " in int8, a scale for each token and head".to_string(),
            other => format!(" in {other}{}", other.caution()),
        };
        let limit = if self.limited_by_pool { ", cut to what the cache holds" } else { "" };
        [
            format!(
                "{} blocks of {} tokens{groups} = {tokens} tokens, {bytes}{form}",
                self.num_blocks, self.block_size
            ),
            format!("{} tokens{limit}", self.max_model_len),
        ]
    }

    /// Returns the configuration with all automatic choices resolved: a start with it uses the same device and the same number of
    /// blocks.
    pub(crate) fn resolve(&self, config: &EngineConfig, opened: &Opened) -> EngineConfig {
        // A replay has one rank.
        let format = opened.kernels.format;
        let bytes_of = |decoder: &Decoder| PageLayout::new(decoder).page_bytes_per_token(decoder, &format);
        let more = bytes_of(&opened.whole).saturating_sub(bytes_of(&opened.config.decoder));
        let block_bytes = self.block_bytes() + more * self.block_size as u64;
        let host_bytes = self.host_blocks as u64 * block_bytes;
        let model = match &config.model {
            ModelSource::Folder(path) => {
                ModelSource::Folder(std::path::absolute(path).unwrap_or_else(|_| path.clone()))
            }
            ModelSource::Demo => ModelSource::Demo,
        };
        EngineConfig {
            model,
            block_size: Some(self.block_size),
            device: opened.device.name().to_string(),
            dtype: Some(opened.dtype),
            kv_cache_memory_bytes: Some(self.num_blocks as u64 * block_bytes),
            swap_space_bytes: if self.host_caching { 0 } else { host_bytes },
            kv_offloading_bytes: if self.host_caching { host_bytes } else { 0 },
            max_model_len: Some(self.max_model_len),
            ..config.clone()
        }
    }
}

/// Refuses sizes of the memory for adapters.
fn check_lora(lora: &LoraConfig) -> Result<(), EngineError> {
    if !(1..=MOST_LORAS).contains(&lora.max_loras) {
        return Err(bad("--max-loras", lora.max_loras, format!("1 to {MOST_LORAS}")));
    }
    if !(1..=MOST_RANK).contains(&lora.max_lora_rank) {
        return Err(bad("--max-lora-rank", lora.max_lora_rank, format!("1 to {MOST_RANK}")));
    }
    let cpu = lora.num_cpu_loras();
    if !(lora.max_loras..=MOST_CPU_LORAS).contains(&cpu) {
        let expected = format!("{} (--max-loras) to {MOST_CPU_LORAS}", lora.max_loras);
        return Err(bad("--max-cpu-loras", cpu, expected));
    }
    Ok(())
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "model              {}", self.model)?;
        let lines = [Some(self.weights_line()), Some(self.step_line()), self.draft_line(), self.adapters_line()];
        for (label, text) in lines.iter().flatten().filter_map(|line| line.split_once(": ")) {
            writeln!(f, "{label:<18} {text}")?;
        }
        write!(f, "cache per token    {}", Bytes(self.kv_bytes_per_token))?;
        if let Some(expanded) = self.expanded_kv_bytes_per_token {
            write!(f, " (latents; keys and values of every head would take {})", Bytes(expanded))?;
        }
        writeln!(f)?;
        writeln!(f, "cache per block    {} ({} tokens)", Bytes(self.block_bytes()), self.block_size)?;
        if self.state_bytes > 0 {
            let states = Bytes(self.state_bytes);
            writeln!(
                f,
                "state per sequence {states}, and as much for each cached block of {} tokens",
                self.block_size
            )?;
            writeln!(f, "prefix hits        whole blocks; up to {} tokens are computed again", self.block_size)?;
        }
        let [blocks, context] = self.cache_parts();
        writeln!(f, "cache              {blocks}")?;
        writeln!(f, "cache size from    {}", self.reason)?;
        writeln!(f, "context            {context}")?;
        let bytes = Bytes(self.host_blocks as u64 * self.block_bytes());
        match (self.host_blocks, self.host_caching) {
            (0, _) => {}
            (blocks, false) => writeln!(f, "swap space         {blocks} blocks")?,
            (blocks, true) => writeln!(f, "host tier          {blocks} blocks, {bytes}, shared with the swap space")?,
        }
        writeln!(f)?;
        writeln!(f, "{:>14}  {:>19}", "sequence length", "sequences at once")?;
        let mut length = 256.min(self.max_model_len);
        loop {
            let blocks = self.sched.least_blocks(length);
            writeln!(f, "{length:>15}  {:>18}", (self.num_blocks / blocks).min(self.max_num_seqs))?;
            if length == self.max_model_len {
                return Ok(());
            }
            length = (length * 2).min(self.max_model_len);
        }
    }
}

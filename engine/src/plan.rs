//! Where the memory goes: weights, step buffers, and what is left for pages.

use std::fmt;

use attention_kernels::CacheFormat;
use device::Device;
use device::gemm::Quantization;
use models::{Model, ModelConfig, PageLayout};

use crate::api::EngineConfig;
use crate::error::EngineError;
use crate::kv_cache::KvCacheDtype;

/// Memory of a start, known without reading a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Folder name of the checkpoint.
    pub model: String,
    /// Weights, as they will lie in memory.
    pub weight_bytes: u64,
    /// What their matrices are made into.
    pub quantization: Option<Quantization>,
    /// Buffers of the greatest step.
    pub step_bytes: u64,
    /// Keys and values of one token in all layers.
    pub kv_bytes_per_token: u64,
    /// How they are kept.
    pub kv_cache_dtype: KvCacheDtype,
    /// Tokens per block.
    pub block_size: usize,
    /// Groups of layers; a sequence has a block table, and blocks, for each.
    pub groups: usize,
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Blocks of host memory for requests that are swapped out.
    pub host_blocks: usize,
    /// Longest prompt plus output that will be served.
    pub max_model_len: usize,
    /// Whether the pool, not the model, limits `max_model_len`.
    pub limited_by_pool: bool,
    /// Sequences in one step.
    pub max_num_seqs: usize,
    /// Why the pool has this size.
    pub reason: String,
}

impl Plan {
    pub(crate) fn new(
        engine: &EngineConfig,
        config: &ModelConfig,
        device: &dyn Device,
        model: &str,
        weight_bytes: u64,
        format: CacheFormat,
    ) -> Result<Plan, EngineError> {
        let block_size = engine.block_size;
        if !block_size.is_power_of_two() || !(8..=128).contains(&block_size) {
            return Err(bad("--block-size", block_size, "a power of two from 8 to 128"));
        }
        for (flag, value) in
            [("--max-num-seqs", engine.max_num_seqs), ("--max-num-batched-tokens", engine.max_num_batched_tokens)]
        {
            if value == 0 || value > 1 << 20 {
                return Err(bad(flag, value, "1 to 1048576"));
            }
        }
        if !(engine.gpu_memory_utilization > 0.0 && engine.gpu_memory_utilization <= 1.0) {
            return Err(bad(
                "--gpu-memory-utilization",
                engine.gpu_memory_utilization,
                "a share above 0 and at most 1",
            ));
        }
        let context = config.max_position_embeddings;
        if let Some(wanted) = engine.max_model_len
            && (wanted == 0 || wanted > context)
        {
            return Err(bad(
                "--max-model-len",
                wanted,
                format!("1 to {context}, the context that the model was made for"),
            ));
        }
        let layout = PageLayout::new(config);
        let groups = layout.groups.len();
        let page_bytes_per_token = layout.page_bytes_per_token(config, format);
        let kv_bytes_per_token = page_bytes_per_token * groups as u64;
        let block_bytes = page_bytes_per_token * block_size as u64;
        let step_bytes = Model::step_bytes(config, engine.max_num_batched_tokens, engine.quantization);
        let wanted_len = engine.max_model_len.unwrap_or(context);
        let (bytes, reason) = match engine.kv_cache_memory_bytes {
            Some(bytes) => (bytes, "--kv-cache-memory-bytes".to_string()),
            None => {
                let free = device.memory().available.saturating_sub(weight_bytes + step_bytes);
                let share = engine.gpu_memory_utilization;
                let bytes = (free as f64 * share) as u64;
                // More blocks than all sequences at full length could own would never be used at once.
                let useful = (engine.max_num_seqs as u64)
                    .saturating_mul((wanted_len.div_ceil(block_size) * groups) as u64)
                    .saturating_mul(block_bytes);
                if useful < bytes {
                    (useful, format!("enough for {} sequences at full length", engine.max_num_seqs))
                } else {
                    (bytes, format!("{:.0} % of {} free memory", share * 100.0, Bytes(free)))
                }
            }
        };
        let num_blocks = bytes / block_bytes;
        if num_blocks < groups as u64 {
            let least = block_bytes * groups as u64;
            let expected = format!("at least {least} bytes, one block of {block_size} tokens");
            return Err(bad("--kv-cache-memory-bytes", bytes, expected));
        }
        let total = device.memory().total;
        if bytes > total {
            let expected = format!("at most the {total} bytes of memory that the device has");
            return Err(bad("--kv-cache-memory-bytes", bytes, expected));
        }
        let num_blocks = usize::try_from(num_blocks.min(u64::from(u32::MAX / 2))).unwrap_or(usize::MAX);
        let pool_tokens = (num_blocks / groups).saturating_mul(block_size);
        if let Some(wanted) = engine.max_model_len
            && wanted > pool_tokens
        {
            let needed = (wanted.div_ceil(block_size) * groups) as u64 * block_bytes;
            let expected = format!(
                "at most {pool_tokens} tokens, which is what {bytes} bytes of cache hold; lower it or set --kv-cache-memory-bytes {needed}"
            );
            return Err(bad("--max-model-len", wanted, expected));
        }
        let host_free = total.saturating_sub(bytes);
        if engine.swap_space_bytes > host_free {
            let expected = format!("at most {host_free} bytes, which is what the cache leaves of the memory");
            return Err(bad("--swap-space", engine.swap_space_bytes, expected));
        }
        let host_blocks = usize::try_from((engine.swap_space_bytes / block_bytes).min(u64::from(u32::MAX / 2)));
        Ok(Plan {
            model: model.to_string(),
            weight_bytes,
            quantization: engine.quantization,
            step_bytes,
            kv_bytes_per_token,
            kv_cache_dtype: engine.kv_cache_dtype,
            block_size,
            groups,
            num_blocks,
            host_blocks: host_blocks.unwrap_or(usize::MAX),
            max_model_len: wanted_len.min(pool_tokens),
            limited_by_pool: wanted_len > pool_tokens,
            max_num_seqs: engine.max_num_seqs,
            reason,
        })
    }

    /// Tokens that the pool holds.
    pub fn pool_tokens(&self) -> usize {
        self.num_blocks / self.groups * self.block_size
    }

    /// The weights in one line.
    pub fn weights_line(&self) -> String {
        let form =
            self.quantization.map_or("matrices in the checkpoint's type".to_string(), |q| format!("matrices in {q}"));
        format!("weights: {}, {form}", Bytes(self.weight_bytes))
    }

    /// The cache in one line.
    pub fn cache_line(&self) -> String {
        let cache = Bytes(self.kv_bytes_per_token * self.pool_tokens() as u64);
        let limit = if self.limited_by_pool { "; the context is cut to what the cache holds" } else { "" };
        let groups = if self.groups > 1 { format!(" in {} groups of layers", self.groups) } else { String::new() };
        let form = match self.kv_cache_dtype {
            KvCacheDtype::Auto => String::new(),
            KvCacheDtype::Int8 => " in int8, a scale for each token and head".to_string(),
            other => format!(" in {other}"),
        };
        let swap = match self.host_blocks {
            0 => String::new(),
            blocks => format!("; {blocks} host blocks to swap to"),
        };
        format!(
            "cache: {} blocks of {} tokens{groups} = {} tokens, {cache}{form} ({}){limit}; context {} tokens{swap}",
            self.num_blocks,
            self.block_size,
            self.pool_tokens(),
            self.reason,
            self.max_model_len
        )
    }
}

fn bad(flag: &'static str, found: impl fmt::Display, expected: impl Into<String>) -> EngineError {
    EngineError::Config { flag, found: found.to_string(), expected: expected.into() }
}

/// A number of bytes as people read it.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0..1024 => write!(f, "{} B", self.0),
            1024..1_048_576 => write!(f, "{:.1} KiB", bytes / 1024.0),
            1_048_576..1_073_741_824 => write!(f, "{:.1} MiB", bytes / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", bytes / 1_073_741_824.0),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "model              {}", self.model)?;
        writeln!(f, "{}", self.weights_line().replacen("weights: ", "weights            ", 1))?;
        writeln!(f, "step buffers       {}", Bytes(self.step_bytes))?;
        writeln!(f, "cache per token    {}", Bytes(self.kv_bytes_per_token))?;
        writeln!(
            f,
            "cache per block    {} ({} tokens)",
            Bytes(self.kv_bytes_per_token / self.groups as u64 * self.block_size as u64),
            self.block_size
        )?;
        writeln!(f, "{}", self.cache_line().replacen("cache: ", "cache              ", 1))?;
        writeln!(f)?;
        writeln!(f, "{:>14}  {:>19}", "sequence length", "sequences at once")?;
        let mut length = 256.min(self.max_model_len);
        loop {
            let blocks = length.div_ceil(self.block_size) * self.groups;
            writeln!(f, "{length:>15}  {:>18}", (self.num_blocks / blocks).min(self.max_num_seqs))?;
            if length == self.max_model_len {
                return Ok(());
            }
            length = (length * 2).min(self.max_model_len);
        }
    }
}

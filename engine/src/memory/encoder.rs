//! What an encoder changes in a configuration: it has no cache, and a step computes all tokens of a prompt.

use std::borrow::Cow;

use models::ModelConfig;

use crate::api::EngineConfig;
use crate::error::{EngineError, bad};

/// Why the cache has no bytes.
pub(super) const REASON: &str = "an encoder keeps no keys and values";

/// Greatest number of tokens of a prompt unless the user sets it: a step has memory for all of them at once.
const MOST_TOKENS: usize = 8192;

/// The configuration that the model runs with: that of an encoder has no caching and no chunks, and steps that hold the longest prompt.
pub(super) fn adapted<'a>(
    engine: &'a EngineConfig,
    config: &ModelConfig,
) -> Result<Cow<'a, EngineConfig>, EngineError> {
    if !config.decoder.is_encoder() {
        return Ok(Cow::Borrowed(engine));
    }
    let expected = "nothing: an encoder keeps no keys and values";
    if engine.swap_space_bytes > 0 {
        return Err(bad("--swap-space", format!("{} bytes", engine.swap_space_bytes), expected));
    }
    if engine.kv_offloading_bytes > 0 {
        return Err(bad("--kv-offloading-size", format!("{} bytes", engine.kv_offloading_bytes), expected));
    }
    let longest = engine.max_model_len.unwrap_or(config.max_position_embeddings.min(MOST_TOKENS));
    let tokens = engine.max_num_batched_tokens.max(longest).max(engine.max_num_seqs + 1);
    Ok(Cow::Owned(EngineConfig {
        enable_prefix_caching: false,
        enable_chunked_prefill: false,
        itl_target: None,
        kv_cache_memory_bytes: Some(0),
        max_model_len: Some(longest),
        max_num_batched_tokens: tokens,
        ..engine.clone()
    }))
}

/// Number of blocks without bytes for the sequences of a step.
pub(super) fn blocks(engine: &EngineConfig, block_size: usize) -> u64 {
    (engine.max_num_batched_tokens.div_ceil(block_size) + 2 * engine.max_num_seqs) as u64
}

//! How the engine of a handle sleeps and wakes.

use crate::api::{EngineConfig, SleepError, SleepLevel};
use crate::start::{LoadOn, Loaded, load};
use crate::worker::Worker;

/// What makes a worker anew.
pub(super) struct Reload {
    /// The configuration of the start, with the number of blocks that it led to.
    config: EngineConfig,
    num_blocks: usize,
    /// Why the weights cannot be dropped, if they cannot.
    problem: Option<&'static str>,
}

impl Reload {
    /// For the worker of a model that is loaded.
    pub fn new(config: &EngineConfig, loaded: &Loaded) -> Reload {
        let num_blocks = loaded.info.num_blocks;
        let bytes = (num_blocks as u64).saturating_mul(loaded.parts.info.host_block_bytes as u64);
        let problem = match config {
            _ if loaded.ranks.is_some() => Some("several ranks compute the model"),
            EngineConfig { lora: Some(_), .. } => Some("the server has LoRA adapters"),
            EngineConfig { record: Some(_), .. } => Some("the server records its steps"),
            EngineConfig { profile: Some(_), .. } => Some("the server records a profile"),
            EngineConfig { calculate_kv_scales: true, .. } => {
                Some("the scales of the cache are those of the first step")
            }
            _ => None,
        };
        let config = EngineConfig {
            // The engine has these still.
            kv_events: None,
            kv_transfer: None,
            kv_cache_memory_bytes: Some(bytes).filter(|bytes| *bytes > 0),
            ..config.clone()
        };
        Reload { config, num_blocks, problem }
    }

    /// Fails if an engine of this configuration cannot give back what `level` says.
    pub fn check(&self, level: SleepLevel) -> Result<(), SleepError> {
        match self.problem.filter(|_| level == SleepLevel::CacheAndWeights) {
            Some(problem) => {
                Err(SleepError::Unsupported(format!("the weights cannot be dropped: {problem}; use level 1")))
            }
            None => Ok(()),
        }
    }

    /// A new worker.
    pub fn worker(&self) -> Result<Box<dyn Worker>, String> {
        let loaded = load(&self.config, LoadOn::Configured, &|_, _| {}).map_err(|error| error.to_string())?;
        match loaded.info.num_blocks {
            found if found < self.num_blocks => {
                Err(format!("found memory for {found} blocks of the cache, expected {}", self.num_blocks))
            }
            _ => Ok(loaded.parts.worker),
        }
    }
}

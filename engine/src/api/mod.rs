//! Configuration, requests, events and statistics, as plain values.

mod config;
mod event;
mod generation_config;
mod hf_overrides;
mod itl_target;
mod kv_cache;
mod parallel;
mod request;
mod sleep;
mod stats;

pub use config::{AdapterInfo, EngineConfig, LoraConfig, ModelInfo, ModelSource};
pub use event::{Delta, DraftCounts, Event, FinishReason, StopCause, TokenEvent, TokenOutput};
pub use generation_config::{GenerationConfig, GenerationOverrides, GenerationSource};
pub use hf_overrides::HfOverrides;
pub use itl_target::ItlTarget;
pub use kv_cache::KvCacheDtype;
pub use parallel::{Backend, ParallelConfig};
pub use request::{BeamSearch, GenerationParams, GenerationRequest, StructuredOutput};
pub use sleep::{SleepError, SleepLevel};
pub use stats::{EngineStats, StepTokens};

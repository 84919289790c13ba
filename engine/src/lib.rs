//! The inference engine: plan, submit, collect, publish, commit.
//!
//! This crate contains the loop that turns requests into tokens. [`Llm`] answers batches of prompts on the caller's thread;
//! [`AsyncEngine`] runs on a thread of its own, for a server; [`Engine`] runs the same steps on token ids.
//!
//! ```text
//! request ─▶ sched: plan ─▶ worker: block copies, forward pass, draws ─▶ publish ─▶ sched: commit ─▶ text ─▶ events
//! ```
//!
//! The interface between the engine and the device is [`worker::Worker`]. The crate contains no HTTP, and scheduling decisions
//! are made in `sched` alone, and texts in the crate `text`.
//!
//! ```
//! let mut llm = engine::Llm::new(engine::EngineConfig::default())?;
//! let params = engine::GenerationParams { max_tokens: Some(12), ..Default::default() };
//! let answers = llm.generate(&["The capital of France is"], &params)?;
//! println!("{}", answers[0].outputs[0].text);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod api;
mod connector;
mod error;
mod keys;
mod memory;
mod parallel;
pub mod profile;
mod serve;
pub mod speculate;
mod start;
mod step;
pub mod watch;
pub mod worker;

/// Devices and kernels without an engine, for measurements.
pub mod kernels {
    pub use attention_kernels::{Dtype, KvDtype, Operation, load_plugin};
    pub use device::sim::{Counts, SECTOR, Tally};
    pub use device::{Device, DeviceError, Options, Resources, open_with};
    pub use trial::Peaks;
    pub use trial::grid::{Grid, GridError, Measurement};
}

pub use api::*;
pub use attention_kernels::{Dtype, KernelChoice};
pub use connector::{KvRole, KvTransfer, KvTransferConfig};
pub use device::Profile;
pub use error::{AdapterError, AuditError, EngineError, SubmitError};
pub use kvevents::KvEventsConfig;
pub use linear::Quantization;
pub use memory::Plan;
pub use models::RoundActivations;
pub use models::decoder::Reduce;
pub use models::{GenerationDefaults, ModelConfig, Pooler, Pooling, ScoreFunction, Task};
pub use parallel::Group;
pub use sampling::{
    Constraint, ConstraintError, MAX_TEMPERATURE, Mask, Sampled, SamplingParams, TokenLogprobs, TokenSet,
};
pub use sched::{BACKGROUND, Policy, PreemptionMode, PrefixStats, RequestId, SchedulerStats, SpecStats};
pub use serve::{
    AsyncEngine, Completion, CompletionOutput, EngineStatus, GrammarConstraint, Llm, OutputStream, Watcher,
};
pub use simd::allocator;
pub use speculate::{DraftCheckpoint, SpeculativeConfig, SpeculativeMethod};
pub use start::{
    Estimate, LoadOn, Loaded, Opened, Progress, Recording, RecordingError, Replayed, Roofline, WorkCounts,
};
pub use start::{declare, describe_kernels, follow, load, open, plan};
pub use step::{Engine, EngineParts, KvTransferParts};
pub use text::{Grammar, ThinkingLimit};

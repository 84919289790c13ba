//! LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors` (Hu et al., "LoRA: Low-Rank Adaptation of
//! Large Language Models", 2021).
//!
//! An adapter adds `s·B·A` to the weights of some modules, with `s = lora_alpha / r`, or `lora_alpha / sqrt(r)` with `use_rslora`
//! (Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023). The weights stay as they are: a step adds
//! `s·(x·Aᵀ)·Bᵀ` to the outputs of the rows of each adapter ([`attention_kernels::LowRankArgs`]).
//!
//! | file | contents |
//! |---|---|
//! | `config` | `adapter_config.json`: which modules, which rank and scale |
//! | `pattern` | the names and regular expressions in it |
//! | `modules` | the modules of a decoder that adapters may target, and the linear layers that hold their rows |
//! | `adapter` | reading an adapter: every tensor is checked against the decoder before a number is read |
//! | `store` | the adapters in host memory |
//!
//! **Memory.** [`AdapterLimits`] bound the rank and therefore the size of an adapter ([`most_adapter_bytes`]). Files above that size
//! are refused before they are parsed. Only safetensors files are read. A device that launches kernels has memory for
//! [`AdapterLimits::slots`] adapters of that size ([`adapter_slot_bytes`]).

mod adapter;
mod config;
mod error;
mod modules;
mod store;

use serde::{Deserialize, Serialize};

pub use adapter::Adapter;
pub use error::AdapterError;
pub(crate) use modules::adapter_sizes;
pub use modules::{adapter_slot_bytes, most_adapter_bytes, most_adapter_width};
pub use store::{AdapterRef, AdapterStore};

/// Sizes of the memory for adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterLimits {
    /// Greatest number of different adapters in a step.
    pub slots: usize,
    /// Greatest rank.
    pub rank: usize,
}

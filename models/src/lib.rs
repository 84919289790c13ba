//! What a checkpoint says about numbers: configuration, weights and adapters, and the forward pass. Tokenizers and chat templates
//! are made by the crate `text`, of files that [`ModelFiles`] reads.
//!
//! A checkpoint is a folder in Hugging Face layout, or the same files embedded in the binary ([`ModelFiles`]):
//!
//! ```text
//! config.json                    ModelConfig         the decoder, declared by its family
//! *.safetensors (+ index.json)   Weights             memory-mapped tensors, f32, f16 or bf16
//! generation_config.json         GenerationDefaults  end tokens and sampling defaults
//! modules.json, 1_Pooling, …      Pooler              how hidden states become an embedding or scores of labels
//! ```
//!
//! A GGUF file (also a split one) states the same configuration and holds the same weights; [`gguf`] reads it. It is a whole
//! checkpoint: nothing beside it is read.
//!
//! [`Model`] uploads the weights to a device, unchanged or quantised, and runs steps. A step computes a [`ForwardBatch`]: tokens of
//! many sequences, each with its block table. Keys and values are written to and read from pages.
//!
//! Every problem with these files is a [`LoadError`] of one line. No content of a file makes this crate panic.
//!
//! This crate does not schedule, sample or serve. It holds no state of requests and downloads nothing.
//!
//! ```
//! use std::path::Path;
//!
//! use models::{ForwardBatch, Model, ModelConfig, ModelFiles, Weights};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reference/qwen3");
//! let files = ModelFiles::open(Path::new(folder))?;
//! let config = ModelConfig::load(&files)?;
//! let weights = Weights::open(&files)?;
//! let decoder = &config.decoder;
//! weights.expect("model.norm.weight", &[decoder.hidden_size()])?;
//!
//! // The forward pass: a prompt in blocks 7, 6, 5, … of a pool of eight blocks.
//! let device = device::open("cpu", None)?;
//! let kernels = attention_kernels::select(&Default::default(), &Model::needs(decoder, &*device))?;
//! let mut model = Model::load(decoder, &weights, device, kernels, 128, &|_, _| Ok(()))?;
//! let mut caches = model.new_cache(8, 16)?;
//! let ids: Vec<u32> = (3..40).collect();
//! let table: Vec<i32> = (0..8).rev().collect();
//! let slots: Vec<i64> = (0..ids.len()).map(|p| i64::from(table[p / 16]) * 16 + p as i64 % 16).collect();
//! let mut batch = ForwardBatch::default();
//! batch.clear(1);
//! let last_row = batch.push(0, &ids, [(&slots[..], &table[..])]);
//! model.forward(&batch, &mut caches)?;
//! assert_eq!(model.logits(&[last_row])?.len(), decoder.vocab_size());
//! # Ok(())
//! # }
//! ```
mod checkpoint;
pub mod decoder;
mod families;
mod forward;
pub mod lora;
mod pooling;

pub use checkpoint::{
    FileBytes, GenerationDefaults, LoadError, ModelFiles, Needed, RoundActivations, WeightView, Weights, demo, gguf,
    needed, stored_as,
};
pub use decoder::Decoder;
pub use families::{Eagle3, ModelConfig, Supported, supported};
pub use forward::{
    Fill, ForwardBatch, GraphCount, GroupBatch, LOGIT_ROWS, MatrixOutline, Model, Observer, PageLayout, Progress,
    StageError, States, StepLimits, WeightBytes, check_weights, checkpoint_dtype, draft_graph_sizes, graph_sizes,
    head_tokens, in_stored_forms, kernels, kv_scale_bytes, layers_with_kv_scales, load_matrix, most_drawn_rows,
    partition, weight_bytes, weight_bytes_beside,
};
pub use pooling::{Dimensions, Pooler, Pooling, ScoreFunction, Task};

//! The integration tests of the models, in one program.
#![allow(clippy::unwrap_used)]

mod bad_checkpoints;
mod common;
mod config_spellings;
#[path = "../../device/tests/support/allocations.rs"]
mod counter;
#[path = "../../attention-kernels/tests/conformance/covering.rs"]
mod covering;
mod documentation;
mod draft_graphs_sim;
mod drafts;
mod encoders;
mod formats;
mod forward;
mod forward_codes;
mod forward_sim;
mod gguf;
mod graphs_sim;
mod kernels;
mod layout;
mod lora;
mod naive;
mod pooling;
mod predictors;
mod quantized;
mod ranks;
mod reference_cases;
mod step_sim;
#[path = "../../device/tests/support/mod.rs"]
mod support;
#[path = "../../engine/src/start/texts.rs"]
mod texts;
mod weight_files;

//! The integration tests of the engine, in one program.
#![allow(clippy::unwrap_used)]

mod batching;
mod beam;
mod beam_search;
mod best_of;
mod common;
#[path = "../../device/tests/support/allocations.rs"]
mod counter;
mod dequantised;
mod deterministic;
mod draft_model;
mod embeddings;
#[path = "../../device/tests/backends/fake.rs"]
mod fake;
mod faults;
mod golden;
mod handle;
mod host_tier;
mod hostile;
mod kernels;
mod kv_dtypes;
mod kv_events;
mod kv_transfer;
mod later_sequences;
mod lora;
mod no_gpu;
mod offline;
mod overlap;
mod perplexity;
mod plan;
mod predictors;
mod profile;
mod prompt_budgets;
mod proposers;
mod quantized;
mod ranks;
mod real_models;
mod recent;
mod recurrent;
mod reference;
mod replay;
mod row_invariance;
mod sleep;
mod speculate;
mod speculate_recurrent;
mod speculate_sim;
mod steady;
mod stops;
mod structured;
mod swap;
mod swaps_beside;
mod watch;
mod windows;

//! The integration tests of the server in one executable. The soak test is separate because it measures memory.
#![allow(clippy::unwrap_used)]

mod answers;
mod anthropic;
mod batches;
mod boundary;
mod chat_batches;
mod common;
mod conformance;
#[path = "../../device/tests/support/allocations.rs"]
mod counter;
mod defaults;
mod embeddings;
mod encoders;
mod errors;
mod folders;
mod fuzzed;
mod harsh_http;
mod kv_transfer;
mod lifecycle;
mod limits;
mod listener;
mod llama_server;
mod local;
mod lora;
mod messages;
mod metrics;
mod ollama;
mod openapi;
mod origin;
mod page;
mod real_models;
mod reasoning;
mod responses;
mod routers;
mod scripted;
mod searches;
mod speculation;
mod stored;
mod stored_faults;
mod structured;
mod token_cost;
mod tools;
mod vllm;

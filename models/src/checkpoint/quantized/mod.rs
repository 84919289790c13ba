//! Checkpoints whose weights are stored in fewer bits: GPTQ, AWQ, compressed-tensors, FP8, MXFP4, NVFP4 and NF4.
//!
//! [`config`] reads how modules are stored, [`module`] finds and checks the tensors of a module, [`rows`] reads a row of it in the
//! form that products take ([`linear::StoredFormat`]). A weight has exactly the value that its format defines.

pub(crate) mod config;
mod module;
mod rows;

pub(crate) use module::{Module, find};

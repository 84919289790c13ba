//! Sampling on the device against the host's sampler, which is the definition: equal in every bit, on every device of this
//! machine. Logits behind a row are NaN, so a kernel that reads them fails loudly.
#![allow(clippy::unwrap_used)]

#[allow(dead_code, reason = "shared: each test program takes what it needs")]
#[path = "../common/cases.rs"]
mod cases;
#[path = "../common/distribution.rs"]
mod distribution;
mod histories;
mod problem;
mod reference;
mod refusals;
#[allow(dead_code, reason = "shared: each test program takes what it needs")]
#[path = "../common/rows.rs"]
mod rows;
mod sanitizers;
mod steps;
#[path = "../../../device/tests/support/mod.rs"]
mod support;
mod vocabularies;

static KERNELS: support::Kernels = support::Kernels::of("sampling");

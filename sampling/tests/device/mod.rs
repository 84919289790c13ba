//! Sampling on the device against the host's sampler, which is the definition: equal in every bit, on every device of
//! this machine. Logits behind a row are NaN, so a kernel that reads them fails loudly.

mod histories;
mod problem;
mod reference;
mod refusals;
mod sanitizers;
mod steps;
mod vocabularies;

static KERNELS: crate::support::Kernels = crate::support::Kernels::of("sampling");

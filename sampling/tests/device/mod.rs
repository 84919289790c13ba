//! The device sampler, compared with the host's sampler, which defines the results: equal in every bit, on every device
//! of this machine. The elements behind each row of logits are NaN, so that a kernel that reads them fails.

mod counts;
mod cuts;
mod drafts;
mod histories;
mod problem;
mod reference;
mod refusals;
mod sanitizers;
mod steps;
mod vocabularies;

static KERNELS: crate::support::Kernels = crate::support::Kernels::of("sampling");

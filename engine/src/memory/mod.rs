//! The memory of an engine: weights, step buffers and cache pages.

mod budget;
mod bytes;
mod encoder;
mod plan;

pub(crate) use bytes::Bytes;
pub use plan::Plan;
pub(crate) use plan::sampler_limits;

//! Where the memory goes: weights, step buffers, pages.

mod budget;
mod bytes;
mod plan;

pub(crate) use bytes::Bytes;
pub use plan::Plan;

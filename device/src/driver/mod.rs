//! Handles of the CUDA driver: a GPU with two streams ([`Context`]), memory, events, graphs, and the driver's errors. The types of
//! every backend hold them ([`Buffer`](crate::Buffer), [`Pinned`](crate::Pinned), [`Event`](crate::Event),
//! [`Graph`](crate::Graph)); the backend `cuda` makes them.
//!
//! Every wait has a time limit ([`wait`]).

mod context;
mod error;
mod graph;
mod memory;
pub(crate) mod symbols;
pub(crate) mod wait;

pub(crate) use context::{Context, open};
pub(crate) use error::refused;
pub use error::{CudaError, Refusal};
pub(crate) use graph::{Capture, CudaGraph};
pub(crate) use memory::{Batch, DeviceMemory, PinnedMemory, Point};

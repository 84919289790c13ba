//! From a configuration to a running engine (open, plan, load, start), and to a worker alone, for a replay.

pub(crate) mod draft;
mod estimate;
mod graphs;
pub(crate) mod load;
pub(crate) mod open;
mod replay;
mod roofline;
pub(crate) mod texts;

pub use estimate::Estimate;
pub use load::{LoadOn, Loaded, Progress, describe_kernels, follow, load, plan};
pub use open::{Opened, declare, open};
pub use replay::{Recording, RecordingError, Replayed};
pub use roofline::{Roofline, WorkCounts};

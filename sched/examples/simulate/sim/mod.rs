//! The simulation: traces, a cost model of a GPU, batching policies, and measurements.
//!
//! A run is a pure function of trace, cost model and batch limit, without clock or threads. The module is not part of
//! the library, because no engine needs it. `tests/simulator.rs` includes it by path.

pub mod contiguous;
pub mod cost;
pub mod fleet;
pub mod measure;
pub mod paged;
pub mod random;
pub mod static_batching;
pub mod svg;
pub mod trace;

use self::cost::CostModel;
use self::measure::Run;
use self::trace::Arrival;

/// A batching policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Batches that run until their longest request ends. Each request reserves the longest possible context.
    StaticMax,
    /// The same, but each request reserves the longest length in its batch, which an oracle knows in advance.
    Static,
    /// Requests join and leave at every step. Each reserves the longest possible context contiguously.
    Contiguous,
    /// [`sched::Scheduler`] with blocks of 16 tokens, which plans after each commit (1) or a step ahead (2).
    Quire { max_in_flight: usize },
}

impl Policy {
    /// All policies, in the order of the tables.
    pub const ALL: [Policy; 5] = [
        Policy::StaticMax,
        Policy::Static,
        Policy::Contiguous,
        Policy::Quire { max_in_flight: 1 },
        Policy::Quire { max_in_flight: 2 },
    ];

    pub fn name(self) -> &'static str {
        match self {
            Policy::StaticMax => "static, max-length",
            Policy::Static => "static",
            Policy::Contiguous => "continuous, contiguous",
            Policy::Quire { max_in_flight: 1 } => "Quire",
            Policy::Quire { .. } => "Quire, a step ahead",
        }
    }

    /// Runs a trace, which is in order of arrival, with at most `batch` sequences at once.
    pub fn run(self, trace: &[Arrival], cost: &CostModel, batch: usize) -> Run {
        match self {
            Policy::StaticMax => static_batching::run(trace, cost, batch, static_batching::Reserve::Longest),
            Policy::Static => static_batching::run(trace, cost, batch, static_batching::Reserve::Oracle),
            Policy::Contiguous => contiguous::run(trace, cost, batch),
            Policy::Quire { max_in_flight } => paged::run(trace, cost, batch, 16, max_in_flight),
        }
    }
}

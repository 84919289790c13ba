//! The simulation: traces, a cost model of a GPU, four ways to batch, and what is measured of each.
//!
//! A run is a pure function of trace, cost model and batch size: no clock, no threads. It is not in the
//! library, because an engine needs none of it; `tests/simulator.rs` includes it by path.

pub mod contiguous;
pub mod cost;
pub mod measure;
pub mod paged;
pub mod static_batching;
pub mod trace;

use self::cost::CostModel;
use self::measure::Run;
use self::trace::Arrival;

/// A way to batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Batches that run until their longest member ends; each member reserves the longest possible context.
    StaticMax,
    /// Such batches, but each reserves the longest length of its members, known in advance by an oracle.
    Static,
    /// Requests join and leave at every step; each reserves the longest possible context in one piece.
    Contiguous,
    /// [`sched::Scheduler`] over blocks of 16, planning after each commit (1) or a step ahead (2).
    Quire {
        /// [`sched::SchedConfig::max_in_flight`].
        max_in_flight: usize,
    },
}

impl Policy {
    /// All, in the order of the tables.
    pub const ALL: [Policy; 5] = [
        Policy::StaticMax,
        Policy::Static,
        Policy::Contiguous,
        Policy::Quire { max_in_flight: 1 },
        Policy::Quire { max_in_flight: 2 },
    ];

    /// Short name.
    pub fn name(self) -> &'static str {
        match self {
            Policy::StaticMax => "static, max-length",
            Policy::Static => "static",
            Policy::Contiguous => "continuous, contiguous",
            Policy::Quire { max_in_flight: 1 } => "Quire",
            Policy::Quire { .. } => "Quire, a step ahead",
        }
    }

    /// Runs a trace, in order of arrival, with at most `batch` sequences at once.
    pub fn run(self, trace: &[Arrival], cost: &CostModel, batch: usize) -> Run {
        match self {
            Policy::StaticMax => static_batching::run(trace, cost, batch, static_batching::Reserve::Longest),
            Policy::Static => static_batching::run(trace, cost, batch, static_batching::Reserve::Oracle),
            Policy::Contiguous => contiguous::run(trace, cost, batch),
            Policy::Quire { max_in_flight } => paged::run(trace, cost, batch, 16, max_in_flight),
        }
    }
}

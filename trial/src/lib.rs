//! Generated calls with known results, to test variants and to time them.
//!
//! Contains generated calls ([`Problem`]), their inputs on a device ([`OnDevice`]), the expected result in float64 and the
//! error of a result ([`Results`], [`numbers`]), timing ([`time`]), and grids of variants and shapes ([`grid`]). The
//! conformance tests and `quire bench kernels` are built on it. The engine uses it for profiles alone: what the device can do
//! ([`Peaks`]).
//!
//! ```
//! use attention_kernels::{CacheFormat, Operation, variants};
//! use trial::{Look, Problem};
//! let format = CacheFormat::default();
//! let look = Look { dim: 16, ..Look::plain(format, vec![(1, 40)]) }; // one row that sees 40 tokens
//! let (device, problem) = (device::open("cpu", Some(1))?, Problem::new(7, &look));
//! for variant in variants(Operation::Decode).into_iter().filter(|v| v.capabilities.runs_on("cpu")) {
//!     let results = problem.on(&device)?.run(variant, 0..1, false)?;
//!     println!("{}: {:.2} ulps", variant.name, results.worst(&problem, &problem.truth()));
//! }
//! # Ok::<(), attention_kernels::KernelError>(())
//! ```

mod cell;
mod cells;
pub mod grid;
mod low_rank;
pub mod numbers;
mod peaks;
mod problem;
mod run;
mod time;

pub use cells::write_workspace;
pub use low_rank::{LowRankOnDevice, LowRankProblem, SlotRanks};
pub use peaks::Peaks;
pub use problem::{Look, Problem, Truth};
pub use run::{OnDevice, Results, UNTOUCHED, Wrong, buffer, bytes, cache_bytes, floats};
pub use time::{Time, time};

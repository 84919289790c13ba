//! Problems with known answers: to prove a variant with, and to time it.
//!
//! What it is: generated calls ([`Problem`]), the same on a device ([`OnDevice`]), the float64 truth and how far a result is
//! from it ([`Results`], [`numbers`]), time ([`time`]), and a whole grid of variants and shapes ([`grid`]). The conformance
//! tests and `quire bench kernels` are made of it. What it is not: no engine needs it to run a model.
//!
//! ```
//! use attention_kernels::trial::{Look, Problem};
//! use attention_kernels::{CacheFormat, Operation, variants};
//! let format = CacheFormat::default();
//! let lens = vec![(1, 40)]; // one row that sees 40 tokens
//! let look = Look { format, heads: (4, 2), dim: 16, block_size: 8, scales: None, window: None, soft_cap: false, alibi: false, lens };
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
pub mod numbers;
mod peaks;
mod problem;
mod run;
mod time;

pub use peaks::{Peaks, multiply_and_sum, read_and_fold};
pub use problem::{Look, Problem, Truth};
pub use run::{OnDevice, Results, UNTOUCHED, buffer, bytes, cache_bytes, floats};
pub use time::{Time, time};

//! How a replica is spread over ranks.

use std::fmt;
use std::str::FromStr;

use models::decoder::Reduce;

/// The ranks that compute one model together. The default is one rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ParallelConfig {
    /// Number of ranks that each matrix is cut over.
    pub tensor_parallel_size: usize,
    /// What the ranks that a matrix is cut over exchange.
    pub tp_reduce: Reduce,
    /// Number of stages that the layers are cut into.
    pub pipeline_parallel_size: usize,
    /// Number of layers of each stage; `None`: stages of about equal cost.
    pub pipeline_partition: Option<Vec<usize>>,
    /// What carries the ranks; `None`: MPI if a launcher has started this process, otherwise threads.
    pub backend: Option<Backend>,
}

impl Default for ParallelConfig {
    fn default() -> Self {
        ParallelConfig {
            tensor_parallel_size: 1,
            tp_reduce: Reduce::Gather,
            pipeline_parallel_size: 1,
            pipeline_partition: None,
            backend: None,
        }
    }
}

impl ParallelConfig {
    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.tensor_parallel_size.saturating_mul(self.pipeline_parallel_size)
    }

    /// Whether sums are split over ranks, so that results have other bits than those of one rank.
    pub(crate) fn splits_sums(&self) -> bool {
        self.tp_reduce == Reduce::Sum && self.tensor_parallel_size > 1
    }
}

/// What carries the ranks of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// Threads of one process.
    Threads,
    /// Processes that `mpiexec` or another launcher of MPI has started.
    Mpi,
}

impl FromStr for Backend {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Backend, &'static str> {
        match name {
            "threads" => Ok(Backend::Threads),
            "mpi" => Ok(Backend::Mpi),
            _ => Err("expected threads or mpi"),
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::Threads => "threads",
            Backend::Mpi => "mpi",
        })
    }
}

//! Flags that spread a replica over ranks.

use clap::Args;
use engine::{Backend, ParallelConfig, Reduce};

use crate::values;

/// How a replica is spread over ranks.
#[derive(Debug, Args)]
#[command(next_help_heading = "Ranks")]
pub struct RanksArgs {
    /// Number of ranks that each matrix is cut over [default: 1]
    ///
    /// At most the number of query heads.
    #[arg(long, value_name = "N", value_parser = values::positive, env = "QUIRE_TENSOR_PARALLEL_SIZE")]
    pub tensor_parallel_size: Option<usize>,
    /// What the ranks that a matrix is cut over exchange: gather, rows, for the bits of one rank; or sum, partial sums, for fast
    /// links and other last bits [default: gather]
    ///
    /// No effect with one rank. See [gather or sum](parallel.md#gather-or-sum).
    #[arg(long, value_name = "FORM", env = "QUIRE_TP_REDUCE")]
    pub tp_reduce: Option<Reduce>,
    /// Number of stages that the layers are cut into [default: 1]
    #[arg(long, value_name = "N", value_parser = values::positive, env = "QUIRE_PIPELINE_PARALLEL_SIZE")]
    pub pipeline_parallel_size: Option<usize>,
    /// Number of layers of each stage, such as 10,12,10 [default: stages of about equal cost]
    #[arg(long, value_name = "LAYERS", value_delimiter = ',', value_parser = values::whole::<usize>,
          env = "QUIRE_PIPELINE_PARTITION")]
    pub pipeline_partition: Option<Vec<usize>>,
    /// What carries the ranks: threads, of one process; or mpi, if mpiexec or another launcher has started them
    /// [default: mpi if a launcher has, otherwise threads]
    ///
    /// vLLM's names are accepted too: `mp` and `uni` mean threads, `external_launcher` means mpi.
    #[arg(long, value_name = "CARRIER", value_parser = values::backend, env = "QUIRE_DISTRIBUTED_EXECUTOR_BACKEND")]
    pub distributed_executor_backend: Option<Backend>,
}

impl RanksArgs {
    pub fn to_config(&self) -> ParallelConfig {
        let default = ParallelConfig::default();
        ParallelConfig {
            tensor_parallel_size: self.tensor_parallel_size.unwrap_or(default.tensor_parallel_size),
            tp_reduce: self.tp_reduce.unwrap_or(default.tp_reduce),
            pipeline_parallel_size: self.pipeline_parallel_size.unwrap_or(default.pipeline_parallel_size),
            pipeline_partition: self.pipeline_partition.clone(),
            backend: self.distributed_executor_backend,
        }
    }
}

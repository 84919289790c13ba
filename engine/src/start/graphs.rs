//! CUDA graphs at start: whether they are used, how much memory they need, and the capture of the first one.

use attention_kernels::KernelError;
use device::Device;
use models::{Model, StepLimits};

use crate::api::EngineConfig;
use crate::memory::{Bytes, Plan};

/// Enables graphs, unless `--enforce-eager` or the device prevents it, and returns an upper bound of the bytes that all of them
/// need on a GPU: the size of the largest, captured on a cache of the smallest size, times their number. With a profile, graphs
/// are not used, because the operations of a graph cannot be timed one by one.
pub(crate) fn measure(
    engine: &EngineConfig,
    model: &mut Model,
    device: &dyn Device,
    limits: &StepLimits,
) -> Result<u64, KernelError> {
    if engine.enforce_eager || device.profile().is_some() {
        return Ok(0);
    }
    model.use_graphs(engine.max_num_seqs);
    if device.compute_capability().is_none() {
        return Ok(0);
    }
    let num_blocks = model.layout().groups.len();
    model.reserve(&StepLimits { num_blocks, ..*limits })?;
    let mut caches = model.new_cache(num_blocks, limits.block_size)?;
    Ok(model.capture_largest(&mut caches)? * model.graphs().sizes as u64)
}

/// One line about the graphs for the log; `None` if they are not used.
pub(crate) fn line(model: &Model, plan: &Plan) -> Option<String> {
    let count = model.graphs();
    let bytes = match plan.graph_bytes {
        0 => String::new(),
        bytes => format!(", {} in all", Bytes(bytes)),
    };
    (count.sizes > 0).then(|| {
        format!(
            "CUDA graphs: {} of decode steps of up to {} sequences, {} captured, the others at their first use{bytes}",
            count.sizes, plan.max_num_seqs, count.captured
        )
    })
}

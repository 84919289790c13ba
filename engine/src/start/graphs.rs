//! CUDA graphs at the start: whether there are any, what they take, the first of them.

use attention_kernels::KernelError;
use device::Device;
use models::{Model, StepLimits};

use crate::api::EngineConfig;
use crate::memory::{Bytes, Plan};

/// Turns graphs on, unless `--enforce-eager` or the device says no, and returns the bytes that all of them will take on a GPU:
/// what the largest takes, captured on a cache of the least size, times their number. A smaller one takes no more. A profile has
/// none: the operations of a graph can not be timed one by one.
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

/// What a start says of them; `None` where there are none.
pub(crate) fn line(model: &Model, plan: &Plan) -> Option<String> {
    let count = model.graphs();
    let bytes = match plan.graph_bytes {
        0 => String::new(),
        bytes => format!(", {} in all", Bytes(bytes)),
    };
    (count.sizes > 0).then(|| {
        format!(
            "CUDA graphs: decode steps of {} sizes up to {} sequences, {} captured, the others at their first use{bytes}",
            count.sizes, plan.max_num_seqs, count.captured
        )
    })
}

//! CUDA graphs at start: whether they are used, how much memory they need, and their capture.

use std::time::Instant;

use attention_kernels::{KernelError, KvCache};
use device::Device;
use models::{Model, StepLimits};

use super::draft::OpenedDraft;
use crate::api::EngineConfig;
use crate::memory::Bytes;

/// Enables graphs, unless `--enforce-eager` or the device prevents it, and returns an upper bound of the bytes that all of them
/// need on a GPU: for each family the size of the largest, captured on a cache of the smallest size, times their number. With a
/// profile, graphs are not used, because the operations of a graph cannot be timed one by one.
pub(crate) fn measure(
    engine: &EngineConfig,
    draft: Option<&OpenedDraft>,
    model: &mut Model,
    device: &dyn Device,
    limits: &StepLimits,
) -> Result<u64, KernelError> {
    // A step that runs as a graph keeps no states for a predictor.
    let keeps_states = draft.is_some_and(OpenedDraft::is_predictor);
    // An encoder has no decode steps.
    let is_encoder = model.decoder().is_encoder();
    if engine.enforce_eager || keeps_states || is_encoder || device.profile().is_some() {
        return Ok(0);
    }
    model.use_graphs(engine.max_num_seqs, engine.most_drafts());
    if device.compute_capability().is_none() {
        return Ok(0);
    }
    let num_blocks = model.layout().groups.len();
    model.reserve(&StepLimits { num_blocks, ..*limits })?;
    let mut caches = model.new_cache(num_blocks, limits.block_size)?;
    model.measure_graphs(&mut caches)
}

/// Captures all graphs on a GPU, so that no request waits for one. Returns a line about them for the log; `None` if they are not
/// used.
pub(crate) fn capture(
    model: &mut Model,
    caches: &mut [KvCache],
    device: &dyn Device,
    engine: &EngineConfig,
) -> Result<Option<String>, KernelError> {
    let (start, mut bytes) = (Instant::now(), 0);
    let on_gpu = device.compute_capability().is_some();
    if on_gpu {
        bytes = model.capture_graphs(caches)?;
    }
    let count = model.graphs();
    let drafts = match engine.most_drafts() {
        0 => String::new(),
        drafts => format!(" and {drafts} drafts"),
    };
    let steps =
        format!("CUDA graphs: {} of decode steps of up to {} sequences{drafts}", count.sizes, engine.max_num_seqs);
    let how = match on_gpu {
        true => format!("{} captured in {:.1} s, {}", count.captured, start.elapsed().as_secs_f64(), Bytes(bytes)),
        false => "each captured at its first use".to_string(),
    };
    Ok((count.sizes > 0).then(|| format!("{steps}, {how}")))
}

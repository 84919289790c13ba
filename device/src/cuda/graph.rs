//! Graphs of the driver: a stream captured, and what becomes of it.
//!
//! The capture is the thread's (`THREAD_LOCAL`): what this thread must not do meanwhile the driver would refuse, and end the
//! capture over it; the backend refuses it first. What other threads do on the copy stream goes on.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::context::Context;
use super::error::{CudaError, refused};
use crate::Queue;

/// A capture of the compute stream under way; ended when it goes.
pub(super) struct Capture<'a> {
    context: &'a Arc<Context>,
    ended: bool,
}

impl<'a> Capture<'a> {
    pub fn begin(context: &'a Arc<Context>) -> Result<Capture<'a>, CudaError> {
        context.enter()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the context.
        unsafe { result::stream::begin_capture(context.stream(Queue::Compute), mode) }
            .map_err(refused("capturing a graph"))?;
        Ok(Capture { context, ended: false })
    }

    /// Makes a graph of it that can be launched, and puts it onto the GPU.
    pub fn end(mut self) -> Result<CudaGraph, CudaError> {
        self.context.enter()?;
        self.ended = true;
        // SAFETY: this thread began the capture.
        let graph = unsafe { result::stream::end_capture(self.context.stream(Queue::Compute)) }
            .map_err(refused("ending the capture of a graph"))?;
        let made = CudaGraph::new(self.context, graph);
        // SAFETY: just made; what is launched is a copy of it.
        let _ = unsafe { result::graph::destroy(graph) };
        made
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.ended && self.context.enter().is_ok() {
            // SAFETY: this thread began the capture; the graph, if there is one, is nobody's.
            unsafe {
                if let Ok(graph) = result::stream::end_capture(self.context.stream(Queue::Compute)) {
                    let _ = result::graph::destroy(graph);
                }
            }
        }
    }
}

/// A graph that can be launched.
pub(crate) struct CudaGraph {
    pub(super) context: Arc<Context>,
    handle: sys::CUgraphExec,
    /// What making it took of the memory of the GPU.
    pub bytes: u64,
}

// SAFETY: a handle of the driver, which any thread may use that has the context current, one at a time: launches are given
// to one stream, and the driver locks for itself.
unsafe impl Send for CudaGraph {}
// SAFETY: as above.
unsafe impl Sync for CudaGraph {}

impl CudaGraph {
    fn new(context: &Arc<Context>, graph: sys::CUgraph) -> Result<CudaGraph, CudaError> {
        let available =
            || result::mem_get_info().map(|(available, _)| available as u64).map_err(refused("asking for memory"));
        let before = available()?;
        // SAFETY: the graph is alive.
        let handle = unsafe { result::graph::instantiate(graph, CUgraphInstantiate_flags(0)) }
            .map_err(refused("making a graph"))?;
        let mut made = CudaGraph { context: Arc::clone(context), handle, bytes: 0 };
        // What a first launch would take is taken now.
        // SAFETY: graph and stream are alive.
        unsafe { result::graph::upload(made.handle, context.stream(Queue::Compute)) }
            .map_err(refused("putting a graph onto the GPU"))?;
        context.finish(Queue::Compute)?;
        made.bytes = before.saturating_sub(available()?);
        Ok(made)
    }

    /// Gives it to the compute stream.
    pub fn launch(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: graph and stream are alive, and whoever owns the graph keeps the memory that it works on.
        unsafe { result::graph::launch(self.handle, self.context.stream(Queue::Compute)) }
            .map_err(refused("launching a graph"))
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if self.context.finish_all().is_ok() {
            // SAFETY: made in `new`, destroyed once, and no launch of it runs any more.
            let _ = unsafe { result::graph::exec_destroy(self.handle) };
        }
    }
}

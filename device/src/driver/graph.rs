//! Graphs of the driver, captured from the compute stream.
//!
//! A capture belongs to its thread (mode `THREAD_LOCAL`). The driver would fail forbidden calls of this thread and end the
//! capture; the backend rejects them before they reach the driver. Other threads may use the copy stream meanwhile.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::context::Context;
use super::error::{CudaError, refused};
use crate::Queue;

/// A running capture of the compute stream; dropping it ends the capture.
pub(crate) struct Capture<'a> {
    context: &'a Arc<Context>,
    ended: bool,
}

impl<'a> Capture<'a> {
    pub fn begin(context: &'a Arc<Context>) -> Result<Capture<'a>, CudaError> {
        context.enter()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream exists as long as the context.
        unsafe { result::stream::begin_capture(context.stream(Queue::Compute), mode) }
            .map_err(refused("capturing a graph"))?;
        Ok(Capture { context, ended: false })
    }

    /// Ends the capture, and makes an executable graph on the GPU.
    pub fn end(mut self) -> Result<CudaGraph, CudaError> {
        self.context.enter()?;
        self.ended = true;
        // SAFETY: this thread began the capture.
        let graph = unsafe { result::stream::end_capture(self.context.stream(Queue::Compute)) }
            .map_err(refused("ending the capture of a graph"))?;
        let made = CudaGraph::new(self.context, graph);
        // SAFETY: just made; the executable graph is a copy.
        let _ = unsafe { result::graph::destroy(graph) };
        made
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.ended && self.context.enter().is_ok() {
            // SAFETY: this thread began the capture; nothing else has the graph, if there is one.
            unsafe {
                if let Ok(graph) = result::stream::end_capture(self.context.stream(Queue::Compute)) {
                    let _ = result::graph::destroy(graph);
                }
            }
        }
    }
}

/// An executable graph.
pub(crate) struct CudaGraph {
    pub(crate) context: Arc<Context>,
    handle: sys::CUgraphExec,
    /// GPU memory that making it took.
    pub bytes: u64,
}

// SAFETY: any thread that has made the context current may use the handle, one at a time: launches go to one stream, and the
// driver does its own locking.
unsafe impl Send for CudaGraph {}
// SAFETY: as above.
unsafe impl Sync for CudaGraph {}

impl CudaGraph {
    fn new(context: &Arc<Context>, graph: sys::CUgraph) -> Result<CudaGraph, CudaError> {
        let available =
            || result::mem_get_info().map(|(available, _)| available as u64).map_err(refused("querying memory"));
        let before = available()?;
        // SAFETY: the graph exists.
        let handle = unsafe { result::graph::instantiate(graph, CUgraphInstantiate_flags(0)) }
            .map_err(refused("instantiating a graph"))?;
        let mut made = CudaGraph { context: Arc::clone(context), handle, bytes: 0 };
        // The upload allocates now what the first launch would allocate.
        // SAFETY: the graph and the stream exist.
        unsafe { result::graph::upload(made.handle, context.stream(Queue::Compute)) }
            .map_err(refused("uploading a graph"))?;
        context.finish(Queue::Compute)?;
        made.bytes = before.saturating_sub(available()?);
        Ok(made)
    }

    /// Enqueues the graph on the compute stream.
    pub fn launch(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the graph and the stream exist, and the owner of the graph keeps the memory that it uses.
        unsafe { result::graph::launch(self.handle, self.context.stream(Queue::Compute)) }
            .map_err(refused("launching a graph"))
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if self.context.finish_all().is_ok() {
            // SAFETY: made in `new`, destroyed once, and no launch is running any more.
            let _ = unsafe { result::graph::exec_destroy(self.handle) };
        }
    }
}

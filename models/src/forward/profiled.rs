//! Layer operations under the clock: each is handed on to the backend's, between the two events of a span. Only a device with a
//! profile has them.

use std::sync::Arc;

use attention_kernels::{Dtype, KernelError, KernelSet, Workspace};
use device::profile::{self, Cost, Running};
use device::{Buffer, Device, Matrix, Profile, Queue};

use super::ops::{Heads, LayerOps};
use super::{ForwardBatch, StepLimits};

pub(super) struct Profiled {
    inner: Box<dyn LayerOps>,
    device: Arc<dyn Device>,
    profile: Arc<Profile>,
    /// What the operations are, by the registry's rule for names: `device.kind`.
    variant: &'static str,
    /// Bytes of a number of a row.
    element: usize,
}

impl Profiled {
    /// Those of the backend, and on a device with a profile the same under the clock.
    pub fn over(inner: Box<dyn LayerOps>, device: &Arc<dyn Device>, dtype: Dtype) -> Box<dyn LayerOps> {
        let Some(profile) = device.profile().cloned() else { return inner };
        let variant = if device.is_host() { "cpu.layer" } else { "cuda.layer" };
        Box::new(Profiled { inner, device: Arc::clone(device), profile, variant, element: dtype.bytes() })
    }

    /// The time of an operation that moves so many numbers.
    fn time(&self, operation: &'static str, numbers: usize) -> Option<Running<'_>> {
        self.time_of(operation, self.variant, numbers)
    }

    fn time_of(&self, operation: &'static str, variant: &'static str, numbers: usize) -> Option<Running<'_>> {
        let bytes = (numbers * self.element) as u64;
        profile::start(&*self.device, Queue::Compute, operation, variant, || Cost { bytes, operations: 0 })
    }
}

impl LayerOps for Profiled {
    fn reserve(&mut self, limits: &StepLimits) -> Result<(), KernelError> {
        self.inner.reserve(limits)
    }

    fn load(&mut self, batch: &ForwardBatch, fixed: bool) -> Result<(), KernelError> {
        let _phase = self.profile.phase("inputs");
        self.inner.load(batch, fixed)
    }

    fn load_copies(&mut self, copies: &[(u32, u32)]) -> Result<(), KernelError> {
        let _phase = self.profile.phase("inputs");
        self.inner.load_copies(copies)
    }

    fn most_copies(&self) -> usize {
        self.inner.most_copies()
    }

    fn tokens(&self) -> Option<&Buffer> {
        self.inner.tokens()
    }

    fn workspace(&self, group: usize) -> Option<&Workspace> {
        self.inner.workspace(group)
    }

    fn embed(&self, batch: &ForwardBatch, table: &Matrix, out: &mut Buffer) -> Result<(), KernelError> {
        let _time = self.time("embed", 2 * batch.tokens.len() * table.k());
        self.inner.embed(batch, table, out)
    }

    fn rope_table(&self, batch: &ForwardBatch, out: &mut Buffer) -> Result<(), KernelError> {
        let _time = self.time("rope_table", 0);
        self.inner.rope_table(batch, out)
    }

    fn rms_norm(
        &self,
        x: &Buffer,
        weight: &Buffer,
        eps: f32,
        rows: usize,
        out: &mut Buffer,
        blocks: Option<&mut Buffer>,
    ) -> Result<(), KernelError> {
        let _time = self.time("rms_norm", 2 * rows * width(weight));
        self.inner.rms_norm(x, weight, eps, rows, out, blocks)
    }

    fn add_norm(
        &self,
        x: &mut Buffer,
        y: &mut Buffer,
        weight: &Buffer,
        eps: f32,
        rows: usize,
        blocks: Option<&mut Buffer>,
    ) -> Result<(), KernelError> {
        let _time = self.time("add_norm", 4 * rows * width(weight));
        self.inner.add_norm(x, y, weight, eps, rows, blocks)
    }

    fn heads(
        &self,
        device: &dyn Device,
        kernels: &KernelSet,
        batch: &ForwardBatch,
        heads: Heads<'_>,
    ) -> Result<(), KernelError> {
        // One kernel that writes the cache too is known to the registry, by that.
        let fused = kernels.cache_write.capabilities.fused && heads.calibrate.is_none();
        let variant = if fused { kernels.cache_write.name } else { self.variant };
        let rotated = (heads.num_heads + heads.cache.shape.num_kv_heads) * heads.cache.shape.head_dim;
        let _time = self.time_of("heads", variant, 2 * heads.rows * rotated);
        self.inner.heads(device, kernels, batch, heads)
    }

    fn silu_mul(
        &self,
        gate_up: &Buffer,
        width: usize,
        rows: usize,
        out: &mut Buffer,
        blocks: Option<&mut Buffer>,
    ) -> Result<(), KernelError> {
        let _time = self.time("silu_mul", 3 * rows * width);
        self.inner.silu_mul(gate_up, width, rows, out, blocks)
    }

    fn keep(&self, batch: &ForwardBatch, x: &Buffer, width: usize, out: &mut Buffer) -> Result<(), KernelError> {
        let _time = self.time("keep", 2 * batch.needed.as_ref().map_or(0, Vec::len) * width);
        self.inner.keep(batch, x, width, out)
    }

    fn gather(&mut self, x: &Buffer, rows: &[u32], width: usize, out: &mut Buffer) -> Result<(), KernelError> {
        let bytes = (2 * rows.len() * width * self.element) as u64;
        let cost = || Cost { bytes, operations: 0 };
        let _time = profile::start(&*self.device, Queue::Compute, "gather", self.variant, cost);
        self.inner.gather(x, rows, width, out)
    }

    fn to_host<'a>(&'a mut self, buffer: &'a Buffer, dtype: Dtype, elements: usize) -> Result<&'a [f32], KernelError> {
        let _phase = self.profile.phase("wait");
        self.inner.to_host(buffer, dtype, elements)
    }
}

/// Elements of a norm's weights.
fn width(weight: &Buffer) -> usize {
    weight.len_bytes() / size_of::<f32>()
}

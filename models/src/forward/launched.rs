//! Layer operations as launches of the kernels in `csrc/`, for `cuda` and `cuda-sim`.
//!
//! The inputs of a step (tokens, positions, slots, block tables, needed and requested rows) lie in persistent device arrays
//! ([`Mirror`]): a step uploads only the differences from the one before. Only [`LayerOps::to_host`] waits for the device, and no
//! step allocates device memory.

use std::sync::Arc;

use attention_kernels::{Dtype, KernelError, Workspace};
use device::{Buffer, Device, DeviceError, Matrix, Mirror, Pinned, Queue, Uploader};

use super::kernels::{self as launch, QkNormRopeCacheArgs};
use super::ops::{LayerOps, Norm, Out, QkvRows};
use super::{ForwardBatch, LOGIT_ROWS, PageLayout, StepLimits};
use crate::decoder::{Activation, Decoder, Heads};

pub(super) struct Launched {
    device: Arc<dyn Device>,
    dtype: Dtype,
    heads: Heads,
    /// Angular frequencies of each rotary embedding, float32 `[head_dim / 2]`.
    frequencies: Vec<Buffer>,
    tokens: Mirror,
    positions: Mirror,
    needed: Mirror,
    /// Rows whose results are requested.
    requested: Mirror,
    /// Logits and hidden states on the host.
    results: Pinned,
    /// The same converted to float32, if they have another type.
    converted: Vec<f32>,
    /// One per group of layers.
    workspaces: Vec<Workspace>,
    windows: Vec<Option<usize>>,
}

/// Loads the kernels and products, so that a missing library is reported before any weight is read.
pub(super) fn open(device: &dyn Device) -> Result<(), DeviceError> {
    for module in ["attention_kernels", launch::MODULE] {
        device.load(module)?;
    }
    device.load_products()
}

impl Launched {
    pub fn new(
        device: &Arc<dyn Device>,
        decoder: &Decoder,
        layout: &PageLayout,
        frequencies: &[Vec<f32>],
        dtype: Dtype,
        max_rows: usize,
    ) -> Result<Launched, DeviceError> {
        let indices = |rows: usize| Mirror::new(&**device, rows * size_of::<u32>());
        let mut uploader = Uploader::new(&**device)?;
        let mut upload = |frequencies: &Vec<f32>| {
            let bytes: Vec<u8> = frequencies.iter().flat_map(|f| f.to_le_bytes()).collect();
            uploader.numbers(Dtype::F32, &[(Dtype::F32, &bytes[..])])
        };
        let largest = decoder.vocab_size().max(decoder.hidden_size());
        Ok(Launched {
            device: Arc::clone(device),
            dtype,
            heads: decoder.heads(),
            frequencies: frequencies.iter().map(&mut upload).collect::<Result<_, _>>()?,
            tokens: indices(max_rows)?,
            positions: indices(max_rows)?,
            needed: indices(max_rows)?,
            requested: indices(LOGIT_ROWS)?,
            results: device.pinned(LOGIT_ROWS * largest * size_of::<f32>())?,
            converted: Vec::new(),
            workspaces: Vec::new(),
            windows: layout.groups.iter().map(|group| group.window).collect(),
        })
    }

    /// Bytes of device memory, not counting the workspaces.
    pub fn bytes(decoder: &Decoder, num_ropes: usize, limits: &StepLimits) -> usize {
        let frequencies = num_ropes * decoder.heads().head_dim / 2 * size_of::<f32>();
        (3 * limits.max_rows + limits.result_rows()) * size_of::<u32>() + frequencies
    }
}

impl LayerOps for Launched {
    fn reserve(&mut self, limits: &StepLimits) -> Result<(), KernelError> {
        self.requested = Mirror::new(&*self.device, limits.result_rows() * size_of::<u32>())?;
        // Free the old ones first: the plan has no memory for both.
        self.workspaces.clear();
        for _ in &self.windows {
            self.workspaces.push(Workspace::new(&*self.device, limits.workspace(self.heads))?);
        }
        Ok(())
    }

    fn load(&mut self, batch: &ForwardBatch, fixed: bool) -> Result<(), KernelError> {
        let device = &*self.device;
        self.tokens.set(device, batch.tokens.iter().map(|token| token.to_ne_bytes()))?;
        self.positions.set(device, batch.positions.iter().map(|position| position.to_ne_bytes()))?;
        if let Some(needed) = &batch.needed {
            self.needed.set(device, needed.iter().map(|row| row.to_ne_bytes()))?;
        }
        if self.workspaces.len() != batch.groups.len() {
            return Err(NO_WORKSPACE);
        }
        for ((workspace, window), group) in self.workspaces.iter_mut().zip(&self.windows).zip(&batch.groups) {
            let load = if fixed { Workspace::load_fixed } else { Workspace::load };
            load(workspace, device, &group.attention, &group.slot_mapping, *window)?;
        }
        Ok(())
    }

    fn load_copies(&mut self, copies: &[(u32, u32)]) -> Result<(), KernelError> {
        self.workspaces.first_mut().ok_or(NO_WORKSPACE)?.load_copies(&*self.device, copies)
    }

    fn most_copies(&self) -> usize {
        self.workspaces.first().map_or(usize::MAX, |workspace| workspace.limits().max_copies)
    }

    fn tokens(&self) -> Option<&Buffer> {
        Some(self.tokens.buffer())
    }

    fn workspace(&self, group: usize) -> Option<&Workspace> {
        self.workspaces.get(group)
    }

    fn embed(&self, batch: &ForwardBatch, table: &Matrix, out: &mut Buffer) -> Result<(), KernelError> {
        let numbers = table.numbers().ok_or(DeviceError::NoMatrices(self.device.name()))?;
        let size = (batch.tokens.len(), table.k());
        launch::gather_rows(&*self.device, self.dtype, numbers, self.tokens.buffer(), out, size)
    }

    fn rope_table(&self, table: usize, batch: &ForwardBatch, out: &mut Buffer) -> Result<(), KernelError> {
        let size = (batch.positions.len(), self.heads.head_dim / 2);
        launch::rope_table(&*self.device, self.positions.buffer(), &self.frequencies[table], out, size)
    }

    fn rms_norm(&self, x: &Buffer, norm: &Norm, rows: usize, out: Out<'_>) -> Result<(), KernelError> {
        let size = (rows, width(&norm.weight));
        launch::rms_norm(&*self.device, self.dtype, x, numbers(out)?, &norm.weight, norm.eps, size)
    }

    fn add(&self, x: &mut Buffer, y: &Buffer, rows: usize, width: usize) -> Result<(), KernelError> {
        launch::add(&*self.device, self.dtype, x, y, (rows, width))
    }

    fn fused_add_rms_norm(
        &self,
        x: &mut Buffer,
        y: &mut Buffer,
        norm: &Norm,
        rows: usize,
        q8: Option<&mut Buffer>,
    ) -> Result<(), KernelError> {
        let (y, size) = (numbers(q8.map_or(Out::Numbers(y), Out::Q8))?, (rows, width(&norm.weight)));
        launch::fused_add_rms_norm(&*self.device, self.dtype, x, y, &norm.weight, norm.eps, size)
    }

    fn qk_norm_rope_cache(&self, args: QkvRows<'_>) -> Result<(), KernelError> {
        let QkvRows { qkv, rows, num_heads, query_norm, key_norm, rope, group, cache, fused } = args;
        let eps = query_norm.or(key_norm).map_or(0.0, |norm| norm.eps);
        let [query_norm, key_norm] = [query_norm, key_norm].map(|norm| norm.map(|norm| &norm.weight));
        let slots = self.workspace(group).filter(|_| fused).map(Workspace::slot_mapping);
        let args = QkNormRopeCacheArgs { qkv, rows, num_heads, query_norm, key_norm, eps, rope, cache, slots };
        launch::qk_norm_rope_cache(&*self.device, args)
    }

    fn act_and_mul(
        &self,
        activation: Activation,
        gate_up: &Buffer,
        width: usize,
        rows: usize,
        out: Out<'_>,
    ) -> Result<(), KernelError> {
        launch::act_and_mul(&*self.device, self.dtype, activation, gate_up, numbers(out)?, (rows, width))
    }

    fn gather_needed(
        &self,
        batch: &ForwardBatch,
        x: &Buffer,
        width: usize,
        out: &mut Buffer,
    ) -> Result<(), KernelError> {
        let size = (batch.needed.as_ref().map_or(0, Vec::len), width);
        launch::gather_rows(&*self.device, self.dtype, x, self.needed.buffer(), out, size)
    }

    fn gather_rows(&mut self, x: &Buffer, rows: &[u32], width: usize, out: &mut Buffer) -> Result<(), KernelError> {
        self.requested.set(&*self.device, rows.iter().map(|row| row.to_ne_bytes()))?;
        launch::gather_rows(&*self.device, self.dtype, x, self.requested.buffer(), out, (rows.len(), width))
    }

    fn to_host<'a>(&'a mut self, buffer: &'a Buffer, dtype: Dtype, elements: usize) -> Result<&'a [f32], KernelError> {
        self.device.download_async(Queue::Compute, buffer, 0, &mut self.results, 0, elements * dtype.bytes())?;
        self.device.record(Queue::Compute)?.synchronize()?;
        if dtype == Dtype::F32 {
            return Ok(&self.results.host::<f32>()?[..elements]);
        }
        let halves = &self.results.host::<u16>()?[..elements];
        self.converted.clear();
        self.converted.extend(halves.iter().map(|&bits| match dtype {
            Dtype::F16 => half::f16::from_bits(bits).to_f32(),
            _ => half::bf16::from_bits(bits).to_f32(),
        }));
        Ok(&self.converted)
    }
}

const NO_WORKSPACE: KernelError =
    KernelError::NotLoaded { variant: "models", what: "workspace (Model::reserve allocates it)" };

/// The output buffer. Products on these devices take no rows in 8 bits, so the program has none.
fn numbers(out: Out<'_>) -> Result<&mut Buffer, KernelError> {
    match out {
        Out::Numbers(out) => Ok(out),
        Out::Q8(_) => Err(KernelError::Unsupported { variant: "cuda.layer", found: "rows in 8 bits".to_string() }),
    }
}

fn width(weight: &Buffer) -> usize {
    weight.len_bytes() / size_of::<f32>()
}

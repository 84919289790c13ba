//! Layer operations as launches of the kernels in `csrc/`, for `cuda` and `cuda-sim`.
//!
//! The inputs of a step (tokens, positions, slots, block tables, needed and requested rows) lie in persistent device arrays
//! ([`Mirror`]): a step uploads only the differences from the one before, all in one copy ([`Upload`]). Only [`LayerOps::to_host`]
//! waits for the device, and an upload if two steps in flight use all of its stages. No step allocates device memory.

use std::sync::Arc;

use attention_kernels::{
    ChosenMemory, Dtype, KernelError, KernelSet, KvCache, Mirror, Upload, Workspace, WorkspaceLimits,
};
use device::{Buffer, Device, DeviceError, Pinned, Queue};
use linear::{Matrix, Uploader};

use super::adapters::Adapters;
use super::kernels::{self as launch, NormArgs, QkNormRopeCacheArgs, RotateArgs};
use super::launched_both::Sides;
use super::launched_experts::ExpertMemory;
use super::linear::Norm;
use super::ops::{BothRows, ExpertRows, HeadProduct, LatentRows, LayerOps, Out, QkvRows, RecurrentRows, StreamRows};
use super::ops::{ChosenRows, HeadSizes, IndexRows};
use super::{
    ForwardBatch, LOGIT_ROWS, PageLayout, StepLimits, launched_chosen, launched_latent, launched_recurrent,
    launched_streams,
};
use crate::decoder::{self, Activation, Decoder, Heads, NormKind, Rope};

pub(super) struct Launched {
    device: Arc<dyn Device>,
    dtype: Dtype,
    heads: Heads,
    /// Angular frequencies of each rotary embedding, float32 `[dims / 2]`, and its attention factor.
    ropes: Vec<(Buffer, f32)>,
    experts: Option<ExpertMemory>,
    upload: Upload,
    tokens: Mirror,
    positions: Mirror,
    needed: Mirror,
    /// Rows whose results are requested.
    requested: Mirror,
    /// Number of drafts of each sequence; only for recurrent layers.
    drafts: Option<Mirror>,
    /// Only for encoders.
    sides: Option<Sides>,
    /// Logits and hidden states on the host.
    results: Pinned,
    /// The same converted to float32, if they have another type.
    converted: Vec<f32>,
    /// Items of the list of work that the decode kernel computes at once.
    items_at_once: usize,
    /// One per view of the cache.
    workspaces: Vec<Workspace>,
    /// Window and parts of each view.
    views: Vec<(Option<usize>, usize)>,
    /// Tokens that an indexer chooses at most, and the memory for its choices.
    most_chosen: Option<usize>,
    chosen: Option<ChosenMemory>,
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
        ropes: &[Rope],
        kernels: &KernelSet,
        max_rows: usize,
    ) -> Result<Launched, DeviceError> {
        let indices = |rows: usize| Mirror::new(&**device, rows * size_of::<u32>());
        let mut uploader = Uploader::new(&**device)?;
        let mut upload = |rope: &Rope| {
            let bytes: Vec<u8> = rope.frequencies().iter().flat_map(|f| f.to_le_bytes()).collect();
            let frequencies = uploader.numbers(Dtype::F32, &[(Dtype::F32, &bytes[..])])?;
            Ok::<_, DeviceError>((frequencies, rope.attention_factor()))
        };
        let largest = decoder.vocab_size().max(decoder.output_width());
        let heads = decoder.heads();
        Ok(Launched {
            device: Arc::clone(device),
            dtype: kernels.format.dtype,
            heads,
            ropes: ropes.iter().map(&mut upload).collect::<Result<_, _>>()?,
            experts: ExpertMemory::new(&**device, decoder, max_rows, kernels)?,
            upload: Upload::new(&**device)?,
            tokens: indices(max_rows)?,
            positions: indices(max_rows)?,
            needed: indices(max_rows)?,
            requested: indices(LOGIT_ROWS)?,
            drafts: decoder.recurrent().next().map(|_| indices(0)).transpose()?,
            sides: Sides::new(&**device, decoder, max_rows)?,
            results: device.pinned(LOGIT_ROWS * largest * size_of::<f32>())?,
            converted: Vec::new(),
            items_at_once: kernels.decode.items_at_once(
                &**device,
                kernels.format,
                layout.shape(1, 1),
                heads.num_heads,
            )?,
            workspaces: Vec::new(),
            most_chosen: launched_chosen::most(decoder),
            chosen: None,
            views: layout.views.iter().map(|view| (layout.groups[view.group].window, view.parts)).collect(),
        })
    }

    /// Bytes of device memory, not counting the workspaces.
    pub fn bytes(decoder: &Decoder, ropes: &[Rope], kernels: &KernelSet, limits: &StepLimits) -> usize {
        let frequencies = ropes.iter().map(|rope| rope.dims / 2).sum::<usize>() * size_of::<f32>();
        let experts = ExpertMemory::bytes(decoder, limits.max_rows, kernels);
        let drafts = decoder.recurrent().next().map_or(0, |_| limits.max_seqs);
        (3 * limits.max_rows + limits.max_rows.max(limits.result_rows()) + drafts) * size_of::<u32>()
            + Upload::bytes()
            + frequencies
            + experts
            + launched_chosen::bytes(decoder, limits)
            + Sides::bytes(decoder, limits.max_rows)
    }
}

impl LayerOps for Launched {
    fn reserve(&mut self, limits: &StepLimits) -> Result<(), KernelError> {
        self.requested = Mirror::new(&*self.device, limits.max_rows.max(limits.result_rows()) * size_of::<u32>())?;
        if let Some(drafts) = &mut self.drafts {
            *drafts = Mirror::new(&*self.device, limits.max_seqs * size_of::<u32>())?;
        }
        // Free the old ones first: the plan has no memory for both.
        self.workspaces.clear();
        self.chosen = None;
        self.chosen = launched_chosen::memory(&*self.device, self.most_chosen, limits)?;
        for (_, parts) in &self.views {
            let limits = StepLimits { num_blocks: parts * limits.num_blocks, ..*limits }.workspace(self.heads);
            let limits = WorkspaceLimits { items_at_once: self.items_at_once, ..limits };
            self.workspaces.push(Workspace::new(&*self.device, limits)?);
        }
        Ok(())
    }

    fn load(
        &mut self,
        batch: &ForwardBatch,
        fixed: Option<usize>,
        adapters: Option<&mut Adapters>,
    ) -> Result<(), KernelError> {
        let Launched { tokens, positions, needed, drafts, sides, workspaces, views, .. } = self;
        tokens.set(batch.tokens.iter().map(|token| token.to_ne_bytes()))?;
        positions.set(batch.positions.iter().map(|position| position.to_ne_bytes()))?;
        if let Some(rows) = &batch.needed {
            needed.set(rows.iter().map(|row| row.to_ne_bytes()))?;
        }
        if let Some(sides) = sides {
            sides.set(batch)?;
        }
        if let Some(drafts) = drafts {
            drafts.set((0..batch.num_seqs()).map(|seq| batch.num_drafts(seq).to_ne_bytes()))?;
        }
        if workspaces.len() != batch.groups.len() {
            return Err(NO_WORKSPACE);
        }
        for ((workspace, (window, _)), group) in workspaces.iter_mut().zip(views).zip(&batch.groups) {
            workspace.set(&group.attention, &group.slot_mapping, *window, fixed)?;
        }
        let arrays = [tokens, positions, needed].into_iter().chain(drafts);
        let arrays = arrays.chain(sides.iter_mut().flat_map(Sides::arrays));
        let arrays = arrays.chain(workspaces.iter_mut().flat_map(Workspace::arrays));
        let arrays = arrays.chain(adapters.into_iter().flat_map(Adapters::arrays));
        self.upload.send(&*self.device, arrays)
    }

    fn load_copies(&mut self, copies: &[(u32, u32)]) -> Result<(), KernelError> {
        let workspace = self.workspaces.first_mut().ok_or(NO_WORKSPACE)?;
        workspace.set_copies(copies)?;
        self.upload.send(&*self.device, workspace.arrays())
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

    fn embed(&self, batch: &ForwardBatch, table: &Matrix, scale: f32, out: &mut Buffer) -> Result<(), KernelError> {
        let size = (batch.tokens.len(), table.k());
        let numbers = table.numbers().ok_or(DeviceError::NoMatrices(self.device.name()))?;
        let scale = match self.dtype {
            Dtype::F32 => scale,
            Dtype::F16 => half::f16::from_f32(scale).to_f32(),
            Dtype::Bf16 => half::bf16::from_f32(scale).to_f32(),
        };
        launch::gather_rows(&*self.device, self.dtype, numbers, self.tokens.buffer(), scale, out, size)
    }

    fn add_positions(
        &self,
        batch: &ForwardBatch,
        table: &Matrix,
        offset: usize,
        x: &mut Buffer,
    ) -> Result<(), KernelError> {
        let size = (batch.positions.len(), table.k());
        let numbers = table.numbers().ok_or(DeviceError::NoMatrices(self.device.name()))?;
        let indices = (self.positions.buffer(), offset);
        launch::add_gathered_rows(&*self.device, self.dtype, numbers, indices, x, size)
    }

    fn add_types(&self, batch: &ForwardBatch, table: &Matrix, x: &mut Buffer) -> Result<(), KernelError> {
        let size = (batch.tokens.len(), table.k());
        let numbers = table.numbers().ok_or(DeviceError::NoMatrices(self.device.name()))?;
        let types = self.sides.as_ref().ok_or(NO_WORKSPACE)?.types();
        launch::add_gathered_rows(&*self.device, self.dtype, numbers, (types, 0), x, size)
    }

    fn attend_both(&self, batch: &ForwardBatch, args: BothRows<'_>) -> Result<(), KernelError> {
        let rows = (self.positions.buffer(), batch.tokens.len());
        self.sides.as_ref().ok_or(NO_WORKSPACE)?.attend(&*self.device, self.dtype, rows, args)
    }

    fn rope_table(&self, table: usize, batch: &ForwardBatch, out: &mut Buffer) -> Result<(), KernelError> {
        let (frequencies, factor) = &self.ropes[table];
        let size = (batch.positions.len(), frequencies.len_bytes() / size_of::<f32>());
        launch::rope_table(&*self.device, self.positions.buffer(), frequencies, *factor, out, size)
    }

    fn norm(&self, x: &Buffer, norm: &Norm, rows: usize, out: Out<'_>) -> Result<(), KernelError> {
        // Groups of a row may have weights of their own.
        let groups = (norm.weight.len_bytes() / size_of::<f32>() / norm.width.max(1)).max(1);
        launch::norm(&*self.device, self.dtype, x, numbers(out)?, groups, norm.args(rows / groups))
    }

    fn add(&self, x: &mut Buffer, y: &Buffer, scale: f32, rows: usize, width: usize) -> Result<(), KernelError> {
        launch::add(&*self.device, self.dtype, x, y, scale, (rows, width))
    }

    fn add_norm(
        &self,
        x: &mut Buffer,
        y: &mut Buffer,
        scale: f32,
        norm: &Norm,
        rows: usize,
        q8: Option<&mut Buffer>,
    ) -> Result<(), KernelError> {
        let y = numbers(q8.map_or(Out::Numbers(y), Out::Q8))?;
        launch::fused_add_norm(&*self.device, self.dtype, x, y, scale, norm.args(rows))
    }

    /// One kernel for RMS norms of heads and the rotation of whole heads in halves; other layers launch one for each part.
    fn qk_norm_rope_cache(&self, _batch: &ForwardBatch, args: QkvRows<'_>) -> Result<(), KernelError> {
        let QkvRows { query_norm, key_norm, value_norm, .. } = args;
        let QkvRows { qkv, rows, layer, rope, group, cache, fused, .. } = args;
        let (heads, stride, device) = (layer.heads, layer.row_width(), &*self.device);
        let per_head = |norm: &decoder::Norm| {
            norm.kind == NormKind::Rms
                && norm.bias.is_none()
                && norm.width == heads.head_dim
                && norm.shape == [norm.width]
                && norm.weight.len() == 1
        };
        let mut norms = [&layer.query_norm, &layer.key_norm].into_iter().flatten();
        let whole = |rope: &Rope| rope.dims == heads.head_dim && !rope.interleaved;
        let is_usual = norms.all(per_head) && !layer.norm_after_rope && layer.rope.as_ref().is_none_or(whole);
        let has_keys = layer.shares.is_none() && value_norm.is_none();
        let fast = cache.is_some() && is_usual && has_keys && layer.clip.is_none() && layer.query_growth.is_none();
        if !fast {
            self.qk_by_parts(QkvRows { qkv: &mut *qkv, ..args })?;
        }
        let eps = query_norm.or(key_norm).map_or(0.0, |norm| norm.eps);

        let query_weight = query_norm.filter(|_| fast).map(|norm| &norm.weight);
        let key_weight = key_norm.filter(|_| fast).map(|norm| &norm.weight);
        let slots = self.workspace(group).filter(|_| fused).map(Workspace::slot_mapping);
        let changes = |cache: &KvCache| args.key_offset.is_some() || cache.format.mixes_keys(heads.head_dim);
        let runs = |cache: &&KvCache| fast || slots.is_some() || changes(cache);
        let Some(cache) = cache.filter(runs) else { return Ok(()) };
        let args = QkNormRopeCacheArgs {
            qkv,
            rows,
            num_heads: heads.num_heads,
            num_kv_heads: layer.own_kv_heads(),
            query_norm: query_weight,
            key_norm: key_weight,
            eps,
            stride,
            rope: rope.filter(|_| fast),
            key_offset: args.key_offset,
            cache,
            slots,
        };
        launch::qk_norm_rope_cache(device, args)
    }

    fn latent_rows(&self, args: LatentRows<'_>) -> Result<(), KernelError> {
        launched_latent::rows(&*self.device, self.dtype, self.positions.buffer(), args)
    }

    fn copy_heads(&self, size: HeadSizes, from: (&Buffer, usize), to: (&mut Buffer, usize)) -> Result<(), KernelError> {
        launched_latent::copy_heads(&*self.device, self.dtype, size, from, to)
    }

    fn index_rows(&self, args: IndexRows<'_>) -> Result<(), KernelError> {
        launched_chosen::index_rows(&*self.device, self.dtype, self.positions.buffer(), args)
    }

    fn attend_chosen(&mut self, args: ChosenRows<'_>) -> Result<(), KernelError> {
        let workspace = self.workspaces.get(args.layer.view).ok_or(NO_WORKSPACE)?;
        let memory = self.chosen.as_mut().ok_or(NO_WORKSPACE)?;
        launched_chosen::attend(&*self.device, workspace, memory, args)
    }

    fn head_linear(&self, args: HeadProduct<'_>) -> Result<(), KernelError> {
        launched_latent::linear(&*self.device, self.dtype, args)
    }

    fn recurrent(&mut self, args: RecurrentRows<'_>) -> Result<(), KernelError> {
        let workspace = self.workspaces.get(args.layer.group).ok_or(NO_WORKSPACE)?;
        let drafts = self.drafts.as_ref().ok_or(NO_WORKSPACE)?.buffer();
        launched_recurrent::run(&*self.device, self.dtype, (workspace, drafts), args)
    }

    fn gate(
        &self,
        attended: &mut Buffer,
        qkv: &Buffer,
        stride: usize,
        width: usize,
        rows: usize,
    ) -> Result<(), KernelError> {
        launch::gate(&*self.device, self.dtype, attended, (qkv, stride), (rows, width))
    }

    fn activate(
        &self,
        activation: Activation,
        gated: bool,
        gate_up: &Buffer,
        width: usize,
        rows: usize,
        out: Out<'_>,
    ) -> Result<(), KernelError> {
        let (gate_stride, up) = if gated { (2 * width, Some((gate_up, 2 * width, width))) } else { (width, None) };
        let gate = (gate_up, gate_stride);
        launch::activate(&*self.device, self.dtype, activation, gate, up, numbers(out)?, (rows, width))
    }

    fn activate_by(
        &self,
        activation: Activation,
        gate: &Buffer,
        inputs: (&Buffer, usize, usize),
        (rows, width): (usize, usize),
        out: &mut Buffer,
    ) -> Result<(), KernelError> {
        let gate = (gate, width);
        launch::activate(&*self.device, self.dtype, activation, gate, Some(inputs), out, (rows, width))
    }

    fn streams(&self, args: StreamRows<'_>) -> Result<(), KernelError> {
        launched_streams::run(&*self.device, self.dtype, args)
    }

    fn sparsify(&self, x: &mut Buffer, width: usize, deviations: f32, rows: usize) -> Result<(), KernelError> {
        launched_streams::sparsify(&*self.device, self.dtype, x, (rows, width), deviations)
    }

    fn scale(&self, x: &mut Buffer, factor: f32, rows: usize, width: usize) -> Result<(), KernelError> {
        launch::scale(&*self.device, self.dtype, x, factor, (rows, width))
    }

    fn experts(&mut self, args: ExpertRows<'_>) -> Result<(), KernelError> {
        let no_memory = KernelError::NotLoaded { variant: "models", what: "memory of experts" };
        self.experts.as_mut().ok_or(no_memory)?.run(self.dtype, args)
    }

    fn finish_logits(
        &self,
        logits: &mut Buffer,
        count: usize,
        scale: f32,
        soft_cap: Option<f32>,
    ) -> Result<(), KernelError> {
        launch::finish_logits(&*self.device, logits, count, scale, soft_cap)
    }

    fn gather_needed(
        &self,
        batch: &ForwardBatch,
        x: &Buffer,
        width: usize,
        out: &mut Buffer,
    ) -> Result<(), KernelError> {
        let size = (batch.needed.as_ref().map_or(0, Vec::len), width);
        launch::gather_rows(&*self.device, self.dtype, x, self.needed.buffer(), 1.0, out, size)
    }

    fn gather_rows(&mut self, x: &Buffer, rows: &[u32], width: usize, out: &mut Buffer) -> Result<(), KernelError> {
        self.requested.set(rows.iter().map(|row| row.to_ne_bytes()))?;
        self.upload.send(&*self.device, [&mut self.requested])?;
        launch::gather_rows(&*self.device, self.dtype, x, self.requested.buffer(), 1.0, out, (rows.len(), width))
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

impl Launched {
    /// Norms, clamping and rotation of query and key heads, one launch each.
    fn qk_by_parts(&self, args: QkvRows<'_>) -> Result<(), KernelError> {
        let QkvRows { qkv, rows, layer, query_norm, key_norm, value_norm, rope, .. } = args;
        let (heads, stride, device, dtype) = (layer.heads, layer.row_width(), &*self.device, self.dtype);
        let (queries, keys) = (heads.query_width(), layer.own_kv_heads() * heads.head_dim);
        let norm_heads = |qkv: &mut Buffer| -> Result<(), KernelError> {
            let norms = [query_norm, key_norm, value_norm].into_iter();
            for (norm, (first, width)) in norms.zip([(0, queries), (queries, keys), (queries + keys, keys)]) {
                if let Some(norm) = norm {
                    launch::norm_groups(device, dtype, qkv, (first, width / norm.width, stride), norm.args(rows))?;
                }
            }
            Ok(())
        };
        if !layer.norm_after_rope {
            norm_heads(qkv)?;
        }
        if let Some(limit) = layer.clip {
            launch::clamp(device, dtype, qkv, limit, (rows, queries + 2 * keys, stride))?;
        }
        let rope = layer.rope.as_ref().zip(rope).map(|(rope, table)| (table, rope.dims, rope.interleaved));
        let growth = layer.query_growth;
        let rotate = |qkv: &mut Buffer, rope: Option<_>, growth: Option<_>| -> Result<(), KernelError> {
            if rope.is_none() && growth.is_none() {
                return Ok(());
            }
            let (num_heads, head_dim) = ([heads.num_heads, layer.own_kv_heads()], heads.head_dim);
            let positions = self.positions.buffer();
            let args = RotateArgs { heads: qkv, first: 0, rows, stride, num_heads, head_dim, rope, growth, positions };
            launch::rotate_heads(device, dtype, args)
        };
        if layer.norm_after_rope {
            rotate(qkv, rope, None)?;
            norm_heads(qkv)?;
            return rotate(qkv, None, growth);
        }
        rotate(qkv, rope, growth)
    }
}

impl Norm {
    /// The norm of so many rows.
    pub fn args(&self, rows: usize) -> NormArgs<'_> {
        let Norm { weight, bias, width, eps, centre } = self;
        NormArgs { weight, bias: bias.as_ref(), eps: *eps, centre: *centre, rows, width: *width }
    }
}

//! A decoder on a device: loading, memory, and the beginning of a step.

use std::sync::Arc;

use attention_kernels::{AttentionBatch, BlockCopyArgs, KernelError, KernelSet, KvCache, KvScales, KvShape};
use device::profile::Phase;
use device::{Device, Features};

use super::graph_sizes::Graphs;
use super::launched::{self, Launched};
use super::linear::{Linear, Loader};
use super::ops::{Cpu, LayerOps, Norm};
use super::program::{Fusion, Program};
use super::step::{Fill, LOGIT_ROWS, StepBuffers, StepLimits, StepSizes};
use super::{ForwardBatch, GroupBatch, PageLayout};
use super::{rope, scales};
use crate::decoder::{Attention, Decoder};
use crate::{LoadError, Weights};

/// The weights of a decoder on a device, in the order of its walks.
pub(super) struct Loaded {
    pub(super) linears: Vec<Linear>,
    pub(super) norms: Vec<Norm>,
    pub(super) attention: Vec<AttentionLayer>,
}

impl Loaded {
    /// The output projection.
    pub(super) fn head(&self, decoder: &Decoder) -> &Linear {
        &self.linears[if decoder.is_tied() { 0 } else { self.linears.len() - 1 }]
    }
}

/// What an attention layer has beside its linear layers and norms.
pub(super) struct AttentionLayer {
    pub(super) declared: Attention,
    /// Whose block table it reads by.
    pub(super) group: usize,
    /// Its place in a page.
    pub(super) place: usize,
    /// Of 8-bit keys and values, where the cache takes them.
    pub(super) kv_scales: Option<Arc<KvScales>>,
    /// Those are still to be made of what the next step computes.
    pub(super) uncalibrated: bool,
}

/// A decoder on a device, ready to run steps of up to a fixed number of tokens.
pub struct Model {
    pub(super) decoder: Decoder,
    pub(super) program: Program,
    pub(super) device: Arc<dyn Device>,
    pub(super) kernels: KernelSet,
    pub(super) ops: Box<dyn LayerOps>,
    pub(super) loaded: Loaded,
    pub(super) layout: PageLayout,
    pub(super) step: StepBuffers,
    /// Of the last step, the rows that went through to the end, ascending; all if `None`.
    pub(super) kept: Option<Vec<u32>>,
    /// The first so many rows of the last step have their logits in `step.logits` already.
    pub(super) with_logits: usize,
    /// Of decode steps, where they are used.
    pub(super) graphs: Option<Graphs>,
    /// Rows whose results are wanted at once, at most, and where they are among those kept; reused.
    pub(super) result_rows: usize,
    pub(super) places: Vec<u32>,
}

impl Model {
    /// Bytes that every buffer of a step of that size takes, the workspaces of attention included ([`Model::reserve`]), beside
    /// what products take ([`Device::product_bytes`]).
    pub fn step_bytes(features: Features, decoder: &Decoder, kernels: &KernelSet, limits: &StepLimits) -> u64 {
        let program = Program::new(decoder, Fusion::of(kernels));
        let sizes = |result_rows| {
            StepSizes::new(decoder, &program, kernels.format.dtype, limits.max_rows, result_rows).bytes() as u64
        };
        if features.launches {
            let groups = PageLayout::new(decoder).groups.len();
            let workspaces = groups * limits.workspace(decoder.heads()).bytes();
            let launched = Launched::bytes(decoder, program.ropes.len(), limits) + workspaces;
            return sizes(limits.result_rows()) + launched as u64;
        }
        let scratch = match program.widest_quantised_here(decoder) {
            0 => 0,
            widest => device::gemm::scratch_bytes(limits.max_rows.max(LOGIT_ROWS), widest),
        };
        sizes(LOGIT_ROWS) + scratch as u64
    }

    /// Puts the weights on the device, one at a time: on a CPU matrices in the checkpoint's type or quantised while they
    /// are read, and biases in float32; on a device that launches kernels both in the type that the kernels were chosen
    /// for. Norms are float32. `progress(done, total)` counts bytes of the checkpoint.
    ///
    /// # Errors
    /// A tensor that is missing or of another shape or type, a form that the device has no product for, and the device's.
    pub fn load(
        decoder: &Decoder,
        weights: &Weights,
        device: Arc<dyn Device>,
        kernels: KernelSet,
        max_rows: usize,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Model, LoadError> {
        Model::load_fused(decoder, weights, device, kernels, Fusion::of(&kernels), max_rows, progress)
    }

    pub(super) fn load_fused(
        decoder: &Decoder,
        weights: &Weights,
        device: Arc<dyn Device>,
        kernels: KernelSet,
        fusion: Fusion,
        max_rows: usize,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Model, LoadError> {
        let failed = |error: device::DeviceError| LoadError::Device(error.to_string());
        if device.features().launches {
            launched::open(&*device).map_err(failed)?;
        }
        let dtype = kernels.format.dtype;
        let (program, layout) = (Program::new(decoder, fusion), PageLayout::new(decoder));
        let mut loader = Loader::new(weights, &*device, dtype, progress)?;
        let linears = decoder.linears().map(|linear| loader.linear(linear)).collect::<Result<_, _>>()?;
        let norms = decoder.norms().map(|norm| loader.norm(norm)).collect::<Result<_, _>>()?;
        let mut attention = Vec::new();
        for (number, declared) in decoder.attention().enumerate() {
            let (group, place) = layout.place(number).unwrap_or_default();
            let kv_scales = match kernels.format.kv_dtype.takes_scales() {
                true => scales::load(declared, weights, &*device)?.map(Arc::new),
                false => None,
            };
            attention.push(AttentionLayer { declared: declared.clone(), group, place, kv_scales, uncalibrated: false });
        }
        let sizes = StepSizes::new(decoder, &program, dtype, max_rows, LOGIT_ROWS);
        let step = StepBuffers::new(&*device, sizes, max_rows).map_err(failed)?;
        let head_dim = decoder.heads().head_dim;
        let frequencies: Vec<_> = program.ropes.iter().map(|rope| rope::frequencies(rope, head_dim)).collect();
        let ops: Box<dyn LayerOps> = if device.features().launches {
            let launched = Launched::new(&device, decoder, &layout, &frequencies, dtype, max_rows);
            Box::new(launched.map_err(failed)?)
        } else {
            Box::new(Cpu::new(&*device, frequencies))
        };
        Ok(Model {
            decoder: decoder.clone(),
            program,
            device,
            kernels,
            ops,
            loaded: Loaded { linears, norms, attention },
            layout,
            step,
            kept: None,
            with_logits: 0,
            graphs: None,
            result_rows: LOGIT_ROWS,
            places: Vec::new(),
        })
    }

    /// Has the first step that computes tokens make the scales of a cache that takes some, in layers for which the checkpoint
    /// has none. Before that step they are 1.
    ///
    /// # Errors
    /// The device has no memory for them.
    pub fn calculate_kv_scales(&mut self) -> Result<(), KernelError> {
        if self.kernels.format.kv_dtype.takes_scales() {
            for layer in self.loaded.attention.iter_mut().filter(|layer| layer.kv_scales.is_none()) {
                layer.kv_scales = Some(Arc::new(scales::ones(&layer.declared, &*self.device)?));
                layer.uncalibrated = true;
            }
        }
        Ok(())
    }

    /// Whether the next step that computes tokens makes scales ([`Model::calculate_kv_scales`]): it waits for the device in
    /// between, which no other does, and can not be recorded.
    pub fn is_calibrating(&self) -> bool {
        self.loaded.attention.iter().any(|layer| layer.uncalibrated)
    }

    /// Takes the memory that the kernels of steps of that size work in, and the results that stay on the device; before the
    /// first step. A CPU needs none.
    ///
    /// # Errors
    /// The device has not enough of it.
    pub fn reserve(&mut self, limits: &StepLimits) -> Result<(), KernelError> {
        // They work on the memory that was.
        self.forget_graphs();
        if self.device.features().launches {
            self.result_rows = limits.result_rows();
            let (dtype, max_rows) = (self.kernels.format.dtype, self.step.max_rows);
            let sizes = StepSizes::new(&self.decoder, &self.program, dtype, max_rows, self.result_rows);
            self.step.replace_results(&*self.device, &sizes)?;
        }
        self.ops.reserve(limits)
    }

    /// What the model is.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Which layers share block tables.
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// An empty cache of `num_blocks` pages: one [`KvCache`] for each place in a page.
    pub fn new_cache(&self, num_blocks: usize, block_size: usize) -> Result<Vec<KvCache>, KernelError> {
        let heads = self.decoder.heads();
        let shape = KvShape { num_blocks, num_kv_heads: heads.num_kv_heads, block_size, head_dim: heads.head_dim };
        let format = self.kernels.format;
        let cache = |_| Ok(KvCache::with_format(&*self.device, shape, format)?);
        (0..self.layout.layers_per_page).map(cache).collect()
    }

    /// Computes the batch's tokens: their keys and values go to their slots, their hidden states stay for
    /// [`Model::logits`], those of [`ForwardBatch::needed`] at least. `caches` holds one cache for each place in a page
    /// ([`Model::new_cache`]).
    ///
    /// # Errors
    /// A batch that does not fit this model, and the device's.
    pub fn forward(&mut self, batch: &ForwardBatch, caches: &mut [KvCache]) -> Result<(), KernelError> {
        self.forward_with(batch, caches, None)
    }

    /// The same where tokens are known to the device alone ([`ForwardBatch::AWAITED`]): `fill` gets the array of tokens, u32,
    /// as the batch has it, and orders their way into it.
    ///
    /// # Errors
    /// As [`Model::forward`], and those of `fill`.
    pub fn forward_with(
        &mut self,
        batch: &ForwardBatch,
        caches: &mut [KvCache],
        fill: Option<Fill<'_>>,
    ) -> Result<(), KernelError> {
        let rows = batch.tokens.len();
        if rows > self.step.max_rows {
            return Err(KernelError::Shape { what: "rows of a step", found: rows, expected: self.step.max_rows });
        }
        let (places, groups) = (self.layout.layers_per_page, self.layout.groups.len());
        for (what, found, expected) in
            [("caches", caches.len(), places), ("cache groups of a batch", batch.groups.len(), groups)]
        {
            if found != expected {
                return Err(KernelError::Shape { what, found, expected });
            }
        }
        let filled = fill.is_some() && self.ops.tokens().is_some();
        let vocab_size = self.decoder.vocab_size();
        let is_known = |token: u32| (token as usize) < vocab_size || filled && token == ForwardBatch::AWAITED;
        if let Some(&token) = batch.tokens.iter().find(|token| !is_known(**token)) {
            let (found, expected) = (token as usize, vocab_size);
            return Err(KernelError::Shape { what: "token id", found, expected });
        }
        if let Some(&row) = batch.needed.iter().flatten().find(|row| **row as usize >= rows) {
            return Err(KernelError::Shape { what: "needed row", found: row as usize, expected: rows });
        }
        self.kept.clone_from(&batch.needed);
        self.with_logits = 0;
        if rows == 0 {
            return Ok(());
        }
        if let Some(index) = self.graph_for(batch) {
            return self.decode(index, batch, caches, fill);
        }
        self.load_batch(batch, false)?;
        self.fill(fill)?;
        self.pass(batch, caches)
    }

    /// Tokens that are known to the device alone come to the others.
    pub(super) fn fill(&mut self, fill: Option<Fill<'_>>) -> Result<(), KernelError> {
        fill.zip(self.ops.tokens()).map_or(Ok(()), |(fill, tokens)| fill(tokens))
    }

    /// A phase of the step, where the device keeps a profile.
    pub(super) fn phase(&self, name: &'static str) -> Option<Phase> {
        self.device.profile()?.phase(name)
    }

    /// Brings what a batch says to where the operations read it ([`LayerOps::load`]).
    pub(super) fn load_batch(&mut self, batch: &ForwardBatch, fixed: bool) -> Result<(), KernelError> {
        let _phase = self.phase("inputs");
        self.ops.load(batch, fixed)
    }

    /// A step of the greatest size that reads and writes no cache: what is taken at the first use of anything (code, the
    /// choice of products) is taken now.
    pub fn warm_up(&mut self, caches: &mut [KvCache]) -> Result<(), KernelError> {
        let rows = self.step.max_rows;
        let attention = AttentionBatch {
            query_starts: vec![0, rows as u32],
            context_lens: vec![0],
            block_tables: [[-1]].into_iter().collect(),
        };
        let group = GroupBatch { slot_mapping: vec![-1; rows], attention };
        let groups = vec![group; self.layout.groups.len()];
        let batch = ForwardBatch { tokens: vec![0; rows], positions: vec![0; rows], groups, decodes: 0, needed: None };
        self.forward(&batch, caches)?;
        self.logits(&[0]).map(drop)
    }

    /// Copies whole blocks within every cache, in order.
    pub fn copy_blocks(&mut self, copies: &[(u32, u32)], caches: &mut [KvCache]) -> Result<(), KernelError> {
        for copies in copies.chunks(self.ops.most_copies().max(1)) {
            {
                let _phase = self.phase("inputs");
                self.ops.load_copies(copies)?;
            }
            for cache in &mut *caches {
                let args = BlockCopyArgs { copies, cache, workspace: self.ops.workspace(0) };
                self.kernels.block_copy(&*self.device, args)?;
            }
        }
        Ok(())
    }
}

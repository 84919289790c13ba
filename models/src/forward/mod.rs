//! The forward pass: tokens in, hidden states and logits out, keys and values in pages.
//!
//! ```text
//! tokens ─embed─▶ hidden ─┬─norm─▶ qkv ─ heads: (norm) rotate, cache write ─▶ paged attention ─▶ output ─▶(+)─┐
//!                         └──────────────────────────────── residual ──────────────────────────────────────┘  │
//!                    ┌────────────────────────────────────────────────────────────────────────────────────────┘
//!                    └┬─norm─▶ gate_up ─ silu·mul ─▶ down ─▶(+)─ next layer … ─▶ norm ─▶ logits of chosen rows
//!                     └────────────── residual ─────────────┘
//! ```
//!
//! Nothing here touches a number: layers are made of [`Linear`]s (declared in [`declare`]), of the layer operations of
//! the device ([`LayerOps`]) and of the kernels that the registry chose. A sum and the norm behind it are one operation; where
//! weights are quantised it ends with the norm in 8 bits, and so does the activation: the products find their rows ready.
//!
//! **Memory.** All buffers of a step are taken at start-up for the greatest step ([`step::StepBuffers`]), so a step
//! allocates nothing and its peak is known before it runs.
//!
//! **Needed rows.** After the last layer's attention only those rows go on whose results may be asked for
//! ([`ForwardBatch::needed`]): of a prompt usually the last one.
//!
//! **Graphs.** Where a device launches kernels, steps of single tokens are padded to one of a few sizes and replayed
//! ([`graphs`]).
//!
//! **Row-invariance.** Every operation computes a row from that row alone, or, in attention, from its sequence's
//! context in absolute order; see the docs of `attention_kernels` and `device::gemm`.

mod batch;
mod declare;
mod graphs;
mod groups;
mod launched;
mod linear;
mod ops;
mod profiled;
mod results;
mod rope;
mod scales;
mod step;

use std::sync::Arc;

use attention_kernels::{
    AttentionArgs, AttentionBatch, BlockCopyArgs, Dtype, KernelError, KernelSet, KvCache, KvScales, KvShape, Rows,
};
use device::gemm::Quantization;
use device::{Buffer, Device};

pub use batch::{ForwardBatch, GroupBatch};
pub use declare::{check_weights, checkpoint_dtype, dense_weight_bytes, parameters, weight_bytes};
pub use graphs::{GraphCount, graph_sizes};
pub use groups::{LayerGroup, PageLayout};
pub use scales::{kv_scale_bytes, layers_with_kv_scales};

use crate::{LoadError, ModelConfig, Weights};
use declare::{LayerNames, declare};
use graphs::Graphs;
use launched::Launched;
use linear::{Linear, Loader};
use ops::{Cpu, Heads, LayerOps};
use profiled::Profiled;
pub use step::StepLimits;
use step::{Form, StepBuffers};

/// Rows whose logits the host gets at once; bounds the logits buffer at this many times the vocabulary, or at as many as there
/// are sequences in a step where they stay on the device ([`Model::device_logits`]).
pub const LOGIT_ROWS: usize = 64;

/// Orders the way of tokens that the device alone knows into the array of a step's tokens ([`Model::forward_with`]).
pub type Fill<'a> = &'a dyn Fn(&Buffer) -> Result<(), KernelError>;

/// One decoder layer.
struct Layer {
    input_norm: Buffer,
    qkv: Linear,
    query_norm: Option<Buffer>,
    key_norm: Option<Buffer>,
    output: Linear,
    post_norm: Buffer,
    gate_up: Linear,
    down: Linear,
    window: Option<usize>,
    /// Whose block table it reads by.
    group: usize,
    /// Its place in a page.
    place: usize,
    /// Of 8-bit keys and values, where the cache takes them.
    kv_scales: Option<Arc<KvScales>>,
    /// Those are still to be made of what the next step computes.
    uncalibrated: bool,
}

/// A decoder on a device, ready to run steps of up to a fixed number of tokens.
pub struct Model {
    config: ModelConfig,
    device: Arc<dyn Device>,
    kernels: KernelSet,
    ops: Box<dyn LayerOps>,
    embedding: Linear,
    layers: Vec<Layer>,
    layout: PageLayout,
    final_norm: Buffer,
    /// Absent when the embedding matrix is the output layer.
    head: Option<Linear>,
    step: StepBuffers,
    /// Of the last step, the rows that went through to the end, ascending; all if `None`.
    kept: Option<Vec<u32>>,
    /// `step.hidden` and `step.narrow` have changed places since the start.
    swapped: bool,
    /// The first so many rows of the last step have their logits in `step.logits` already.
    with_logits: usize,
    /// Of decode steps, where they are used.
    graphs: Option<Graphs>,
    /// Rows whose results are wanted at once, at most, and where they are among those kept; reused.
    result_rows: usize,
    places: Vec<u32>,
}

impl Model {
    /// Bytes that the buffers of a step of `max_rows` tokens take on a CPU.
    pub fn step_bytes(
        config: &ModelConfig,
        kernels: &KernelSet,
        max_rows: usize,
        quantization: Option<Quantization>,
    ) -> u64 {
        let form = Form::of(kernels, quantization);
        // Rows that a product brings to 8 bits itself: if not all, those of attention and of the last layer.
        let mut widest = config.hidden_size.max(config.num_heads * config.head_dim);
        if !form.blocks {
            widest = widest.max(config.intermediate_size);
        }
        let scratch = quantization.map_or(0, |_| device::gemm::scratch_bytes(max_rows.max(LOGIT_ROWS), widest));
        (StepBuffers::bytes(config, form, max_rows, LOGIT_ROWS) + scratch) as u64
    }

    /// The same on a device that launches kernels: every buffer of a step of that size, the workspaces of attention
    /// ([`Model::reserve`]) included, beside what products take ([`Device::product_bytes`]).
    pub fn launched_step_bytes(config: &ModelConfig, dtype: Dtype, limits: &StepLimits) -> u64 {
        let workspace = limits.workspace(config.num_heads, config.head_dim).bytes();
        let groups = PageLayout::new(config).groups.len();
        let inputs = Launched::bytes(config, limits);
        (StepBuffers::bytes(config, Form::launched(dtype), limits.max_rows, limits.result_rows())
            + inputs
            + groups * workspace) as u64
    }

    /// Puts the weights on the device, one at a time: on a CPU matrices in the checkpoint's type or quantised while they
    /// are read, and biases in float32; on a device that launches kernels both in the type that the kernels were chosen
    /// for. Norms are float32. `progress(done, total)` counts bytes of the checkpoint.
    pub fn load(
        config: &ModelConfig,
        weights: &Weights,
        device: Arc<dyn Device>,
        kernels: KernelSet,
        quantization: Option<Quantization>,
        max_rows: usize,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Model, LoadError> {
        let names = declare(config);
        let failed = |error: device::DeviceError| LoadError::Device(error.to_string());
        if !device.is_host() {
            launched::open(&*device).map_err(failed)?;
        }
        let dtype = kernels.format.dtype;
        let mut loader = Loader::new(weights, &*device, quantization, dtype, progress)?;
        let embedding = loader.linear(&names.embedding, config.hidden_size)?;
        let mut layers = Vec::with_capacity(config.num_layers);
        let layout = PageLayout::new(config);
        for (number, layer) in names.layers.iter().enumerate() {
            let mut layer = load_layer(&mut loader, config, layer, number, &layout)?;
            if kernels.format.kv_dtype.takes_scales() {
                layer.kv_scales = scales::load(config, weights, &*device, number)?.map(Arc::new);
            }
            layers.push(layer);
        }
        let final_norm = loader.vector(&names.final_norm, config.hidden_size)?;
        let head = match &names.head {
            Some(head) => Some(loader.linear(head, config.hidden_size)?),
            None => None,
        };
        let form = Form::of(&kernels, quantization);
        let step = StepBuffers::new(&*device, config, form, max_rows).map_err(failed)?;
        let frequencies = rope::frequencies(&config.rope, config.head_dim);
        let ops: Box<dyn LayerOps> = if device.is_host() {
            Box::new(Cpu::new(&*device, frequencies))
        } else {
            let launched = Launched::new(&device, config, &layout, &frequencies, dtype, max_rows);
            Box::new(launched.map_err(failed)?)
        };
        let ops = Profiled::over(ops, &device, dtype);
        Ok(Model {
            config: config.clone(),
            device,
            kernels,
            ops,
            embedding,
            layers,
            layout,
            final_norm,
            head,
            step,
            kept: None,
            swapped: false,
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
            for layer in self.layers.iter_mut().filter(|layer| layer.kv_scales.is_none()) {
                layer.kv_scales = Some(Arc::new(scales::ones(&self.config, &*self.device)?));
                layer.uncalibrated = true;
            }
        }
        Ok(())
    }

    /// Whether the next step that computes tokens makes scales ([`Model::calculate_kv_scales`]): it waits for the device in
    /// between, which no other does, and can not be recorded.
    pub fn is_calibrating(&self) -> bool {
        self.layers.iter().any(|layer| layer.uncalibrated)
    }

    /// Takes the memory that the kernels of steps of that size work in, and the results that stay on the device; before the
    /// first step. A CPU needs none.
    ///
    /// # Errors
    /// The device has not enough of it.
    pub fn reserve(&mut self, limits: &StepLimits) -> Result<(), KernelError> {
        // They work on the memory that was.
        self.forget_graphs();
        if !self.device.is_host() {
            self.result_rows = limits.result_rows();
            let (device, dtype) = (&*self.device, self.kernels.format.dtype);
            self.step.reserve_results(device, &self.config, dtype, self.result_rows)?;
        }
        self.ops.reserve(limits)
    }

    /// What the model is.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Which layers share block tables.
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// An empty cache of `num_blocks` pages: one [`KvCache`] for each place in a page.
    pub fn new_cache(&self, num_blocks: usize, block_size: usize) -> Result<Vec<KvCache>, KernelError> {
        let (num_kv_heads, head_dim) = (self.config.num_kv_heads, self.config.head_dim);
        let shape = KvShape { num_blocks, num_kv_heads, block_size, head_dim };
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
        let is_known =
            |token: u32| (token as usize) < self.config.vocab_size || filled && token == ForwardBatch::AWAITED;
        if let Some(&token) = batch.tokens.iter().find(|token| !is_known(**token)) {
            let (found, expected) = (token as usize, self.config.vocab_size);
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
        self.ops.load(batch, false)?;
        self.fill(fill)?;
        self.pass(batch, caches)
    }

    /// Tokens that are known to the device alone come to the others.
    fn fill(&mut self, fill: Option<Fill<'_>>) -> Result<(), KernelError> {
        fill.zip(self.ops.tokens()).map_or(Ok(()), |(fill, tokens)| fill(tokens))
    }

    /// All layers of a batch that was loaded. What is launched follows from the sizes of the batch, and, where it was loaded
    /// as fixed, from nothing else of it.
    fn pass(&mut self, batch: &ForwardBatch, caches: &mut [KvCache]) -> Result<(), KernelError> {
        self.unswap();
        let mut rows = batch.tokens.len();
        let (config, device, ops, step) = (&self.config, &*self.device, &*self.ops, &mut self.step);
        let (kernels, dtype, eps) = (&self.kernels, self.kernels.format.dtype, self.config.rms_norm_eps);
        let (dim, num_heads) = (config.head_dim, config.num_heads);
        let query_stride = (num_heads + 2 * config.num_kv_heads) * dim;

        ops.embed(batch, &self.embedding.weights, &mut step.hidden)?;
        ops.rope_table(batch, &mut step.rope)?;
        if let Some(first) = self.layers.first() {
            ops.rms_norm(&step.hidden, &first.input_norm, eps, rows, &mut step.narrow, step.blocks.as_mut())?;
        }
        for number in 0..self.layers.len() {
            let (head, tail) = self.layers.split_at_mut(number + 1);
            let (Some(layer), next) = (head.last_mut(), tail.first()) else { break };
            let slots = &batch.groups[layer.group].slot_mapping;
            let calibrates = layer.uncalibrated && slots.iter().any(|slot| *slot >= 0);
            if calibrates {
                // They are written in place, so that whoever knows their address finds them.
                caches.iter_mut().for_each(|cache| cache.scales = None);
            }
            let (cache, attention) = (&mut caches[layer.place], &batch.groups[layer.group].attention);
            // Layers of several groups share pages, not scales.
            if !calibrates {
                cache.scales.clone_from(&layer.kv_scales);
            }
            layer.qkv.run(kernels, device, rows_of(&step.narrow, &step.blocks), rows, &mut step.qkv, dtype)?;
            let (query_norm, key_norm) = (layer.query_norm.as_ref(), layer.key_norm.as_ref());
            let (qkv, rope, group) = (&mut step.qkv, &step.rope, layer.group);
            let calibrate = layer.kv_scales.as_mut().filter(|_| calibrates);
            let heads = Heads { qkv, rows, num_heads, query_norm, key_norm, eps, rope, group, cache, calibrate };
            ops.heads(device, kernels, batch, heads)?;
            layer.uncalibrated &= !calibrates;
            let cache = &caches[layer.place];
            for seqs in [0..batch.decodes, batch.decodes..attention.num_seqs()] {
                if !seqs.is_empty() {
                    let args = AttentionArgs {
                        query: &step.qkv,
                        query_stride,
                        num_heads,
                        output: &mut step.attended,
                        lse: None,
                        cache,
                        batch: attention,
                        seqs,
                        scale: 1.0 / (dim as f32).sqrt(),
                        window: layer.window,
                        soft_cap: None,
                        alibi_slopes: None,
                        workspace: ops.workspace(layer.group),
                    };
                    kernels.attention(device, args)?;
                }
            }
            let mut attended = &step.attended;
            if let (None, Some(needed)) = (next, batch.needed.as_ref().filter(|needed| needed.len() < rows)) {
                // From here on a row serves its own result alone.
                rows = needed.len();
                ops.keep(batch, &step.attended, num_heads * dim, &mut step.qkv)?;
                ops.keep(batch, &step.hidden, config.hidden_size, &mut step.narrow)?;
                std::mem::swap(&mut step.hidden, &mut step.narrow);
                self.swapped = true;
                attended = &step.qkv;
            }
            if rows == 0 {
                return Ok(());
            }
            layer.output.run(kernels, device, Rows::Numbers(attended), rows, &mut step.narrow, dtype)?;
            ops.add_norm(&mut step.hidden, &mut step.narrow, &layer.post_norm, eps, rows, step.blocks.as_mut())?;
            layer.gate_up.run(kernels, device, rows_of(&step.narrow, &step.blocks), rows, &mut step.gate_up, dtype)?;
            let (width, blocks) = (config.intermediate_size, step.blocks.as_mut());
            ops.silu_mul(&step.gate_up, width, rows, &mut step.activated, blocks)?;
            layer.down.run(kernels, device, rows_of(&step.activated, &step.blocks), rows, &mut step.narrow, dtype)?;
            // Of the last layer's rows more is asked than a product: hidden states.
            let (norm, blocks) = match next {
                Some(layer) => (&layer.input_norm, step.blocks.as_mut()),
                None => (&self.final_norm, None),
            };
            ops.add_norm(&mut step.hidden, &mut step.narrow, norm, eps, rows, blocks)?;
        }
        Ok(())
    }

    /// Gives the buffers of a step the places that they had at the start: graphs know them by their addresses.
    fn unswap(&mut self) {
        if std::mem::take(&mut self.swapped) {
            std::mem::swap(&mut self.step.hidden, &mut self.step.narrow);
        }
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
            self.ops.load_copies(copies)?;
            for cache in &mut *caches {
                let args = BlockCopyArgs { copies, cache, workspace: self.ops.workspace(0) };
                self.kernels.block_copy(&*self.device, args)?;
            }
        }
        Ok(())
    }
}

/// Rows for a product: where the operation before has put them.
fn rows_of<'a>(numbers: &'a Buffer, blocks: &'a Option<Buffer>) -> Rows<'a> {
    blocks.as_ref().map_or(Rows::Numbers(numbers), Rows::Blocks)
}

fn load_layer(
    loader: &mut Loader<'_>,
    config: &ModelConfig,
    names: &LayerNames,
    number: usize,
    layout: &PageLayout,
) -> Result<Layer, LoadError> {
    let (group, place) = layout.place(number).unwrap_or_default();
    let hidden = config.hidden_size;
    let head_norm = |loader: &mut Loader<'_>, name: &Option<String>| match name {
        Some(name) => loader.vector(name, config.head_dim).map(Some),
        None => Ok(None),
    };
    Ok(Layer {
        input_norm: loader.vector(&names.input_norm, hidden)?,
        qkv: loader.linear(&names.qkv, hidden)?,
        query_norm: head_norm(loader, &names.query_norm)?,
        key_norm: head_norm(loader, &names.key_norm)?,
        output: loader.linear(&names.output, config.num_heads * config.head_dim)?,
        post_norm: loader.vector(&names.post_norm, hidden)?,
        gate_up: loader.linear(&names.gate_up, hidden)?,
        down: loader.linear(&names.down, config.intermediate_size)?,
        window: layout.groups[group].window,
        group,
        place,
        kv_scales: None,
        uncalibrated: false,
    })
}

//! The forward pass: tokens in, hidden states and logits out, keys and values in pages.
//!
//! ```text
//! tokens ─embed─▶ hidden ─┬─norm─▶ qkv ─(norm heads)─rotate─▶ cache write ─▶ paged attention ─▶ output ─▶(+)─┐
//!                         └──────────────────────────────── residual ─────────────────────────────────────┘  │
//!                    ┌───────────────────────────────────────────────────────────────────────────────────────┘
//!                    └┬─norm─▶ gate_up ─ silu·mul ─▶ down ─▶(+)─ next layer … ─▶ norm ─▶ logits of chosen rows
//!                     └────────────── residual ─────────────┘
//! ```
//!
//! Nothing here touches a number: layers are made of [`Linear`]s (declared in [`declare`]), of the layer operations of
//! the device ([`LayerOps`]) and of the kernels that the registry chose. All buffers of a step are taken at start-up
//! for the greatest step, so a step allocates nothing. After the last layer's attention only the rows go on whose logits
//! are wanted.
//!
//! **Row-invariance.** Every operation computes a row from that row alone, or, in attention, from its sequence's
//! context in absolute order; see the docs of `attention_kernels` and `device::gemm`.

mod batch;
mod declare;
mod groups;
mod linear;
mod ops;
mod rope;
mod scales;

use std::sync::Arc;

use attention_kernels::{AttentionArgs, CacheWriteArgs, KernelError, KernelSet, KvCache, KvScales, KvShape};
use device::gemm::Quantization;
use device::{Buffer, Device, DeviceError};

pub use batch::{ForwardBatch, GroupBatch};
pub use declare::{check_weights, parameters, weight_bytes};
pub use groups::{LayerGroup, PageLayout};
pub use scales::layers_with_kv_scales;

use crate::{LoadError, ModelConfig, Weights};
use declare::{LayerNames, declare};
use linear::{Linear, Loader};
use ops::{HeadSpan, LayerOps};

/// Rows whose logits are computed at once; bounds the logits buffer at this many times the vocabulary.
pub const LOGIT_ROWS: usize = 64;

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
    /// Of 8-bit keys and values, where the cache takes them and the checkpoint has them.
    kv_scales: Option<Arc<KvScales>>,
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
    /// Of the rotary embedding, per pair of a head's elements.
    frequencies: Vec<f32>,
    /// Absent when the embedding matrix is the output layer.
    head: Option<Linear>,
    step: StepBuffers,
    /// Of the last step, the rows that went through to the end, ascending; all if `None`.
    kept: Option<Vec<u32>>,
}

/// Everything a step writes, `[max_rows, …]` each, float32.
struct StepBuffers {
    max_rows: usize,
    hidden: Buffer,
    normed: Buffer,
    qkv: Buffer,
    attended: Buffer,
    gate_up: Buffer,
    activated: Buffer,
    /// What attention or the feed-forward adds to the residual stream.
    delta: Buffer,
    /// Cosines, then sines, of each row's position: `[max_rows, head_dim]`.
    rope: Buffer,
    /// `[LOGIT_ROWS, hidden_size]`.
    chosen: Buffer,
    /// `[LOGIT_ROWS, vocab_size]`.
    logits: Buffer,
}

impl StepBuffers {
    /// Elements of each buffer, in the order of the fields.
    fn sizes(config: &ModelConfig, max_rows: usize) -> [usize; 10] {
        let (hidden, ffn, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
        [
            // This and the next change places where rows are left out.
            max_rows.max(LOGIT_ROWS) * hidden,
            max_rows.max(LOGIT_ROWS) * hidden,
            max_rows * (config.num_heads + 2 * config.num_kv_heads) * dim,
            max_rows * config.num_heads * dim,
            max_rows * 2 * ffn,
            max_rows * ffn,
            max_rows * hidden,
            max_rows * dim,
            LOGIT_ROWS * hidden,
            LOGIT_ROWS * config.vocab_size,
        ]
    }

    fn new(device: &dyn Device, config: &ModelConfig, max_rows: usize) -> Result<StepBuffers, DeviceError> {
        let mut sizes = StepBuffers::sizes(config, max_rows).into_iter();
        let mut next = || device.alloc(sizes.next().unwrap_or(0) * size_of::<f32>());
        Ok(StepBuffers {
            max_rows,
            hidden: next()?,
            normed: next()?,
            qkv: next()?,
            attended: next()?,
            gate_up: next()?,
            activated: next()?,
            delta: next()?,
            rope: next()?,
            chosen: next()?,
            logits: next()?,
        })
    }
}

impl Model {
    /// Bytes that the buffers of a step of `max_rows` tokens take.
    pub fn step_bytes(config: &ModelConfig, max_rows: usize, quantization: Option<Quantization>) -> u64 {
        let elements: usize = StepBuffers::sizes(config, max_rows).into_iter().sum();
        let widest = config.intermediate_size.max(config.hidden_size).max(config.num_heads * config.head_dim);
        let scratch = quantization.map_or(0, |_| device::gemm::scratch_bytes(max_rows.max(LOGIT_ROWS), widest));
        (elements * size_of::<f32>() + scratch) as u64
    }

    /// Puts the weights on the device: matrices in the checkpoint's type or quantised while they are read, one at a
    /// time; norms and biases in float32. `progress(done, total)` counts bytes of the checkpoint.
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
        let mut loader = Loader::new(weights, &*device, quantization, progress);
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
        let ops = ops::for_device(&*device);
        let step = StepBuffers::new(&*device, config, max_rows).map_err(|e| LoadError::Device(e.to_string()))?;
        let frequencies = rope::frequencies(&config.rope, config.head_dim);
        Ok(Model {
            config: config.clone(),
            device,
            kernels,
            ops,
            embedding,
            layers,
            layout,
            final_norm,
            frequencies,
            head,
            step,
            kept: None,
        })
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
    pub fn forward(&mut self, batch: &ForwardBatch, caches: &mut [KvCache]) -> Result<(), KernelError> {
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
        self.kept.clone_from(&batch.needed);
        if rows == 0 {
            return Ok(());
        }
        let mut rows = rows;
        let (config, device, ops, step) = (&self.config, &*self.device, &*self.ops, &mut self.step);
        let (dim, eps) = (config.head_dim, config.rms_norm_eps);
        let stride = (config.num_heads + 2 * config.num_kv_heads) * dim;
        let queries = HeadSpan { stride, first: 0, heads: config.num_heads, dim };
        let keys = HeadSpan { stride, first: config.num_heads, heads: config.num_kv_heads, dim };
        let rotated = HeadSpan { heads: config.num_heads + config.num_kv_heads, ..queries };

        ops.embed(&batch.tokens, &self.embedding.weights, &mut step.hidden)?;
        ops.rope_table(&batch.positions, &self.frequencies, &mut step.rope)?;
        if let Some(first) = self.layers.first() {
            ops.rms_norm(&step.hidden, &first.input_norm, eps, rows, &mut step.normed)?;
        }
        for (number, layer) in self.layers.iter().enumerate() {
            let next = self.layers.get(number + 1);
            let (cache, GroupBatch { slot_mapping, attention }) =
                (&mut caches[layer.place], &batch.groups[layer.group]);
            // Layers of several groups share pages, not scales.
            cache.scales.clone_from(&layer.kv_scales);
            layer.qkv.run(&self.kernels, device, &step.normed, rows, &mut step.qkv)?;
            for (span, weight) in [(queries, &layer.query_norm), (keys, &layer.key_norm)] {
                if let Some(weight) = weight {
                    ops.norm_heads(&mut step.qkv, span, weight, eps, rows)?;
                }
            }
            ops.rotate(&mut step.qkv, rotated, &step.rope, rows)?;
            let (key_offset, value_offset) = (config.num_heads * dim, (config.num_heads + config.num_kv_heads) * dim);
            self.kernels.cache_write(
                device,
                CacheWriteArgs {
                    source: &step.qkv,
                    key_offset,
                    value_offset,
                    stride,
                    slot_mapping,
                    cache,
                    workspace: None,
                },
            )?;
            for seqs in [0..batch.decodes, batch.decodes..attention.num_seqs()] {
                if !seqs.is_empty() {
                    self.kernels.attention(
                        device,
                        AttentionArgs {
                            query: &step.qkv,
                            query_stride: stride,
                            num_heads: config.num_heads,
                            output: &mut step.attended,
                            lse: None,
                            cache,
                            batch: attention,
                            seqs,
                            scale: 1.0 / (dim as f32).sqrt(),
                            window: layer.window,
                            soft_cap: None,
                            alibi_slopes: None,
                            workspace: None,
                        },
                    )?;
                }
            }
            let mut attended = &step.attended;
            if let (None, Some(needed)) = (next, &batch.needed) {
                // From here on a row serves its own logits alone.
                rows = needed.len();
                ops.gather(&step.attended, needed, config.num_heads * dim, &mut step.qkv)?;
                ops.gather(&step.hidden, needed, config.hidden_size, &mut step.normed)?;
                std::mem::swap(&mut step.hidden, &mut step.normed);
                attended = &step.qkv;
            }
            if rows == 0 {
                return Ok(());
            }
            layer.output.run(&self.kernels, device, attended, rows, &mut step.delta)?;
            ops.add_norm(&mut step.hidden, &step.delta, &layer.post_norm, eps, rows, &mut step.normed)?;
            layer.gate_up.run(&self.kernels, device, &step.normed, rows, &mut step.gate_up)?;
            ops.silu_mul(&step.gate_up, config.intermediate_size, rows, &mut step.activated)?;
            layer.down.run(&self.kernels, device, &step.activated, rows, &mut step.delta)?;
            match next {
                Some(next) => {
                    ops.add_norm(&mut step.hidden, &step.delta, &next.input_norm, eps, rows, &mut step.normed)?;
                }
                None => ops.add(&mut step.hidden, &step.delta, rows * config.hidden_size)?,
            }
        }
        Ok(())
    }

    /// Logits of up to [`LOGIT_ROWS`] rows of the last step, `[rows, vocab_size]`, on the host.
    ///
    /// # Errors
    /// If there are more, or one is not among [`ForwardBatch::needed`].
    pub fn logits(&mut self, rows: &[u32]) -> Result<&[f32], KernelError> {
        if rows.len() > LOGIT_ROWS {
            return Err(KernelError::Shape { what: "rows of logits", found: rows.len(), expected: LOGIT_ROWS });
        }
        self.choose(rows)?;
        let step = &mut self.step;
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        head.run(&self.kernels, &*self.device, &step.normed, rows.len(), &mut step.logits)?;
        Ok(&step.logits.host::<f32>()?[..rows.len() * self.config.vocab_size])
    }

    /// Hidden states behind the final norm of up to [`LOGIT_ROWS`] rows of the last step, `[rows, hidden_size]`, on the
    /// host.
    pub fn hidden(&mut self, rows: &[u32]) -> Result<&[f32], KernelError> {
        if rows.len() > LOGIT_ROWS {
            return Err(KernelError::Shape { what: "rows of hidden states", found: rows.len(), expected: LOGIT_ROWS });
        }
        self.choose(rows)?;
        Ok(&self.step.normed.host::<f32>()?[..rows.len() * self.config.hidden_size])
    }

    /// The first rows of `normed` become those rows of the last step, behind the final norm.
    fn choose(&mut self, rows: &[u32]) -> Result<(), KernelError> {
        let (ops, step, eps) = (&*self.ops, &mut self.step, self.config.rms_norm_eps);
        let mut places = [0u32; LOGIT_ROWS];
        for (place, row) in places.iter_mut().zip(rows) {
            *place = match &self.kept {
                None => *row,
                Some(kept) => kept.binary_search(row).map(|place| place as u32).map_err(|_| KernelError::Shape {
                    what: "a row of logits that the step has not kept",
                    found: *row as usize,
                    expected: kept.len(),
                })?,
            };
        }
        ops.gather(&step.hidden, &places[..rows.len()], self.config.hidden_size, &mut step.chosen)?;
        ops.rms_norm(&step.chosen, &self.final_norm, eps, rows.len(), &mut step.normed)
    }
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
    })
}

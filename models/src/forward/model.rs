//! A decoder on a device: loading, memory, and the start of a step.

use std::sync::Arc;

use attention_kernels::{BlockCopyArgs, KernelError, KernelSet, KvCache, LinearScratch, Needs};
use collective::Collective;
use device::profile::Phase;
use device::{Buffer, Device};

use super::adapters::Adapters;
use super::blocks::Blocks;
use super::cpu::Cpu;
use super::graph_sizes::Graphs;
use super::launched::{self, Launched};
use super::launched_both;
use super::launched_recurrent;
use super::linear::{Loader, Progress, Types};
use super::loaded::{AttentionLayer, Loaded, with_learned};
use super::ops::LayerOps;
use super::program::Program;
use super::ranks::{Ranks, Stages};
use super::row_ops::RowOps;
use super::scales;
use super::step::{Extra, Fill, LOGIT_ROWS, StepBuffers, StepLimits, StepSizes};
use super::weight_bytes::scratch_sizes;
use super::{ForwardBatch, GroupBatch, PageLayout};
use crate::decoder::{Attention, Decoder, Form, Linear, Mixer, Positions};
use crate::lora::Adapter;
use crate::{LoadError, Weights};

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
    /// Blocks of rows for the threads of a CPU.
    pub(super) blocks: Option<Blocks>,
    /// Memory of products whose operands are rewritten.
    pub(super) scratch: LinearScratch,
    /// Rows of the last step that were computed to the end, ascending; `None`: all.
    pub(super) kept_rows: Option<Vec<u32>>,
    /// Number of leading rows of the last step whose logits are in `step.logits` already.
    pub(super) logit_rows: usize,
    pub(super) graphs: Option<Graphs>,
    /// Greatest number of rows whose results are requested at once.
    pub(super) result_rows: usize,
    /// `None` if the decoder takes no adapters.
    pub(super) adapters: Option<Adapters>,
    /// Memory of products with adapters ([`Adapters::scratch_bytes`]).
    pub(super) adapter_scratch: Buffer,
    /// Indices of the requested rows among the kept ones; reused.
    pub(super) gathered: Vec<u32>,
    /// The batch by views, if they differ from groups; reused.
    viewed: ForwardBatch,
    /// Sees the inputs of linear layers.
    pub(super) observer: Option<Observer>,
    /// The ranks that compute the other parts of the decoder.
    pub(super) ranks: Option<Ranks>,
    /// The ranks that compute the layers before and behind.
    pub(super) stages: Option<Stages>,
}

/// Receives the index of a linear layer ([`Decoder::linears`]) and its input rows `[rows, inputs]`.
pub type Observer = Box<dyn FnMut(usize, &[f32]) + Send>;

impl Model {
    /// Bytes of all buffers of a step of this size, including the workspaces of attention ([`Model::reserve`]) but not those of
    /// products ([`Device::product_bytes`]) and the slots of adapters ([`adapter_slot_bytes`](crate::lora::adapter_slot_bytes)).
    pub fn step_bytes(device: &dyn Device, decoder: &Decoder, kernels: &KernelSet, limits: &StepLimits) -> u64 {
        let features = device.features();
        let program = Program::new(decoder, kernels.linear.capabilities.takes_blocks);
        let sizes = |result_rows| {
            StepSizes::new(decoder, &program, kernels.format.dtype, limits.max_rows, result_rows).bytes() as u64
        };
        let adapters = Adapters::bytes(decoder, device, limits.max_rows);
        if features.launches {
            let views = PageLayout::new(decoder).views.len();
            let workspaces = views * limits.workspace(decoder.heads()).bytes();
            let launched = Launched::bytes(decoder, &program.ropes, kernels, limits) + workspaces;
            let launched = launched + scratch_sizes(features, decoder, kernels, limits.max_rows).bytes();
            return sizes(limits.result_rows()) + (launched + adapters) as u64;
        }
        let rows = limits.max_rows.max(LOGIT_ROWS);
        let widest = |is_counted: fn(&Linear) -> bool| {
            decoder.all_linears().filter(|linear| is_counted(linear)).map(|linear| linear.inputs).max().unwrap_or(0)
        };
        let blocks = linear::scratch_bytes(rows, program.widest_self_quantised(decoder));
        let bands = linear::band_bytes(rows, widest(|linear| linear.form != Form::Dense));
        let rounded = kernels.arithmetic.rounded_bytes(rows, widest(|_| true));
        sizes(LOGIT_ROWS) + (blocks + bands + rounded + adapters) as u64
    }

    /// What a decoder needs of kernels on a device, in float32 and with the default cache.
    pub fn needs(decoder: &Decoder, device: &dyn Device) -> Needs {
        let any = |has: fn(&Attention) -> bool| decoder.attention().any(has);
        let head_dim = decoder.heads().head_dim;
        Needs {
            head_dim,
            other_head_dim: decoder.attention().map(|layer| layer.heads.head_dim).find(|dim| *dim != head_dim),
            latent: decoder.latent_dim(),
            window: any(|layer| layer.window.is_some()),
            block_sparse: decoder.sparse_block(),
            soft_cap: any(|layer| layer.soft_cap.is_some()),
            alibi: any(|layer| layer.alibi_slopes.is_some()),
            sinks: any(|layer| layer.sinks.is_some()),
            ..Needs::on(device)
        }
    }

    /// Uploads the weights to the device, one at a time. On a CPU, matrices keep the checkpoint's type or are quantised while
    /// they are read, and biases are float32; on a device that launches kernels, both have the type that the kernels were chosen
    /// for. Norms are float32. `progress(done, total)` counts bytes of the
    /// checkpoint and can end the loading with an error.
    ///
    /// # Errors
    /// A tensor that is missing or has an unexpected shape or type, a form that the device has no product for, and errors of the
    /// device.
    pub fn load(
        decoder: &Decoder,
        weights: &Weights,
        device: Arc<dyn Device>,
        kernels: KernelSet,
        max_rows: usize,
        progress: Progress<'_>,
    ) -> Result<Model, LoadError> {
        Model::load_beside(decoder, weights, device, kernels, max_rows, (progress, None))
    }

    /// [`Model::load`] for a model that uses the matrices of another that it declares as that model does.
    pub(super) fn load_beside(
        decoder: &Decoder,
        weights: &Weights,
        device: Arc<dyn Device>,
        kernels: KernelSet,
        max_rows: usize,
        (progress, target): (Progress<'_>, Option<&Model>),
    ) -> Result<Model, LoadError> {
        if device.features().launches {
            launched_both::check(decoder, &*device)?;
            launched::open(&*device)?;
            decoder.recurrent().try_for_each(launched_recurrent::check)?;
        }
        let dtype = kernels.format.dtype;
        let complete = with_learned(decoder.clone(), weights)?;
        let decoder = &complete;
        let mut program = Program::new(decoder, kernels.linear.capabilities.takes_blocks);
        let layout = PageLayout::new(decoder);
        let mut loader = Loader::new(weights, &*device, Types::of(&kernels), progress)?;
        let linears: Vec<_> =
            loader.linears(decoder, target.map(|target| (&target.decoder, &target.loaded.linears[..])))?;
        let norms = decoder.norms().map(|norm| loader.norm(norm)).collect::<Result<_, _>>()?;
        let stacks = device.features().launches;
        let heads = decoder.head_linears().map(|linears| loader.heads(linears, stacks)).collect::<Result<_, _>>()?;
        let experts = decoder.experts().map(|experts| Ok((experts.clone(), loader.experts(experts, stacks)?)));
        let experts = experts.collect::<Result<_, LoadError>>()?;
        let scalars = decoder.layers.iter().flat_map(|layer| &layer.scalar).map(|name| loader.scalar(name));
        let scalars = scalars.collect::<Result<_, _>>()?;
        let mixings = decoder.layers.iter().flat_map(|layer| &layer.mixing).map(|mixing| loader.mixing(mixing));
        let mixings = mixings.collect::<Result<_, _>>()?;
        let mask = loader.mask(&decoder.head, decoder.vocab_size())?;
        let (mut attention, mut recurrent) = (Vec::<AttentionLayer>::new(), Vec::new());
        let index_of =
            |number: usize| decoder.paged().take(number).filter(|mixer| matches!(mixer, Mixer::Attention(_))).count();
        for (number, mixer) in decoder.paged().enumerate() {
            let declared = match mixer {
                Mixer::Attention(declared) => declared,
                Mixer::Recurrent(declared) => {
                    let (place, view) = layout.place(number).unwrap_or_default();
                    recurrent.push(loader.recurrent(declared, (view, place))?);
                    continue;
                }
                _ => continue,
            };
            let donor = declared.shares.unwrap_or(number);
            let (place, view) = layout.place(donor).unwrap_or_default();
            let kv_scales = match kernels.format.kv_dtype.takes_scales() && declared.shares.is_none() {
                true => scales::load(declared, weights, &*device)?.map(Arc::new),
                false => None,
            };
            let key_offset = match kernels.format.kv_dtype.is_byte() {
                true => loader.key_offset(decoder, declared, &linears, (&*device, dtype))?,
                false => None,
            };
            let sinks = declared.sinks.as_ref().map(|name| loader.sinks(name, declared));
            let by_distance = declared.distances.as_ref().map(|it| loader.by_distance(it, declared));
            attention.push(AttentionLayer {
                declared: declared.clone(),
                alibi_slopes: declared.alibi_slopes.as_ref().map(|slopes| loader.numbers(slopes)).transpose()?,
                sinks: sinks.transpose()?,
                by_distance: by_distance.transpose()?,
                view,
                donor: index_of(donor),
                place,
                kv_scales,
                key_offset,
                uncalibrated: false,
            });
        }
        let sizes = StepSizes::new(decoder, &program, dtype, max_rows, LOGIT_ROWS);
        let step = StepBuffers::new(&*device, sizes, max_rows)?;
        let scratch = LinearScratch::new(&*device, scratch_sizes(device.features(), decoder, &kernels, max_rows))?;
        let adapter_scratch = device.alloc(Adapters::scratch_bytes(decoder, device.features(), max_rows))?;
        let adapters = decoder.adapters.map(|limits| Adapters::new(&*device, decoder, &limits, dtype, max_rows));
        let ops: Box<dyn LayerOps> = if device.features().launches {
            Box::new(Launched::new(&device, decoder, &layout, &program.ropes, &kernels, max_rows)?)
        } else {
            Box::new(Cpu::new(&*device, &program.ropes))
        };
        if decoder.adapters.is_none() {
            program.activate_in_products(|linear| linears[linear].takes_activation(&kernels));
        }
        let loaded = Loaded { linears, norms, attention, recurrent, experts, mixings, scalars, heads, mask };
        let blocks = (!device.features().launches)
            .then(|| Blocks::new(&program, &RowOps::new(decoder, &loaded, (&kernels, &*device), &*ops)));
        Ok(Model {
            decoder: complete,
            program,
            device,
            kernels,
            ops,
            loaded,
            blocks,
            layout,
            step,
            scratch,
            kept_rows: None,
            logit_rows: 0,
            graphs: None,
            result_rows: LOGIT_ROWS,
            adapters: adapters.transpose()?,
            adapter_scratch,
            gathered: Vec::new(),
            viewed: ForwardBatch::default(),
            observer: None,
            ranks: None,
            stages: None,
        })
    }

    /// Calls `observer` with the inputs of every linear layer of the following steps, except inputs in 8 bits and those of heads and
    /// experts. A device that launches kernels waits for each, so its steps must not be captured or replayed as graphs.
    pub fn observe(&mut self, observer: Option<Observer>) {
        self.observer = observer;
    }

    /// Joins the group of ranks that compute the other parts of the decoder ([`Decoder::shard`]). All of them must then make the same
    /// calls with equal batches.
    pub fn join(&mut self, group: Arc<dyn Collective>) {
        self.ranks = Some(Ranks::new(group));
    }

    /// Joins the stages of a pipeline ([`Decoder::stage`]), whose ranks are in the order of their layers. All of them must then get
    /// equal batches in the same order.
    pub fn connect(&mut self, pipeline: Arc<dyn Collective>) {
        self.stages = Some(Stages::new(pipeline));
    }

    /// Lets the first step that computes tokens set the scales of layers for which the checkpoint has none. Until then they
    /// are 1. Does nothing if the cache takes no scales.
    ///
    /// # Errors
    /// The device is out of memory.
    pub fn calculate_kv_scales(&mut self) -> Result<(), KernelError> {
        if self.kernels.format.kv_dtype.takes_scales() {
            let own = |layer: &&mut AttentionLayer| layer.kv_scales.is_none() && layer.declared.shares.is_none();
            for layer in self.loaded.attention.iter_mut().filter(own) {
                layer.kv_scales = Some(Arc::new(scales::ones(&layer.declared, &*self.device)?));
                layer.uncalibrated = true;
            }
        }
        Ok(())
    }

    /// Puts an adapter into a slot, or empties the slot. A device that launches kernels does so after the steps that were enqueued.
    ///
    /// # Errors
    /// The decoder has no such slot ([`Decoder::with_adapters`]), or the upload fails, which leaves the slot empty.
    pub fn set_adapter(&mut self, slot: usize, adapter: Option<Arc<Adapter>>) -> Result<(), KernelError> {
        let problem = KernelError::Shape { what: "slot of an adapter", found: slot, expected: 0 };
        self.adapters.as_mut().ok_or(problem)?.set(&*self.device, slot, adapter)
    }

    /// Whether the next step that computes tokens sets scales ([`Model::calculate_kv_scales`]). Such a step waits for the device
    /// between its layers, so it cannot be captured.
    pub fn is_calibrating(&self) -> bool {
        self.loaded.attention.iter().any(|layer| layer.uncalibrated)
    }

    /// Allocates the workspaces of kernels and the buffers of results for steps of this size. Call it before the first step. A
    /// CPU needs neither.
    ///
    /// # Errors
    /// The device is out of memory.
    pub fn reserve(&mut self, limits: &StepLimits) -> Result<(), KernelError> {
        // Captured graphs hold the addresses of the old buffers.
        self.forget_graphs();
        if self.device.features().launches {
            self.result_rows = limits.result_rows();
            let (dtype, max_rows) = (self.kernels.format.dtype, self.step.max_rows);
            let sizes = StepSizes::new(&self.decoder, &self.program, dtype, max_rows, self.result_rows);
            self.step.replace_results(&*self.device, &sizes)?;
        }
        self.ops.reserve(limits)
    }

    /// The declaration of the model's layers.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Returns how many tokens of a sequence at most the decode kernel computes.
    pub fn decode_rows(&self) -> usize {
        self.kernels.decode.capabilities.decode_rows
    }

    /// Groups of layers that share block tables.
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// Allocates an empty cache of `num_blocks` pages: one [`KvCache`] per place in a page.
    pub fn new_cache(&self, num_blocks: usize, block_size: usize) -> Result<Vec<KvCache>, KernelError> {
        let (shape, latent) = (self.layout.shape(num_blocks, block_size), self.decoder.latent_dim());
        let format = self.kernels.format;
        let least = PageLayout::least_block_size(&self.decoder, &format);
        if block_size < least {
            let what = "tokens per block of a model with recurrent states";
            return Err(KernelError::Shape { what, found: block_size, expected: least });
        }
        let parts = self.layout.views.iter().map(|view| view.parts).max().unwrap_or(1);
        if num_blocks > i32::MAX as usize / parts {
            let (what, expected) = ("blocks of a cache", i32::MAX as usize / parts);
            return Err(KernelError::Shape { what, found: num_blocks, expected });
        }
        let cache = |_| match latent {
            Some(dim) => KvCache::latent(&*self.device, shape, format, dim),
            None => Ok(KvCache::with_format(&*self.device, shape, format)?),
        };
        (0..self.layout.places).map(cache).collect()
    }

    /// Computes the tokens of a batch. Keys and values are written to their slots. Hidden states, at least those of
    /// [`ForwardBatch::needed`], are kept for [`Model::logits`]. `caches` holds one cache per place in a page
    /// ([`Model::new_cache`]).
    ///
    /// # Errors
    /// A batch that does not fit this model, and errors of the device.
    pub fn forward(&mut self, batch: &ForwardBatch, caches: &mut [KvCache]) -> Result<(), KernelError> {
        self.forward_with(batch, caches, None)
    }

    /// [`Model::forward`] for a batch with tokens that only the device knows ([`ForwardBatch::AWAITED`]). `fill` gets the device
    /// array of the batch's tokens (u32) and enqueues the copies into it.
    ///
    /// # Errors
    /// The errors of [`Model::forward`] and of `fill`.
    pub fn forward_with(
        &mut self,
        batch: &ForwardBatch,
        caches: &mut [KvCache],
        fill: Option<Fill<'_>>,
    ) -> Result<(), KernelError> {
        self.forward_extra(batch, caches, Extra { fill, states: None })
    }

    pub(super) fn forward_extra(
        &mut self,
        batch: &ForwardBatch,
        caches: &mut [KvCache],
        extra: Extra<'_>,
    ) -> Result<(), KernelError> {
        let rows = batch.tokens.len();
        if rows > self.step.max_rows {
            return Err(KernelError::Shape { what: "rows of a step", found: rows, expected: self.step.max_rows });
        }
        let (places, groups) = (self.layout.places, self.layout.groups.len());
        for (what, found, expected) in
            [("caches", caches.len(), places), ("cache groups of a batch", batch.groups.len(), groups)]
        {
            if found != expected {
                return Err(KernelError::Shape { what, found, expected });
            }
        }
        let filled = extra.fill.is_some() && self.ops.tokens().is_some();
        let vocab_size = self.decoder.vocab_size();
        let is_known = |token: u32| (token as usize) < vocab_size || filled && token == ForwardBatch::AWAITED;
        if let Some(&token) = batch.tokens.iter().find(|token| !is_known(**token)) {
            let (found, expected) = (token as usize, vocab_size);
            return Err(KernelError::Shape { what: "token id", found, expected });
        }
        // A table of learned positions has a row for each.
        if let Some(Positions { table, offset }) = &self.decoder.embedding.positions
            && let Some(&position) = batch.positions.iter().find(|at| **at as usize + offset >= table.rows())
        {
            let (found, expected) = (position as usize, table.rows() - offset);
            return Err(KernelError::Shape { what: "position", found, expected });
        }
        if let Some(&row) = batch.needed.iter().flatten().find(|row| **row as usize >= rows) {
            return Err(KernelError::Shape { what: "needed row", found: row as usize, expected: rows });
        }
        batch.check_drafts()?;
        if self.decoder.is_encoder() {
            batch.check_whole()?;
        }
        match &mut self.adapters {
            Some(adapters) => adapters.load(batch)?,
            None => {
                let named = batch.adapters.iter().find(|slot| **slot != ForwardBatch::NO_ADAPTER);
                if let Some(&slot) = named {
                    let (what, found, expected) = ("slot of an adapter", slot as usize, 0);
                    return Err(KernelError::Shape { what, found, expected });
                }
            }
        }
        self.kept_rows.clone_from(&batch.needed);
        self.logit_rows = 0;
        if rows == 0 {
            return Ok(());
        }
        if !self.layout.has_parts() {
            return self.run_step(batch, caches, extra);
        }
        let mut viewed = std::mem::take(&mut self.viewed);
        self.view(batch, caches, &mut viewed);
        let outcome = self.run_step(&viewed, caches, extra);
        self.viewed = viewed;
        outcome
    }

    /// Runs a checked batch that has a group for each view.
    fn run_step(
        &mut self,
        batch: &ForwardBatch,
        caches: &mut [KvCache],
        Extra { fill, states }: Extra<'_>,
    ) -> Result<(), KernelError> {
        if let Some(at) = self.graph_for(batch) {
            return self.decode(at, batch, caches, fill);
        }
        self.load_batch(batch, None, fill)?;
        self.pass(batch, caches, states)
    }

    /// Fills `to` with a batch that has the group of each view instead of those of `batch`.
    fn view(&self, batch: &ForwardBatch, caches: &[KvCache], to: &mut ForwardBatch) {
        let ForwardBatch { tokens, positions, groups, adapters, drafts, seconds, needed } = to;
        tokens.clone_from(&batch.tokens);
        positions.clone_from(&batch.positions);
        needed.clone_from(&batch.needed);
        adapters.clone_from(&batch.adapters);
        drafts.clone_from(&batch.drafts);
        seconds.clone_from(&batch.seconds);
        groups.resize_with(self.layout.views.len(), GroupBatch::default);
        let block_size = caches.first().map_or(1, |cache| cache.shape.block_size);
        for (view, to) in self.layout.views.iter().zip(groups) {
            view.load(&batch.groups[view.group], block_size, to);
        }
    }

    /// Times a phase of the step until the guard is dropped; `None` without a profile.
    pub(super) fn phase(&self, name: &'static str) -> Option<Phase> {
        self.device.profile()?.phase(name)
    }

    /// Copies a batch to where the operations read it ([`LayerOps::load`]), and runs `fill` on the device's token array.
    pub(super) fn load_batch(
        &mut self,
        batch: &ForwardBatch,
        fixed: Option<usize>,
        fill: Option<Fill<'_>>,
    ) -> Result<(), KernelError> {
        let _phase = self.phase("inputs");
        self.ops.load(batch, fixed, self.adapters.as_mut())?;
        fill.zip(self.ops.tokens()).map_or(Ok(()), |(fill, tokens)| fill(tokens))
    }

    /// Copies blocks within every cache, in the order given.
    pub fn copy_blocks(&mut self, copies: &[(u32, u32)], caches: &mut [KvCache]) -> Result<(), KernelError> {
        for copies in copies.chunks(self.ops.most_copies().max(1)) {
            {
                let _phase = self.phase("inputs");
                self.ops.load_copies(copies)?;
            }
            for cache in &mut *caches {
                let args = BlockCopyArgs { copies, cache, workspace: self.ops.workspace(0) };
                self.kernels.block_copy.block_copy(&*self.device, args)?;
            }
        }
        Ok(())
    }
}

//! The interpreter of a [`Program`](super::program::Program). It knows operations, not families.

use std::borrow::Cow;
use std::sync::Arc;

use attention_kernels::{AttentionArgs, CacheWriteArgs, Dtype, KernelError, KernelSet, KvCache, Workspace};
use device::{Buffer, Device, DeviceError};

use super::clock::clock;
use super::loaded::AttentionLayer;
use super::op::{Op, Register, StreamStep};
use super::ops::{
    BothRows, ChosenRows, ExpertRows, HeadProduct, IndexRows, LatentRows, QkvRows, RecurrentPart, RecurrentRows,
    StreamRows,
};
use super::predictor::{self, NO_STATES};
use super::row_ops::RowOps;
use super::step::States;
use super::{ForwardBatch, Model, ranks, scales, values};

/// The first numbers of a buffer. A device that launches kernels waits for its earlier work.
pub(super) fn numbers_on_host<'a>(
    device: &dyn Device,
    buffer: &'a Buffer,
    dtype: Dtype,
    count: usize,
) -> Result<Cow<'a, [f32]>, DeviceError> {
    if let Ok(numbers) = buffer.host::<f32>() {
        return Ok(Cow::Borrowed(&numbers[..count]));
    }
    let mut bytes = vec![0; count * dtype.bytes()];
    device.download(buffer, 0, &mut bytes)?;
    let mut numbers = vec![0.0; count];
    dtype.read_row(&bytes, &mut numbers);
    Ok(Cow::Owned(numbers))
}

/// Writes the keys and values of fused rows to the cache.
fn write_cache(
    kernels: &KernelSet,
    device: &dyn Device,
    layer: &AttentionLayer,
    source: &Buffer,
    slot_mapping: &[i64],
    caches: &mut [KvCache],
    workspace: Option<&Workspace>,
) -> Result<(), KernelError> {
    let (heads, stride) = (layer.declared.heads, layer.declared.row_width());
    let key_offset = heads.query_width();
    let value_offset = key_offset + heads.key_width();
    let cache = &mut caches[layer.place];
    let args = CacheWriteArgs { source, key_offset, value_offset, stride, slot_mapping, cache, workspace };
    kernels.cache_write.cache_write(device, args)
}

impl Model {
    /// Runs all layers on a loaded batch. The sequence of launches depends only on the batch's sizes; if the batch was loaded
    /// with fixed grids, the grids depend only on them too.
    pub(super) fn pass(
        &mut self,
        batch: &ForwardBatch,
        caches: &mut [KvCache],
        states: Option<States<'_>>,
    ) -> Result<(), KernelError> {
        let shape = caches.first().map(|cache| cache.shape);
        let outcome = self.run(batch, caches, states);
        // Layers may see pages in other shapes than those who copy and swap them.
        caches.iter_mut().zip(shape.iter().cycle()).for_each(|(cache, shape)| cache.shape = *shape);
        outcome
    }

    fn run(
        &mut self,
        batch: &ForwardBatch,
        caches: &mut [KvCache],
        states: Option<States<'_>>,
    ) -> Result<(), KernelError> {
        let Model {
            decoder,
            program,
            device,
            kernels,
            ops,
            loaded,
            step,
            blocks,
            scratch,
            observer,
            adapters,
            adapter_scratch,
            ranks,
            stages,
            ..
        } = self;
        let (device, dtype, hidden): (&dyn Device, _, _) = (&**device, kernels.format.dtype, decoder.hidden_size());
        let time = |operation, numbers| clock(device, operation, None, numbers, dtype);
        let per_layer = decoder.embedding.per_layer.as_ref().map_or(0, |inputs| inputs.projection.rows());
        let mut rows = batch.tokens.len();
        step.registers.reset_names();
        let adapters = adapters.as_ref();
        // Observers see the rows of a whole step.
        let mut blocks = blocks.as_mut().filter(|_| observer.is_none());
        let mut next = 0;
        while let Some(op) = program.ops.get(next) {
            if let Some(blocks) = &mut blocks {
                let row_ops = RowOps::new(decoder, loaded, (kernels, device), &**ops);
                let row_ops = row_ops.adapted(adapters, rows < batch.tokens.len());
                let done = blocks.run(program, next, (&mut step.registers, rows), &row_ops)?;
                if done > 0 {
                    next += done;
                    continue;
                }
            }
            next += 1;
            match *op {
                Op::Embed { table, scale, to } => {
                    let table = &loaded.linears[table].weights;
                    let _time = time("embed", 2 * rows * table.k());
                    ops.embed(batch, table, scale, step.registers.get_mut(to))?;
                }
                Op::Receive { to } => {
                    let _time = time("receive", rows * hidden);
                    ranks::stages(stages)?.receive(
                        device,
                        rows * hidden * dtype.bytes(),
                        step.registers.get_mut(to),
                    )?;
                }
                Op::Send => {
                    let stream = step.registers.get(Register::Stream);
                    let _time = time("send", rows * hidden);
                    ranks::stages(stages)?.send(device, rows * hidden * dtype.bytes(), stream)?;
                }
                Op::AddPositions { table, offset } => {
                    let _time = time("add_positions", 3 * rows * hidden);
                    ops.add_positions(
                        batch,
                        &loaded.linears[table].weights,
                        offset,
                        step.registers.get_mut(Register::Stream),
                    )?;
                }
                Op::AddTypes { table } => {
                    let _time = time("add_types", 3 * rows * hidden);
                    let stream = step.registers.get_mut(Register::Stream);
                    ops.add_types(batch, &loaded.linears[table].weights, stream)?;
                }
                Op::ZeroFirst => {
                    let row = hidden * dtype.bytes();
                    let stream = step.registers.get_mut(Register::Stream);
                    for (at, _) in batch.positions.iter().enumerate().filter(|(_, position)| **position == 0) {
                        device.fill(stream, at * row, row, 0)?;
                    }
                }
                Op::States { linear, norm } => {
                    let (loaded, beside) = (&*loaded, decoder.embedding.beside.as_ref());
                    let Some((states, beside)) = states.zip(beside) else { return Err(NO_STATES) };
                    predictor::stream(&mut **ops, (kernels, device), (loaded, step), (linear, norm), beside, states)?;
                }
                Op::Tap { state } => {
                    let stream = step.registers.get(Register::Stream);
                    let all: Vec<u32> = (0..rows as u32).collect();
                    ops.gather_rows(stream, &all, hidden, &mut step.taps[state])?;
                }
                Op::RopeTable { table } => {
                    let _time = time("rope_table", 0);
                    ops.rope_table(table, batch, &mut step.ropes[table])?;
                }
                Op::Linear { linear, from, .. } | Op::LinearActivate { linear, from, .. } => {
                    if let Some(observer) = observer
                        && from != Register::Q8
                    {
                        let count = rows * loaded.linears[linear].weights.k();
                        observer(linear, &numbers_on_host(device, step.registers.get(from), dtype, count)?);
                    }
                    let row_ops = RowOps::new(decoder, loaded, (kernels, device), &**ops);
                    let row_ops = row_ops.adapted(adapters, rows < batch.tokens.len());
                    row_ops.run(op, &mut step.registers, 0..rows, Some((&mut *scratch, &mut *adapter_scratch)))?;
                }
                Op::QkNormRopeCache { attention } => {
                    let scales = loaded.attention[loaded.attention[attention].donor].kv_scales.clone();
                    let (layer, plan) = (&mut loaded.attention[attention], program.attention[attention]);
                    let (heads, slot_mapping) = (layer.declared.heads, &batch.groups[layer.view].slot_mapping);
                    let calibrates = layer.uncalibrated && slot_mapping.iter().any(|slot| *slot >= 0);
                    let cache = &mut caches[layer.place];
                    // Layers of several groups share pages, not scales and shapes.
                    cache.scales = scales;
                    cache.shape = layer.shape(cache.shape);
                    // A fused kernel also writes the cache. Calibration comes between the rotation and that write.
                    let shares = layer.declared.shares.is_some();
                    let fused = kernels.cache_write.capabilities.fused && !calibrates && !shares;
                    let rotated = (heads.num_heads + layer.declared.own_kv_heads()) * heads.head_dim;
                    let variant = fused.then_some(kernels.cache_write.name);
                    let _time = clock(device, "qk_rope", variant, 2 * rows * rotated, dtype);
                    let qkv = step.registers.get_mut(Register::Qkv);
                    let args = QkvRows::of(layer, plan, (&loaded.norms, &step.ropes), &mut *qkv, rows);
                    ops.qk_norm_rope_cache(batch, QkvRows { cache: Some(cache), fused, ..args })?;
                    let stride = layer.declared.row_width();
                    if calibrates && let Some(scales) = &mut layer.kv_scales {
                        // The scales are written in place: captured graphs know their address.
                        caches.iter_mut().for_each(|cache| cache.scales = None);
                        scales::calibrate(device, qkv, (heads, stride), slot_mapping, kernels.format, scales)?;
                        caches[layer.place].scales = Some(Arc::clone(scales));
                    }
                    if !fused && !shares {
                        let (layer, source) = (&loaded.attention[attention], step.registers.get(Register::Qkv));
                        write_cache(kernels, device, layer, source, slot_mapping, caches, ops.workspace(layer.view))?;
                    }
                    let layer = &mut loaded.attention[attention];
                    layer.uncalibrated &= !calibrates;
                }
                Op::QkNormRope { attention } => {
                    let (layer, plan) = (&loaded.attention[attention], program.attention[attention]);
                    let _time = time("qk_rope", 2 * rows * layer.declared.row_width());
                    let qkv = step.registers.get_mut(Register::Qkv);
                    let args = QkvRows::of(layer, plan, (&loaded.norms, &step.ropes), qkv, rows);
                    ops.qk_norm_rope_cache(batch, args)?;
                }
                Op::WidenValues { attention } => {
                    let layer = &loaded.attention[attention].declared;
                    let [from, to] = step.registers.several([Register::GateUp, Register::Qkv])?;
                    let _time = time("widen", 2 * rows * layer.row_width());
                    values::widen(&**ops, layer, rows, from, to)?;
                }
                Op::NarrowValues { attention } => {
                    let layer = &loaded.attention[attention].declared;
                    let [from, to] = step.registers.several([Register::Attended, Register::Activated])?;
                    let _time = time("narrow", 2 * rows * layer.output.inputs);
                    values::narrow(&**ops, layer, rows, from, to)?;
                }
                Op::AttendBoth { attention } => {
                    let [qkv, output] = step.registers.several([Register::Qkv, Register::Attended])?;
                    let layer = &loaded.attention[attention];
                    let _time = time("attention", rows * layer.declared.row_width());
                    ops.attend_both(batch, BothRows { layer, qkv, output })?;
                }
                Op::LatentRows { attention } => {
                    let (layer, plan) = (&loaded.attention[attention], program.attention[attention]);
                    caches[layer.place].scales.clone_from(&layer.kv_scales);
                    let [queries, latents, out] =
                        step.registers.several([Register::Attended, Register::GateUp, Register::Qkv])?;
                    let declared = &layer.declared;
                    let (Some(latent), Some(norm), Some(table)) = (&declared.latent, plan.latent_norm, plan.table)
                    else {
                        continue;
                    };
                    let _time = time("latent_rows", 2 * rows * declared.row_width());
                    let (norm, rope) = (&loaded.norms[norm], &step.ropes[table]);
                    ops.latent_rows(LatentRows { layer: declared, latent, rows, queries, latents, norm, rope, out })?;
                }
                Op::IndexRows { attention, norm } => {
                    let (layer, plan) = (&loaded.attention[attention].declared, program.attention[attention]);
                    let [queries, latents] = step.registers.several([Register::Index, Register::GateUp])?;
                    let indexer = layer.latent.as_ref().and_then(|latent| Some((latent, latent.indexer()?)));
                    let Some(((latent, indexer), table)) = indexer.zip(plan.table) else { continue };
                    let _time = time("index_rows", 2 * rows * indexer.query.rows());
                    let (norm, rope) = (&loaded.norms[norm], &step.ropes[table]);
                    ops.index_rows(IndexRows { layer, latent, indexer, rows, queries, latents, norm, rope })?;
                }
                Op::AttendChosen { attention } => {
                    let layer = &loaded.attention[attention];
                    let [query, index, weights, output] = step.registers.several([
                        Register::Qkv,
                        Register::Index,
                        Register::Scores,
                        Register::Attended,
                    ])?;
                    let latent = layer.declared.latent.as_ref();
                    let Some((latent, choice)) = latent.and_then(|it| Some((it, it.choice.as_ref()?))) else {
                        continue;
                    };
                    let (index, cache) = ([&*index, &*weights], &caches[layer.place]);
                    let _time = time("attention", rows * layer.declared.row_width());
                    ops.attend_chosen(ChosenRows { batch, layer, latent, choice, query, index, output, cache })?;
                }
                Op::HeadLinear { product, from, to } => {
                    let (linears, shape) = &loaded.heads[product];
                    let registers = [from.register, to.register, Register::Activated, Register::Mixed];
                    let [x, y, inputs, outputs] = step.registers.several(registers)?;
                    let (shape, scratch) = (*shape, [inputs, outputs]);
                    ops.head_linear(HeadProduct { kernels, device, linears, shape, rows, x, from, y, to, scratch })?;
                }
                Op::WriteCache { attention } => {
                    let (layer, source) = (&loaded.attention[attention], step.registers.get(Register::Qkv));
                    let (slots, workspace) = (&batch.groups[layer.view].slot_mapping, ops.workspace(layer.view));
                    write_cache(kernels, device, layer, source, slots, caches, workspace)?;
                }
                Op::Attend { attention } => {
                    let layer = &loaded.attention[attention];
                    let declared = &layer.declared;
                    let [query, output] = step.registers.several([Register::Qkv, Register::Attended])?;
                    let group = &batch.groups[layer.view].attention;
                    let decodes = kernels.decodes(group);
                    for seqs in [0..decodes, decodes..group.num_seqs()] {
                        if !seqs.is_empty() {
                            let args = AttentionArgs {
                                query,
                                query_stride: declared.row_width(),
                                num_heads: declared.heads.num_heads,
                                output,
                                lse: None,
                                cache: &caches[layer.place],
                                batch: group,
                                seqs,
                                scale: declared.scale,
                                window: declared.window,
                                sparse: declared.sparse,
                                soft_cap: declared.soft_cap,
                                alibi_slopes: layer.alibi_slopes.as_ref(),
                                sinks: layer.sinks.as_ref(),
                                workspace: ops.workspace(layer.view),
                            };
                            kernels.attention(device, args)?;
                        }
                    }
                }
                Op::Recurrent { recurrent, norm } => {
                    let layer = &loaded.recurrent[recurrent];
                    let [projected, output] = step.registers.several([Register::Qkv, Register::Attended])?;
                    let (cache, norm) = (&mut caches[layer.place], norm.map(|norm| &loaded.norms[norm]));
                    let _time = time("recurrent", rows * layer.declared.projections.rows());
                    let part = RecurrentPart::Whole;
                    ops.recurrent(RecurrentRows { batch, layer, norm, part, projected, output, rows, cache })?;
                }
                Op::ChannelDelta { recurrent, norm } => {
                    use Register::{Activated, Attended, GateUp, Qkv};
                    let layer = &loaded.recurrent[recurrent];
                    let [projected, steps, gates, output] =
                        step.registers.several([Qkv, GateUp, Activated, Attended])?;
                    let (cache, norm) = (&mut caches[layer.place], norm.map(|norm| &loaded.norms[norm]));
                    let _time = time("recurrent", 2 * rows * layer.declared.projections.rows());
                    let part = RecurrentPart::Channels { steps, gates };
                    ops.recurrent(RecurrentRows { batch, layer, norm, part, projected, output, rows, cache })?;
                }
                Op::Convolve { recurrent } => {
                    let layer = &loaded.recurrent[recurrent];
                    let [projected, output] = step.registers.several([Register::Qkv, Register::Activated])?;
                    let (cache, part) = (&mut caches[layer.place], RecurrentPart::Convolution);
                    let _time = time("convolve", 2 * rows * layer.declared.value_width());
                    ops.recurrent(RecurrentRows { batch, layer, norm: None, part, projected, output, rows, cache })?;
                }
                Op::Scan { recurrent, norms } => {
                    use Register::{Activated, Attended, GateUp, Mixed, Qkv};
                    let layer = &loaded.recurrent[recurrent];
                    let [projected, values, steps, keys, output] =
                        step.registers.several([Qkv, Activated, GateUp, Mixed, Attended])?;
                    let norms = norms.map(|norm| &loaded.norms[norm]);
                    let part = RecurrentPart::Matrix { values, steps, keys, norms };
                    let cache = &mut caches[layer.place];
                    let _time = time("scan", 4 * rows * layer.declared.value_width());
                    ops.recurrent(RecurrentRows { batch, layer, norm: None, part, projected, output, rows, cache })?;
                }
                Op::KeepNeeded { ref moves } => {
                    let Some(needed) = batch.needed.as_ref().filter(|needed| needed.len() < rows) else { continue };
                    rows = needed.len();
                    for &(from, to, width) in moves {
                        let [x, out] = step.registers.several([from, to])?;
                        let _time = time("keep", 2 * rows * width);
                        ops.gather_needed(batch, x, width, out)?;
                        step.registers.swap(from, to);
                    }
                    if rows == 0 {
                        return Ok(());
                    }
                }
                Op::Sparsify { width, deviations } => {
                    let _time = time("sparsify", 3 * rows * width);
                    ops.sparsify(step.registers.get_mut(Register::GateUp), width, deviations, rows)?;
                }
                Op::Streams { step: kind, others } => {
                    use Register::{Branch, Mixture, Scores, Stream};
                    let count = decoder.streams.as_ref().map_or(0, |streams| streams.merge.len());
                    let layer = match kind {
                        StreamStep::Mix(layer) | StreamStep::Correct(layer) => loaded.mixings.get(layer),
                        StreamStep::Rescale | StreamStep::Add | StreamStep::Mean => None,
                    };
                    let [stream, others, mixture, branch, scores] =
                        step.registers.several([Stream, others, Mixture, Branch, Scores])?;
                    let _time = time("streams", 2 * rows * (count + 1) * hidden);
                    let size = StreamRows {
                        step: kind,
                        layer,
                        rows,
                        width: hidden,
                        count,
                        stream,
                        others,
                        mixture,
                        branch,
                        scores,
                    };
                    ops.streams(size)?;
                }
                Op::ActivatePerLayer { activation, width, layer } => {
                    let [gate, inputs, out] =
                        step.registers.several([Register::GateUp, Register::PerLayer, Register::Activated])?;
                    let _time = time("activate", 3 * rows * width);
                    ops.activate_by(activation, gate, (inputs, per_layer, layer * width), (rows, width), out)?;
                }
                Op::Experts { experts, from } => {
                    use Register::{Activated, Attended, GateUp, Gathered, Mixed, Qkv, Scores};
                    let [x, scores, mixed, inputs, gate_up, activated, output, gathered] =
                        step.registers.several([from, Scores, Mixed, Qkv, GateUp, Activated, Attended, Gathered])?;
                    let scratch = [inputs, gate_up, activated, output, gathered];
                    let (declared, loaded) = &loaded.experts[experts];
                    let args = ExpertRows { declared, loaded, kernels, device, rows, x, scores, mixed, scratch, ranks };
                    ops.experts(args)?;
                }
                Op::Gather { from, to, ref widths } => {
                    let [own, all] = step.registers.several([from, to])?;
                    let _time = time("gather_ranks", rows * widths.iter().sum::<usize>());
                    ranks::needed(ranks)?.gather(device, own, (rows, widths, dtype.bytes()), all)?;
                }
                Op::Sum { register, width } => {
                    let _time = time("sum_ranks", rows * width);
                    ranks::needed(ranks)?.sum(device, dtype, step.registers.get_mut(register), rows * width)?;
                }
                Op::Swap { a, b } => step.registers.swap(a, b),
                Op::Norm { .. }
                | Op::GateAttended { .. }
                | Op::Activate { .. }
                | Op::AddRows { .. }
                | Op::Add { .. }
                | Op::Scale { .. }
                | Op::AddNorm { .. } => {
                    let row_ops = RowOps::new(decoder, loaded, (kernels, device), &**ops);
                    row_ops.run(op, &mut step.registers, 0..rows, None)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

//! Layer operations on a CPU, over the pool's threads. The loops over a row are in [`attention_kernels::layer`].

mod rows;

use attention_kernels::layer::{self, Activate, Activation, BothSides, NormRow};
use attention_kernels::{Dtype, KernelError};
use device::{Buffer, Device};
use linear::{Matrix, RowBlock};
use simd::{Isa, Pool};

use super::ForwardBatch;
use super::linear::Norm;
use super::ops::{BothRows, ExpertRows, HeadProduct, LatentRows, LayerOps, Out, QkvRows, RecurrentRows, StreamRows};
use super::ops::{ChosenRows, HeadSizes, IndexRows};
use super::ranks;
use super::routing::Choices;
use super::{chosen, recurrent, streams};
use crate::decoder::{Latent, Rope};
use rows::{copy_heads, for_chosen, gather_rows, q8_rows};

pub(super) struct Cpu {
    isa: Isa,
    threads: Pool,
    ropes: Vec<Rotation>,
    /// The experts of each row; reused.
    choices: Choices,
    /// Lists of recurrent layers; reused.
    recurrent: recurrent::Lists,
    /// The tokens that each row of the last layer with an indexer attends to.
    chosen: Vec<u32>,
}

/// A rotary embedding: the angular frequency of each pair, and the factor of all cosines and sines.
struct Rotation {
    frequencies: Vec<f32>,
    factor: f32,
}

/// Rough costs per element in multiply-adds, from which the pool decides how many threads to use: of a pass over it, of its
/// exponential, and of reading it from a packed matrix.
pub(super) const PASS_COST: usize = 8;
const EXP_COST: usize = 16;
const GATHER_COST: usize = 32;

impl Norm {
    /// The norm of a row on a CPU.
    pub(super) fn row(&self) -> Result<NormRow<'_>, KernelError> {
        let bias = self.bias.as_ref().map_or(Ok(&[][..]), |bias| bias.host::<f32>())?;
        Ok(NormRow { weight: self.weight.host()?, bias, width: self.width, eps: self.eps, centre: self.centre })
    }
}

impl LayerOps for Cpu {
    fn embed(&self, batch: &ForwardBatch, table: &Matrix, scale: f32, out: &mut Buffer) -> Result<(), KernelError> {
        let table = table.host()?;
        let (tokens, width, isa) = (&batch.tokens, table.k(), self.isa);
        let out = &mut out.host_mut::<f32>()?[..tokens.len() * width];
        self.threads.chunks_mut(out, width, width * GATHER_COST, |t, row| {
            table.copy_row(tokens[t] as usize, row);
            layer::scale(isa, row, scale);
        });
        Ok(())
    }

    fn add_positions(
        &self,
        batch: &ForwardBatch,
        table: &Matrix,
        offset: usize,
        x: &mut Buffer,
    ) -> Result<(), KernelError> {
        let table = table.host()?;
        let (positions, width) = (&batch.positions, table.k());
        let x = &mut x.host_mut::<f32>()?[..positions.len() * width];
        let mut row = vec![0.0; width];
        for (x, position) in x.chunks_mut(width).zip(positions) {
            table.copy_row(*position as usize + offset, &mut row);
            layer::add(self.isa, x, &row, 1.0);
        }
        Ok(())
    }

    fn add_types(&self, batch: &ForwardBatch, table: &Matrix, x: &mut Buffer) -> Result<(), KernelError> {
        let table = table.host()?;
        let width = table.k();
        let x = &mut x.host_mut::<f32>()?[..batch.tokens.len() * width];
        let mut row = vec![0.0; width];
        for (x, kind) in x.chunks_mut(width).zip(batch.types()) {
            table.copy_row(kind.min(table.n() - 1), &mut row);
            layer::add(self.isa, x, &row, 1.0);
        }
        Ok(())
    }

    fn rope_table(&self, table: usize, batch: &ForwardBatch, out: &mut Buffer) -> Result<(), KernelError> {
        let (positions, Rotation { frequencies, factor }) = (&batch.positions, &self.ropes[table]);
        let half = frequencies.len();
        let out = &mut out.host_mut::<f32>()?[..positions.len() * 2 * half];
        self.threads.chunks_mut(out, 2 * half, half * EXP_COST, |t, row| {
            let (cos, sin) = row.split_at_mut(half);
            for ((&f, cos), sin) in frequencies.iter().zip(cos).zip(sin) {
                let (s, c) = (positions[t] as f32 * f).sin_cos();
                (*sin, *cos) = (s * factor, c * factor);
            }
        });
        Ok(())
    }

    fn norm(&self, x: &Buffer, norm: &Norm, rows: usize, out: Out<'_>) -> Result<(), KernelError> {
        let (x, norm, isa) = (x.host::<f32>()?, norm.row()?, self.isa);
        let width = norm.width;
        match out {
            Out::Q8(blocks) => {
                let (blocks, per_row) = q8_rows(blocks, rows, width)?;
                self.threads.chunks_mut(blocks, per_row, width * RowBlock::COST, |t, out| {
                    layer::norm_q8(isa, &x[t * width..][..width], norm, out);
                });
            }
            Out::Numbers(out) => {
                let out = &mut out.host_mut::<f32>()?[..rows * width];
                // Groups of a row may have weights of their own.
                let groups = (norm.weight.len() / width.max(1)).max(1);
                self.threads.chunks_mut(out, width, width * PASS_COST, |t, out| {
                    layer::norm(isa, &x[t * width..][..width], norm.of_group(t % groups), out);
                });
            }
        }
        Ok(())
    }

    fn add(&self, x: &mut Buffer, y: &Buffer, scale: f32, rows: usize, width: usize) -> Result<(), KernelError> {
        let (x, y, isa) = (&mut x.host_mut::<f32>()?[..rows * width], y.host::<f32>()?, self.isa);
        self.threads.chunks_mut(x, width, width * PASS_COST, |t, x| {
            layer::add(isa, x, &y[t * width..][..width], scale);
        });
        Ok(())
    }

    /// One pass over the rows: each is still in the first-level cache when it is normed.
    fn add_norm(
        &self,
        x: &mut Buffer,
        y: &mut Buffer,
        scale: f32,
        norm: &Norm,
        rows: usize,
        q8: Option<&mut Buffer>,
    ) -> Result<(), KernelError> {
        let (norm, isa) = (norm.row()?, self.isa);
        let width = norm.width;
        let (x, y) = (&mut x.host_mut::<f32>()?[..rows * width], &mut y.host_mut::<f32>()?[..rows * width]);
        if let Some(blocks) = q8 {
            let (blocks, per_row) = q8_rows(blocks, rows, width)?;
            let y = &*y;
            self.threads.zip_chunks_mut((x, width), (blocks, per_row), width * RowBlock::COST, |t, x, out| {
                layer::add(isa, x, &y[t * width..][..width], scale);
                layer::norm_q8(isa, x, norm, out);
            });
            return Ok(());
        }
        self.threads.zip_chunks_mut((x, width), (y, width), width * PASS_COST, |_, x, y| {
            layer::add(isa, x, y, scale);
            layer::norm(isa, x, norm, y);
        });
        Ok(())
    }

    fn qk_norm_rope_cache(&self, batch: &ForwardBatch, args: QkvRows<'_>) -> Result<(), KernelError> {
        let QkvRows { qkv, rows, layer, query_norm, key_norm, value_norm, rope, .. } = args;
        let (isa, heads, positions) = (self.isa, layer.heads, &batch.positions);
        let (queries, keys) = (heads.query_width(), layer.own_kv_heads() * heads.head_dim);
        let mixes = args.cache.is_some_and(|cache| cache.format.mixes_keys(heads.head_dim));
        let key_offset = args.key_offset.map(|offset| offset.host::<f32>()).transpose()?;
        let stride = layer.row_width();
        let norms = [query_norm, key_norm, value_norm].map(|norm| norm.map(Norm::row).transpose());
        let [query_norm, key_norm, value_norm] = norms;
        let (query_norm, key_norm, value_norm) = (query_norm?, key_norm?, value_norm?);
        let table = rope.map(|rope| rope.host::<f32>()).transpose()?;
        let qkv = &mut qkv.host_mut::<f32>()?[..rows * stride];
        self.threads.chunks_mut(qkv, stride, (queries + keys) * PASS_COST, |t, row| {
            let norm = |row: &mut [f32]| {
                let (query_heads, others) = row.split_at_mut(queries);
                let (key_heads, others) = others.split_at_mut(keys);
                let value_heads = &mut others[..keys];
                for (heads, norm) in [(query_heads, query_norm), (key_heads, key_norm), (value_heads, value_norm)] {
                    if let Some(norm) = norm {
                        layer::norm_heads(isa, heads, norm);
                    }
                }
            };
            if !layer.norm_after_rope {
                norm(row);
            }
            if let Some(clip) = layer.clip {
                row[..queries + 2 * keys].iter_mut().for_each(|x| *x = x.clamp(-clip, clip));
            }
            if let Some((rope, table)) = layer.rope.as_ref().zip(table) {
                let table = &table[t * rope.dims..][..rope.dims];
                layer::rotate_heads(isa, &mut row[..queries + keys], heads.head_dim, table, rope.interleaved);
            }
            if layer.norm_after_rope {
                norm(row);
            }
            if let Some(growth) = layer.query_growth {
                let factor = growth.at(positions[t]);
                layer::scale(isa, &mut row[..queries], factor);
            }
            if let Some(offset) = key_offset {
                row[queries..queries + keys].iter_mut().zip(offset).for_each(|(x, offset)| *x -= offset);
            }
            if mixes {
                let [of_queries, of_keys] = layer::mixing_factors(heads.head_dim);
                let (queries, others) = row.split_at_mut(queries);
                layer::mix_heads(isa, queries, heads.head_dim, of_queries);
                layer::mix_heads(isa, &mut others[..keys], heads.head_dim, of_keys);
            }
        });
        Ok(())
    }

    fn attend_both(
        &self,
        batch: &ForwardBatch,
        BothRows { layer, qkv, output }: BothRows<'_>,
    ) -> Result<(), KernelError> {
        let (declared, stride, rows) = (&layer.declared, layer.declared.row_width(), batch.tokens.len());
        let shape = BothSides {
            heads: (declared.heads.num_heads, declared.heads.num_kv_heads),
            head_dim: declared.heads.head_dim,
            stride,
            scale: declared.scale,
            soft_cap: declared.soft_cap,
            window: declared.window,
            by_distance: layer.by_distance.as_ref().map_or(Ok(&[][..]), |table| table.host::<f32>())?,
            slopes: declared.alibi_slopes.as_deref().unwrap_or_default(),
        };
        let (isa, width) = (self.isa, declared.attended_width());
        let qkv = &qkv.host::<f32>()?[..rows * stride];
        let sequences: Vec<_> = batch.sequences().filter(|rows| !rows.is_empty()).collect();
        let longest = sequences.iter().map(std::ops::Range::len).max().unwrap_or(0);
        let seen = declared.window.map_or(longest, |window| longest.min(2 * window));
        self.threads.chunks_mut(&mut output.host_mut::<f32>()?[..rows * width], width, 2 * seen * width, |t, out| {
            let of = sequences.partition_point(|rows| rows.end <= t);
            let Some(sequence) = sequences.get(of) else { return };
            let keys = &qkv[sequence.start * stride..sequence.end * stride];
            layer::both_sides(isa, shape, keys, t - sequence.start, out);
        });
        Ok(())
    }

    fn latent_rows(&self, args: LatentRows<'_>) -> Result<(), KernelError> {
        let LatentRows { layer, latent, rows, queries, latents, norm, rope, out } = args;
        let (isa, norm, table) = (self.isa, norm.row()?, rope.host::<f32>()?);
        let Latent { nope_dim, rope_dim, rank, .. } = *latent;
        let (query_dim, dim, heads) = (nope_dim + rope_dim, layer.heads.head_dim, layer.heads.num_heads);
        let interleaved = layer.rope.as_ref().is_some_and(|rope| rope.interleaved);
        let queries = &queries.host::<f32>()?[..rows * heads * query_dim];
        let latents = &mut latents.host_mut::<f32>()?[..rows * dim];
        let out = &mut out.host_mut::<f32>()?[..rows * (heads + 1) * dim];
        let work = (heads + 1) * dim * PASS_COST;
        self.threads.zip_chunks_mut((out, (heads + 1) * dim), (latents, dim), work, |t, out, latent| {
            let table = &table[t * rope_dim..][..rope_dim];
            layer::norm_heads(isa, &mut latent[..rank], norm);
            let (queries_out, key) = out.split_at_mut(heads * dim);
            key.copy_from_slice(latent);
            let row = &queries[t * heads * query_dim..][..heads * query_dim];
            for (head, query) in queries_out.chunks_exact_mut(dim).zip(row.chunks_exact(query_dim)) {
                head[rank..rank + rope_dim].copy_from_slice(&query[nope_dim..]);
            }
            for head in out.chunks_exact_mut(dim) {
                layer::rotate_heads(isa, &mut head[rank..rank + rope_dim], rope_dim, table, interleaved);
            }
        });
        Ok(())
    }

    fn copy_heads(&self, size: HeadSizes, from: (&Buffer, usize), to: (&mut Buffer, usize)) -> Result<(), KernelError> {
        copy_heads(&self.threads, size, from, to)
    }

    fn index_rows(&self, args: IndexRows<'_>) -> Result<(), KernelError> {
        chosen::index_rows(self.isa, &self.threads, args)
    }

    fn attend_chosen(&mut self, args: ChosenRows<'_>) -> Result<(), KernelError> {
        chosen::attend(&self.threads, &mut self.chosen, args)
    }

    fn head_linear(&self, args: HeadProduct<'_>) -> Result<(), KernelError> {
        let HeadProduct { kernels, device, linears, shape, rows, x, from, y, to, scratch } = args;
        let ([inputs, outputs], [_, n, k]) = (scratch, shape);
        let copy = |width, from, to| HeadSizes { rows, heads: 1, width, from: [from, 0], to: [to, 0] };
        for (head, linear) in linears.iter().enumerate() {
            copy_heads(&self.threads, copy(k, from.stride, k), (x, head * from.head_stride), (inputs, 0))?;
            linear.run((kernels, device), attention_kernels::Rows::Numbers(inputs), rows, outputs, Dtype::F32, None)?;
            copy_heads(&self.threads, copy(n, n, to.stride), (outputs, 0), (y, head * to.head_stride))?;
        }
        Ok(())
    }

    fn recurrent(&mut self, args: RecurrentRows<'_>) -> Result<(), KernelError> {
        let norm = args.norm.map(Norm::row).transpose()?;
        recurrent::run(&mut self.recurrent, self.isa, &self.threads, norm, args)
    }

    fn gate(
        &self,
        attended: &mut Buffer,
        qkv: &Buffer,
        stride: usize,
        width: usize,
        rows: usize,
    ) -> Result<(), KernelError> {
        let (qkv, isa) = (qkv.host::<f32>()?, self.isa);
        let attended = &mut attended.host_mut::<f32>()?[..rows * width];
        self.threads.chunks_mut(attended, width, width * EXP_COST, |t, row| {
            layer::gate(isa, row, &qkv[(t + 1) * stride - width..][..width]);
        });
        Ok(())
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
        let (gate_up, isa) = (gate_up.host::<f32>()?, self.isa);
        let activate = Activate { activation, gated };
        let stride = if gated { 2 * width } else { width };
        match out {
            Out::Q8(blocks) => {
                let (blocks, per_row) = q8_rows(blocks, rows, width)?;
                self.threads.chunks_mut(blocks, per_row, width * (EXP_COST + RowBlock::COST), |t, out| {
                    layer::activate_q8(isa, activate, &gate_up[t * stride..][..stride], width, out);
                });
            }
            Out::Numbers(out) => {
                let out = &mut out.host_mut::<f32>()?[..rows * width];
                self.threads.chunks_mut(out, width, width * EXP_COST, |t, out| {
                    layer::activate(isa, activate, &gate_up[t * stride..][..stride], out);
                });
            }
        }
        Ok(())
    }

    fn activate_by(
        &self,
        activation: Activation,
        gate: &Buffer,
        (inputs, stride, first): (&Buffer, usize, usize),
        (rows, width): (usize, usize),
        out: &mut Buffer,
    ) -> Result<(), KernelError> {
        let (gate, inputs, isa) = (gate.host::<f32>()?, inputs.host::<f32>()?, self.isa);
        let activate = Activate { activation, gated: true };
        let out = &mut out.host_mut::<f32>()?[..rows * width];
        self.threads.chunks_mut(out, width, width * EXP_COST, |t, out| {
            let inputs = &inputs[t * stride + first..][..width];
            layer::activate_by(isa, activate, &gate[t * width..][..width], inputs, out);
        });
        Ok(())
    }

    fn streams(&self, args: StreamRows<'_>) -> Result<(), KernelError> {
        streams::run(self.isa, &self.threads, args)
    }

    fn sparsify(&self, x: &mut Buffer, width: usize, deviations: f32, rows: usize) -> Result<(), KernelError> {
        streams::sparsify(&self.threads, x, width, deviations, rows)
    }

    fn scale(&self, x: &mut Buffer, factor: f32, rows: usize, width: usize) -> Result<(), KernelError> {
        let x = &mut x.host_mut::<f32>()?[..rows * width];
        let isa = self.isa;
        self.threads.chunks_mut(x, width, width * PASS_COST, |_, x| layer::scale(isa, x, factor));
        Ok(())
    }

    /// Expert by expert: its rows are gathered, computed as those of any network, and added to the result. A row's sum goes over
    /// its experts in ascending order, so it does not depend on the other rows.
    fn experts(&mut self, args: ExpertRows<'_>) -> Result<(), KernelError> {
        let ExpertRows { declared, loaded, kernels, device, rows, x, scores, mixed, scratch, ranks } = args;
        let [inputs, gate_up, activated, output, gathered] = scratch;
        let width = declared.inputs();
        let outputs = declared.experts.first().map_or(width, |expert| expert.down.rows());
        let mut choices = std::mem::take(&mut self.choices);
        let [bias, scale] = [&loaded.choice_bias, &loaded.expert_scale]
            .map(|vector| vector.as_ref().map(|vector| vector.host::<f32>()).transpose());
        let scores = scores.host_mut::<f32>()?;
        choices.choose(&self.threads, declared, scores, [bias?, scale?], rows);
        let sum = &mut mixed.host_mut::<f32>()?[..rows * outputs];
        if !declared.adds_shared() {
            sum.fill(0.0);
        } else if declared.shared_gate {
            let stride = declared.router.rows();
            let (scores, isa) = (&*scores, self.isa);
            self.threads.chunks_mut(sum, outputs, outputs * PASS_COST, |row, sum| {
                let gate = 1.0 / (1.0 + (-scores[(row + 1) * stride - 1]).exp());
                layer::scale(isa, sum, gate);
            });
        }
        if let Some(profile) = device.profile() {
            let rows = choices.by_expert().map(|(expert, rows)| (expert, rows.len() as u64));
            profile.experts(declared.experts.len(), rows);
        }
        for (expert, chosen) in choices.by_expert() {
            let ([projections, down], network) = (&loaded.networks[expert], &declared.experts[expert]);
            let (source, isa, scales_inputs) = (x.host::<f32>()?, self.isa, declared.routing.scales_inputs);
            let rows_of_expert = &mut inputs.host_mut::<f32>()?[..chosen.len() * width];
            self.threads.chunks_mut(rows_of_expert, width, width * PASS_COST, |index, to| {
                let choice = chosen[index];
                to.copy_from_slice(&source[choice.row as usize * width..][..width]);
                if scales_inputs {
                    layer::scale(isa, to, choice.weight);
                }
            });
            let (count, inner) = (chosen.len(), network.width());
            let numbers = attention_kernels::Rows::Numbers;
            projections.run((kernels, device), numbers(inputs), count, gate_up, Dtype::F32, None)?;
            let out = Out::Numbers(activated);
            self.activate(network.activation, network.gated, gate_up, inner, count, out)?;
            let widths = &network.down.gathered_inputs;
            let activated = if widths.is_empty() {
                &*activated
            } else {
                ranks::needed(ranks)?.gather(device, activated, (count, widths, size_of::<f32>()), gathered)?;
                &*gathered
            };
            down.run((kernels, device), numbers(activated), count, output, Dtype::F32, None)?;
            let sum = &mut mixed.host_mut::<f32>()?[..rows * outputs];
            let from = output.host::<f32>()?;
            for_chosen(&self.threads, chosen, (sum, outputs), |index, to| {
                let weight = if scales_inputs { 1.0 } else { chosen[index].weight };
                layer::add(isa, to, &from[index * outputs..][..outputs], weight);
            });
        }
        self.choices = choices;
        Ok(())
    }

    fn gather_needed(
        &self,
        batch: &ForwardBatch,
        x: &Buffer,
        width: usize,
        out: &mut Buffer,
    ) -> Result<(), KernelError> {
        gather_rows(x, batch.needed.iter().flatten(), width, out)
    }

    fn gather_rows(&mut self, x: &Buffer, rows: &[u32], width: usize, out: &mut Buffer) -> Result<(), KernelError> {
        gather_rows(x, rows, width, out)
    }

    fn finish_logits(
        &self,
        logits: &mut Buffer,
        count: usize,
        scale: f32,
        soft_cap: Option<f32>,
    ) -> Result<(), KernelError> {
        const SHARE: usize = 1 << 10;
        let isa = self.isa;
        let logits = &mut logits.host_mut::<f32>()?[..count];
        self.threads.chunks_mut(logits, SHARE, SHARE * EXP_COST, |_, share| {
            layer::scale(isa, share, scale);
            if let Some(cap) = soft_cap {
                share.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
            }
        });
        Ok(())
    }

    fn to_host<'a>(&'a mut self, buffer: &'a Buffer, _dtype: Dtype, elements: usize) -> Result<&'a [f32], KernelError> {
        Ok(&buffer.host::<f32>()?[..elements])
    }
}

impl Cpu {
    pub fn new(device: &dyn Device, ropes: &[Rope]) -> Cpu {
        let ropes =
            ropes.iter().map(|rope| Rotation { frequencies: rope.frequencies(), factor: rope.attention_factor() });
        let (isa, threads, ropes) = (Isa::best(), device.pool().clone(), ropes.collect());
        Cpu {
            isa,
            threads,
            ropes,
            choices: Choices::default(),
            recurrent: recurrent::Lists::default(),
            chosen: Vec::new(),
        }
    }
}

//! The interpreter of a [`Program`](super::program::Program): it knows operations, not families.

use attention_kernels::{AttentionArgs, Dtype, KernelError, KvCache, Rows};
use device::{Buffer, Device};

use super::clock::clock;
use super::ops::{Out, QkvRows};
use super::program::{Op, Register};
use super::{ForwardBatch, Model};

/// Rows that a product reads.
fn rows_of(buffer: &Buffer, register: Register) -> Rows<'_> {
    if register == Register::Blocks { Rows::Blocks(buffer) } else { Rows::Numbers(buffer) }
}

/// Where rows go.
fn out_to(buffer: &mut Buffer, register: Register) -> Out<'_> {
    if register == Register::Blocks { Out::Blocks(buffer) } else { Out::Numbers(buffer) }
}

impl Model {
    /// All layers of a batch that was loaded. What is launched follows from the sizes of the batch, and, where it was loaded
    /// as fixed, from nothing else of it.
    pub(super) fn pass(&mut self, batch: &ForwardBatch, caches: &mut [KvCache]) -> Result<(), KernelError> {
        let Model { decoder, program, device, kernels, ops, loaded, step, .. } = self;
        let (device, dtype, hidden): (&dyn Device, Dtype, usize) =
            (&**device, kernels.format.dtype, decoder.hidden_size());
        let time = |operation, numbers| clock(device, operation, None, numbers, dtype);
        let mut rows = batch.tokens.len();
        step.reset_names();
        for op in &program.ops {
            match *op {
                Op::Embed => {
                    let _time = time("embed", 2 * rows * hidden);
                    ops.embed(batch, &loaded.linears[0].weights, step.register_mut(Register::Stream))?;
                }
                Op::RopeTable { table } => {
                    let _time = time("rope_table", 0);
                    ops.rope_table(table, batch, &mut step.ropes[table])?;
                }
                Op::Norm { norm, from, to } => {
                    let [x, out] = step.several([from, to])?;
                    let _time = time("rms_norm", 2 * rows * hidden);
                    ops.rms_norm(x, &loaded.norms[norm], rows, out_to(out, to))?;
                }
                Op::Linear { linear, from, to } => {
                    let [x, y] = step.several([from, to])?;
                    loaded.linears[linear].run(kernels, device, rows_of(x, from), rows, y, dtype)?;
                }
                Op::Heads { attention } => {
                    let (layer, plan) = (&mut loaded.attention[attention], program.attention[attention]);
                    let slots = &batch.groups[layer.group].slot_mapping;
                    let calibrates = layer.uncalibrated && slots.iter().any(|slot| *slot >= 0);
                    if calibrates {
                        // They are written in place, so that whoever knows their address finds them.
                        caches.iter_mut().for_each(|cache| cache.scales = None);
                    }
                    let (cache, heads) = (&mut caches[layer.place], layer.declared.heads);
                    // Layers of several groups share pages, not scales.
                    if !calibrates {
                        cache.scales.clone_from(&layer.kv_scales);
                    }
                    // One kernel that writes the cache too is known to the registry, by that.
                    let fused = kernels.cache_write.capabilities.fused && !calibrates;
                    let rotated = (heads.num_heads + heads.num_kv_heads) * heads.head_dim;
                    let variant = fused.then_some(kernels.cache_write.name);
                    let _time = clock(device, "heads", variant, 2 * rows * rotated, dtype);
                    let qkv = step.buffer_of(Register::Qkv);
                    let qkv = QkvRows {
                        qkv: &mut step.registers[qkv],
                        rows,
                        num_heads: heads.num_heads,
                        query_norm: plan.query_norm.map(|norm| &loaded.norms[norm]),
                        key_norm: plan.key_norm.map(|norm| &loaded.norms[norm]),
                        rope: &step.ropes[plan.table],
                        group: layer.group,
                        cache,
                        calibrate: layer.kv_scales.as_mut().filter(|_| calibrates),
                    };
                    ops.heads(device, kernels, batch, qkv)?;
                    layer.uncalibrated &= !calibrates;
                }
                Op::Attend { attention } => {
                    let layer = &loaded.attention[attention];
                    let [query, output] = step.several([Register::Qkv, Register::Attended])?;
                    let rows_of_group = &batch.groups[layer.group].attention;
                    for seqs in [0..batch.decodes, batch.decodes..rows_of_group.num_seqs()] {
                        if !seqs.is_empty() {
                            let args = AttentionArgs {
                                query,
                                query_stride: layer.declared.heads.qkv_width(),
                                num_heads: layer.declared.heads.num_heads,
                                output,
                                lse: None,
                                cache: &caches[layer.place],
                                batch: rows_of_group,
                                seqs,
                                scale: layer.declared.scale,
                                window: layer.declared.window,
                                soft_cap: None,
                                alibi_slopes: None,
                                workspace: ops.workspace(layer.group),
                            };
                            kernels.attention(device, args)?;
                        }
                    }
                }
                Op::Needed { moves } => {
                    let Some(needed) = batch.needed.as_ref().filter(|needed| needed.len() < rows) else { continue };
                    rows = needed.len();
                    for (from, to, width) in moves {
                        let [x, out] = step.several([from, to])?;
                        let _time = time("keep", 2 * rows * width);
                        ops.keep(batch, x, width, out)?;
                        step.swap(from, to);
                    }
                    if rows == 0 {
                        return Ok(());
                    }
                }
                Op::Activate { activation, width, to } => {
                    let [gate_up, out] = step.several([Register::GateUp, to])?;
                    let _time = time("silu_mul", 3 * rows * width);
                    ops.activate(activation, gate_up, width, rows, out_to(out, to))?;
                }
                Op::Add => {
                    let [x, y] = step.several([Register::Stream, Register::Branch])?;
                    let _time = time("add", 3 * rows * hidden);
                    ops.add(x, y, rows, hidden)?;
                }
                Op::AddNorm { norm, to } => {
                    let _time = time("add_norm", 4 * rows * hidden);
                    let norm = &loaded.norms[norm];
                    if to == Register::Blocks {
                        let [x, y, out] = step.several([Register::Stream, Register::Branch, to])?;
                        ops.add_norm(x, y, norm, rows, Some(out))?;
                    } else {
                        let [x, y] = step.several([Register::Stream, to])?;
                        ops.add_norm(x, y, norm, rows, None)?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use attention_kernels::{KernelChoice, Needs, select};
    use device::gemm::Quantization;
    use device::{Device, Options};

    use super::*;
    use crate::decoder::Form;
    use crate::forward::StepLimits;
    use crate::forward::program::{Fusion, Program};
    use crate::{ModelConfig, ModelFiles, Weights};

    const LIMITS: StepLimits =
        StepLimits { max_rows: 32, max_seqs: 2, max_model_len: 64, block_size: 8, num_blocks: 8 };

    /// Logits of a prompt's last token and of the token behind it.
    fn logits(case: &str, device: &Arc<dyn Device>, dtype: Dtype, form: Form, fused: bool) -> Vec<u32> {
        let folder = format!("{}/tests/reference/{case}", env!("CARGO_MANIFEST_DIR"));
        let files = ModelFiles::open(folder.as_ref()).unwrap();
        let decoder = ModelConfig::load(&files).unwrap().decoder.in_form(form);
        let needs = Needs { dtype, head_dim: decoder.heads().head_dim, window: true, ..Needs::on(&**device) };
        let kernels = select(&KernelChoice::default(), &needs).unwrap();
        let all = Fusion::of(&kernels);
        let fusion = if fused { all } else { Fusion { add_norm: false, blocks: false } };
        let count = |fusion, op: fn(&Op) -> bool| Program::new(&decoder, fusion).ops.iter().filter(|it| op(it)).count();
        assert_eq!(count(fusion, |op| matches!(op, Op::AddNorm { .. })) > 0, fused);
        assert_eq!(count(fusion, |op| matches!(op, Op::Add)) == 0, fused);
        let weights = Weights::open(&files).unwrap();
        let mut model =
            Model::load_fused(&decoder, &weights, device.clone(), kernels, fusion, LIMITS.max_rows, &|_, _| {})
                .unwrap();
        model.reserve(&LIMITS).unwrap();
        let mut caches = model.new_cache(LIMITS.num_blocks, LIMITS.block_size).unwrap();
        let (table, mut found) = ([5, 1, 4], Vec::new());
        let (mut batch, prompt): (_, Vec<u32>) = (ForwardBatch::default(), (3..20).collect());
        for (start, tokens) in [(0, &prompt[..]), (prompt.len(), &[7])] {
            let slots = (start..start + tokens.len()).map(|at| i64::from(table[at / 8]) * 8 + at as i64 % 8);
            batch.clear(1);
            let row = batch.push(start, tokens, [(&slots.collect::<Vec<_>>()[..], &table[..])]);
            batch.needed = Some(vec![row]);
            model.forward(&batch, &mut caches).unwrap();
            found.extend(model.logits(&[row]).unwrap().iter().map(|logit| logit.to_bits()));
        }
        found
    }

    #[test]
    fn operations_that_are_merged_have_the_bits_of_those_that_are_not() {
        let cpu = device::open("cpu", Some(1)).unwrap();
        let kernels = testkit::kernels::host::folder_for_tests();
        let options = Options { threads: Some(1), kernels: kernels.clone(), ..Options::default() };
        let sim = kernels.map(|_| device::open_with("cuda-sim", &options).unwrap());
        let on_cpu = [Form::Dense, Form::Quantized(Quantization::Q8), Form::Quantized(Quantization::Q4)];
        let on_sim = Dtype::ALL.map(|dtype| sim.as_ref().map(|sim| (sim, dtype, Form::Dense)));
        let all = on_cpu.map(|form| Some((&cpu, Dtype::F32, form))).into_iter().chain(on_sim).flatten();
        for (device, dtype, form) in all {
            let [merged, plain] = [true, false].map(|fused| logits("qwen3", device, dtype, form, fused));
            assert!(merged == plain, "{} in {dtype}, {form}", device.name());
        }
    }
}

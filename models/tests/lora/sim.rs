//! Adapters on `cuda-sim`, or on `cuda` where `QUIRE_TEST_DEVICE` says so: results near those of the CPU, bits that do not depend on
//! the batch, captured graphs, and memory.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use attention_kernels::{Dtype, KernelChoice, Needs, select};
use device::{Device, Options};
use linear::Arithmetic;
use models::decoder::Form;
use models::lora::{Adapter, AdapterLimits, adapter_slot_bytes};
use models::{Decoder, GraphCount, Model, ModelConfig, ModelFiles, StepLimits, Weights, weight_bytes};
use testkit::adapters::simple;

use super::{BLOCK_SIZE, BLOCKS_PER_SEQ, LIMITS, Loaded, Seq, load, modules};
use crate::common::{assert_allocated, folder, needs};
use crate::forward_sim::mean_tolerance;
use crate::support::opened;

const STEP: StepLimits = StepLimits {
    max_rows: 48,
    max_seqs: 6,
    max_model_len: BLOCKS_PER_SEQ * BLOCK_SIZE,
    block_size: BLOCK_SIZE,
    num_blocks: 6 * BLOCKS_PER_SEQ,
};

struct OnDevice {
    device: Arc<dyn Device>,
    decoder: Decoder,
    loaded: Loaded,
}

/// A model whose slots are empty; `None`, reported, where there is no compiler.
fn on_device(case: &Path, dtype: Dtype, limits: Option<AdapterLimits>, graphs: bool) -> Option<OnDevice> {
    let device = opened::open(Options { seed: 5, deterministic: true, ..Options::default() })?;
    let files = ModelFiles::open(case).unwrap();
    let decoder = ModelConfig::load(&files).unwrap().decoder.with_adapters(limits);
    let needs = Needs { dtype, row_invariant: true, ..needs(&*device, &decoder) };
    let kernels = select(&KernelChoice::default(), &needs).unwrap();
    let weights = Weights::open(&files).unwrap();
    let mut model = Model::load(&decoder, &weights, device.clone(), kernels, STEP.max_rows, &|_, _| Ok(())).unwrap();
    if graphs {
        model.use_graphs(STEP.max_seqs, 3);
    }
    model.reserve(&STEP).unwrap();
    if limits.is_none() || !graphs {
        let planned = weight_bytes(&decoder, &weights, device.features(), &kernels).unwrap().all
            + Model::step_bytes(&*device, &decoder, &kernels, &STEP)
            + limits.map_or(0, |limits| adapter_slot_bytes(&decoder, &limits, dtype));
        assert_allocated(&*device, planned, dtype.name());
    }
    let caches = model.new_cache(STEP.num_blocks, STEP.block_size).unwrap();
    Some(OnDevice { device, decoder, loaded: Loaded { model, caches } })
}

impl OnDevice {
    fn set(&mut self, slot: usize, folder: Option<&PathBuf>) {
        let adapter =
            folder.map(|folder| Arc::new(Adapter::read(folder, &self.decoder, &LIMITS, Arithmetic::Exact).unwrap()));
        self.loaded.model.set_adapter(slot, adapter).unwrap();
    }
}

/// Three adapters of other ranks and modules, in a folder that lives as long as the first value.
fn adapters(case: &Path) -> (tempfile::TempDir, [PathBuf; 3]) {
    let decoder = ModelConfig::load(&ModelFiles::open(case).unwrap()).unwrap().decoder;
    let (modules, temporary) = (modules(&decoder), tempfile::TempDir::new().unwrap());
    let folders = ["a", "b", "c"].map(|name| temporary.path().join(name));
    simple(&folders[0], &modules, 3, 1);
    simple(&folders[1], &modules[1..4], 20, 2);
    simple(&folders[2], &modules, 16, 3);
    (temporary, folders)
}

fn tokens(seq: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| 3 + (seq * 37 + i * 11) % 97).collect()
}

#[test]
fn logits_with_adapters_are_those_of_the_cpu_on_devices_that_launch_kernels() {
    // Separate modules, and packed by groups of heads, with biases.
    for (case, dtype) in
        [("llama", Dtype::F32), ("gpt-neox", Dtype::F32), ("llama", Dtype::F16), ("qwen3", Dtype::Bf16)]
    {
        let (_temporary, folders) = adapters(&folder(case));
        let Some(mut found) = on_device(&folder(case), dtype, Some(LIMITS), false) else { return };
        let mut cpu = load(&folder(case), Form::Dense, 2, Some(&folders));
        (0..3).for_each(|slot| found.set(slot, Some(&folders[slot])));
        let seqs: Vec<Seq> = (0..3).map(|slot| Seq::new(Some(slot), &tokens(slot, 12))).collect();
        let found = found.loaded.logits(seqs.clone(), &[12; 3]);
        for (slot, (found, want)) in found.iter().zip(cpu.logits(seqs, &[12; 3])).enumerate() {
            let errors: Vec<f32> = found.iter().zip(&want).map(|(a, b)| (a - b).abs()).collect();
            let greatest = errors.iter().copied().fold(0.0, f32::max);
            let mean = errors.iter().map(|error| f64::from(*error)).sum::<f64>() / errors.len() as f64;
            println!("{case} in {dtype}, slot {slot}: {greatest}, {mean} in the mean");
            assert!(mean < mean_tolerance(case, dtype), "{case} in {dtype}, slot {slot}: {mean} in the mean");
            assert!(dtype != Dtype::F32 || greatest < 2e-3, "{case}, slot {slot}: {greatest}");
        }
    }
}

/// Prompts of which all but the last four tokens are computed in one step, then decode steps, of one token or two as with drafts.
fn run(of: &mut OnDevice, slots: &[Option<u32>]) -> Vec<Vec<f32>> {
    let mut seqs: Vec<Seq> =
        slots.iter().zip(0..).map(|(slot, seq)| Seq::new(*slot, &tokens(seq, 9 + seq % 2))).collect();
    let prompts: Vec<usize> = seqs.iter().map(|seq| seq.tokens.len() - 4).collect();
    of.loaded.step(&mut seqs, &prompts);
    let rows = |more: usize| (0..seqs.len()).map(|seq| 1 + (seq + more) % 2).collect::<Vec<_>>();
    let decodes = [vec![1; seqs.len()], rows(0), rows(1)];
    let last = decodes.iter().map(|rows| of.loaded.step(&mut seqs, rows)).last().unwrap();
    last.into_iter().flatten().collect()
}

#[test]
fn a_row_has_the_bits_that_it_has_alone_with_and_without_graphs_and_one_without_adapter_those_without_lora() {
    let case = folder("llama");
    let (_temporary, folders) = adapters(&case);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let Some(mut plain) = on_device(&case, dtype, None, false) else { return };
        let mut eager = on_device(&case, dtype, Some(LIMITS), false).unwrap();
        let mut graphs = on_device(&case, dtype, Some(LIMITS), true).unwrap();
        let allocated = eager.device.allocated();
        for of in [&mut eager, &mut graphs] {
            of.set(0, Some(&folders[0]));
            of.set(2, Some(&folders[1]));
        }
        let without = run(&mut plain, &[None; 5]);
        let mixes: [&[Option<u32>]; 4] = [
            &[None, Some(0), Some(2), None, Some(0)],
            &[None; 5],
            &[Some(2), None, None, Some(0), None],
            &[Some(1), Some(2), Some(0), None, Some(1)],
        ];
        let mut seen = Vec::<(usize, &str, Vec<f32>)>::new();
        for (turn, slots) in mixes.into_iter().enumerate() {
            if turn == 3 {
                // Captured graphs are replayed with other contents of the slots.
                for of in [&mut eager, &mut graphs] {
                    of.set(0, Some(&folders[1]));
                    of.set(1, Some(&folders[2]));
                    of.set(2, Some(&folders[0]));
                }
            }
            let names = if turn == 3 { ["b", "c", "a"] } else { ["a", "", "b"] };
            let found = run(&mut eager, slots);
            assert!(found == run(&mut graphs, slots), "{dtype}, turn {turn}: graphs change a bit");
            for (seq, (slot, found)) in slots.iter().zip(found).enumerate() {
                let Some(slot) = slot else {
                    assert!(found == without[seq], "{dtype}, turn {turn}: sequence {seq} has no adapter");
                    continue;
                };
                assert!(found != without[seq], "{dtype}, turn {turn}: the adapter of sequence {seq} has no effect");
                // The same sequence with the same adapter, in another slot and among others.
                let name = names[*slot as usize];
                let before = seen.iter().find(|(other, of, _)| (*other, *of) == (seq, name));
                assert!(before.is_none_or(|(.., before)| *before == found), "{dtype}, turn {turn}: sequence {seq}");
                seen.push((seq, name, found));
            }
        }
        // Five sequences: the graph of 6 of either kind, and of 8 rows with drafts of a kernel that computes several of a sequence.
        // Other sizes are captured when a step has them.
        let (sizes, captured) = if dtype == Dtype::F32 { (8, 2) } else { (18, 4) };
        assert_eq!(graphs.loaded.model.graphs(), GraphCount { sizes, captured, failed: 0 });
        assert_eq!(eager.device.allocated().zip(allocated).map(|(now, then)| now - then), Some(0));
        // An empty slot, and one that does not exist.
        eager.set(1, None);
        for (slot, said) in [(1, "slot with an adapter: found 1"), (7, "slot with an adapter: found 7, expected 3")] {
            let mut seqs = [Seq::new(Some(slot), &tokens(0, 2))];
            let batch = eager.loaded.batch(&mut seqs, &[2]).0;
            let error = eager.loaded.model.forward(&batch, &mut eager.loaded.caches).unwrap_err().to_string();
            assert!(error.starts_with(said), "{error}");
        }
    }
}

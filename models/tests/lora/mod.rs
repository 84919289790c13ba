//! LoRA adapters: reading, and the forward pass of rows with adapters.

mod files;
mod fuzzed;
mod merged;
mod mixes;
mod ranks;
mod reference;
mod sim;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use attention_kernels::{Dtype, KernelChoice, KvCache, Needs, select};
use collective::{Collective, single};
use models::decoder::{Form, Reduce};
use models::lora::{Adapter, AdapterLimits};
use models::{Decoder, ForwardBatch, Model, ModelConfig, ModelFiles, Weights};
use testkit::adapters::Module;

use crate::common::needs;

const LIMITS: AdapterLimits = AdapterLimits { slots: 3, rank: 64 };
const BLOCK_SIZE: usize = 8;
const BLOCKS_PER_SEQ: usize = 26;
/// Most tokens of a step.
const MAX_ROWS: usize = 512;

/// The modules of a decoder that adapters may target.
fn modules(decoder: &Decoder) -> Vec<Module> {
    let mut modules = Vec::new();
    for linear in decoder.linears().filter(|linear| linear.adapters) {
        for part in &linear.parts {
            let module = (part.name.clone(), linear.inputs, part.pick.total);
            if !modules.contains(&module) {
                modules.push(module);
            }
        }
    }
    modules
}

/// The last parts of the names of modules, each once.
fn kinds(modules: &[Module]) -> Vec<String> {
    let mut kinds: Vec<String> =
        modules.iter().map(|(name, ..)| name.rsplit('.').next().unwrap().to_string()).collect();
    kinds.sort();
    kinds.dedup();
    kinds
}

/// A model on the CPU whose slots hold these adapters.
struct Loaded {
    model: Model,
    caches: Vec<KvCache>,
}

fn load(folder: &Path, form: Form, threads: usize, adapters: Option<&[PathBuf]>) -> Loaded {
    load_on(folder, (form, Dtype::F32), threads, adapters, (single(), Reduce::Gather))
}

/// The part of a model that one rank computes. Products in bfloat16 have the arithmetic of tiles.
fn load_on(
    folder: &Path,
    (form, arithmetic): (Form, Dtype),
    threads: usize,
    adapters: Option<&[PathBuf]>,
    (group, reduce): (Arc<dyn Collective>, Reduce),
) -> Loaded {
    let files = ModelFiles::open(folder).unwrap();
    let decoder = ModelConfig::load(&files).unwrap().decoder.in_form(form).with_adapters(adapters.map(|_| LIMITS));
    let decoder = decoder.shard(group.rank(), group.size(), reduce).unwrap();
    let device = device::open("cpu", Some(threads)).unwrap();
    let mut choice = KernelChoice::default();
    if arithmetic == Dtype::Bf16 {
        choice.linear = "cpu.portable_tiles".to_string();
    }
    let kernels = select(&choice, &Needs { arithmetic, ..needs(&*device, &decoder) }).unwrap();
    let weights = Weights::open(&files).unwrap();
    let mut model = Model::load(&decoder, &weights, device, kernels, MAX_ROWS, &|_, _| Ok(())).unwrap();
    model.join(group);
    for (slot, folder) in adapters.into_iter().flatten().enumerate() {
        let adapter = Adapter::read(folder, &decoder, &LIMITS, kernels.arithmetic).unwrap();
        model.set_adapter(slot, Some(Arc::new(adapter))).unwrap();
    }
    let caches = model.new_cache(20 * BLOCKS_PER_SEQ, BLOCK_SIZE).unwrap();
    Loaded { model, caches }
}

/// A sequence: the slot of its adapter, its tokens, and how many of them are computed.
#[derive(Clone, Debug)]
struct Seq {
    slot: Option<u32>,
    tokens: Vec<u32>,
    computed: usize,
}

impl Seq {
    fn new(slot: Option<u32>, tokens: &[u32]) -> Seq {
        Seq { slot, tokens: tokens.to_vec(), computed: 0 }
    }
}

impl Loaded {
    /// A batch of up to so many tokens of each sequence, each in blocks of its own, and the last row of those whose tokens are all
    /// computed.
    fn batch(&self, seqs: &mut [Seq], chunks: &[usize]) -> (ForwardBatch, Vec<Option<u32>>) {
        let groups = self.model.layout().groups.len();
        assert_eq!(groups, 1);
        let mut batch = ForwardBatch::default();
        batch.clear(groups);
        batch.needed = Some(Vec::new());
        let counts: Vec<usize> =
            seqs.iter().zip(chunks).map(|(seq, chunk)| (seq.tokens.len() - seq.computed).min(*chunk)).collect();
        let mut order: Vec<usize> = (0..seqs.len()).filter(|&i| counts[i] > 0).collect();
        order.sort_by_key(|&i| counts[i] > 1);
        let mut rows = vec![None; seqs.len()];
        for i in order {
            let (seq, count) = (&mut seqs[i], counts[i]);
            let table: Vec<i32> = (0..BLOCKS_PER_SEQ).map(|block| (i * BLOCKS_PER_SEQ + block) as i32).collect();
            let start = seq.computed;
            let slot = |p: usize| i64::from(table[p / BLOCK_SIZE]) * BLOCK_SIZE as i64 + (p % BLOCK_SIZE) as i64;
            let slots: Vec<i64> = (start..start + count).map(slot).collect();
            let last = batch.push(start, &seq.tokens[start..start + count], [(&slots[..], &table[..])]);
            if let Some(slot) = seq.slot {
                batch.set_adapter(slot);
            }
            seq.computed += count;
            if seq.computed == seq.tokens.len() {
                rows[i] = Some(last);
                batch.needed.as_mut().unwrap().push(last);
            }
        }
        (batch, rows)
    }

    /// Computes up to so many tokens of each sequence and returns the logits of the last token of those whose tokens are all
    /// computed.
    fn step(&mut self, seqs: &mut [Seq], chunks: &[usize]) -> Vec<Option<Vec<f32>>> {
        let (batch, rows) = self.batch(seqs, chunks);
        self.model.forward(&batch, &mut self.caches).unwrap();
        rows.into_iter().map(|row| Some(self.model.logits(&[row?]).unwrap().to_vec())).collect()
    }

    /// The logits of the last token of each sequence, computed in chunks of these sizes.
    fn logits(&mut self, mut seqs: Vec<Seq>, chunks: &[usize]) -> Vec<Vec<f32>> {
        let mut found = vec![None; seqs.len()];
        while found.iter().any(Option::is_none) {
            for (found, new) in found.iter_mut().zip(self.step(&mut seqs, chunks)) {
                *found = new.or(found.take());
            }
        }
        found.into_iter().flatten().collect()
    }
}

fn greatest(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    best.unwrap() as u32
}

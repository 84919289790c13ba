//! Decode steps as graphs on `cuda-sim`, or on `cuda` where `QUIRE_TEST_DEVICE` says so, against the same steps given kernel by kernel: equal bits, whatever the batch.
//!
//! A replay runs what was captured and nothing else, so a length, a slot or a grid that was frozen by mistake shows in the
//! steps after the first.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{assert_graph_bytes, faulty::faulty, files};
use crate::support::opened;
use attention_kernels::{Dtype, KernelChoice, KvCache, Needs, select};
use device::{Device, Options};
use models::decoder::Mixer;
use models::{ForwardBatch, GraphCount, Model, ModelConfig, StepLimits, Weights};

/// Contexts of up to 1200 tokens: three partitions.
pub const LIMITS: StepLimits =
    StepLimits { max_rows: 64, max_seqs: 11, max_model_len: 1200, block_size: 8, num_blocks: 160 };

pub struct Loaded {
    pub device: Arc<dyn Device>,
    faults: Arc<AtomicUsize>,
    pub model: Model,
    pub caches: Vec<KvCache>,
}

/// A model on a device of which a test can make replays and captures fail; `graphs`: decode steps are replayed.
fn load(case: &str, dtype: Dtype, windows: bool, choice: &KernelChoice, graphs: bool) -> Option<Loaded> {
    let (device, faults) = faulty(launching()?);
    Some(load_on((device, faults), (case, dtype, windows), choice, graphs.then_some(0), &LIMITS))
}

/// A device whose products have the same bits in a graph's padded step; `None`, reported, where there is no compiler.
pub fn launching() -> Option<Arc<dyn Device>> {
    opened::open(Options { seed: 3, deterministic: true, ..Options::default() })
}

/// A model for steps of this size; with `drafts`, decode steps that verify up to so many of a sequence are replayed.
pub fn load_on(
    (device, faults): (Arc<dyn Device>, Arc<AtomicUsize>),
    (case, dtype, windows): (&str, Dtype, bool),
    choice: &KernelChoice,
    drafts: Option<usize>,
    limits: &StepLimits,
) -> Loaded {
    let files = files(case);
    let mut config = ModelConfig::load(&files).unwrap();
    if windows {
        let branches = config.decoder.layers.iter_mut().flat_map(|layer| &mut layer.branches);
        let attention = branches.filter_map(|branch| match &mut branch.mixer {
            Mixer::Attention(attention) => Some(attention),
            _ => None,
        });
        attention.enumerate().for_each(|(layer, attention)| attention.window = (layer % 2 == 1).then_some(12));
    }
    let head_dim = config.decoder.heads().head_dim;
    let needs = Needs { dtype, head_dim, window: true, row_invariant: true, ..Needs::on(&*device) };
    let (set, weights) = (select(choice, &needs).unwrap(), Weights::open(&files).unwrap());
    let mut model =
        Model::load(&config.decoder, &weights, device.clone(), set, limits.max_rows, &|_, _| Ok(())).unwrap();
    if let Some(drafts) = drafts {
        model.use_graphs(limits.max_seqs, drafts);
    }
    model.reserve(limits).unwrap();
    let caches = model.new_cache(limits.num_blocks, limits.block_size).unwrap();
    Loaded { device, faults, model, caches }
}

/// Sequences by the number of their tokens; sequence s owns every `max_seqs`-th block, in each group others.
pub fn step(model: &Model, seqs: &[(usize, usize, usize)], needed: bool) -> ForwardBatch {
    let groups = model.layout().groups.len();
    let mut batch = ForwardBatch::default();
    batch.clear(groups);
    batch.needed = needed.then(Vec::new);
    for &(seq, start, tokens) in seqs {
        let block = |group: usize, i: usize| {
            // Every step of the walk is another block: 7 has no factor in common with the pool.
            ((seq * 14 + i + group * 80) * 7 % LIMITS.num_blocks) as i32
        };
        let size = LIMITS.block_size;
        let tables: Vec<Vec<i32>> =
            (0..groups).map(|g| (0..(start + tokens).div_ceil(size)).map(|i| block(g, i)).collect()).collect();
        let slots: Vec<Vec<i64>> = tables
            .iter()
            .map(|table| {
                let slot = |p: usize| i64::from(table[p / size]) * size as i64 + (p % size) as i64;
                (start..start + tokens).map(slot).collect()
            })
            .collect();
        let ids: Vec<u32> = (start..start + tokens).map(|p| ((seq * 37 + p * 11) % 97 + 3) as u32).collect();
        let last = batch.push(start, &ids, slots.iter().zip(&tables).map(|(s, t)| (&s[..], &t[..])));
        if let Some(needed) = &mut batch.needed {
            needed.push(last);
        }
    }
    batch
}

/// Logits of the last row of every sequence.
fn logits(loaded: &mut Loaded, batch: &ForwardBatch) -> Vec<Vec<f32>> {
    let rows: Vec<u32> = batch.groups[0].attention.query_starts[1..].iter().map(|end| end - 1).collect();
    loaded.model.forward(batch, &mut loaded.caches).unwrap();
    let vocab = loaded.model.decoder().vocab_size();
    loaded.model.logits(&rows).unwrap().chunks(vocab).map(<[f32]>::to_vec).collect()
}

#[test]
fn hidden_states_and_logits_of_any_row_of_a_replayed_step_are_those_of_an_eager_one() {
    // Mixtures leave their results in a buffer that then has the name of another, so it depends on their number.
    for case in ["llama", "mixtral", "qwen3-moe", "qwen2-moe", "gpt-oss"] {
        let mut found = Vec::new();
        for graphs in [false, true] {
            let Some(mut loaded) = load(case, Dtype::F32, false, &KernelChoice::default(), graphs) else { return };
            let Loaded { model, caches, .. } = &mut loaded;
            let prompts = step(model, &[(0, 0, 5), (1, 0, 9), (2, 0, 3)], false);
            model.forward(&prompts, caches).unwrap();
            let mut results = Vec::new();
            for at in 0..3 {
                let batch = step(model, &[(0, 5 + at, 1), (1, 9 + at, 1), (2, 3 + at, 1)], false);
                model.forward(&batch, caches).unwrap();
                results.extend_from_slice(model.hidden(&[2, 1]).unwrap());
                results.extend_from_slice(model.logits(&[1]).unwrap());
            }
            found.push(results.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        }
        assert!(found[0] == found[1], "{case}");
    }
}

/// Prompts of odd lengths, decode steps of sizes between those of graphs, mixed steps in between, sequences that leave and
/// come back, blocks that fill up.
fn history() -> Vec<Vec<(usize, usize, usize)>> {
    let mut lens: Vec<usize> = (0..6).map(|seq| 5 + seq * 3).collect();
    let mut steps = vec![lens[..3].iter().enumerate().map(|(s, len)| (s, 0, *len)).collect::<Vec<_>>()];
    steps.push(lens[3..].iter().enumerate().map(|(s, len)| (s + 3, 0, *len)).collect());
    let mut decode = |seqs: &[usize]| {
        let step = seqs.iter().map(|&s| (s, lens[s], 1)).collect::<Vec<_>>();
        seqs.iter().for_each(|s| lens[*s] += 1);
        step
    };
    for seqs in [&[0, 1, 2][..], &[0, 1, 2], &[2, 0], &[5], &[5, 4, 3, 2, 1, 0], &[1, 3, 5, 0, 2], &[0, 1, 2, 3]] {
        steps.push(decode(seqs));
    }
    // A mixed step, of which not all rows go through to the end.
    let mut mixed = decode(&[4, 1]);
    mixed.push((6, 0, 20));
    steps.push(mixed);
    for seqs in [&[5, 4, 3, 2, 1, 0][..], &[0, 1, 2], &[3], &[4, 5], &[1, 2, 3, 4, 5]] {
        steps.push(decode(seqs));
    }
    steps
}

#[test]
fn replayed_steps_have_the_bits_of_eager_ones_whatever_the_batch_and_the_lengths() {
    let gqa = KernelChoice { decode: "cuda.paged_gqa".into(), ..Default::default() };
    let by_name = KernelChoice { cache_write: "cuda.reshape_and_cache".into(), ..Default::default() };
    let any = KernelChoice::default();
    for (case, dtype, windows, choice) in [
        ("llama", Dtype::F32, false, &any),
        ("qwen2", Dtype::F16, false, &gqa),
        ("qwen3", Dtype::Bf16, false, &by_name),
        ("mistral-sliding", Dtype::Bf16, false, &any),
        ("llama", Dtype::F16, true, &any),
    ] {
        let Some(mut eager) = load(case, dtype, windows, choice, false) else { return };
        let mut graphs = load(case, dtype, windows, choice, true).unwrap();
        for (i, seqs) in history().iter().enumerate() {
            let batch = step(&eager.model, seqs, true);
            let want = logits(&mut eager, &batch);
            let found = logits(&mut graphs, &batch);
            assert!(want == found, "{case} in {dtype}, step {i}: {seqs:?}");
        }
        // 1, 2, 4 and 8, not 11.
        let count = GraphCount { sizes: 5, captured: 4, failed: 0 };
        assert_eq!((graphs.model.graphs(), eager.model.graphs()), (count, GraphCount::default()), "{case}");
        // Of some rows, in another order, and hidden states.
        let batch = step(&eager.model, &[(0, 30, 1), (1, 30, 1), (2, 30, 1)], false);
        for loaded in [&mut eager, &mut graphs] {
            loaded.model.forward(&batch, &mut loaded.caches).unwrap();
        }
        assert!(eager.model.logits(&[2, 0]).unwrap() == graphs.model.logits(&[2, 0]).unwrap());
        assert!(eager.model.logits(&[1]).unwrap() == graphs.model.logits(&[1]).unwrap());
        assert!(eager.model.hidden(&[0, 2]).unwrap() == graphs.model.hidden(&[0, 2]).unwrap());
    }
}

#[test]
fn one_graph_serves_contexts_of_one_partition_and_of_three() {
    for dtype in [Dtype::F32, Dtype::F16] {
        let choice = KernelChoice::default();
        let Some(mut eager) = load("llama", dtype, false, &choice, false) else { return };
        let mut graphs = load("llama", dtype, false, &choice, true).unwrap();
        // What stands in the cache before is the same in both: zeros.
        for start in [3, 600, 1199, 511] {
            let batch = step(&eager.model, &[(0, start, 1)], true);
            assert!(logits(&mut eager, &batch) == logits(&mut graphs, &batch), "{dtype}: {start}");
        }
        assert_eq!(graphs.model.graphs().captured, 1);
    }
}

#[test]
fn graphs_are_captured_on_padding_and_write_no_slot() {
    let choice = KernelChoice::default();
    let Some(mut loaded) = load("qwen3", Dtype::F16, false, &choice, true) else { return };
    let Loaded { device, model, caches, .. } = &mut loaded;
    assert_graph_bytes(&**device, model.measure_graphs(caches).unwrap());
    assert_eq!(model.graphs(), GraphCount { sizes: 5, captured: 1, failed: 0 });
    assert_graph_bytes(&**device, model.capture_graphs(caches).unwrap());
    assert_eq!(model.graphs(), GraphCount { sizes: 5, captured: 5, failed: 0 });
    for pages in caches.iter().flat_map(KvCache::buffers) {
        let mut bytes = vec![1; pages.len_bytes()];
        device.download(pages, 0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
    // Nine sequences are padded to eleven.
    let seqs: Vec<_> = (0..9).map(|seq| (seq, 4 * seq, 1)).collect();
    let batch = step(&loaded.model, &seqs, true);
    let mut eager = load("qwen3", Dtype::F16, false, &choice, false).unwrap();
    assert!(logits(&mut eager, &batch) == logits(&mut loaded, &batch));
    // Other caches: what the graph knows is not what the step is for.
    for loaded in [&mut eager, &mut loaded] {
        loaded.caches = loaded.model.new_cache(LIMITS.num_blocks, LIMITS.block_size).unwrap();
    }
    assert!(logits(&mut eager, &batch) == logits(&mut loaded, &batch));
    let next: Vec<_> = (0..9).map(|seq| (seq, 4 * seq + 1, 1)).collect();
    let batch = step(&loaded.model, &next, true);
    assert!(logits(&mut eager, &batch) == logits(&mut loaded, &batch));
}

#[test]
fn a_replay_that_fails_fails_its_step_and_a_capture_that_fails_leaves_the_size_without_a_graph() {
    let choice = KernelChoice::default();
    let Some(mut graphs) = load("llama", Dtype::Bf16, false, &choice, true) else { return };
    let mut eager = load("llama", Dtype::Bf16, false, &choice, false).unwrap();
    let mut both = |graphs: &mut Loaded, seqs: &[(usize, usize, usize)]| {
        let batch = step(&graphs.model, seqs, true);
        assert!(logits(&mut eager, &batch) == logits(graphs, &batch), "{seqs:?}");
    };
    both(&mut graphs, &[(0, 0, 1), (1, 0, 1)]);
    both(&mut graphs, &[(0, 1, 1), (1, 1, 1)]);
    graphs.faults.store(1, Ordering::Relaxed);
    let batch = step(&graphs.model, &[(0, 2, 1), (1, 2, 1)], true);
    let error = graphs.model.forward(&batch, &mut graphs.caches).unwrap_err().to_string();
    assert!(error.contains("a fault that a test asked for"), "{error}");
    both(&mut graphs, &[(0, 2, 1), (1, 2, 1)]);
    assert_eq!(graphs.model.graphs(), GraphCount { sizes: 5, captured: 1, failed: 0 });
    // The step of a failed capture is done all the same.
    graphs.faults.store(1, Ordering::Relaxed);
    both(&mut graphs, &[(0, 3, 1), (1, 3, 1), (2, 0, 1)]);
    both(&mut graphs, &[(0, 4, 1), (1, 4, 1), (2, 1, 1)]);
    assert_eq!(graphs.model.graphs(), GraphCount { sizes: 5, captured: 1, failed: 1 });
    both(&mut graphs, &[(1, 5, 1)]);
    assert_eq!(graphs.model.graphs(), GraphCount { sizes: 5, captured: 2, failed: 1 });
}

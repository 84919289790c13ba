//! Decode steps in which sequences have several rows, their last token and drafts, as graphs: equal bits to the same
//! steps given kernel by kernel, whatever the numbers of rows, and in no other slot of the cache.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use device::{Device, DeviceError, Graph, Launch, Product};

use crate::common::assert_graph_bytes;
use crate::graphs_sim::{LIMITS, Loaded, launching, load_on, step};
use crate::support::hooked::{Hooked, Hooks};
use attention_kernels::{Dtype, KernelChoice, KvCache};
use models::{ForwardBatch, GraphCount, StepLimits};

/// Greatest number of drafts of a sequence: so many that the decode kernel takes more than one tile of 16 rows for some.
const DRAFTS: usize = 9;
/// 50 rows at most: graphs of 2, 4, 8, 16, 32 and 50 rows, and of 1, 2, 4 and 5 single tokens.
const SMALL: StepLimits = StepLimits { max_seqs: 5, ..LIMITS };

/// Numbers of launches and products, and of replays.
#[derive(Clone, Default)]
struct Calls(Arc<[AtomicUsize; 2]>);

impl Hooks for Calls {
    fn launch(&self, device: &dyn Device, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.0[0].fetch_add(1, Relaxed);
        device.launch(launch)
    }
    fn product(&self, device: &dyn Device, product: Product<'_>) -> Result<(), DeviceError> {
        self.0[0].fetch_add(1, Relaxed);
        device.product(product)
    }
    fn replay(&self, device: &dyn Device, graph: &Graph) -> Result<(), DeviceError> {
        self.0[1].fetch_add(1, Relaxed);
        device.replay(graph)
    }
}

impl Calls {
    fn now(&self) -> [usize; 2] {
        self.0.each_ref().map(|count| count.load(Relaxed))
    }

    /// Asserts that one step since then was replayed, logits included: the only launch is that of the upload of its inputs.
    fn assert_replay(&self, before: [usize; 2], seqs: &[(usize, usize, usize)]) {
        let [launches, replays] = self.now();
        assert_eq!([launches - before[0], replays - before[1]], [1, 1], "launches and replays of {seqs:?}");
    }
}

fn load(case: &str, dtype: Dtype, windows: bool, drafts: Option<usize>) -> Option<(Loaded, Calls)> {
    let calls = Calls::default();
    let device: Arc<dyn Device> = Arc::new(Hooked { device: launching()?, hooks: calls.clone() });
    let choice = KernelChoice::default();
    Some((load_on((device, Arc::default()), (case, dtype, windows), &choice, drafts, &SMALL), calls))
}

/// Logits of all rows of a step, in the order of the batch.
fn logits(loaded: &mut Loaded, batch: &ForwardBatch) -> Vec<u32> {
    loaded.model.forward(batch, &mut loaded.caches).unwrap();
    let rows: Vec<u32> = (0..batch.tokens.len() as u32).collect();
    loaded.model.logits(&rows).unwrap().iter().map(|logit| logit.to_bits()).collect()
}

fn contents(device: &dyn Device, caches: &[KvCache]) -> Vec<Vec<u8>> {
    let download = |pages: &device::Buffer| {
        let mut bytes = vec![1; pages.len_bytes()];
        device.download(pages, 0, &mut bytes).unwrap();
        bytes
    };
    caches.iter().flat_map(KvCache::buffers).map(download).collect()
}

/// Steps of one to ten rows of each sequence, every n-th number of them: alone, all alike, all different, with padding and without. A
/// sequence continues behind its first row or later, as after drafts that were wrong or right.
fn history(every: usize) -> Vec<Vec<(usize, usize, usize)>> {
    let mut lens = [5, 17, 8, 0, 30];
    let mut steps = vec![vec![(0, 0, 5), (1, 0, 17)], vec![(2, 0, 8), (4, 0, 30)]];
    let each = (1..=1 + DRAFTS).step_by(every);
    let alike = each.clone().map(|rows| vec![(0, rows), (1, rows), (2, rows), (3, rows), (4, rows)]);
    let alone = each.map(|rows| vec![(1, rows)]);
    let mixed = [
        vec![(0, 1), (1, 4), (2, 2)],
        vec![(2, 3), (0, 1)],
        vec![(4, 4), (3, 10), (2, 3), (1, 9), (0, 2)],
        vec![(0, 1), (1, 1), (2, 1), (3, 1), (4, 10)],
        vec![(3, 2), (1, 1), (0, 8)],
    ];
    for (i, seqs) in alike.chain(alone).chain(mixed).enumerate() {
        steps.push(seqs.iter().map(|&(seq, rows)| (seq, lens[seq], rows)).collect());
        // How many drafts were right varies.
        seqs.iter().for_each(|&(seq, rows)| lens[seq] += 1 + (i + seq) % rows);
    }
    steps
}

#[test]
fn replayed_steps_with_up_to_k_drafts_of_each_sequence_have_the_bits_of_eager_ones_in_all_rows() {
    // The numbers of rows choose the graph, whatever the model.
    let every = if testkit::everything() { 1 } else { 4 };
    for (case, dtype, windows, every) in [
        ("llama", Dtype::F16, false, 1),
        ("qwen3", Dtype::Bf16, false, every),
        ("llama", Dtype::Bf16, true, every),
        ("mixtral", Dtype::F16, false, every),
    ] {
        let Some((mut eager, _)) = load(case, dtype, windows, None) else { return };
        let (mut graphs, calls) = load(case, dtype, windows, Some(DRAFTS)).unwrap();
        // Single tokens of 1, 2, 4 and 5 sequences; drafts of 2, 4, 8, 16, 32 and 50 rows.
        graphs.model.capture_graphs(&mut graphs.caches).unwrap();
        assert_eq!(graphs.model.graphs(), GraphCount { sizes: 10, captured: 10, failed: 0 }, "{case}");
        for (i, seqs) in history(every).iter().enumerate() {
            let batch = ForwardBatch { needed: None, ..step(&eager.model, seqs, false) };
            let before = calls.now();
            let (want, found) = (logits(&mut eager, &batch), logits(&mut graphs, &batch));
            assert!(want == found, "{case} in {dtype}, step {i}: {seqs:?}");
            if seqs.iter().all(|(_, _, rows)| *rows <= 1 + DRAFTS) {
                calls.assert_replay(before, seqs);
            }
        }
        let [eager, graphs] = [eager, graphs].map(|loaded| contents(&*loaded.device, &loaded.caches));
        assert!(eager == graphs, "{case} in {dtype}: padding has written a slot");
    }
}

#[test]
fn a_graph_for_drafts_is_captured_on_padding_and_serves_every_distribution_of_its_rows() {
    let Some((mut eager, _)) = load("llama", Dtype::F16, false, None) else { return };
    let (mut graphs, calls) = load("llama", Dtype::F16, false, Some(DRAFTS)).unwrap();
    let Loaded { device, model, caches, .. } = &mut graphs;
    assert_graph_bytes(&**device, model.measure_graphs(caches).unwrap());
    assert_eq!(model.graphs(), GraphCount { sizes: 10, captured: 2, failed: 0 });
    model.capture_graphs(caches).unwrap();
    assert_eq!(model.graphs(), GraphCount { sizes: 10, captured: 10, failed: 0 });
    assert!(contents(&*graphs.device, &graphs.caches).iter().flatten().all(|byte| *byte == 0));
    // 8 rows first, and contexts of one partition and of three.
    let steps = [
        vec![(0, 0, 4), (1, 600, 4)],
        vec![(0, 1190, 8)],
        vec![(0, 1, 1), (1, 510, 3), (2, 0, 1), (3, 1023, 2), (4, 70, 1)],
        vec![(2, 512, 2), (1, 1100, 4)],
        // 16 rows.
        vec![(0, 1101, 10), (1, 3, 3), (2, 511, 1)],
        vec![(1, 1020, 6), (0, 9, 10)],
    ];
    for seqs in &steps {
        let batch = ForwardBatch { needed: None, ..step(&eager.model, seqs, false) };
        let before = calls.now();
        assert!(logits(&mut eager, &batch) == logits(&mut graphs, &batch), "{seqs:?}");
        calls.assert_replay(before, seqs);
    }
}

#[test]
fn steps_with_more_rows_of_a_sequence_than_the_graphs_are_for_run_without_one() {
    let Some((mut eager, _)) = load("llama", Dtype::F16, false, None) else { return };
    let (mut graphs, calls) = load("llama", Dtype::F16, false, Some(DRAFTS)).unwrap();
    let batch = ForwardBatch { needed: None, ..step(&eager.model, &[(0, 0, 11), (1, 0, 1)], false) };
    assert!(logits(&mut eager, &batch) == logits(&mut graphs, &batch));
    assert_eq!((calls.now()[1], graphs.model.graphs().captured), (0, 0));
    // A kernel with one row of a sequence: single tokens only.
    let device: Arc<dyn Device> = launching().unwrap();
    let any = KernelChoice::default();
    let loaded = load_on((device, Arc::default()), ("llama", Dtype::F32, false), &any, Some(DRAFTS), &SMALL);
    assert_eq!((loaded.model.decode_rows(), loaded.model.graphs().sizes), (1, 4));
    // A state that cannot be reset to an earlier token.
    let limits = StepLimits { block_size: 128, ..SMALL };
    let recurrent = load_on(
        (launching().unwrap(), Arc::default()),
        ("qwen3-next", Dtype::Bf16, false),
        &any,
        Some(DRAFTS),
        &limits,
    );
    assert_eq!((recurrent.model.decode_rows(), recurrent.model.graphs().sizes), (16, 4));
}

//! Verification of drafts on a device that launches kernels: steps are replayed as CUDA graphs and drawn by the device's sampler, with the bits of an
//! engine without speculation.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use device::{Device, DeviceError, Dtype, Graph, Launch};
use engine::speculate::Speculation;
use engine::worker::{StepError, StepInput, StepOutput, Worker};
use engine::{Engine, EngineConfig, EngineParts, TokenEvent};
use proptest::prelude::*;
use testkit::everything;

use crate::common::hooked::{Hooked, Hooks, Transfer};
use crate::common::{VOCABULARY, config, on_sim, opened, parts_on, shared};
use crate::overlap::{Load, answers, option_requests};
use crate::speculate::{CERTAIN, Case, Oracle, check, plain};

/// That device in f16, for which the decode kernel computes several rows of a sequence, with room for `drafts` of each.
fn in_halves(config: EngineConfig, drafts: usize, graphs: bool) -> EngineConfig {
    let json = format!(r#"{{"method": "ngram", "num_speculative_tokens": {drafts}}}"#);
    let speculative = json.parse().ok();
    let bytes = |bytes| bytes / 2;
    let config = on_sim(config).unwrap();
    EngineConfig {
        dtype: Some(Dtype::F16),
        kv_cache_memory_bytes: config.kv_cache_memory_bytes.map(bytes),
        swap_space_bytes: bytes(config.swap_space_bytes),
        enforce_eager: !graphs,
        speculative,
        ..config
    }
}

#[test]
fn replayed_verifications_drawn_on_the_device_change_no_token_and_no_log_probability_of_any_load() {
    if on_sim(config(200)).is_none() {
        return;
    }
    // Loads, sources of drafts, their number, the pool, preemption, the prefix cache, and graphs.
    let load = (0u64..1000, 0usize..10, 1usize..6);
    let drafts = (0usize..5, 1usize..7, 2usize..9);
    let cases = (load, drafts, 10u64..24, 13usize..40, any::<(bool, bool, bool)>());
    let (accepted, preemptions) = (AtomicU64::new(0), AtomicU64::new(0));
    let config = ProptestConfig { cases: if everything() { 6 } else { 2 }, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    runner
        .run(&cases, |((seed, first, count), (method, most, wrong), blocks, budget, (swaps, caches, graphs))| {
            let case = Case { seed, first, count, method, most, wrong, blocks, budget, swaps, caches };
            let (right, preempted) = check(&case, |config| in_halves(config, most, graphs))?;
            accepted.fetch_add(right, Relaxed);
            preemptions.fetch_add(preempted, Relaxed);
            Ok(())
        })
        .unwrap();
    // One that shows something for certain, with graphs and without.
    for graphs in [false, true] {
        let (accepted, preemptions) = check(&CERTAIN, |config| in_halves(config, 3, graphs)).unwrap();
        assert!(accepted > 20 && preemptions > 0, "{accepted} accepted, {preemptions} preemptions");
    }
}

/// What a device did.
#[derive(Default)]
struct Seen {
    /// Launches of the last kernel of a step in which the device draws behind drafts.
    accepts: u64,
    /// Captures and replays of steps.
    graphs: [u64; 2],
    /// Copies to the host of a row of logits or more.
    rows_read: u64,
}

#[derive(Clone, Default)]
struct Observer(Arc<Mutex<Seen>>);

impl Hooks for Observer {
    fn launch(&self, device: &dyn Device, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.0.lock().unwrap().accepts += u64::from(launch.kernel == "sample_accept");
        device.launch(launch)
    }
    fn capture(&self, device: &dyn Device, work: &mut dyn FnMut()) -> Result<Graph, DeviceError> {
        self.0.lock().unwrap().graphs[0] += 1;
        device.capture(work)
    }
    fn replay(&self, device: &dyn Device, graph: &Graph) -> Result<(), DeviceError> {
        self.0.lock().unwrap().graphs[1] += 1;
        device.replay(graph)
    }
    fn before_transfer(&self, _: &dyn Device, transfer: &Transfer) -> Result<(), DeviceError> {
        let is_row = !transfer.upload && transfer.bytes >= VOCABULARY * size_of::<f32>();
        self.0.lock().unwrap().rows_read += u64::from(is_row);
        Ok(())
    }
}

/// Counts steps with drafts, and all steps of at most four rows of each sequence.
struct Counting(Box<dyn Worker>, Arc<[AtomicU64; 2]>);

impl Worker for Counting {
    fn submit(&mut self, input: Arc<StepInput>) {
        let spans = &input.plan.spans;
        let verifies = spans.iter().any(|span| span.drafts > 0);
        let is_decode = !spans.is_empty() && spans.iter().all(|span| span.tokens.len() <= 4);
        self.1[0].fetch_add(u64::from(verifies), Relaxed);
        self.1[1].fetch_add(u64::from(is_decode), Relaxed);
        self.0.submit(input);
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        self.0.collect(output)
    }

    fn num_sequences(&self) -> usize {
        self.0.num_sequences()
    }
}

/// Runs loads with three drafts of each sequence, a quarter of them wrong. Returns what the device did, and the numbers of steps with
/// drafts and of steps of at most four rows of each sequence.
fn observed(config: &EngineConfig, loads: &[Load]) -> (Seen, [u64; 2]) {
    let without = EngineConfig { speculative: None, ..config.clone() };
    let want = answers(&mut shared::engine(&without).unwrap(), loads);
    let options = device::Options { deterministic: true, ..Default::default() };
    let seen = Observer::default();
    let device = Hooked { device: opened::open(options).unwrap(), hooks: seen.clone() };
    let parts = parts_on(config, Arc::new(device));
    // A GPU captures its graphs while it loads.
    *seen.0.lock().unwrap() = Seen::default();
    let proposer = Oracle::new(&want, 4);
    let speculation = Some(Speculation { proposer, num_speculative_tokens: 3, is_adaptive: false });
    let steps = Arc::<[AtomicU64; 2]>::default();
    let worker = Box::new(Counting(parts.worker, steps.clone()));
    let mut engine = Engine::new(EngineParts { worker, speculation, ..parts }).unwrap();
    let got: Vec<Vec<TokenEvent>> = answers(&mut engine, loads);
    assert_eq!(plain(&engine, got), want);
    let seen = std::mem::take(&mut *seen.0.lock().unwrap());
    (seen, steps.each_ref().map(|count| count.load(Relaxed)))
}

#[test]
fn every_verification_is_replayed_as_a_graph_and_drawn_on_the_device() {
    if on_sim(config(200)).is_none() {
        return;
    }
    // All options that do not need the host: penalties, filters, lists and min_tokens, greedy; one with two sequences.
    let mut loads: Vec<Load> = option_requests().into_iter().take(4).collect();
    loads.iter_mut().for_each(|(request, _)| request.params.max_tokens = Some(30));
    let large = EngineConfig { max_model_len: Some(64), ..config(200) };
    for graphs in [true, false] {
        let (seen, [verifications, decodes]) = observed(&in_halves(large.clone(), 3, graphs), &loads);
        assert!(verifications > 5, "{verifications} verifications");
        assert_eq!((seen.accepts, seen.rows_read), (verifications, 0), "drawn on the device, no row of logits read");
        let [captures, replays] = seen.graphs;
        // The first step of a size is captured.
        let in_graphs = if graphs { decodes } else { 0 };
        assert_eq!(captures + replays, in_graphs, "{captures} captures, {replays} replays, {decodes} steps");
        assert!(!graphs || replays > captures);
    }
    // A kernel with one row of a sequence: only single tokens are replayed, but the device draws all the same.
    let single = on_sim(large.clone()).unwrap();
    let speculative = r#"{"method": "ngram", "num_speculative_tokens": 3}"#.parse().ok();
    let (seen, [verifications, _]) = observed(&EngineConfig { speculative, ..single }, &loads);
    assert_eq!((seen.accepts, seen.rows_read), (verifications, 0));
    // A grammar's rows are for the host, as is what exceeds the sampler, which has three rows.
    let constrained: Vec<Load> = option_requests().into_iter().filter(|(_, grammar)| grammar.is_some()).collect();
    let (seen, [verifications, _]) = observed(&in_halves(large.clone(), 3, true), &constrained);
    assert!(verifications > 0 && seen.accepts == 0 && seen.rows_read > 0);
    let narrow = EngineConfig { max_num_seqs: 3, speculative: None, ..in_halves(large, 3, true) };
    let (seen, [verifications, _]) = observed(&narrow, &loads);
    assert!(seen.accepts < verifications && seen.rows_read > 0, "{} of {verifications}", seen.accepts);
}

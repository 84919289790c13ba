//! Swaps run beside the steps: a step waits for a swap if it needs its blocks, and for no other.
//!
//! A device that only observes takes every swap to be under way until the compute queue waits for it or two more steps have been
//! submitted, and compares its blocks with those that each block copy and forward pass reads and writes.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::{Device, DeviceError, Event, Graph, Launch, Queue};
use engine::worker::{StepError, StepInput, StepOutput, Worker};
use engine::{Engine, EngineConfig, EngineParts, GenerationRequest, PreemptionMode, TokenEvent};
use sched::{MemOp, SeqId, StepPlan};

use crate::common::hooked::{Hooked, Hooks, Transfer};
use crate::common::{TOKEN_BYTES, opened, overlapping, parts_on, request};

const BLOCK_SIZE: usize = 8;
/// Bytes of a block of keys in one of the three layers.
const LAYER_BLOCK_BYTES: usize = BLOCK_SIZE * TOKEN_BYTES as usize / 3 / 2;

/// A swap that the compute queue has not waited for.
struct Swap {
    to_device: bool,
    blocks: HashSet<usize>,
    /// Recorded right before the event that the engine got.
    end: Option<Event>,
    step: usize,
}

#[derive(Default)]
struct Observed {
    step: usize,
    swaps: Vec<Swap>,
    tables: HashMap<SeqId, Vec<Vec<i64>>>,
    /// Blocks that each run of block copies of the step reads and writes.
    copies: VecDeque<[HashSet<usize>; 2]>,
    /// Blocks that the forward pass of the step reads and writes.
    pass: [HashSet<usize>; 2],
    capturing: bool,
    passes_beside_swaps: usize,
    waits: usize,
    mistakes: Vec<String>,
}

impl Observed {
    /// A step without poison, which release builds do not order.
    fn submit(&mut self, plan: &mut StepPlan) {
        self.step += 1;
        let step = self.step;
        self.swaps.retain(|swap| swap.step + 2 > step);
        plan.memory.retain(|op| !matches!(op, MemOp::Poison { .. }));
        plan.released.iter().for_each(|seq| drop(self.tables.remove(seq)));
        let runs = plan.memory.chunk_by(|a, b| std::mem::discriminant(a) == std::mem::discriminant(b));
        let blocks = |run: &[MemOp]| {
            let pairs = run.iter().filter_map(|op| match op {
                MemOp::Copy { src, dst } => Some((src.index(), dst.index())),
                _ => None,
            });
            let (reads, writes): (HashSet<_>, HashSet<_>) = pairs.unzip();
            [reads, writes]
        };
        self.copies = runs.map(blocks).filter(|[reads, _]| !reads.is_empty()).collect();
        self.pass = Default::default();
        for span in &plan.spans {
            let tables = self.tables.entry(span.seq).or_default();
            tables.resize_with(span.groups.len(), Vec::new);
            for (table, group) in tables.iter_mut().zip(&span.groups) {
                group.table.apply(table, -1, |block| i64::from(block.0));
                self.pass[0].extend(table.iter().filter_map(|block| usize::try_from(*block).ok()));
                self.pass[1].extend(group.slots.iter().map(|slot| *slot as usize / BLOCK_SIZE));
            }
        }
    }

    fn compare(&mut self, what: &str, [reads, writes]: &[HashSet<usize>; 2]) {
        for Swap { to_device, blocks, .. } in &self.swaps {
            let conflicts = |block: &&usize| writes.contains(block) || *to_device && reads.contains(block);
            if let Some(block) = blocks.iter().find(conflicts) {
                let direction = if *to_device { "in" } else { "out" };
                self.mistakes.push(format!("{what} of step {}: block {block} is being swapped {direction}", self.step));
            }
        }
    }

    fn begin_pass(&mut self) {
        if !self.capturing {
            let pass = std::mem::take(&mut self.pass);
            self.compare("the forward pass", &pass);
            self.passes_beside_swaps += usize::from(!self.swaps.is_empty());
        }
    }
}

/// Observes the calls of a device and the inputs of its worker.
#[derive(Default)]
struct Observer(Mutex<Observed>);

impl Observer {
    fn lock(&self) -> MutexGuard<'_, Observed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hooks for Arc<Observer> {
    fn launch(&self, device: &dyn Device, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let mut observed = self.lock();
        match launch.kernel {
            "rope_table" => observed.begin_pass(),
            "copy_blocks" => {
                let copies = observed.copies.pop_front().unwrap_or_default();
                observed.compare("a block copy", &copies);
            }
            _ => {}
        }
        drop(observed);
        device.launch(launch)
    }

    fn capture(&self, device: &dyn Device, work: &mut dyn FnMut()) -> Result<Graph, DeviceError> {
        self.lock().capturing = true;
        let graph = device.capture(work);
        self.lock().capturing = false;
        graph
    }

    fn replay(&self, device: &dyn Device, graph: &Graph) -> Result<(), DeviceError> {
        self.lock().begin_pass();
        device.replay(graph)
    }

    fn before_transfer(&self, _: &dyn Device, transfer: &Transfer) -> Result<(), DeviceError> {
        if transfer.queue == Queue::Copy {
            let mut observed = self.lock();
            let (step, to_device) = (observed.step, transfer.upload);
            if observed.swaps.last().is_none_or(|last| last.end.is_some()) {
                observed.swaps.push(Swap { to_device, blocks: HashSet::new(), end: None, step });
            }
            let blocks = transfer.at / LAYER_BLOCK_BYTES..(transfer.at + transfer.bytes) / LAYER_BLOCK_BYTES;
            observed.swaps.last_mut().unwrap().blocks.extend(blocks);
        }
        Ok(())
    }

    fn record(&self, device: &dyn Device, queue: Queue) -> Result<Event, DeviceError> {
        if queue == Queue::Copy
            && let Some(swap) = self.lock().swaps.last_mut().filter(|swap| swap.end.is_none())
        {
            swap.end = Some(device.record(queue)?);
        }
        device.record(queue)
    }

    fn wait(&self, device: &dyn Device, queue: Queue, event: &Event) -> Result<(), DeviceError> {
        if queue == Queue::Compute {
            let mut observed = self.lock();
            let before = observed.swaps.len();
            let is_over =
                |swap: &Swap| swap.end.as_ref().is_some_and(|end| event.since(end).is_ok_and(|time| !time.is_zero()));
            observed.swaps.retain(|swap| !is_over(swap));
            if observed.swaps.len() == before {
                let step = observed.step;
                observed.mistakes.push(format!("step {step} waits for a swap that is over"));
            }
            observed.waits += 1;
        }
        device.wait(queue, event)
    }
}

struct Observing(Box<dyn Worker>, Arc<Observer>);

impl Worker for Observing {
    fn submit(&mut self, input: Arc<StepInput>) {
        let mut input = StepInput::clone(&input);
        self.1.lock().submit(&mut input.plan);
        self.0.submit(Arc::new(input));
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        self.0.collect(output)
    }

    fn num_sequences(&self) -> usize {
        self.0.num_sequences()
    }
}

/// An engine that swaps, and its observer.
fn observed(blocks: u64) -> Option<(Engine, Arc<Observer>)> {
    let config = EngineConfig { preemption_mode: PreemptionMode::Swap, ..overlapping(blocks)? };
    let options = device::Options { deterministic: config.deterministic, ..Default::default() };
    let hooks = Arc::new(Observer::default());
    let device = Hooked { device: opened::open(options)?, hooks: hooks.clone() };
    let parts = parts_on(&config, Arc::new(device));
    let worker = Box::new(Observing(parts.worker, hooks.clone()));
    Some((Engine::new(EngineParts { worker, ..parts }).unwrap(), hooks))
}

/// Tokens by request and sequence.
fn drive(engine: &mut Engine, requests: &[GenerationRequest]) -> Vec<Vec<Vec<u32>>> {
    let ids: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    let mut tokens: Vec<_> = requests.iter().map(|request| vec![Vec::new(); request.params.n]).collect();
    while engine.has_work() {
        engine.step(|id, event| {
            if let TokenEvent::Token { index, token: Some(token), .. } = event {
                let place = ids.iter().position(|known| *known == id).unwrap();
                tokens[place][index as usize].push(token.token);
            }
        });
    }
    engine.audit().unwrap();
    tokens
}

#[test]
fn a_step_waits_for_the_swaps_of_its_blocks_and_for_no_others() {
    let Some((mut large, _)) = observed(200) else { return };
    let requests: Vec<_> = (0..7).map(|i| request(i, 9 + i as usize, 20, 1 + i as usize % 2)).collect();
    let want = drive(&mut large, &requests);
    let (mut engine, observer) = observed(16).unwrap();
    assert_eq!(drive(&mut engine, &requests), want);
    let observed = observer.lock();
    assert!(observed.mistakes.is_empty(), "{:#?}", observed.mistakes);
    let swaps = engine.stats().scheduler.swap_preemptions;
    assert!(swaps > 3 && observed.waits > 0, "{swaps} swaps and {} waits show nothing", observed.waits);
    assert!(observed.passes_beside_swaps > 0, "every step waited for every swap");
}

//! Workers around another worker.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use device::profile::Step;
use engine::worker::{StepError, StepInput, StepOutput, Worker};
use engine::{Engine, EngineConfig, EngineParts};

use super::shared;

/// A worker whose host draws for every request.
pub struct OnHost(pub Box<dyn Worker>);

impl Worker for OnHost {
    fn submit(&mut self, input: Arc<StepInput>) {
        let mut input = StepInput::clone(&input);
        input.requests.iter_mut().for_each(|request| Arc::make_mut(request).on_host = true);
        self.0.submit(Arc::new(input));
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        self.0.collect(output)
    }

    fn num_sequences(&self) -> usize {
        self.0.num_sequences()
    }
}

/// An engine that draws on the host and plans no step ahead.
pub fn on_host(config: &EngineConfig) -> Engine {
    let mut parts = shared::parts(config).unwrap();
    assert!(parts.info.sampler.take().is_some(), "cuda-sim draws on the device");
    parts.info.max_in_flight = 1;
    Engine::new(EngineParts { worker: Box::new(OnHost(parts.worker)), ..parts }).unwrap()
}

/// Steps with work that were submitted to a worker and collected from it.
#[derive(Default)]
pub struct Steps {
    pub submitted: AtomicUsize,
    pub collected: AtomicUsize,
}

impl Steps {
    /// Numbers of steps in flight and of steps submitted.
    pub fn now(&self) -> (usize, usize) {
        let submitted = self.submitted.load(Relaxed);
        (submitted - self.collected.load(Relaxed), submitted)
    }
}

/// A worker that counts its steps.
struct Counted(Box<dyn Worker>, Arc<Steps>);

impl Worker for Counted {
    fn submit(&mut self, input: Arc<StepInput>) {
        self.1.submitted.fetch_add(1, Relaxed);
        self.0.submit(input);
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        self.1.collected.fetch_add(1, Relaxed);
        self.0.collect(output)
    }

    fn num_sequences(&self) -> usize {
        self.0.num_sequences()
    }

    fn profile_step(&self) -> Option<Step> {
        self.0.profile_step()
    }
}

/// An engine, and the steps that its worker is given.
pub fn counted(config: &EngineConfig) -> (Engine, Arc<Steps>) {
    counted_parts(shared::parts(config).unwrap())
}

/// The same of these parts.
pub fn counted_parts(parts: EngineParts) -> (Engine, Arc<Steps>) {
    let steps = Arc::new(Steps::default());
    let worker = Box::new(Counted(parts.worker, steps.clone()));
    (Engine::new(EngineParts { worker, ..parts }).unwrap(), steps)
}

//! An idle engine gives memory back, and takes it again.

use std::sync::Arc;

use super::Engine;
use crate::api::{SleepError, SleepLevel};
use crate::worker::{StepError, StepInput, StepOutput, Worker};

/// In place of a worker that has been dropped.
struct Dropped;

impl Worker for Dropped {
    fn submit(&mut self, _: Arc<StepInput>) {}

    fn collect(&mut self, _: &mut StepOutput) -> Result<(), StepError> {
        Err(StepError("the engine sleeps".to_string()))
    }

    fn num_sequences(&self) -> usize {
        0
    }
}

impl Engine {
    /// Empties the prefix cache and gives memory back. No request may be unfinished and no step in flight.
    ///
    /// # Errors
    /// Requests are unfinished, or the worker cannot do it. The engine goes on as before, but for its prefix cache.
    pub(crate) fn sleep(&mut self, level: SleepLevel) -> Result<(), SleepError> {
        if self.num_unfinished() > 0 || !self.in_flight.is_empty() {
            return Err(SleepError::Busy(self.num_unfinished()));
        }
        if level == SleepLevel::Pause {
            return Ok(());
        }
        if self.exchange.is_some() {
            let problem =
                "an engine that exchanges blocks with other replicas cannot give its cache back; stop it instead";
            return Err(SleepError::Unsupported(problem.to_string()));
        }
        if !self.reset_prefix_cache(false) {
            return Err(SleepError::Busy(0));
        }
        if level == SleepLevel::Cache {
            return self.worker.free_cache().map_err(|error| SleepError::Unsupported(error.0));
        }
        // It knew them.
        self.ended.clear();
        self.worker = Box::new(Dropped);
        Ok(())
    }

    /// Takes the memory again that [`Engine::sleep`] gave back. `reload` makes the worker anew.
    ///
    /// # Errors
    /// Memory cannot be allocated, or the weights cannot be read.
    pub(crate) fn wake(
        &mut self,
        level: SleepLevel,
        reload: impl FnOnce() -> Result<Box<dyn Worker>, String>,
    ) -> Result<(), SleepError> {
        match level {
            SleepLevel::Pause => {}
            SleepLevel::Cache => self.worker.allocate_cache().map_err(|error| SleepError::Failed(error.0))?,
            SleepLevel::CacheAndWeights => self.worker = reload().map_err(SleepError::Failed)?,
        }
        Ok(())
    }
}

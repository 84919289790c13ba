//! The loop of the ranks other than 0: they compute what they are told, until rank 0 ends.

use std::sync::Arc;

use collective::Collective;
use models::lora::AdapterStore;

use super::pieces;
use super::rank::{Rank, together};
use super::worker::{ANSWER, Order, Outcomes};
use crate::error::EngineError;
use crate::worker::{StepOutput, Worker};

/// Computes the orders of rank 0, with adapters in this store. Returns why the group has failed.
pub(crate) fn obey(rank: &Rank, local: &mut dyn Worker, store: Option<&AdapterStore>) -> Result<(), String> {
    let mut outcomes = Outcomes::new(rank);
    let (mut bytes, mut output, mut expected) = (Vec::new(), StepOutput::default(), 0);
    loop {
        let decoded = postcard::from_bytes::<(u64, Order)>(pieces::receive(&*rank.world, &mut bytes)?);
        let (number, order) = decoded.map_err(|error| format!("an order that cannot be read ({error})"))?;
        if number != expected {
            return Err(format!("found order {number} of rank 0, expected {expected}"));
        }
        expected += 1;
        match order {
            Order::Step(input) => {
                local.submit(Arc::new(input));
                let collected = local.collect(&mut output);
                outcomes.compare(expected, &collected, &output)?;
                if rank.world.rank() == rank.drawing_rank() {
                    outcomes.send(&*rank.world)?;
                }
                // Without its rows the stages behind it would wait.
                if rank.stages() > 1 {
                    collected.map_err(|error| error.to_string())?;
                }
            }
            Order::Adapter(adapter, kept) => {
                // Every rank has the settings of rank 0, so if that has a store, this one has too.
                let read = store.map_or(Ok(()), |store| store.follow(&adapter, &kept).map_err(EngineError::from));
                if let Err(EngineError::Ranks(error)) = together(&*rank.world, read) {
                    return Err(error.to_string());
                }
            }
            Order::Probe => rank.world.agree(ANSWER, expected).map_err(|error| error.to_string())?,
            Order::End => return Ok(()),
        }
    }
}

/// Ends a group if this rank's thread panics: no rank may end silently, because the others would wait for it.
pub(crate) struct EndOnPanic(pub Arc<dyn Collective>);

impl Drop for EndOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort(&format!("rank {} has panicked", self.0.rank()));
        }
    }
}

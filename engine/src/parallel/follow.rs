//! The loop of the ranks other than 0: they compute what they are told, until rank 0 ends.

use std::sync::Arc;

use device::Collective;

use super::place::Place;
use super::worker::{ANSWER, Order, Outcomes};
use crate::worker::{StepOutput, Worker};

/// Computes the orders of rank 0. Returns why the group has failed.
pub(crate) fn obey(place: &Place, local: &mut dyn Worker) -> Result<(), String> {
    let mut outcomes = Outcomes::new(place);
    let (mut bytes, mut output, mut expected) = (Vec::new(), StepOutput::default(), 0);
    loop {
        place.world.broadcast(0, &mut bytes).map_err(|error| error.to_string())?;
        let decoded = postcard::from_bytes::<(u64, Order)>(&bytes);
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
                if place.world.rank() == place.drawing_rank() {
                    outcomes.send(&*place.world)?;
                }
                // Without its rows the stages behind it would wait.
                if place.stages() > 1 {
                    collected.map_err(|error| error.to_string())?;
                }
            }
            Order::Probe => place.world.agree(ANSWER, expected).map_err(|error| error.to_string())?,
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

//! A step between its launch and its commit: who draws where, and how it is known to be over.

use std::sync::Arc;

use attention_kernels::KernelError;
use device::{DeviceError, Event};
use sampling::device::{Pending, SampleError};
use sched::{SeqId, StepPlan};

use super::Engine;
use crate::draw::{allowed, ready};
use crate::executor::Needed;

/// Why a step could not be computed.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Sample(#[from] SampleError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Can only be a fault of this file.
    #[error("{0}: a step awaits its last token, and the device does not draw for it")]
    Unknown(SeqId),
}

/// Who draws where in a step.
#[derive(Default)]
pub(super) struct Lists {
    /// Whose tokens the device draws, in the order of its results.
    pub drawn: Vec<SeqId>,
    /// Spans whose last row the host draws from.
    pub on_host: Vec<usize>,
    /// Spans that complete the prompt of a request that wants no token.
    pub no_token: Vec<usize>,
}

/// A step that the device has been given.
pub(super) struct Flight {
    pub plan: Arc<StepPlan>,
    pub lists: Lists,
    /// The host takes prompt log-probabilities or hidden states of it.
    pub scored: bool,
    /// The next step must not be planned before this one is committed: the host looks at its rows, which the next would
    /// overwrite; or what it draws is held by a grammar, and the next mask follows from the token.
    pub holds_up: bool,
    /// It was not launched whole.
    pub failure: Option<StepError>,
    pub results: Results,
    /// A test wants its failure to come to light when it is waited for.
    #[cfg(test)]
    pub fails_late: bool,
}

/// How a step is known to be over.
pub(super) enum Results {
    /// By its draws on the device.
    Drawn(Pending),
    /// By an event alone.
    Marked(Event),
    /// By the call that launched it, or by its logits, which the host waits for.
    Host,
}

impl Flight {
    /// With lists whose contents are of no meaning.
    pub fn new(plan: Arc<StepPlan>, mut lists: Lists) -> Flight {
        lists.drawn.clear();
        lists.on_host.clear();
        lists.no_token.clear();
        Flight {
            plan,
            lists,
            scored: false,
            holds_up: false,
            failure: None,
            results: Results::Host,
            #[cfg(test)]
            fails_late: false,
        }
    }
}

impl Engine {
    /// Gives a planned step to the device: memory operations, forward pass, draws. On a device that launches kernels nothing
    /// here waits.
    pub(super) fn give(&mut self, flight: &mut Flight) -> Result<(), StepError> {
        let plan = flight.plan.clone();
        self.release_slots(&plan);
        let (requests, max_model_len) = (&self.requests, self.max_model_len);
        let mut scored = false;
        self.executor.prepare(&plan, |span| match requests.get(&span.seq.request) {
            Some(active) if active.is_scored() => {
                scored = true;
                Needed::All
            }
            Some(active) if !span.sample.is_empty() && active.limit(max_model_len) > 0 => Needed::Last,
            _ => Needed::None,
        })?;
        flight.scored = scored;
        self.seat(flight)?;
        flight.holds_up |= flight.scored || !flight.lists.on_host.is_empty();
        let Engine { slots, executor, rows, .. } = self;
        let Some(slots) = slots else { return Ok(executor.forward(None)?) };
        slots.stage()?;
        #[cfg(test)]
        {
            flight.fails_late = executor.silent_after == Some(0);
        }
        executor.forward(Some(&|tokens| slots.fill(tokens)))?;
        flight.results = if flight.lists.drawn.is_empty() {
            Results::Marked(executor.mark()?)
        } else {
            Results::Drawn(slots.draw(executor.device_logits(rows)?)?)
        };
        Ok(())
    }

    /// Takes the slots of sequences that have lost their keys and values: those who come back have them set anew.
    fn release_slots(&mut self, plan: &StepPlan) {
        let Engine { slots: Some(slots), requests, .. } = self else { return };
        for seq in &plan.released {
            if let Some(slot) = requests.get_mut(&seq.request).and_then(|a| a.slots.get_mut(seq.index as usize)) {
                slots.release(slot);
            }
        }
        // Sequences that have not forked from their prompt yet have a slot, but no table of their own.
        for id in &plan.preempted {
            if let Some(active) = requests.get_mut(id) {
                active.slots.iter_mut().for_each(|slot| slots.release(slot));
            }
        }
    }

    /// Decides for every row that is drawn from whether the device does it, and gives that what it has to know.
    fn seat(&mut self, flight: &mut Flight) -> Result<(), StepError> {
        let Engine { slots, requests, executor, eos_token_ids, max_model_len, rows, .. } = self;
        rows.clear();
        if let Some(slots) = slots {
            slots.begin();
        }
        for (index, span) in flight.plan.spans.iter().enumerate() {
            let active = requests.get_mut(&span.seq.request);
            if span.awaits.is_some() {
                let slot = active.as_ref().and_then(|active| *active.slots.get(span.seq.index as usize)?);
                let (Some(slots), Some(slot)) = (&mut *slots, slot) else { return Err(StepError::Unknown(span.seq)) };
                slots.awaits(slot, executor.last_row(index));
            }
            let Some(active) = active else { continue };
            if span.sample.is_empty() {
                continue;
            }
            if active.limit(*max_model_len) == 0 {
                flight.lists.no_token.push(index);
                continue;
            }
            let mut guides = active.guides.take();
            let live =
                span.sample.clone().find(|&index| active.outputs.get(index as usize).is_some_and(Option::is_some));
            let mask = match (&mut guides, live) {
                (Some(guides), Some(live)) => {
                    flight.holds_up = true;
                    ready(guides, live, &active.request.params, &active.stop_ids, eos_token_ids);
                    allowed(guides, live).map(Some)
                }
                _ => Ok(None),
            };
            let is_draw = active.beams.is_none() && !active.on_host;
            let seated = match (slots.as_mut().filter(|_| is_draw), mask) {
                (Some(slots), Ok(mask)) => slots.seat(active, span.sample.clone(), rows.len() as u32, mask)?,
                // The host ends a sequence that nothing can follow.
                (Some(_), Err(_)) | (None, _) => false,
            };
            active.guides = guides;
            if seated {
                rows.push(executor.last_row(index));
                let live = |index: &u32| active.outputs[*index as usize].is_some();
                let request = span.seq.request;
                flight.lists.drawn.extend(span.sample.clone().filter(live).map(|index| SeqId { request, index }));
            } else {
                flight.lists.on_host.push(index);
            }
        }
        Ok(())
    }
}

//! Rank 0's worker: broadcasts its inputs, computes its own part, and compares the outcome with that of the other ranks.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::thread::JoinHandle;

use collective::Collective;
use device::profile::Step;
use models::lora::AdapterRef;
use serde::{Deserialize, Serialize};
use siphasher::sip::SipHasher13;

use super::pieces::{self, HEAD, PIECE};
use super::rank::{Rank, together};
use crate::error::EngineError;
use crate::speculate::ProposeError;
use crate::worker::{StepError, StepInput, StepOutput, Worker};

/// Most bytes of the results of a step: above those of the most tokens with the most log-probabilities that a server allows.
const MOST_RESULT_BYTES: usize = 1 << 30;

/// What the ranks compare when they are probed.
pub(super) const ANSWER: &str = "number of orders";

/// What rank 0 tells the other ranks, with references to what is sent.
#[derive(Deserialize, Serialize)]
pub(super) enum Order<Step = StepInput, Adapter = AdapterRef, Kept = Vec<String>> {
    /// Compute a step.
    Step(Step),
    /// Read an adapter, and drop those that are not kept.
    Adapter(Adapter, Kept),
    /// Answer a probe.
    Probe,
    /// The engine has ended.
    End,
}

type OrderRef<'a> = Order<&'a StepInput, &'a AdapterRef, &'a [String]>;

/// See the [module](self).
pub(crate) struct GroupWorker {
    world: Arc<dyn Collective>,
    outcomes: Outcomes,
    /// The rank that draws, if it is in another stage than this one.
    drawing_rank: Option<usize>,
    local: Box<dyn Worker>,
    /// Number of orders.
    sent: u64,
    buffer: Vec<u8>,
    /// Why the group has ended.
    lost: Option<String>,
    threads: Vec<JoinHandle<()>>,
}

impl GroupWorker {
    /// Puts a worker in front of the other ranks.
    pub fn new(rank: Rank, local: Box<dyn Worker>) -> GroupWorker {
        let drawing_rank = Some(rank.drawing_rank()).filter(|rank| *rank > 0);
        let outcomes = Outcomes::new(&rank);
        let Rank { world, threads, .. } = rank;
        GroupWorker { world, outcomes, drawing_rank, local, sent: 0, buffer: Vec::new(), lost: None, threads }
    }

    /// Broadcasts an order, unless the group has ended.
    fn send(&mut self, order: &OrderRef<'_>) {
        if self.lost.is_some() {
            return;
        }
        self.buffer.clear();
        // A long order is an exception, whose memory is not kept.
        self.buffer.shrink_to(PIECE);
        self.buffer.extend([0; HEAD]);
        let sent = postcard::to_extend(&(self.sent, order), std::mem::take(&mut self.buffer))
            .map_err(|error| error.to_string())
            .and_then(|buffer| {
                self.buffer = buffer;
                pieces::send(&*self.world, &mut self.buffer).map_err(|error| error.to_string())
            });
        self.sent += 1;
        if let Err(reason) = sent {
            self.end(reason);
        }
    }

    /// Collects what this rank has computed, and compares it with the other ranks of its stage.
    fn collect_own(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        let collected = self.local.collect(output);
        match self.outcomes.compare(self.sent, &collected, output) {
            Ok(()) => collected,
            Err(reason) => {
                self.end(reason.clone());
                Err(StepError(reason))
            }
        }
    }

    /// Ends the group after a failure.
    fn end(&mut self, reason: String) {
        if self.lost.is_none() {
            tracing::error!("{reason}");
            // Processes end at once, so clients are told first: when this is dropped.
            if !self.threads.is_empty() {
                self.world.abort(&reason);
            }
            self.lost = Some(reason);
        }
    }
}

impl Worker for GroupWorker {
    /// Only rank 0 has a draft model: the input has the drafts.
    fn draft(&mut self, input: &StepInput) -> Result<Vec<u32>, ProposeError> {
        self.local.draft(input)
    }

    fn submit(&mut self, input: Arc<StepInput>) {
        self.send(&OrderRef::Step(&input));
        if self.lost.is_some() {
            return;
        }
        self.local.submit(input);
        if self.drawing_rank.is_some() {
            // The first stage has done its part. What the last one draws is collected later.
            let mut nothing = StepOutput::default();
            let computed = self.collect_own(&mut nothing);
            computed.err().into_iter().for_each(|StepError(reason)| self.end(reason));
        }
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        let collected = match (&self.lost, self.drawing_rank) {
            (Some(reason), _) => Err(StepError(reason.clone())),
            (None, None) => self.collect_own(output),
            (None, Some(rank)) => receive(&*self.world, rank, &mut self.buffer, output).map_err(|reason| {
                self.end(reason.clone());
                StepError(reason)
            }),
        };
        collected.inspect_err(|_| output.clear())
    }

    fn share_adapter(&mut self, adapter: &AdapterRef, kept: &[String]) -> Result<(), String> {
        self.send(&OrderRef::Adapter(adapter, kept));
        let agreed = self.lost.as_ref().map_or_else(|| together(&*self.world, Ok(())), |_| Ok(()));
        if let Err(EngineError::Ranks(error)) = &agreed {
            self.end(error.to_string());
        }
        match &self.lost {
            Some(reason) => Err(reason.clone()),
            None => agreed.map_err(|error| error.to_string()),
        }
    }

    fn num_sequences(&self) -> usize {
        self.local.num_sequences()
    }

    fn profile_step(&self) -> Option<Step> {
        self.local.profile_step()
    }

    fn probe(&mut self) {
        self.send(&OrderRef::Probe);
        if self.lost.is_none() {
            let answered = self.world.agree(ANSWER, self.sent);
            answered.err().into_iter().for_each(|error| self.end(error.to_string()));
        }
    }

    fn is_lost(&self) -> bool {
        self.lost.is_some() || self.local.is_lost()
    }
}

impl Drop for GroupWorker {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.end("rank 0 has panicked".to_string());
        }
        self.send(&OrderRef::End);
        if let Some(reason) = &self.lost {
            self.world.abort(reason);
        }
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Compares what the ranks of a stage have computed.
pub(super) struct Outcomes {
    group: Arc<dyn Collective>,
    /// The outcome that was compared last.
    buffer: Vec<u8>,
}

impl Outcomes {
    pub fn new(rank: &Rank) -> Outcomes {
        Outcomes { group: rank.tensor.clone(), buffer: Vec::new() }
    }

    /// Compares the outcomes of a step.
    ///
    /// # Errors
    /// Another rank has another outcome, or the group has ended: the reason.
    pub fn compare(&mut self, step: u64, outcome: &Result<(), StepError>, output: &StepOutput) -> Result<(), String> {
        self.buffer.clear();
        let written = postcard::to_extend(&outcome.as_ref().map(|()| output), std::mem::take(&mut self.buffer));
        self.buffer = written.map_err(|error| error.to_string())?;
        let mut hasher = SipHasher13::new();
        (step, &self.buffer).hash(&mut hasher);
        let compared = self.group.agree("hash of the results of a step", hasher.finish());
        compared.map_err(|error| match outcome {
            Ok(()) => format!("order {step}: {error}"),
            Err(failure) => format!("order {step}: {error}; rank {}: {failure}", self.group.rank()),
        })
    }

    /// Sends the outcome that was compared last to rank 0.
    pub fn send(&self, world: &dyn Collective) -> Result<(), String> {
        let length = (self.buffer.len() as u64).to_le_bytes();
        world.send(0, &length).and_then(|()| world.send(0, &self.buffer)).map_err(|error| error.to_string())
    }
}

/// Receives the outcome of a step that another rank has [sent](Outcomes::send). A failure of a stage ends the group: the others wait for its rows.
fn receive(world: &dyn Collective, rank: usize, buffer: &mut Vec<u8>, output: &mut StepOutput) -> Result<(), String> {
    let mut length = [0; size_of::<u64>()];
    world.receive(rank, &mut length).map_err(|error| error.to_string())?;
    let length = usize::try_from(u64::from_le_bytes(length)).unwrap_or(usize::MAX);
    if length > MOST_RESULT_BYTES {
        return Err(format!("rank {rank} sends results of {length} bytes, expected at most {MOST_RESULT_BYTES}"));
    }
    buffer.resize(length, 0);
    world.receive(rank, buffer).map_err(|error| error.to_string())?;
    let received: Result<StepOutput, StepError> = postcard::from_bytes(buffer).map_err(|error| error.to_string())?;
    *output = received.map_err(|error| error.to_string())?;
    Ok(())
}

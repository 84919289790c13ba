//! Sequences of a request beyond those that run at once (`--max-num-seqs`).
//!
//! The first sequences are one request of the engine. Each of the others becomes a request of its own as soon as one before it
//! has ended, in the order of their numbers, so a request never has more than `--max-num-seqs` sequences in the engine. It finds the
//! prompt in the prefix cache. A token is drawn for a seed, a position and the sequence's number, so it is the one that the
//! sequence would have if all ran at once.

use std::ops::Range;

use sampling::Constraint;
use sched::RequestId;

use crate::api::{GenerationParams, GenerationRequest};
use crate::connector::KvTransfer;
use crate::error::SubmitError;
use crate::step::{Engine, MOST_SEQUENCES, Origin};

/// See the [module](self).
pub(super) struct LaterSequences {
    /// Numbers of those that were not submitted yet.
    waiting: Range<u32>,
    /// The request for each of them.
    request: GenerationRequest,
    constraint: Option<Box<dyn Constraint>>,
    /// `None` until the first sequences are submitted.
    origin: Option<Origin>,
}

impl LaterSequences {
    /// Cuts a request to the sequences that run at once. Returns the others; `None` if there are none. The beams of a search cannot be
    /// computed one after the other.
    pub fn split(
        request: &mut GenerationRequest,
        constraint: Option<&dyn Constraint>,
        at_once: usize,
    ) -> Option<LaterSequences> {
        let params = &mut request.params;
        let all = params.best_of.unwrap_or(params.n);
        if all <= at_once || all > MOST_SEQUENCES || params.beam.is_some() {
            return None;
        }
        (params.n, params.best_of) = (at_once, None);
        // The scores of the prompt come from the first request, and so do its blocks for other replicas.
        let params = GenerationParams { n: 1, prompt_logprobs: None, ..params.clone() };
        let request = GenerationRequest { params, kv_transfer: KvTransfer::default(), ..request.clone() };
        let constraint = constraint.map(Constraint::fork);
        Some(LaterSequences { waiting: at_once as u32..all as u32, request, constraint, origin: None })
    }

    /// Notes the request of the first sequences.
    pub fn follow(&mut self, engine: &Engine, first: RequestId) {
        self.origin = engine.origin(first);
    }

    /// Submits the next sequence. Returns its number, and the engine's request or why there is none.
    pub fn next(&mut self, engine: &mut Engine) -> Option<(u32, Result<RequestId, SubmitError>)> {
        let origin = self.origin.as_ref()?;
        let number = self.waiting.next()?;
        let constraint = self.constraint.as_ref().map(|constraint| constraint.fork());
        Some((number, engine.submit_later(self.request.clone(), constraint, (origin, number))))
    }
}

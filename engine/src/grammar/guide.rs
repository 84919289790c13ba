//! The constraints of a request's sequences, and the threads that compute their masks.
//!
//! After a token is accepted, a guide sends its constraint to a mask thread, and takes it back when the next step of the sequence
//! is planned. So the masks of all sequences are computed in parallel, while other tokens are published and the step is
//! committed. The device's own threads are not used, because a mask would delay every thread that takes part in a matrix product.
//!
//! A constraint may be the caller's own code. Every call is guarded: a panic ends the sequences of its request with an error and
//! has no other effect.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use rayon::ThreadPool;
use sampling::{Constraint, ConstraintError, Mask, TokenSet};

use crate::api::{FinishReason, StopCause};

/// Greatest number of mask threads, which start with the first constraint.
const MAX_THREADS: usize = 8;

/// The mask threads.
#[derive(Default)]
pub(crate) struct MaskThreads(Option<ThreadPool>);

impl MaskThreads {
    fn run(&mut self, work: impl FnOnce() + Send + 'static) {
        if self.0.is_none() {
            let threads = std::thread::available_parallelism().map_or(1, usize::from).div_ceil(2).min(MAX_THREADS);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|_| "quire-mask".to_string());
            // Without a handler, a panic in a task would abort the process.
            let pool = pool.panic_handler(|_| tracing::error!("a mask thread panicked"));
            self.0 = pool.build().map_err(|error| tracing::warn!("masks are computed on the engine thread, because the mask threads could not be started: {error}")).ok();
        }
        match &self.0 {
            Some(pool) => pool.spawn(work),
            None => work(),
        }
    }
}

/// A constraint whose panics become errors.
struct Caught(Option<Box<dyn Constraint>>);

impl Caught {
    fn call<T>(
        &mut self,
        method: &str,
        work: impl FnOnce(&mut dyn Constraint) -> Result<T, ConstraintError>,
    ) -> Result<T, ConstraintError> {
        let Some(constraint) = &mut self.0 else { return Err(not_computed()) };
        catch_unwind(AssertUnwindSafe(|| work(&mut **constraint))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
            Err(ConstraintError(format!("the constraint panicked in {method}: {text}")))
        })
    }
}

impl Drop for Caught {
    fn drop(&mut self) {
        let constraint = self.0.take();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(constraint)));
    }
}

/// A constraint and its mask.
type Masked = (Caught, Result<Mask, ConstraintError>);

/// The tokens that a sequence may continue with, or why it ends.
type Allowed = Result<Arc<TokenSet>, FinishReason>;

/// A constraint whose next mask is computed or being computed.
struct Guide {
    /// Receives the constraint from the mask thread, while that computes the mask.
    pending: Option<Receiver<Masked>>,
    constraint: Caught,
    allowed: Allowed,
}

impl Guide {
    fn start(mut constraint: Caught, threads: &mut MaskThreads) -> Guide {
        let (done, result) = channel();
        threads.run(move || {
            let mask = constraint.call("mask", |constraint| constraint.mask());
            // The sequence may have ended in the meantime.
            let _ = done.send((constraint, mask));
        });
        Guide { pending: Some(result), constraint: Caught(None), allowed: allowed(Err(not_computed()), &[]) }
    }

    /// Waits for the mask. If the text may end, the tokens of `ends` are allowed too.
    fn wait(&mut self, ends: &[u32]) -> &Allowed {
        if let Some(Ok((constraint, mask))) = self.pending.take().map(|result| result.recv()) {
            self.constraint = constraint;
            self.allowed = allowed(mask, ends);
        }
        &self.allowed
    }
}

fn allowed(mask: Result<Mask, ConstraintError>, ends: &[u32]) -> Allowed {
    let Mask { mut tokens, may_end } = mask.map_err(|error| FinishReason::Grammar(error.0))?;
    if may_end {
        ends.iter().for_each(|token| tokens.insert(*token));
    }
    match (tokens.is_empty(), may_end) {
        (false, _) => Ok(Arc::new(tokens)),
        (true, true) => Err(FinishReason::Stop(Some(StopCause::Complete))),
        (true, false) => Err(FinishReason::Grammar("no token of the vocabulary can follow".to_string())),
    }
}

fn not_computed() -> ConstraintError {
    ConstraintError("the mask could not be computed".into())
}

/// The constraints of all sequences of a request. Sequences share one constraint until they have drawn their first tokens.
pub(crate) struct Guides {
    root: Guide,
    own: Vec<Option<Guide>>,
    /// Tokens that end a sequence, which are allowed if its text may end.
    ends: Vec<u32>,
}

impl Guides {
    /// Creates the guides of `n` sequences that end at any token of `ends`, and starts the first mask.
    pub fn new(constraint: Box<dyn Constraint>, n: usize, ends: Vec<u32>, threads: &mut MaskThreads) -> Guides {
        let root = Guide::start(Caught(Some(constraint)), threads);
        Guides { root, own: std::iter::repeat_with(|| None).take(n).collect(), ends }
    }

    /// Waits for and returns the tokens that a sequence may continue with, or why it ends.
    pub fn allowed(&mut self, index: u32) -> &Allowed {
        let Guides { root, own, ends } = self;
        own.get_mut(index as usize).and_then(Option::as_mut).unwrap_or(root).wait(ends)
    }

    /// Accepts the token that a sequence has drawn, and starts its next mask. Returns `true` if nothing can follow.
    pub fn accept(&mut self, index: u32, token: u32, threads: &mut MaskThreads) -> Result<bool, ConstraintError> {
        if self.allowed(index).is_err() {
            return Err(not_computed());
        }
        let Guides { root, own, .. } = self;
        let Some(slot) = own.get_mut(index as usize) else { return Ok(false) };
        let mut constraint = match slot.take() {
            Some(guide) => guide.constraint,
            None => root.constraint.call("fork", |root| Ok(Caught(Some(root.fork()))))?,
        };
        let complete = constraint.call("accept", |constraint| {
            constraint.accept(token)?;
            Ok(constraint.is_complete())
        })?;
        if !complete {
            *slot = Some(Guide::start(constraint, threads));
        }
        Ok(complete)
    }
}

//! The constraints of a request's sequences, and the threads that compute their masks.
//!
//! After a token is accepted, a guide sends its constraint to a mask thread, and takes it back when the next step of the sequence
//! is planned. So the masks of all sequences are computed in parallel, while other tokens are published and the step is
//! committed. The device's own threads are not used, because a mask would delay every thread that takes part in a matrix product.
//!
//! A constraint may be the caller's own code. Every call is guarded: a panic ends the sequences of its request with an error and
//! has no other effect.

use std::collections::VecDeque;
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
    /// Drafts that the grammar allows one after the other, and the tokens that it allows behind each.
    ahead: VecDeque<(u32, Arc<TokenSet>)>,
}

impl Guide {
    fn start(mut constraint: Caught, threads: &mut MaskThreads) -> Guide {
        let (done, result) = channel();
        threads.run(move || {
            let mask = constraint.call("mask", |constraint| constraint.mask());
            // The sequence may have ended in the meantime.
            let _ = done.send((constraint, mask));
        });
        let allowed = allowed(Err(not_computed()), &[]);
        Guide { pending: Some(result), constraint: Caught(None), allowed, ahead: VecDeque::new() }
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

    /// Cuts drafts of a sequence before the first that the grammar forbids or that may end the text, and computes what is allowed
    /// behind each of the others. A copy of the constraint accepts them, so the constraint itself stays at the last drawn token.
    /// The masks are computed on this thread: the step cannot be planned before its drafts are cut.
    pub fn look_ahead(&mut self, index: u32, drafts: &mut Vec<u32>) {
        let Guides { own, ends, .. } = self;
        let guide = own.get_mut(index as usize).and_then(Option::as_mut);
        // Drafts follow a token, so there is one.
        let Some(guide) = guide else { return drafts.clear() };
        guide.ahead.clear();
        let Ok(mut next) = guide.wait(ends).clone() else { return drafts.clear() };
        let fork = guide.constraint.call("fork", |constraint| Ok(Caught(Some(constraint.fork()))));
        let Ok(mut fork) = fork else { return drafts.clear() };
        for &draft in &*drafts {
            if !next.contains(draft) || ends.contains(&draft) {
                break;
            }
            let mask = fork.call("accept", |constraint| {
                constraint.accept(draft)?;
                if constraint.is_complete() { Err(not_computed()) } else { constraint.mask() }
            });
            let Ok(mask) = allowed(mask, ends) else { break };
            guide.ahead.push_back((draft, mask.clone()));
            next = mask;
        }
        drafts.truncate(guide.ahead.len());
    }

    /// Waits for and returns the tokens that a sequence may continue with, and those behind each of its next `drafts` drafts.
    pub fn allowed_ahead(&mut self, index: u32, drafts: usize) -> Result<Vec<Arc<TokenSet>>, FinishReason> {
        let first = self.allowed(index).clone()?;
        let ahead = self.own.get(index as usize).and_then(Option::as_ref).map(|guide| &guide.ahead);
        let behind = ahead.into_iter().flatten().take(drafts).map(|(_, allowed)| allowed.clone());
        Ok(std::iter::once(first).chain(behind).collect())
    }

    /// Accepts the token that a sequence has drawn, and starts its next mask. Returns `true` if nothing can follow.
    pub fn accept(&mut self, index: u32, token: u32, threads: &mut MaskThreads) -> Result<bool, ConstraintError> {
        if self.allowed(index).is_err() {
            return Err(not_computed());
        }
        let Guides { root, own, .. } = self;
        let Some(slot) = own.get_mut(index as usize) else { return Ok(false) };
        let (mut constraint, mut ahead) = match slot.take() {
            Some(guide) => (guide.constraint, guide.ahead),
            None => (root.constraint.call("fork", |root| Ok(Caught(Some(root.fork()))))?, VecDeque::new()),
        };
        let complete = constraint.call("accept", |constraint| {
            constraint.accept(token)?;
            Ok(constraint.is_complete())
        })?;
        if !complete {
            // If the token was a draft, the next mask is known.
            *slot = Some(match ahead.pop_front().filter(|(draft, _)| *draft == token) {
                Some((_, allowed)) => Guide { pending: None, constraint, allowed: Ok(allowed), ahead },
                None => Guide::start(constraint, threads),
            });
        }
        Ok(complete)
    }
}

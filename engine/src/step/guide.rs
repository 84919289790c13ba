//! The constraints of a request's sequences, and the threads that compute their masks.
//!
//! After a token is accepted, a guide sends its constraint to a mask thread, and takes it back when the next step of the sequence
//! is planned. So the masks of all sequences are computed in parallel, while other tokens are published and the step is
//! committed. The device's own threads are not used, because a mask would delay every thread that takes part in a matrix product.
//!
//! A step does not wait for a mask that is late: its sequence is left out. The exceptions are the first mask of a caller's own code,
//! and a sequence that returns after a preemption. Constraints whose last call took long have threads of
//! their own, which also call [`Constraint::accept`], so that nothing else is behind theirs, and they get no drafts.
//!
//! A constraint may be the caller's own code. Every call is guarded: a panic ends the sequences of its request with an error and
//! has no other effect.

use std::collections::{HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rayon::ThreadPool;
use sampling::{Constraint, ConstraintError, Mask, TokenSet, banned_words};

use crate::api::{FinishReason, StopCause};

/// Greatest number of mask threads for quick constraints, and of those for slow ones. They start with the first mask.
const MAX_THREADS: usize = 8;

/// Longest wait of a step for masks, that of all sequences together: little beside a step, and enough for the masks of most grammars.
pub(super) const MASK_WAIT: Duration = Duration::from_millis(2);

/// A constraint whose last calls took longer is slow.
const QUICK: Duration = Duration::from_millis(1);

/// The mask threads: those for quick constraints, and those for slow ones.
#[derive(Default)]
pub(super) struct MaskThreads([Option<ThreadPool>; 2]);

impl MaskThreads {
    fn run(&mut self, is_slow: bool, work: impl FnOnce() + Send + 'static) {
        let pool = &mut self.0[usize::from(is_slow)];
        if pool.is_none() {
            let threads = std::thread::available_parallelism().map_or(1, usize::from).div_ceil(2).min(MAX_THREADS);
            let builder =
                rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|_| "quire-mask".to_string());
            // Without a handler, a panic in a task would abort the process.
            let builder = builder.panic_handler(|_| tracing::error!("a mask thread panicked"));
            *pool = builder.build().map_err(|error| tracing::warn!("masks are computed on the engine thread, because the mask threads could not be started: {error}")).ok();
        }
        match pool {
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

    /// Accepts a token. Returns whether nothing can follow.
    fn accept(&mut self, token: u32) -> Result<bool, ConstraintError> {
        self.call("accept", |constraint| {
            constraint.accept(token)?;
            Ok(constraint.is_complete())
        })
    }
}

impl Drop for Caught {
    fn drop(&mut self) {
        let constraint = self.0.take();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(constraint)));
    }
}

/// A constraint, its mask, and whether that took long.
struct Masked {
    constraint: Caught,
    /// `None` if the text is complete.
    mask: Result<Option<Mask>, ConstraintError>,
    is_slow: bool,
}

/// The tokens that a sequence may continue with, or why it ends.
type Allowed = Result<Arc<TokenSet>, FinishReason>;

/// A constraint whose next mask is computed or being computed.
struct Guide {
    /// Receives the constraint from the mask thread, while that computes the mask.
    pending: Option<Receiver<Masked>>,
    constraint: Caught,
    /// The last calls took long.
    is_slow: bool,
    allowed: Allowed,
    /// Drafts that the grammar allows one after the other, and the tokens that it allows behind each.
    ahead: VecDeque<(u32, Arc<TokenSet>)>,
    /// The sequence's tokens, if there are bad words.
    output: Vec<u32>,
}

impl Guide {
    /// Starts the mask that follows `token`, or the tokens that the constraint has accepted.
    fn start(
        mut constraint: Caught,
        token: Option<u32>,
        is_slow: bool,
        output: Vec<u32>,
        threads: &mut MaskThreads,
    ) -> Guide {
        let (done, result) = channel();
        threads.run(is_slow, move || {
            let start = Instant::now();
            let accepted = token.map_or(Ok(false), |token| constraint.accept(token));
            let mask = accepted.and_then(|is_complete| match is_complete {
                true => Ok(None),
                false => constraint.call("mask", |constraint| constraint.mask().map(Some)),
            });
            let is_slow = start.elapsed() > QUICK;
            // The sequence may have ended in the meantime.
            let _ = done.send(Masked { constraint, mask, is_slow });
        });
        let allowed = Err(FinishReason::Grammar(not_computed().0));
        Guide { pending: Some(result), constraint: Caught(None), is_slow, allowed, ahead: VecDeque::new(), output }
    }

    /// Waits for the mask until the deadline, if there is one. Returns whether it is still being computed.
    fn is_late(&mut self, limits: &Limits, deadline: Option<Instant>) -> bool {
        let Some(pending) = &self.pending else { return false };
        let received = match deadline {
            Some(deadline) => pending.recv_timeout(deadline.saturating_duration_since(Instant::now())),
            None => pending.recv().map_err(RecvTimeoutError::from),
        };
        if matches!(received, Err(RecvTimeoutError::Timeout)) {
            return true;
        }
        self.pending = None;
        if let Ok(Masked { constraint, mask, is_slow }) = received {
            (self.constraint, self.is_slow) = (constraint, is_slow);
            self.allowed = limits.allowed(mask, &self.output);
        }
        false
    }

    /// Waits for the mask.
    fn wait(&mut self, limits: &Limits) -> &Allowed {
        self.is_late(limits, None);
        &self.allowed
    }
}

/// What else limits the tokens of a sequence.
pub(super) struct Limits {
    /// Tokens that end a sequence, which are allowed if its text may end.
    pub ends: Vec<u32>,
    /// The only tokens that may be drawn, if given.
    pub allowed: Option<Arc<[u32]>>,
    /// Token sequences that must not be generated.
    pub bad_words: Arc<[Vec<u32>]>,
}

impl Limits {
    /// The tokens that may follow `output`, or why none can: the sampler must have one to draw.
    fn allowed(&self, mask: Result<Option<Mask>, ConstraintError>, output: &[u32]) -> Allowed {
        let mask = mask.map_err(|error| FinishReason::Grammar(error.0))?;
        let Mask { mut tokens, may_end } = mask.ok_or(FinishReason::Stop(Some(StopCause::Complete)))?;
        if may_end {
            self.ends.iter().for_each(|token| tokens.insert(*token));
        }
        if let Some(ids) = &self.allowed {
            let mut both = TokenSet::new(tokens.size());
            ids.iter().filter(|id| tokens.contains(**id)).for_each(|id| both.insert(*id));
            tokens = both;
        }
        let banned: HashSet<u32> = banned_words(&self.bad_words, output).collect();
        let is_one_left = tokens.iter().any(|token| !banned.contains(&token));
        match (is_one_left, may_end) {
            (true, _) => Ok(Arc::new(tokens)),
            (false, true) => Err(FinishReason::Stop(Some(StopCause::Complete))),
            (false, false) => Err(FinishReason::Grammar(match (&self.allowed, &*self.bad_words) {
                (None, []) => "no token of the vocabulary can follow".to_string(),
                _ => "no token that can follow is left by allowed_token_ids and bad_words".to_string(),
            })),
        }
    }
}

fn not_computed() -> ConstraintError {
    ConstraintError("the mask could not be computed".into())
}

/// The constraints of all sequences of a request. Sequences share one constraint until they have drawn their first tokens.
pub(super) struct Guides {
    root: Guide,
    own: Vec<Option<Guide>>,
    limits: Limits,
}

impl Guides {
    /// Creates the guides of `n` sequences, and starts the first mask.
    pub fn new(constraint: Box<dyn Constraint>, n: usize, limits: Limits, threads: &mut MaskThreads) -> Guides {
        let root = Guide::start(Caught(Some(constraint)), None, false, Vec::new(), threads);
        Guides { root, own: std::iter::repeat_with(|| None).take(n).collect(), limits }
    }

    /// Waits until `deadline` for the mask that follows the last token of a sequence. Returns whether it is still being computed.
    pub fn is_late(&mut self, index: u32, deadline: Instant) -> bool {
        let guide = self.own.get_mut(index as usize).and_then(Option::as_mut);
        guide.is_some_and(|guide| guide.is_late(&self.limits, Some(deadline)))
    }

    /// Whether the last calls of a sequence's constraint took long, or its mask is late.
    pub fn is_slow(&self, index: u32) -> bool {
        let guide = self.own.get(index as usize).and_then(Option::as_ref);
        guide.is_some_and(|guide| guide.is_slow || guide.pending.is_some())
    }

    /// Waits for and returns the tokens that a sequence may continue with, or why it ends.
    pub fn allowed(&mut self, index: u32) -> &Allowed {
        let Guides { root, own, limits } = self;
        own.get_mut(index as usize).and_then(Option::as_mut).unwrap_or(root).wait(limits)
    }

    /// Cuts drafts of a sequence before the first that the grammar forbids or that may end the text, and computes what is allowed
    /// behind each of the others. A copy of the constraint accepts them, so the constraint itself stays at the last drawn token.
    /// The masks are computed on this thread, until `deadline`: the step cannot be planned before its drafts are cut.
    pub fn look_ahead(&mut self, index: u32, drafts: &mut Vec<u32>, deadline: Instant) {
        let Guides { own, limits, .. } = self;
        let guide = own.get_mut(index as usize).and_then(Option::as_mut);
        // Drafts follow a token, so there is one.
        let Some(guide) = guide else { return drafts.clear() };
        guide.ahead.clear();
        let Ok(mut next) = guide.allowed.clone() else { return drafts.clear() };
        let fork = guide.constraint.call("fork", |constraint| Ok(Caught(Some(constraint.fork()))));
        let Ok(mut fork) = fork else { return drafts.clear() };
        let mut output = guide.output.clone();
        for &draft in &*drafts {
            if !next.contains(draft) || limits.ends.contains(&draft) || Instant::now() >= deadline {
                break;
            }
            // Nothing is drawn behind the end of a text.
            let mask = fork.accept(draft).and_then(|is_complete| match is_complete {
                true => Err(not_computed()),
                false => fork.call("mask", |constraint| constraint.mask().map(Some)),
            });
            output.push(draft);
            let Ok(mask) = limits.allowed(mask, &output) else { break };
            guide.ahead.push_back((draft, mask.clone()));
            next = mask;
        }
        drafts.truncate(guide.ahead.len());
    }

    /// Waits for the masks of the next token and of each of the next `drafts` draft positions, and returns them.
    pub fn allowed_ahead(&mut self, index: u32, drafts: usize) -> Result<Vec<Arc<TokenSet>>, FinishReason> {
        let first = self.allowed(index).clone()?;
        let ahead = self.own.get(index as usize).and_then(Option::as_ref).map(|guide| &guide.ahead);
        let behind = ahead.into_iter().flatten().take(drafts).map(|(_, allowed)| allowed.clone());
        Ok(std::iter::once(first).chain(behind).collect())
    }

    /// Accepts the token that a sequence has drawn, and starts its next mask. Returns `true` if nothing can follow. A slow
    /// constraint accepts on its thread, so that this shows with the mask, except for the last token of a sequence.
    pub fn accept(
        &mut self,
        index: u32,
        token: u32,
        is_last: bool,
        threads: &mut MaskThreads,
    ) -> Result<bool, ConstraintError> {
        if self.allowed(index).is_err() {
            return Err(not_computed());
        }
        let Guides { root, own, limits } = self;
        let Some(slot) = own.get_mut(index as usize) else { return Ok(false) };
        let (mut constraint, mut is_slow, mut ahead, mut output) = match slot.take() {
            Some(guide) => (guide.constraint, guide.is_slow, guide.ahead, guide.output),
            None => {
                let fork = root.constraint.call("fork", |root| Ok(Caught(Some(root.fork()))))?;
                (fork, root.is_slow, VecDeque::new(), Vec::new())
            }
        };
        if !limits.bad_words.is_empty() {
            output.push(token);
        }
        if is_slow && !is_last {
            *slot = Some(Guide::start(constraint, Some(token), is_slow, output, threads));
            return Ok(false);
        }
        let start = Instant::now();
        let is_complete = constraint.accept(token)?;
        is_slow |= start.elapsed() > QUICK;
        if !is_complete && !is_last {
            // If the token was a draft, the next mask is known.
            *slot = Some(match ahead.pop_front().filter(|(draft, _)| *draft == token) {
                Some((_, allowed)) => Guide { pending: None, constraint, is_slow, allowed: Ok(allowed), ahead, output },
                None => Guide::start(constraint, None, is_slow, output, threads),
            });
        }
        Ok(is_complete)
    }
}

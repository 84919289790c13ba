//! The constraints of a request's sequences, and the threads that compute their masks.
//!
//! A guide lends its constraint to a mask thread right after a token has been accepted, and asks for it back when the next
//! row of logits is there: in between lie the commit, the next plan and its forward pass. The threads are not those of
//! the device: a mask in the middle of a matrix product would hold up everyone who joins there.
//!
//! A constraint may be the caller's own code. Every call of it is caught: a panic ends the sequences of its request with an
//! error, and nothing else.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, channel};

use rayon::ThreadPool;
use sampling::{Constraint, ConstraintError, Mask};

/// Most mask threads; they start with the first constraint.
const MOST: usize = 8;

/// The mask threads.
#[derive(Default)]
pub(crate) struct MaskThreads(Option<ThreadPool>);

impl MaskThreads {
    fn run(&mut self, work: impl FnOnce() + Send + 'static) {
        if self.0.is_none() {
            let threads = std::thread::available_parallelism().map_or(1, usize::from).div_ceil(2).min(MOST);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|_| "quire-mask".to_string());
            // Without a handler a panic in a task would abort the process.
            let pool = pool.panic_handler(|_| tracing::error!("a mask thread panicked"));
            self.0 = pool.build().map_err(|error| tracing::warn!("masks are computed in line: {error}")).ok();
        }
        match &self.0 {
            Some(pool) => pool.spawn(work),
            None => work(),
        }
    }
}

/// A constraint whose panics are errors.
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

/// A constraint with its mask.
type Masked = (Caught, Result<Mask, ConstraintError>);

/// A constraint, with the mask for what comes next done or under way.
enum Guide {
    Ready(Masked),
    Lent(Receiver<Masked>),
}

impl Guide {
    fn start(mut constraint: Caught, threads: &mut MaskThreads) -> Guide {
        let (done, result) = channel();
        threads.run(move || {
            let mask = constraint.call("mask", |constraint| constraint.mask());
            // The sequence may have ended in between.
            let _ = done.send((constraint, mask));
        });
        Guide::Lent(result)
    }

    fn wait(&mut self) -> Result<&mut Mask, ConstraintError> {
        if let Guide::Lent(result) = self {
            *self = Guide::Ready(result.recv().map_err(|_| not_computed())?);
        }
        match self {
            Guide::Ready((_, mask)) => mask.as_mut().map_err(|error| error.clone()),
            Guide::Lent(_) => Err(not_computed()),
        }
    }

    fn mask(&self) -> Result<&Mask, ConstraintError> {
        match self {
            Guide::Ready((_, mask)) => mask.as_ref().map_err(Clone::clone),
            Guide::Lent(_) => Err(not_computed()),
        }
    }
}

fn not_computed() -> ConstraintError {
    ConstraintError("the mask could not be computed".into())
}

/// The constraints of all sequences of a request. They share one until each has drawn its first token.
pub(crate) struct Guides {
    root: Guide,
    own: Vec<Option<Guide>>,
}

impl Guides {
    /// For `n` sequences; the first mask is begun.
    pub fn new(constraint: Box<dyn Constraint>, n: usize, threads: &mut MaskThreads) -> Guides {
        let root = Guide::start(Caught(Some(constraint)), threads);
        Guides { root, own: std::iter::repeat_with(|| None).take(n).collect() }
    }

    /// Waits until the mask of what may come next in a sequence is computed.
    pub fn wait(&mut self, index: u32) -> Result<&mut Mask, ConstraintError> {
        let Guides { root, own } = self;
        own.get_mut(index as usize).and_then(Option::as_mut).unwrap_or(root).wait()
    }

    /// The mask that [`Guides::wait`] has waited for.
    pub fn mask(&self, index: u32) -> Result<&Mask, ConstraintError> {
        self.own.get(index as usize).and_then(Option::as_ref).unwrap_or(&self.root).mask()
    }

    /// Takes the token that a sequence has drawn and begins its next mask. `true` if nothing can follow.
    pub fn accept(&mut self, index: u32, token: u32, threads: &mut MaskThreads) -> Result<bool, ConstraintError> {
        self.wait(index)?;
        let Guides { root, own } = self;
        let Some(slot) = own.get_mut(index as usize) else { return Ok(false) };
        let mut constraint = match (slot.take(), root) {
            (Some(Guide::Ready((constraint, _))), _) => constraint,
            (None, Guide::Ready((constraint, _))) => constraint.call("fork", |root| Ok(Caught(Some(root.fork()))))?,
            (_, _) => return Err(not_computed()),
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

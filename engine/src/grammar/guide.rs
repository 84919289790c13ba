//! The constraints of a request's sequences, and the threads that compute their masks.
//!
//! A guide lends its constraint to a mask thread right after a token has been accepted, and asks for it back when the next
//! row of logits is there: in between lie the commit, the next plan and its forward pass. The threads are not those of
//! the device: a mask in the middle of a matrix product would hold up everyone who joins there.

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
            self.0 = pool.build().map_err(|error| tracing::warn!("masks are computed in line: {error}")).ok();
        }
        match &self.0 {
            Some(pool) => pool.spawn(work),
            None => work(),
        }
    }
}

/// A constraint with its mask.
type Masked = (Box<dyn Constraint>, Result<Mask, ConstraintError>);

/// A constraint, with the mask for what comes next done or under way.
enum Guide {
    Ready(Masked),
    Lent(Receiver<Masked>),
}

impl Guide {
    fn start(mut constraint: Box<dyn Constraint>, threads: &mut MaskThreads) -> Guide {
        let (done, result) = channel();
        threads.run(move || {
            let mask = constraint.mask();
            // The sequence may have ended in between.
            let _ = done.send((constraint, mask));
        });
        Guide::Lent(result)
    }

    fn wait(&mut self) -> Result<(&dyn Constraint, &mut Mask), ConstraintError> {
        if let Guide::Lent(result) = self {
            let masked = result.recv().map_err(|_| ConstraintError("the mask could not be computed".into()))?;
            *self = Guide::Ready(masked);
        }
        match self {
            Guide::Ready((constraint, Ok(mask))) => Ok((&**constraint, mask)),
            Guide::Ready((_, Err(error))) => Err(error.clone()),
            Guide::Lent(_) => Err(ConstraintError("the mask could not be computed".into())),
        }
    }
}

/// The constraints of all sequences of a request. They share one until each has drawn its first token.
pub(crate) struct Guides {
    root: Guide,
    own: Vec<Option<Guide>>,
}

impl Guides {
    /// For `n` sequences; the first mask is begun.
    pub fn new(constraint: Box<dyn Constraint>, n: usize, threads: &mut MaskThreads) -> Guides {
        Guides { root: Guide::start(constraint, threads), own: std::iter::repeat_with(|| None).take(n).collect() }
    }

    /// What may come next in a sequence; waits for it if it must.
    pub fn mask(&mut self, index: u32) -> Result<&mut Mask, ConstraintError> {
        let Guides { root, own } = self;
        let guide = own.get_mut(index as usize).and_then(Option::as_mut).unwrap_or(root);
        guide.wait().map(|(_, mask)| mask)
    }

    /// Takes the token that a sequence has drawn and begins its next mask. `true` if nothing can follow.
    pub fn accept(&mut self, index: u32, token: u32, threads: &mut MaskThreads) -> Result<bool, ConstraintError> {
        let Guides { root, own } = self;
        let Some(slot) = own.get_mut(index as usize) else { return Ok(false) };
        let mut constraint = match slot.take() {
            Some(mut guide) => {
                guide.wait()?;
                let Guide::Ready((constraint, _)) = guide else { return Ok(false) };
                constraint
            }
            None => root.wait()?.0.fork(),
        };
        constraint.accept(token)?;
        let complete = constraint.is_complete();
        if !complete {
            *slot = Some(Guide::start(constraint, threads));
        }
        Ok(complete)
    }
}

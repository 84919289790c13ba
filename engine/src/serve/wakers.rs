//! Wakes the tasks that read streams, all those of a step at once.
//!
//! To wake a task from another thread takes a lock of the runtime, and may take a system call and the processor on which the engine's
//! thread computes. So the engine's thread collects whom to wake during a step, and hands them together to a task that runs among
//! the readers. Without such a task it wakes them itself.

use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Wake, Waker};

use simd::lock;
use tokio::sync::mpsc;

/// See the [module](self).
#[derive(Default)]
pub(super) struct Wakers {
    /// `None` while readers are woken at once.
    collected: Mutex<Option<Vec<Waker>>>,
    /// Where a task waits that wakes readers.
    task: OnceLock<mpsc::UnboundedSender<Vec<Waker>>>,
}

impl Wakers {
    /// Collects readers from now on.
    pub fn collect(&self) {
        *lock(&self.collected) = Some(Vec::new());
    }

    /// Wakes the readers that were collected. From now on each is woken at once.
    pub fn wake_collected(&self) {
        let mut readers = lock(&self.collected).take().unwrap_or_default();
        if readers.is_empty() {
            return;
        }
        if let Some(task) = self.task.get() {
            match task.send(readers) {
                Ok(()) => return,
                // The task has ended with its runtime.
                Err(mpsc::error::SendError(unsent)) => readers = unsent,
            }
        }
        readers.into_iter().for_each(Waker::wake);
    }

    /// The body of the task that wakes readers. Only the first one has anything to do.
    pub fn task(&self) -> impl Future<Output = ()> + Send + 'static {
        // At most one message waits for each reader: it is not woken again before it has read.
        let (sender, mut steps) = mpsc::unbounded_channel();
        let is_first = self.task.set(sender).is_ok();
        async move {
            while let Some(readers) = if is_first { steps.recv().await } else { None } {
                readers.into_iter().for_each(Waker::wake);
            }
        }
    }
}

/// A reader of a stream. Waking it wakes its task, or has it collected.
pub(super) struct Reader {
    task: Waker,
    wakers: Arc<Wakers>,
}

impl Reader {
    /// The waker of a task's reader.
    pub fn waker(task: Waker, wakers: Arc<Wakers>) -> Waker {
        Waker::from(Arc::new(Reader { task, wakers }))
    }
}

impl Wake for Reader {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        match &mut *lock(&self.wakers.collected) {
            Some(readers) => readers.push(self.task.clone()),
            None => self.task.wake_by_ref(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::task::Context;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    #[test]
    fn the_readers_of_a_step_are_woken_together_by_the_task_or_without_one() {
        let (wakers, count, steps) =
            (Arc::new(Wakers::default()), Arc::new(Count::default()), Arc::new(Count::default()));
        let readers: Vec<Waker> = (0..3).map(|_| Reader::waker(count.clone().into(), wakers.clone())).collect();
        let step = || {
            wakers.collect();
            let before = count.0.load(Relaxed);
            readers.iter().for_each(Waker::wake_by_ref);
            assert_eq!(count.0.load(Relaxed), before, "collected");
            wakers.wake_collected();
        };
        readers[0].wake_by_ref();
        assert_eq!(count.0.load(Relaxed), 1, "outside of a step, at once");
        step();
        assert_eq!(count.0.load(Relaxed), 4, "no task");
        {
            let mut task = pin!(wakers.task());
            let (waker, mut second) = (Waker::from(steps.clone()), pin!(wakers.task()));
            let mut cx = Context::from_waker(&waker);
            assert!(task.as_mut().poll(&mut cx).is_pending() && second.as_mut().poll(&mut cx).is_ready());
            step();
            assert_eq!((count.0.load(Relaxed), steps.0.load(Relaxed)), (4, 1), "one wake-up for the step");
            assert!(task.as_mut().poll(&mut cx).is_pending());
            assert_eq!(count.0.load(Relaxed), 7);
        }
        step();
        assert_eq!(count.0.load(Relaxed), 10, "the task is gone");
    }
}

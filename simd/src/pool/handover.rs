//! Hand-over of a loop from the caller to the workers and back.
//!
//! ```text
//! caller                                          worker
//!   write the job and the tickets                   spin on `epoch` … sleep after a while
//!   epoch += 1 ───────────────────────────────────▶ sees it
//!   take pieces of share 0, then of other shares    take pieces of its own share, then of other shares
//!   wait until `left` is 0 ◀─────────────────────── left −= finished pieces
//! ```
//!
//! The split is static: a thread gets the same part of the same matrix in every step, which is in its own memory and caches.
//! Each share consists of a few pieces, so that other threads can finish the share of a thread that has lost its core to
//! another process. A loop ends when all pieces are done, not when every worker has reported: a sleeping worker is not waited
//! for.
//!
//! **When another process takes a core**, a worker can stop in the middle of a piece, and the caller has to wait. Then the
//! caller sleeps instead of spinning, which leaves its own core to the worker; and for some loops after such a wait, workers
//! spin only briefly and may change cores. More than the other process's share is lost all the same: a busy neighbour costs one stream
//! about half of its speed.
//!
//! **Why a job needs no lock.** A ticket holds the epoch of its job and the rest of a share: the next piece and the end. Taking
//! a piece replaces (epoch, end, i) by (epoch, end, i + 1). A worker reads the job before it takes a piece, and the caller
//! writes the next job only when all pieces of this one are done: so a thread that gets a piece has read the job of that
//! piece. A late worker may read parts of the next job, but then it gets no piece: whether a share is used up is
//! decided by the ticket alone.

use std::any::Any;
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::affinity::Place;
use crate::lock;

/// Maximum number of threads; the number of their pieces must fit [`PIECE_BITS`].
pub(super) const MOST_THREADS: usize = 1024;

/// Maximum number of pieces per share.
const PIECES: usize = 8;

/// Bits of a ticket for the end of the share, and for the next piece. The remaining bits hold the epoch. They wrap around only
/// after days; a thread would have to stop inside of a loop for that long, and resume in exactly the loop with the same bits.
const PIECE_BITS: u32 = 14;
const _: () = assert!(MOST_THREADS * PIECES < 1 << PIECE_BITS);

/// Number of shares from which a worker takes pieces, starting with its own. The caller takes from all shares.
const REACH: usize = 8;

/// Time that a worker spins for the next loop: longer than the pause between two decode steps.
const SPIN: Duration = Duration::from_micros(200);

/// Time that any thread spins while the machine is crowded: about as long as sleeping and waking takes.
const SPIN_CROWDED: Duration = Duration::from_micros(5);

/// A wait of the caller that is longer than this, and longer than its own share took, is for a worker that has lost its core.
const LATE: Duration = Duration::from_micros(200);

/// Number of loops for which the machine then counts as crowded.
const CROWDED_LOOPS: u32 = 200;

/// A value on its own pair of cache lines, because CPUs fetch lines in pairs.
#[repr(align(128))]
struct Apart<T>(T);

/// State shared by all threads of a pool.
pub(super) struct Handover {
    threads: usize,
    /// Whether a caller is using the workers.
    taken: AtomicBool,
    /// Number of the current loop.
    epoch: Apart<AtomicU64>,
    job: Apart<Job>,
    /// Number of pieces of the loop that are not done.
    left: Apart<AtomicUsize>,
    /// One per thread; the caller's first.
    tickets: Box<[Apart<AtomicU64>]>,
    /// One per worker.
    asleep: Box<[Apart<AtomicBool>]>,
    /// Number of loops for which the machine still counts as crowded.
    crowded: AtomicU32,
    stopped: AtomicBool,
    /// Whether the caller is sleeping until `left` is 0.
    waiting: AtomicBool,
    gate: Mutex<()>,
    done: Condvar,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Runs a range of the tasks of a loop.
type Body<'a> = &'a (dyn Fn(Range<usize>) + Sync);

/// The current loop; the module documentation explains who may read it when.
#[derive(Default)]
struct Job {
    /// Pointer to a [`Body`] on the caller's stack.
    body: AtomicPtr<()>,
    tasks: AtomicUsize,
    pieces: AtomicUsize,
}

thread_local! {
    /// Whether this thread is running a task.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

impl Handover {
    pub fn new(threads: usize) -> Handover {
        Handover {
            threads,
            taken: AtomicBool::new(false),
            epoch: Apart(AtomicU64::new(0)),
            job: Apart(Job::default()),
            left: Apart(AtomicUsize::new(0)),
            tickets: (0..threads).map(|_| Apart(AtomicU64::new(0))).collect(),
            asleep: (1..threads).map(|_| Apart(AtomicBool::new(false))).collect(),
            crowded: AtomicU32::new(0),
            stopped: AtomicBool::new(false),
            waiting: AtomicBool::new(false),
            gate: Mutex::new(()),
            done: Condvar::new(),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
        }
    }

    /// Makes the workers return once they are awake.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
    }

    /// Returns whether worker `index` is asleep, and clears the mark; the caller must then wake it.
    pub fn clear_asleep(&self, index: usize) -> bool {
        let asleep = &self.asleep[index].0;
        asleep.load(Ordering::SeqCst) && asleep.swap(false, Ordering::SeqCst)
    }

    /// Runs a loop of `tasks` tasks in up to `pieces` pieces; `wake(n)` must wake the first n workers. Returns `false`, without
    /// running anything, if this thread is running a task or another caller is using the workers.
    pub fn run(&self, tasks: usize, pieces: usize, body: Body<'_>, wake: impl FnOnce(usize)) -> bool {
        if BUSY.get() || self.taken.swap(true, Ordering::Acquire) {
            return false;
        }
        let mut pieces = pieces.min(self.threads * PIECES);
        if self.threads < pieces && pieces < tasks {
            // As many for each thread.
            pieces -= pieces % self.threads;
        }
        let epoch = self.epoch.0.load(Ordering::Relaxed) + 1;
        self.job.0.body.store((&raw const body).cast_mut().cast(), Ordering::Relaxed);
        self.job.0.tasks.store(tasks, Ordering::Relaxed);
        self.job.0.pieces.store(pieces, Ordering::Relaxed);
        self.left.0.store(pieces, Ordering::Relaxed);
        for (thread, ticket) in self.tickets.iter().enumerate() {
            let share = share(pieces, self.threads, thread);
            let left = (share.end << PIECE_BITS | share.start) as u64;
            ticket.0.store(epoch << (2 * PIECE_BITS) | left, Ordering::Release);
        }
        self.epoch.0.store(epoch, Ordering::SeqCst);
        wake(pieces.min(self.threads) - 1);

        let start = Instant::now();
        BUSY.set(true);
        self.work(0, epoch, self.threads);
        BUSY.set(false);
        self.wait(start.elapsed());

        let panic = match self.panicked.swap(false, Ordering::Relaxed) {
            true => lock(&self.panic).take(),
            false => None,
        };
        self.taken.store(false, Ordering::Release);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
        true
    }

    /// Runs worker `index` until the pool is stopped.
    pub fn serve(&self, index: usize, mut place: Option<Place>) {
        BUSY.set(true);
        let mut seen = 0;
        while let Some(epoch) = self.next(index, seen, &mut place) {
            seen = epoch;
            self.work(index + 1, epoch, REACH);
        }
    }

    /// Waits for a loop after `seen` and returns its epoch, or `None` when the pool is stopped.
    fn next(&self, index: usize, seen: u64, place: &mut Option<Place>) -> Option<u64> {
        loop {
            let crowded = self.crowded.load(Ordering::Relaxed) > 0;
            let budget = if crowded { SPIN_CROWDED } else { SPIN };
            if spin(budget, || self.epoch.0.load(Ordering::Acquire) != seen) {
                return Some(self.epoch.0.load(Ordering::Acquire));
            }
            let asleep = &self.asleep[index].0;
            if let Some(place) = place {
                place.pin(!crowded);
            }
            asleep.store(true, Ordering::SeqCst);
            // These loads come after the store: either they see a new loop or the stop, or its publisher sees the store.
            if self.stopped.load(Ordering::SeqCst) {
                return None;
            }
            let epoch = self.epoch.0.load(Ordering::SeqCst);
            if epoch != seen {
                asleep.store(false, Ordering::Relaxed);
                return Some(epoch);
            }
            std::thread::park();
        }
    }

    /// Runs pieces of loop `epoch`: those of thread `own`, then those of the threads after it, `reach` threads in all.
    fn work(&self, own: usize, epoch: u64, reach: usize) {
        let job = &self.job.0;
        let (body, tasks) = (job.body.load(Ordering::Relaxed), job.tasks.load(Ordering::Relaxed));
        let pieces = job.pieces.load(Ordering::Relaxed);
        let mut done = 0;
        for thread in (own..own + reach.min(self.threads)).map(|thread| thread % self.threads) {
            while let Some(piece) = self.take(thread, epoch) {
                let range = piece * tasks / pieces..(piece + 1) * tasks / pieces;
                // SAFETY: this thread has a piece of the loop, so it has read the job of that loop (see the module), and the
                // caller stays in `run`, which owns the body, until the piece is counted as done.
                let body: Body<'_> = unsafe { *body.cast::<Body<'_>>() };
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| body(range))) {
                    lock(&self.panic).get_or_insert(panic);
                    self.panicked.store(true, Ordering::Relaxed);
                }
                done += 1;
            }
        }
        // From here on the caller may write the next job.
        if done > 0 && self.left.0.fetch_sub(done, Ordering::SeqCst) == done && self.waiting.load(Ordering::SeqCst) {
            let _gate = lock(&self.gate);
            self.done.notify_all();
        }
    }

    /// Takes the next piece of a thread's share of loop `epoch`.
    fn take(&self, thread: usize, epoch: u64) -> Option<usize> {
        const PIECE: u64 = (1 << PIECE_BITS) - 1;
        let ticket = &self.tickets[thread].0;
        let mut now = ticket.load(Ordering::Acquire);
        loop {
            let (next, end) = ((now & PIECE) as usize, (now >> PIECE_BITS & PIECE) as usize);
            if now >> (2 * PIECE_BITS) != epoch & (u64::MAX >> (2 * PIECE_BITS)) || next >= end {
                return None;
            }
            match ticket.compare_exchange_weak(now, now + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(next),
                Err(other) => now = other,
            }
        }
    }

    /// Waits, as the caller, for the pieces of other threads; `own` is the time that its own work took.
    fn wait(&self, own: Duration) {
        let crowded = self.crowded.load(Ordering::Relaxed);
        let done = || self.left.0.load(Ordering::Acquire) == 0;
        if !spin(if crowded > 0 { SPIN_CROWDED } else { LATE.max(own) }, done) {
            self.waiting.store(true, Ordering::SeqCst);
            let mut gate = lock(&self.gate);
            while self.left.0.load(Ordering::SeqCst) != 0 {
                gate = self.done.wait(gate).unwrap_or_else(PoisonError::into_inner);
            }
            drop(gate);
            self.waiting.store(false, Ordering::Relaxed);
            if crowded == 0 {
                self.crowded.store(CROWDED_LOOPS, Ordering::Relaxed);
            }
        }
        if crowded > 0 {
            self.crowded.store(crowded - 1, Ordering::Relaxed);
        }
    }
}

/// Returns the pieces of thread `thread`: contiguous, in the order of the threads, in nearly equal numbers.
fn share(pieces: usize, threads: usize, thread: usize) -> Range<usize> {
    let sharing = threads.min(pieces);
    let thread = thread.min(sharing);
    thread * pieces / sharing..(thread + 1).min(sharing) * pieces / sharing
}

/// Spins until `ready`; returns `false` if the budget is used up. Reads the clock only every 32 rounds.
fn spin(budget: Duration, ready: impl Fn() -> bool) -> bool {
    let mut start = None;
    loop {
        for _ in 0..32 {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.get_or_insert_with(Instant::now).elapsed() > budget {
            return ready();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker may read the job of the next loop while its tickets are still those of the previous, shorter loop.
    #[test]
    fn a_worker_that_is_late_gets_no_piece_of_the_next_loop() {
        let handover = Handover::new(2);
        assert!(handover.run(2, 2, &|_| (), |_| ()));
        let body: Body<'_> = &|_| panic!("this piece belongs to no loop");
        handover.job.0.body.store((&raw const body).cast_mut().cast(), Ordering::Relaxed);
        handover.job.0.tasks.store(16, Ordering::Relaxed);
        handover.job.0.pieces.store(16, Ordering::Relaxed);
        handover.left.0.store(16, Ordering::Relaxed);
        handover.work(1, 1, REACH);
        assert_eq!(handover.left.0.load(Ordering::Relaxed), 16);
    }

    /// The bits that a ticket has for the epoch wrap around.
    #[test]
    fn pieces_are_taken_after_more_loops_than_a_ticket_can_count() {
        let (handover, epoch) = (Handover::new(1), 1 << (u64::BITS - 2 * PIECE_BITS));
        handover.tickets[0].0.store(epoch << (2 * PIECE_BITS) | 1 << PIECE_BITS, Ordering::Relaxed);
        assert_eq!((handover.take(0, epoch), handover.take(0, epoch)), (Some(0), None));
    }

    /// Five pieces for two threads would give one of them three fifths of the work.
    #[test]
    fn every_thread_gets_as_many_pieces_if_the_tasks_can_be_cut_so() {
        for (tasks, pieces, expected) in [(18, 5, 4), (18, 18, 16), (18, 2, 2), (3, 3, 3), (18, 1, 1)] {
            let ranges = Mutex::new(Vec::new());
            assert!(Handover::new(2).run(tasks, pieces, &|range| lock(&ranges).push(range), |_| ()));
            let ranges = lock(&ranges);
            assert_eq!(ranges.len(), expected, "{tasks} tasks in {pieces} pieces");
            assert_eq!(ranges.iter().cloned().flatten().collect::<Vec<_>>(), (0..tasks).collect::<Vec<_>>());
        }
    }

    #[test]
    fn shares_cover_all_pieces_in_order() {
        for threads in 1..70 {
            for pieces in 1..200 {
                let shares: Vec<Range<usize>> = (0..threads).map(|thread| share(pieces, threads, thread)).collect();
                assert_eq!(shares.iter().cloned().flatten().collect::<Vec<_>>(), (0..pieces).collect::<Vec<_>>());
                let sizes = shares.iter().map(Range::len).filter(|&len| len > 0);
                assert!(sizes.clone().max() <= sizes.min().map(|least| least + 1), "{threads} {pieces}: {shares:?}");
            }
        }
    }
}

//! The thread pool.

use simd::Pool;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Work per task that is worth a thread.
const LARGE: usize = 1 << 20;

fn counts(n: usize) -> Vec<AtomicUsize> {
    (0..n).map(|_| AtomicUsize::new(0)).collect()
}

fn all_once(counts: &[AtomicUsize]) -> bool {
    counts.iter().all(|count| count.load(Ordering::Relaxed) == 1)
}

#[test]
fn every_task_runs_once_whatever_the_threads() {
    for threads in 1..=8 {
        let pool = Pool::new(Some(threads)).unwrap();
        assert_eq!(pool.threads(), threads);
        for tasks in [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 1000, 100_003] {
            let calls = counts(tasks);
            pool.run(tasks, LARGE, |i| {
                calls[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(all_once(&calls), "{threads} threads, {tasks} tasks");
        }
        let mut data = vec![0usize; 1003];
        pool.chunks_mut(&mut data, 10, LARGE, |i, chunk| chunk.fill(i));
        assert!(data.iter().enumerate().all(|(i, &v)| v == i / 10));
        let mut other = vec![0u8; 1003];
        pool.zip_chunks_mut((&mut data[..1000], 10), (&mut other[..300], 3), LARGE, |i, a, b| {
            assert!(b.len() == 3 && a.iter().all(|&v| v == i));
            b.fill(i as u8);
        });
        assert!(other[..300].iter().enumerate().all(|(i, &v)| v == (i / 3) as u8));
    }
}

/// Small loops in quick succession, sometimes with a pause in which workers fall asleep: each loop must see everything that the
/// previous loop has written.
#[test]
fn every_loop_sees_what_the_previous_loop_wrote() {
    for threads in 1..=8 {
        let pool = Pool::new(Some(threads)).unwrap();
        let mut data = vec![0u64; 97];
        for round in 0..2000u64 {
            if round % 500 == 499 {
                std::thread::sleep(Duration::from_millis(3));
            }
            pool.chunks_mut(&mut data, 3, LARGE, |_, chunk| {
                for value in chunk {
                    assert_eq!(*value, round);
                    *value += 1;
                }
            });
        }
    }
}

/// A worker that is late for a loop of few pieces finds the next loop, of many pieces: it must not take them for its own.
#[test]
fn loops_of_few_and_of_many_pieces_take_turns() {
    for threads in 2..=8 {
        let pool = Pool::new(Some(threads)).unwrap();
        for round in 0..20_000 {
            let tasks = [1, 2, 3, 64, 2, 17][round % 6];
            let calls = counts(tasks);
            pool.run(tasks, LARGE, |i| {
                calls[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(all_once(&calls), "{threads} threads, {tasks} tasks, round {round}");
        }
    }
}

#[test]
fn a_loop_inside_of_a_task_runs_on_the_thread_of_the_task() {
    let pool = Pool::new(Some(4)).unwrap();
    let calls = counts(40 * 30);
    pool.enter(|| {
        pool.run(40, LARGE, |i| {
            let thread = std::thread::current().id();
            pool.run(30, LARGE, |j| {
                assert_eq!(std::thread::current().id(), thread);
                calls[i * 30 + j].fetch_add(1, Ordering::Relaxed);
            });
        });
    });
    assert!(all_once(&calls));
}

#[test]
fn callers_on_several_threads_share_a_pool() {
    let pool = Pool::new(Some(3)).unwrap();
    std::thread::scope(|scope| {
        for caller in 0..4usize {
            let pool = pool.clone();
            scope.spawn(move || {
                for round in 0..500 {
                    let mut data = vec![0; 50];
                    pool.chunks_mut(&mut data, 1, LARGE, |i, chunk| chunk[0] = i * caller + round);
                    assert!(data.iter().enumerate().all(|(i, &v)| v == i * caller + round));
                }
            });
        }
    });
}

#[test]
fn a_panic_in_a_task_reaches_the_caller_after_the_others_and_the_pool_goes_on() {
    for threads in [1, 2, 5] {
        let pool = Pool::new(Some(threads)).unwrap();
        for bad in [0, 17, 63] {
            let calls = counts(64);
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(64, LARGE, |i| {
                    calls[i].fetch_add(1, Ordering::Relaxed);
                    assert!(i != bad, "task {i} fails");
                });
            }));
            let message = outcome.unwrap_err().downcast::<String>().unwrap();
            assert_eq!(*message, format!("task {bad} fails"));
            assert!(calls.iter().all(|count| count.load(Ordering::Relaxed) <= 1), "none runs twice");
            let calls = counts(64);
            pool.run(64, LARGE, |i| {
                calls[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(all_once(&calls), "after a panic, {threads} threads");
        }
    }
}

#[test]
fn a_pool_ends_busy_or_idle() {
    for threads in 1..=8 {
        drop(Pool::new(Some(threads)).unwrap());
        let pool = Pool::new(Some(threads)).unwrap();
        pool.run(100, LARGE, |_| {});
        drop(pool.clone());
        pool.run(100, LARGE, |_| {});
        drop(pool);
        let asleep = Pool::new(Some(threads)).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        drop(asleep);
    }
}

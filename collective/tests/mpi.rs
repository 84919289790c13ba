//! The `mpi` carrier. Without a launcher only what is missing can be tested; the other tests are those of `cargo xtask test-mpi`, which
//! starts this program on several ranks and knows how each test must end.

use std::process::Command;
use std::time::{Duration, Instant};

use collective::{Collective, mpi};

use super::suite;

/// Starts MPI with the ranks that the launcher started.
fn world() -> std::sync::Arc<dyn Collective> {
    let world = mpi().unwrap();
    assert_eq!((world.carrier(), world.size() > 1), ("mpi", true));
    world
}

/// Ends with success.
#[test]
#[ignore = "only under mpiexec, by cargo xtask test-mpi"]
fn processes_do_what_every_carrier_must_do() {
    let world = world();
    suite::ALL.iter().for_each(|demand| demand(&*world));
    let again = mpi().err().unwrap().to_string();
    assert!(again.starts_with("MPI was started before in this process"), "{again}");
    let group = world.split(0).unwrap();
    drop(world);
    // The last group stops MPI.
    suite::gather(&*group, &vec![3; group.size()], 2);
}

/// Ends with success, and prints times.
#[test]
#[ignore = "only under mpiexec, by cargo xtask test-mpi"]
fn times_of_exchanges() {
    let world = world();
    for (bytes, rounds) in [(4 << 10, 2000u32), (256 << 10, 200)] {
        let (widths, own) = (vec![bytes; world.size()], vec![1; bytes]);
        let mut all = vec![0; bytes * world.size()];
        let mut gather = || world.all_gather(&own, 1, &widths, &mut all).unwrap();
        gather();
        let start = Instant::now();
        (0..rounds).for_each(|_| gather());
        let each = start.elapsed().as_secs_f64() * 1e6 / f64::from(rounds);
        if world.rank() == 0 {
            println!("figure: all_gather of {} KiB per rank {each:.0} us", bytes >> 10);
        }
    }
    // One rank sends rows and computes; the other waits for the rows alone.
    let mut rows = vec![1u8; 1 << 20];
    world.min(0).unwrap();
    match world.rank() {
        0 => {
            world.send(1, &rows).unwrap();
            std::thread::sleep(Duration::from_millis(300));
        }
        1 => {
            let start = Instant::now();
            world.receive(0, &mut rows).unwrap();
            println!("figure: 1 MiB of a rank that then computes {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
        }
        _ => {}
    }
    world.min(0).unwrap();
}

/// Ends with success, and prints the CPU time of a wait.
#[test]
#[ignore = "only under mpiexec, by cargo xtask test-mpi"]
fn a_rank_that_waits_uses_little_of_a_core() {
    let (world, mut bytes) = (world(), Vec::new());
    world.min(0).unwrap();
    let (before, start) = (cpu_seconds(), Instant::now());
    if world.rank() == 0 {
        std::thread::sleep(Duration::from_secs(10));
        bytes.push(1);
    }
    world.broadcast(0, &mut bytes).unwrap();
    let share = 100.0 * (cpu_seconds() - before) / start.elapsed().as_secs_f64();
    if world.rank() == 1 {
        println!("figure: {share:.1} % of a core while waiting");
    }
    assert!(share < 5.0, "found {share:.1} % of a core, expected less than 5");
}

/// CPU time of all threads of this process.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // The name of the program may have spaces; the times in user and system mode are fields 14 and 15, in hundredths of a second.
    let fields = stat.rsplit_once(')').unwrap().1.split_whitespace();
    fields.skip(11).take(2).map(|ticks| ticks.parse::<f64>().unwrap() / 100.0).sum()
}

/// Ends with code 70 and the reason.
#[test]
#[ignore = "only under mpiexec, by cargo xtask test-mpi"]
fn a_rank_that_aborts_ends_all() {
    let world = world();
    if world.rank() + 1 == world.size() {
        std::thread::sleep(Duration::from_millis(200));
        // From another thread than the one that waits, as a watchdog does.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(200));
                world.abort("a reason\nof two lines");
            });
            let _ = world.receive(0, &mut [0]);
        });
    }
    let _ = world.receive(world.size() - 1, &mut [0]);
    panic!("a call after the end returned");
}

/// Ends with a failure, as the launcher sees that a process was killed.
#[test]
#[ignore = "only under mpiexec, by cargo xtask test-mpi"]
fn a_rank_that_is_killed_ends_all() {
    let world = world();
    world.min(0).unwrap();
    if world.rank() + 1 == world.size() {
        Command::new("kill").args(["-9", &std::process::id().to_string()]).status().unwrap();
    }
    let _ = world.receive(world.size() - 1, &mut [0]);
    panic!("a call after the end returned");
}

/// Ends with a failure, although the other ranks wait.
#[test]
#[ignore = "only under mpiexec, by cargo xtask test-mpi"]
fn a_rank_that_panics_ends_all() {
    let world = world();
    assert!(world.rank() + 1 < world.size(), "this rank fails");
    let _ = world.receive(world.size() - 1, &mut [0]);
}

/// Ends with a failure that says what differs: rank 1 gathers rows of another width.
#[test]
#[ignore = "only under mpiexec, by cargo xtask test-mpi"]
fn rows_of_other_widths_end_all() {
    let world = world();
    let bytes = 2 + world.rank();
    let (own, widths, mut all) = (vec![1; bytes], vec![bytes; world.size()], vec![0; bytes * world.size()]);
    world.all_gather(&own, 1, &widths, &mut all).unwrap();
}

/// Ends with a failure that says what differs: rank 1 receives a message of another length.
#[test]
#[ignore = "only under mpiexec, by cargo xtask test-mpi"]
fn a_message_of_another_length_ends_all() {
    let world = world();
    match world.rank() {
        0 => world.send(1, &[1, 2, 3]).unwrap(),
        _ => world.receive(0, &mut [0, 0]).unwrap(),
    }
    let _ = world.min(0);
}

/// Ends with a failure that names the calls, with `QUIRE_CHECK_COLLECTIVES=1`.
#[test]
#[ignore = "only under mpiexec, by cargo xtask test-mpi"]
fn other_calls_end_all() {
    let world = world();
    world.min(0).unwrap();
    match world.rank() {
        0 => world.sum(&mut [1.0]).unwrap(),
        _ => world.broadcast(0, &mut Vec::new()).unwrap(),
    }
}

/// Ends with a failure: a message that no rank receives.
#[test]
#[ignore = "only under mpiexec, by cargo xtask test-mpi"]
fn a_message_that_nobody_receives_ends_all() {
    let world = world();
    if world.rank() == 0 {
        world.send(1, &vec![1; 8 << 20]).unwrap();
    }
}

/// Ends with success: each rank gets the error.
#[test]
#[ignore = "only under the mpiexec of another MPI, by cargo xtask test-mpi"]
fn the_library_of_another_mpi_is_one_line() {
    let line = mpi().err().unwrap().to_string();
    assert!(line.contains(" ranks, but ") && line.contains(" finds 1, because it belongs to another MPI; "), "{line}");
    assert!(line.contains("QUIRE_MPI_LIBRARY") && !line.contains('\n'), "{line}");
}

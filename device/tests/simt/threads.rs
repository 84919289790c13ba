//! Indices, barriers, shuffles, votes, atomics, shared memory, and the interface of the library.

use device::sim::{FaultKind, Library, SimError};
use device::{Arg, Launch};

use super::{SEEDS, buffer, launch, library, library_file, run, run_seeded, zeros};

#[test]
fn every_thread_of_a_grid_in_three_dimensions_runs_once_with_its_own_indices() {
    let Some(library) = library() else { return };
    for seed in SEEDS {
        let (grid, block) = ([3, 2, 2], [5, 3, 4]);
        let threads = grid.iter().chain(&block).product::<u32>() as usize;
        let out = zeros::<i64>(threads);
        let map = [-7i64, 3];
        let args = [Arg::pointer(&out, 0), Arg::bytes(&map), 2.5f32.into()];
        run_seeded(library, seed, &Launch { grid, block, ..launch("indices", 0, 0, &args) }).unwrap();
        let expected: Vec<i64> = (0..threads as i64).map(|i| i * 3 - 7 + 1).collect();
        assert_eq!(out.host::<i64>().unwrap(), expected, "seed {seed}");
    }
}

#[test]
fn a_block_meets_at_its_barriers_in_any_order_of_its_threads() {
    let Some(library) = library() else { return };
    for seed in SEEDS {
        for threads in [32, 128, 1024] {
            let values: Vec<i32> = (0..3 * threads).map(|i| i * i % 101 - 50).collect();
            let (input, out) = (buffer(&values), zeros::<i32>(values.len()));
            let args = [Arg::pointer(&out, 0), Arg::pointer(&input, 0)];
            run_seeded(library, seed, &launch("block_sums", 3, threads as u32, &args)).unwrap();
            for (block, found) in out.host::<i32>().unwrap().chunks(threads as usize).enumerate() {
                let own = &values[block * threads as usize..][..threads as usize];
                let expected = 8 * own.iter().sum::<i32>() + 28 * threads;
                assert!(found.iter().all(|sum| *sum == expected), "seed {seed}, {threads} threads, block {block}");
            }
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_library_that_is_closed_leaves_none_of_its_stacks() {
    let Some(file) = library_file() else { return };
    // Another file, because the library of the other tests stays open.
    let folder = tempfile::tempdir().unwrap();
    let file_of_its_own = folder.path().join("library.so");
    std::fs::copy(file, &file_of_its_own).unwrap();
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let before = mappings();
    for _ in 0..20 {
        let library = Library::open(&file_of_its_own).unwrap();
        let (input, out) = (buffer(&[1i32; 1024]), zeros::<i32>(1024));
        run(&library, &launch("block_sums", 1, 1024, &[Arg::pointer(&out, 0), Arg::pointer(&input, 0)])).unwrap();
    }
    // A stack and its guard page per thread; concurrent tests keep some too.
    let left = mappings().saturating_sub(before);
    assert!(left < 10 * 2 * 1024, "{left} mappings are left");
}

#[test]
fn shared_memory_of_both_kinds_is_nan_at_the_start_of_every_block() {
    let Some(library) = library() else { return };
    let out = zeros::<f32>(2 * 32 * 4);
    for write in [1i32, 0] {
        run(library, &launch("fresh_shared", 4, 32, &[Arg::pointer(&out, 0), write.into()])).unwrap();
        assert!(out.host::<f32>().unwrap().iter().all(|value| value.is_nan()), "write {write}");
    }
}

#[test]
fn shuffles_of_each_kind_and_width_move_what_cuda_says() {
    let Some(library) = library() else { return };
    for (by, width) in [(0, 32), (1, 32), (16, 32), (31, 32), (1, 8), (5, 8), (3, 16), (1, 1)] {
        let out = zeros::<i64>(8 * 32);
        let args = [Arg::pointer(&out, 0), by.into(), width.into()];
        run_seeded(library, 5, &launch("shuffles", 1, 32, &args)).unwrap();
        for lane in 0..32 {
            let first = lane / width * width;
            let inside = |source: i32| if (first..first + width).contains(&source) { source } else { lane };
            // An xor may read from a lower segment, but not from a higher one.
            let xor = if (lane ^ by) < first + width { lane ^ by } else { lane };
            let sources = [first + by % width, xor, inside(lane + by), inside(lane - by)];
            let (value, wide) = (|l: i32| i64::from(l) * 3 + 1, |l: i32| ((i64::from(l) * 3 + 1) << 33) + 5);
            let expected: Vec<i64> =
                sources.iter().map(|l| value(*l)).chain(sources[..3].iter().map(|l| wide(*l))).collect();
            let found = &out.host::<i64>().unwrap()[8 * lane as usize..][..8];
            assert_eq!(found[..7], expected, "by {by}, width {width}, lane {lane}");
            assert_eq!(found[7], expected[3], "by {by}, width {width}, lane {lane}");
        }
    }
}

#[test]
fn groups_of_lanes_meet_by_themselves() {
    let Some(library) = library() else { return };
    for seed in SEEDS {
        let out = zeros::<i32>(32);
        run_seeded(library, seed, &launch("groups", 1, 32, &[Arg::pointer(&out, 0)])).unwrap();
        // 0 + .. + 7 = 28, plus 64 for each group; the last group takes the result of its lane 7, which is lane 31.
        let expected: Vec<i32> = (0..32).map(|lane| if lane < 24 { 28 + lane / 8 * 64 } else { 220 + 31 }).collect();
        assert_eq!(out.host::<i32>().unwrap(), expected, "seed {seed}");
    }
}

#[test]
fn votes_count_every_thread_once() {
    let Some(library) = library() else { return };
    let out = zeros::<u32>(8 * 64);
    run_seeded(library, 3, &launch("votes", 1, 64, &[Arg::pointer(&out, 0)])).unwrap();
    for (thread, found) in out.host::<u32>().unwrap().chunks(8).enumerate() {
        let same = (0..32).filter(|lane| lane % 5 == thread % 32 % 5).map(|lane| 1 << lane).sum();
        assert_eq!(found, [0xaaaa_aaaa, 1, 0, 32, 1, 0, same, 31 + (64 << 8)], "thread {thread}");
    }
}

#[test]
fn atomics_lose_nothing_in_any_order() {
    let Some(library) = library() else { return };
    for seed in SEEDS {
        let counts = buffer(&[0u32, 0, 0, 0, 1, 0, 0, 0]);
        let (sum, extremes, bits) = (zeros::<f32>(1), zeros::<i32>(2), zeros::<u64>(1));
        let args = [&counts, &sum, &extremes, &bits].map(|buffer| Arg::pointer(buffer, 0));
        run_seeded(library, seed, &launch("atomics", 5, 96, &args)).unwrap();
        let product = (0..480).fold(1u32, |product, _| product.wrapping_mul(3));
        assert_eq!(counts.host::<u32>().unwrap(), [120, 120, 120, 120, product, 480, 77, 5 % 3], "seed {seed}");
        assert_eq!(sum.host::<f32>().unwrap(), [240.0]);
        assert_eq!(extremes.host::<i32>().unwrap(), [479, -479]);
        assert_eq!(bits.host::<u64>().unwrap(), [u64::MAX]);
    }
}

#[test]
fn several_threads_launch_at_once() {
    let Some(library) = library() else { return };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                let values = zeros::<i32>(8 * 64);
                for seed in 0..20 {
                    run_seeded(library, seed, &launch("add_one", 8, 64, &[Arg::pointer(&values, 0)])).unwrap();
                }
                assert!(values.host::<i32>().unwrap().iter().all(|value| *value == 20), "thread {thread}");
            });
        }
    });
}

#[test]
fn a_pointer_may_begin_inside_of_its_buffer() {
    let Some(library) = library() else { return };
    let values = zeros::<i32>(64);
    run(library, &launch("add_one", 1, 16, &[Arg::pointer(&values, 40 * 4)])).unwrap();
    let expected: Vec<i32> = (0..64).map(|i| i32::from((40..56).contains(&i))).collect();
    assert_eq!(values.host::<i32>().unwrap(), expected);
}

#[test]
fn a_launch_that_does_not_fit_its_kernel_or_any_device_runs_nothing_and_says_why() {
    let Some(library) = library() else { return };
    let values = zeros::<i32>(4);
    let args = [Arg::pointer(&values, 0)];
    let good = launch("add_one", 1, 4, &args);
    let refused = |launch: &Launch<'_>| run(library, launch).unwrap_err();

    let error = refused(&Launch { kernel: "add_two", ..good });
    assert!(error.to_string().contains("there is no kernel \"add_two\" among its "), "{error}");
    let error = refused(&Launch { args: &[3i32.into(), Arg::null()], ..good });
    assert_eq!(error.to_string(), "kernel add_one: found arguments of [4, 8] bytes, expected [8]");
    let error = refused(&Launch { args: &[Arg::pointer(&values, 17)], ..good });
    assert_eq!(error.to_string(), "kernel add_one: argument 0 points at byte 17 of a buffer of 16");
    for (bad, expected) in [
        (Launch { block: [1025, 1, 1], ..good }, "a block of (1025,1,1) threads"),
        (Launch { grid: [1, 0, 1], ..good }, "a grid of (1,0,1) blocks"),
        (Launch { shared_bytes: 300_000, ..good }, "300000 bytes of dynamic shared memory, expected at most 232448"),
    ] {
        let error = refused(&bad);
        assert!(matches!(&error, SimError::Fault(fault) if fault.kind == FaultKind::BadLaunch), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert_eq!(values.host::<i32>().unwrap(), [0; 4]);
    run(library, &good).unwrap();
    assert_eq!(values.host::<i32>().unwrap(), [1; 4]);
}

#[test]
fn kernels_are_listed_with_their_parameters() {
    let Some(library) = library() else { return };
    let kernel = library.kernel("indices").unwrap();
    assert_eq!(kernel.parameter_bytes, [8, 16, 4]);
    assert!(kernel.file.ends_with("threads.cu"));
    assert_eq!([kernel.shared_bytes, library.kernel("reverse_in_own_shared").unwrap().shared_bytes], [0, 64 << 10]);
    assert!(library.kernels().windows(2).all(|pair| pair[0].name < pair[1].name));
}

#[test]
fn a_file_that_is_no_library_is_named_with_the_command_that_builds_one() {
    let error = device::sim::Library::open("no/such/library.so".as_ref()).err().unwrap().to_string();
    assert!(error.contains("no/such/library.so") && error.contains("cargo xtask build-kernels --sim"), "{error}");
}

//! Deliberate errors that the simulator reports, or that show in the result.

use device::Arg;
use device::sim::{FaultKind, SimError};

use super::{SEEDS, buffer, launch, library, line_of, run, run_seeded, zeros};

#[test]
fn a_mistake_among_threads_is_reported_with_kernel_block_thread_file_and_line() {
    let Some(library) = library() else { return };
    for (kernel, threads, kind) in [
        ("divergent_barrier", 128, FaultKind::DivergentBarrier),
        ("barrier_after_exit", 128, FaultKind::BarrierAfterExit),
        ("deadlock", 64, FaultKind::Deadlock),
        ("exited_lane", 32, FaultKind::BadMask),
        ("not_in_mask", 32, FaultKind::BadMask),
        ("lane_outside", 32, FaultKind::BadLane),
        ("misaligned_copy", 1, FaultKind::Misaligned),
        ("trap", 1, FaultKind::Trap),
    ] {
        for seed in SEEDS {
            let out = zeros::<i32>(128);
            let args = [Arg::pointer(&out, 0)];
            let error = run_seeded(library, seed, &launch(kernel, 2, threads, &args)).unwrap_err();
            let SimError::Fault(fault) = error else { panic!("{error}") };
            assert_eq!((fault.kind, fault.kernel.as_str()), (kind, kernel), "{fault}");
            assert!(fault.file.ends_with("mistakes.cu"), "{fault}");
            // Either of two barriers may be reported; the message names both.
            let line = line_of(kernel);
            assert!(fault.line == line || fault.to_string().contains(&format!("mistakes.cu:{line}")), "{fault}");
            assert!(fault.block[0] < 2 && fault.thread[0] < threads, "{fault}");
            let place = format!("kernel {kernel}, block ({},0,0), thread ({},0,0), ", fault.block[0], fault.thread[0]);
            assert!(fault.to_string().starts_with(&place) && !fault.to_string().contains('\n'), "{fault}");
        }
    }
}

#[test]
fn lanes_that_part_before_a_shuffle_are_found_where_lengths_are_ragged() {
    let Some(library) = library() else { return };
    let out = zeros::<i32>(32);
    let of_length =
        |length: i32| run(library, &launch("divergent_shuffle", 1, 32, &[Arg::pointer(&out, 0), length.into()]));
    of_length(32).unwrap();
    let SimError::Fault(fault) = of_length(20).unwrap_err() else { panic!() };
    assert_eq!(fault.kind, FaultKind::DivergentCollective, "{fault}");
}

#[test]
fn a_launch_after_a_fault_is_as_any_other() {
    let Some(library) = library() else { return };
    let out = zeros::<i32>(128);
    for _ in 0..3 {
        run(library, &launch("deadlock", 2, 64, &[Arg::pointer(&out, 0)])).unwrap_err();
        let values = zeros::<i32>(64);
        run(library, &launch("add_one", 1, 64, &[Arg::pointer(&values, 0)])).unwrap();
        assert_eq!(values.host::<i32>().unwrap(), [1; 64]);
    }
}

#[test]
fn a_missing_barrier_before_a_read_shows_as_nan() {
    let Some(library) = library() else { return };
    for seed in SEEDS {
        let out = zeros::<f32>(128);
        run_seeded(library, seed, &launch("read_too_early", 1, 128, &[Arg::pointer(&out, 0)])).unwrap();
        assert!(out.host::<f32>().unwrap().iter().any(|value| value.is_nan()), "seed {seed}");
    }
}

#[test]
fn a_thread_of_an_overlapped_kernel_that_does_not_wait_is_reported() {
    let Some(library) = library() else { return };
    let (out, input) = (zeros::<i32>(32), buffer(&[1i32; 32]));
    let args = [Arg::pointer(&out, 0), Arg::pointer(&input, 0)];
    run(library, &launch("waits_first", 1, 32, &args)).unwrap();
    let SimError::Fault(fault) = run(library, &launch("one_never_waits", 1, 32, &args)).unwrap_err() else { panic!() };
    assert_eq!((fault.kind, fault.thread[0]), (FaultKind::TooEarly, 5), "{fault}");
}

#[test]
fn a_missing_wait_for_a_copy_shows_as_nan() {
    let Some(library) = library() else { return };
    let (out, input) = (zeros::<f32>(32), buffer(&[1.0f32; 128]));
    run(library, &launch("no_wait", 1, 32, &[Arg::pointer(&out, 0), Arg::pointer(&input, 0)])).unwrap();
    assert!(out.host::<f32>().unwrap().iter().all(|value| value.is_nan()));
}

//! Deliberate errors that only a sanitizer detects, each in its own process, and correct kernels that no sanitizer reports.

use std::path::Path;
use std::process::{Command, Output};

use device::{Arg, Launch, Tensor};
use testkit::capability::Capability;
use testkit::kernels::host::{self, Instrument};
use testkit::not_run;

use super::hopper::matrix;
use super::{SEEDS, buffer, compiler, launch, line_of, manifest, zeros};

/// Returns the program that replays launches under a sanitizer; reports and returns `None` if it cannot be built.
fn program(sanitizer: Instrument) -> Option<std::path::PathBuf> {
    host::replay_for_tests(&manifest(), compiler()?, sanitizer)
}

fn replay(program: &Path, launches: &[Launch<'_>], seeds: &[u64]) -> Output {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for launch in launches {
        launch.record(seeds, &mut file).unwrap();
    }
    Command::new(program).arg(file.path()).output().unwrap()
}

/// Checks that the report of the sanitizer about a kernel of `mistakes.cu` names its line.
fn is_found(program: &Path, launch: &Launch<'_>, word: &str) {
    let output = replay(program, std::slice::from_ref(launch), &[1]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{}: nothing was found\n{said}", launch.kernel);
    assert!(said.contains(word), "{}: no {word:?} in\n{said}", launch.kernel);
    let place = format!("mistakes.cu:{}", line_of(launch.kernel));
    assert!(said.contains(&place), "{}: no {place} in\n{said}", launch.kernel);
}

/// Kernels without an error run to the end, with several seeds.
fn is_content(program: &Path) {
    let input = buffer(&(0..3 * 128).collect::<Vec<i32>>());
    let (sums, lanes) = (zeros::<i32>(3 * 128), zeros::<i32>(32));
    let counts = buffer(&[0u32, 0, 0, 0, 1, 0, 0, 0]);
    let (sum, extremes, bits) = (zeros::<f32>(1), zeros::<i32>(2), zeros::<u64>(1));
    let (a, b, c) = (zeros::<u16>(16 * 64), zeros::<u16>(5 * 64), zeros::<f32>(16 * 8));
    let summed = [&sums, &input].map(|buffer| Arg::pointer(buffer, 0));
    let counted = [&counts, &sum, &extremes, &bits].map(|buffer| Arg::pointer(buffer, 0));
    let multiplied = [Arg::pointer(&c, 0), Arg::pointer(&a, 0), Arg::pointer(&b, 0), 64.into(), 5.into()];
    let grouped = [Arg::pointer(&lanes, 0)];
    let (rows, threads, boxes) = (zeros::<u16>(64 * 64), zeros::<i32>(128), zeros::<f32>(2 * 64 * 64));
    let (tensor, eight) = (matrix(&rows, 64, 64), Tensor { tile: [64, 8, 1, 1], ..matrix(&rows, 64, 64) });
    let piped = [Arg::pointer(&sum, 0), Arg::tensor(&eight), 8.into()];
    let met = [Arg::pointer(&threads, 0)];
    let reversed = [Arg::pointer(&input, 0)];
    let boxed = [Arg::pointer(&boxes, 0), Arg::tensor(&tensor), Arg::tensor(&tensor), Arg::pointer(&rows, 0)];
    let launches = [
        launch("pipeline", 1, 96, &piped),
        launch("named_barriers", 1, 128, &met),
        Launch { shared_bytes: 16 << 10 | 8, ..launch("boxes_f16_64_k", 1, 128, &boxed) },
        launch("block_sums", 3, 128, &summed),
        launch("groups", 1, 32, &grouped),
        launch("atomics", 3, 96, &counted),
        launch("product_f16", 1, 32, &multiplied),
        Launch { shared_bytes: 0, ..launch("reverse_in_own_shared", 1, 64, &reversed) },
    ];
    let output = replay(program, &launches, &SEEDS);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_memory_sanitizers_find_accesses_out_of_bounds_misaligned_loads_and_indices_beyond_an_array() {
    let Some(program) = program(Instrument::Memory) else { return };
    is_content(&program);
    let out = zeros::<i32>(128);
    let args = [Arg::pointer(&out, 0), 1.into()];
    is_found(&program, &launch("beyond_global", 1, 128, &args), "heap-buffer-overflow");
    let shared = Launch { shared_bytes: 512, ..launch("beyond_dynamic_shared", 1, 128, &args[..1]) };
    is_found(&program, &shared, "use-after-poison");
    let out = zeros::<i32>(256);
    let args = |offset: i32| [Arg::pointer(&out, 0), offset.into()];
    if compiler().is_some_and(|compiler| compiler.is_clang()) {
        not_run::report(Capability::Ubsan, "misaligned_load: clang's does not check copies of a structure");
    } else {
        is_found(&program, &launch("misaligned_load", 1, 32, &args(1)), "misaligned address");
    }
    is_found(&program, &launch("beyond_fixed_shared", 1, 128, &args(1)), "out of bounds");
    let output = replay(&program, &[launch("misaligned_load", 1, 32, &args(4))], &[0]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_thread_sanitizer_finds_missing_barriers_before_and_after_a_read() {
    let Some(program) = program(Instrument::Thread) else { return };
    is_content(&program);
    let out = zeros::<f32>(128);
    for kernel in ["read_too_early", "write_too_early"] {
        is_found(&program, &launch(kernel, 1, 128, &[Arg::pointer(&out, 0)]), "data race");
    }
}

#[test]
fn a_fault_ends_a_replay_with_its_line() {
    let Some(program) = program(Instrument::None) else { return };
    let out = zeros::<i32>(128);
    let output = replay(&program, &[launch("deadlock", 1, 64, &[Arg::pointer(&out, 0)])], &[9]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.starts_with("replay: seed 9: kernel deadlock, block (0,0,0), thread ("), "{said}");
}

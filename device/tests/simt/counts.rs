//! What the simulator counts, for kernels whose counts are known.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use device::sim::{Counts, FaultKind, Library, SimError, Tally};
use device::{Arg, Buffer, Launch, Options, Tensor};
use proptest::prelude::*;
use testkit::capability::Capability;
use testkit::kernels::host::{self, Instrument};
use testkit::{kernels, not_run, workspace};

use super::hopper::matrix;
use super::{SEEDS, buffer, compiler, launch, manifest, zeros};

/// Returns the library that counts.
fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    let compiler = compiler()?;
    if compiler.is_clang() {
        not_run::report(Capability::Gxx, "clang++ splits loads of vectors before it reports them");
        return None;
    }
    Some(LIBRARY.get_or_init(|| {
        let built = host::library(&workspace::root(), &manifest(), compiler, Instrument::Counts, kernels::cores());
        Library::open(&built.unwrap()).unwrap()
    }))
}

/// Counts a launch; the order of threads makes no difference.
fn count(library: &Library, launch: &Launch<'_>) -> Counts {
    // SAFETY: each test passes buffers of the sizes that its kernel reads and writes.
    let [first, others @ ..] = SEEDS.map(|seed| unsafe { library.count(launch, seed) }.unwrap());
    others.iter().for_each(|other| assert_eq!(*other, first, "{}", launch.kernel));
    first
}

#[test]
fn an_access_to_global_memory_before_the_wait_for_earlier_launches_is_reported() {
    let Some(library) = library() else { return };
    let (out, input) = (zeros::<i32>(32), buffer(&[1i32; 32]));
    let args = [Arg::pointer(&out, 0), Arg::pointer(&input, 0)];
    // SAFETY: the kernels read and write 32 numbers.
    let run = |kernel| unsafe { library.count(&launch(kernel, 1, 32, &args), 0) };
    assert_eq!(run("waits_first").unwrap().requests, 2);
    let error = run("waits_after_a_read").unwrap_err();
    assert!(matches!(&error, SimError::Fault(fault) if fault.kind == FaultKind::TooEarly), "{error}");
}

fn address(buffer: &Buffer) -> usize {
    buffer.host::<u8>().unwrap().as_ptr().addr()
}

/// Sectors of 32 bytes that each 32 of these addresses touch.
fn sectors(addresses: &[usize], bytes: usize) -> u64 {
    addresses.chunks(32).map(|warp| distinct_sectors(warp, bytes)).sum()
}

/// Sectors of 32 bytes that these addresses touch together.
fn distinct_sectors(addresses: &[usize], bytes: usize) -> u64 {
    let touched: BTreeSet<usize> = addresses.iter().flat_map(|at| at / 32..=(at + bytes - 1) / 32).collect();
    touched.len() as u64
}

/// Passes beyond the first, for lanes that share a pass if they read distinct banks or equal words.
fn conflicts(elements: &[i32], bytes: usize) -> u64 {
    let pass = |lanes: &[i32]| {
        let words: BTreeSet<usize> =
            lanes.iter().flat_map(|i| *i as usize * bytes / 4..(*i as usize + 1) * bytes / 4).collect();
        (0..32).map(|bank| words.iter().filter(|word| **word % 32 == bank).count() as u64).max().unwrap() - 1
    };
    elements.chunks(32 * 4 / bytes).map(pass).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn sectors_and_bytes_are_those_of_a_naive_count(
        from in prop::collection::vec(0..512i32, 96),
        spread in prop::sample::select(vec![1, 8, 512]),
        (kernel, bytes) in prop::sample::select(vec![("gather_bytes", 1), ("gather_words", 4), ("gather_fours", 16)]),
    ) {
        let Some(library) = library() else { return Ok(()) };
        let from: Vec<i32> = from.iter().map(|i| i % spread).collect();
        let (input, indices, out) = (zeros::<u8>(512 * bytes), buffer(&from), zeros::<u8>(96 * bytes));
        let args = [&out, &input, &indices].map(|buffer| Arg::pointer(buffer, 0));
        let counts = count(library, &launch(kernel, 1, 96, &args));
        let at = |base: &Buffer, i: usize, bytes| address(base) + i * bytes;
        let read: Vec<usize> = from.iter().map(|i| at(&input, *i as usize, bytes)).collect();
        let ordered = |base, bytes| (0..96).map(|i| at(base, i, bytes)).collect::<Vec<_>>();
        let (written, indexed) = (ordered(&out, bytes), ordered(&indices, 4));
        let number_of = |elements: &[i32]| elements.iter().collect::<BTreeSet<_>>().len();
        let distinct = number_of(&from);
        let wanted: usize = from.chunks(32).map(number_of).sum();
        prop_assert_eq!(counts, Counts {
            blocks: 1,
            busy_blocks: 1,
            read_bytes: 96 * (bytes + 4) as u64,
            written_bytes: 96 * bytes as u64,
            distinct_read_bytes: (distinct * bytes + 96 * 4) as u64,
            distinct_written_bytes: 96 * bytes as u64,
            requests: 3 * 3,
            sectors: sectors(&read, bytes) + sectors(&written, bytes) + sectors(&indexed, 4),
            distinct_sectors: distinct_sectors(&read, bytes)
                + distinct_sectors(&written, bytes)
                + distinct_sectors(&indexed, 4),
            wanted_bytes: ((wanted + 96) * bytes + 96 * 4) as u64,
            ..Counts::default()
        });
    }

    #[test]
    fn bank_conflicts_are_those_of_a_naive_count(
        from in prop::collection::vec(0..96i32, 96),
        stride in prop::sample::select(vec![1, 2, 8, 32]),
        (kernel, bytes) in prop::sample::select(vec![
            ("gather_shared_words", 4), ("gather_shared_twos", 8), ("gather_shared_fours", 16),
        ]),
    ) {
        let Some(library) = library() else { return Ok(()) };
        let from: Vec<i32> = from.iter().map(|i| i * stride % 96).collect();
        let (indices, out) = (buffer(&from), zeros::<u8>(96 * bytes));
        let args = [&out, &indices].map(|buffer| Arg::pointer(buffer, 0));
        let counts = count(library, &launch(kernel, 1, 96, &args));
        prop_assert_eq!(counts.shared_requests, 2 * 3);
        prop_assert_eq!(counts.bank_conflicts, conflicts(&from, bytes));
        // Writes and reads of three warps; a pass takes 128 bytes.
        prop_assert_eq!(counts.shared_passes, 2 * 96 * bytes as u64 / 128 + conflicts(&from, bytes));
        prop_assert_eq!(counts.barriers, 1);
    }
}

#[test]
fn a_stride_of_a_sector_takes_a_sector_for_each_lane_and_a_stride_of_all_banks_a_pass() {
    let Some(library) = library() else { return };
    let strided: Vec<i32> = (0..32).map(|lane| lane * 8).collect();
    let (input, indices, out) = (zeros::<f32>(256), buffer(&strided), zeros::<f32>(32));
    let args = [&out, &input, &indices].map(|buffer| Arg::pointer(buffer, 0));
    assert_eq!(count(library, &launch("gather_words", 1, 32, &args)).sectors, 32 + 4 + 4);
    let same_bank: Vec<i32> = (0..32).map(|lane| lane * 32).collect();
    let indices = buffer(&[same_bank, vec![0; 992]].concat());
    let out = zeros::<f32>(1024);
    let args = [&out, &indices].map(|buffer| Arg::pointer(buffer, 0));
    assert_eq!(count(library, &launch("gather_shared_words", 1, 1024, &args)).bank_conflicts, 31);
}

#[test]
fn blocks_that_write_nothing_do_no_work_and_bytes_are_distinct_across_blocks() {
    let Some(library) = library() else { return };
    let (out, row, busy) = (zeros::<f32>(5 * 32), zeros::<f32>(32), buffer(&[3i32]));
    let args = [&out, &row, &busy].map(|buffer| Arg::pointer(buffer, 0));
    let counts = count(library, &launch("some_blocks", 5, 32, &args));
    assert_eq!((counts.blocks, counts.busy_blocks), (5, 3));
    assert_eq!((counts.read_bytes, counts.distinct_read_bytes), (3 * 2 * 128 + 5 * 128, 3 * 128 + 128 + 4));
    assert_eq!((counts.requests, counts.sectors), (3 * 3 + 5, 3 * 3 * 4 + 5));
}

#[test]
fn lanes_that_leave_a_loop_early_take_no_part_in_its_later_requests() {
    let Some(library) = library() else { return };
    let (input, out) = (zeros::<f32>(32 * 32), zeros::<f32>(32));
    let args = [&out, &input].map(|buffer| Arg::pointer(buffer, 0));
    let counts = count(library, &launch("triangle", 1, 32, &args));
    let rows: Vec<Vec<usize>> =
        (0..32).map(|turn| (turn..32).map(|lane| address(&input) + (turn * 32 + lane) * 4).collect()).collect();
    assert_eq!(counts.requests, 32 + 1);
    assert_eq!(counts.sectors, rows.iter().map(|row| sectors(row, 4)).sum::<u64>() + 4);
    assert_eq!(counts.read_bytes, (1..=32).sum::<u64>() * 4);
}

#[test]
fn accesses_before_and_after_a_meeting_are_two_requests() {
    let Some(library) = library() else { return };
    let (input, out) = (zeros::<f32>(32), zeros::<f32>(32));
    let args = [&out, &input].map(|buffer| Arg::pointer(buffer, 0));
    let counts = count(library, &launch("turns", 1, 32, &args));
    assert_eq!((counts.requests, counts.sectors, counts.read_bytes, counts.barriers), (3, 3 * 4, 128, 2));
}

#[test]
fn an_atomic_operation_is_one_request_of_its_warp() {
    let Some(library) = library() else { return };
    let count_of = zeros::<u32>(1);
    let args = [Arg::pointer(&count_of, 0)];
    let counts = count(library, &launch("count_threads", 2, 64, &args));
    assert_eq!((counts.requests, counts.sectors, counts.distinct_written_bytes), (4, 4, 4));
}

#[test]
fn copies_tiles_and_products_count_as_their_instructions() {
    let Some(library) = library() else { return };
    let (input, out) = (zeros::<u16>(16 * 64), zeros::<u32>(32));
    // A pitch of 128 bytes puts the eight rows of a tile into the same banks; 144 does not.
    for (pitch, conflicts) in [(128, 4 * 7), (144, 0)] {
        let args = [Arg::pointer(&out, 0), Arg::pointer(&input, 0), pitch.into()];
        let counts = count(library, &launch("tile", 1, 32, &args));
        assert_eq!((counts.read_bytes, counts.distinct_read_bytes), (2048, 2048));
        assert_eq!((counts.requests, counts.sectors), (4 + 1, 64 + 4));
        assert_eq!((counts.shared_requests, counts.bank_conflicts), (4 + 1, conflicts), "pitch {pitch}");
        assert_eq!(counts.barriers, 1);
    }
    let (a, b, c) = (zeros::<u16>(16 * 64), zeros::<u16>(5 * 64), zeros::<f32>(16 * 8));
    let args = [Arg::pointer(&c, 0), Arg::pointer(&a, 0), Arg::pointer(&b, 0), 64.into(), 5.into()];
    let counts = count(library, &launch("product_f16", 1, 32, &args));
    assert_eq!((counts.products, counts.warpgroup_products, counts.multiply_adds), (4, 0, 4 * 16 * 8 * 16));
    assert_eq!((counts.read_bytes, counts.written_bytes), (16 * 128 + 5 * 128, 16 * 8 * 4));
    // Rows of 48 bytes: loads of tiles have no conflicts, and the copies one for each eight lanes, which write four rows.
    assert_eq!(counts.bank_conflicts, 4 * (4 + 2));
}

#[test]
fn boxes_count_their_rows_and_products_of_a_warpgroup_once() {
    let Some(library) = library() else { return };
    let (rows, boxes) = (zeros::<u16>(64 * 64), zeros::<f32>(2 * 64 * 64));
    let tensor: Tensor<'_> = matrix(&rows, 64, 64);
    let args = [Arg::pointer(&boxes, 0), Arg::tensor(&tensor), Arg::tensor(&tensor), Arg::pointer(&rows, 0)];
    let counts = count(library, &Launch { shared_bytes: 16 << 10 | 8, ..launch("boxes_f16_64_k", 1, 128, &args) });
    // Both factors are boxes of one tensor; the sums are read too.
    assert_eq!((counts.read_bytes, counts.distinct_read_bytes), (2 * 64 * 128 + 64 * 64 * 4, 64 * 128 + 64 * 64 * 4));
    // Rows of two boxes, a load of each sum, and its two stores by four warps.
    assert_eq!(counts.requests, 2 * 64 + 4 * 32 + 4 * 64);
    assert_eq!((counts.products, counts.warpgroup_products), (0, 8));
    assert_eq!(counts.multiply_adds, 8 * 64 * 64 * 16);
}

#[test]
fn a_store_for_the_tensor_cores_counts_as_one_of_16_bytes() {
    let Some(library) = library() else { return };
    // Two factors of 2 KiB, dense and not swizzled; the second follows the first.
    let (image, c) = (zeros::<u16>(2 * 64 * 16), zeros::<f32>(64 * 64));
    let factor = (1024u64 >> 4) << 16 | (128u64 >> 4) << 32;
    let args = [Arg::pointer(&c, 0), Arg::pointer(&image, 0), 4096.into(), factor.into(), factor.into(), 2048.into()];
    let launch = Launch { shared_bytes: 5 << 10, ..launch("product_of_image_k", 1, 128, &args) };
    let counts = count(library, &launch);
    assert_eq!((counts.warpgroup_products, counts.shared_requests), (1, 4096 / 16 / 32));
    assert_eq!((counts.shared_passes, counts.bank_conflicts), (4096 / 128, 0));
}

#[test]
fn a_device_adds_the_counts_of_its_launches_and_of_each_replay_of_a_graph() {
    let Some(library) = library() else { return };
    let tally = Arc::<Tally>::default();
    let folder = library.path().parent().unwrap().to_owned();
    let options = Options { kernels: Some(folder), counts: Some(Arc::clone(&tally)), ..Options::default() };
    let device = device::open_with("cuda-sim", &options).unwrap();
    device.load("simt_tests").unwrap();
    let out = device.alloc(4).unwrap();
    let args = [Arg::pointer(&out, 0)];
    let launch = launch("count_threads", 2, 64, &args);
    let enqueue = || device.launch(&launch).unwrap();
    enqueue();
    let graph = device.capture(&mut || enqueue()).unwrap();
    device.replay(&graph).unwrap();
    device.replay(&graph).unwrap();
    let taken = tally.take();
    let (launches, counts) = taken["count_threads"];
    assert_eq!((taken.len(), launches, counts.blocks, counts.requests), (1, 3, 6, 12));
    assert!(tally.take().is_empty());
}

#[test]
fn a_library_that_does_not_count_says_so() {
    let Some(library) = super::library() else { return };
    let count_of = zeros::<u32>(1);
    let args = [Arg::pointer(&count_of, 0)];
    // SAFETY: the kernel writes one word.
    let error = unsafe { library.count(&launch("count_threads", 1, 32, &args), 0) }.unwrap_err();
    assert_eq!(
        error.to_string(),
        "kernel count_threads: this library does not count: run cargo xtask build-kernels --sim --counts"
    );
}

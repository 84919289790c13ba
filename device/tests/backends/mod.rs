//! The same tests for every backend that can be opened on this machine; each other backend is reported in a line that begins
//! with `NOT RUN:`.
//!
//! The kernels are those of `simt/tests/`. `cuda` needs a GPU and nvcc; without them its code still runs, with a
//! driver in host code ([`driver`]).

mod driver;
mod fixture;
mod graphs;
mod products;
mod profiles;

use device::transfer::{CopyRange, Download, Upload};
use device::{Arg, Buffer, Device, DeviceError, Element, Launch, Options, Queue, Tensor, Tile};

use fixture::{MODULE, devices, is_fake, launching};

fn bytes<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: elements have no padding, so all of their bytes are initialised.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn filled<T: Element>(device: &dyn Device, values: &[T]) -> Buffer {
    let mut buffer = device.alloc(size_of_val(values)).unwrap();
    device.upload(&mut buffer, 0, bytes(values)).unwrap();
    buffer
}

fn contents(device: &dyn Device, buffer: &Buffer) -> Vec<i32> {
    let mut raw = vec![0; buffer.len_bytes()];
    device.download(buffer, 0, &mut raw).unwrap();
    raw.chunks_exact(4).map(|word| i32::from_ne_bytes(word.try_into().unwrap())).collect()
}

/// Adds one to `64 * blocks` numbers.
fn add_one(device: &dyn Device, values: &Buffer, blocks: u32) -> Result<(), DeviceError> {
    let args = [Arg::pointer(values, 0)];
    let (grid, block) = ([blocks, 1, 1], [64, 1, 1]);
    device.launch(&Launch { module: MODULE, kernel: "add_one", grid, block, shared_bytes: 0, args: &args })
}

#[test]
fn a_kernel_gets_the_shared_memory_that_it_says_it_needs() {
    for device in launching() {
        let values = filled(&*device, &(0..64).collect::<Vec<i32>>());
        let args = [Arg::pointer(&values, 0)];
        let (grid, block) = ([1; 3], [64, 1, 1]);
        let launch =
            Launch { module: MODULE, kernel: "reverse_in_own_shared", grid, block, shared_bytes: 0, args: &args };
        for _ in 0..2 {
            device.launch(&launch).unwrap();
        }
        device.launch(&Launch { shared_bytes: 100 << 10, ..launch }).unwrap();
        assert!(contents(&*device, &values).into_iter().eq((0..64).rev()), "{}", device.name());
    }
}

#[test]
fn a_kernel_that_waits_for_the_launches_before_it_reads_what_they_wrote() {
    for device in launching() {
        let [input, output] = [(); 2].map(|()| filled(&*device, &[0i32; 64]));
        add_one(&*device, &input, 1).unwrap();
        let args = [Arg::pointer(&output, 0), Arg::pointer(&input, 0)];
        let (grid, block) = ([1; 3], [64, 1, 1]);
        device
            .launch(&Launch { module: MODULE, kernel: "waits_first", grid, block, shared_bytes: 0, args: &args })
            .unwrap();
        assert_eq!(contents(&*device, &output), [1; 64], "{}", device.name());
    }
}

#[test]
fn a_launch_on_cuda_allocates_nothing_once_its_kernel_is_loaded() {
    for device in launching() {
        let values = filled(&*device, &[0i32; 64]);
        let args = [Arg::pointer(&values, 0)];
        let (grid, block) = ([1; 3], [64, 1, 1]);
        let launch = Launch { module: MODULE, kernel: "add_one", grid, block, shared_bytes: 100 << 10, args: &args };
        device.launch(&launch).unwrap();
        add_one(&*device, &values, 1).unwrap();
        let before = crate::counter::allocations();
        for _ in 0..100 {
            device.launch(&launch).unwrap();
            add_one(&*device, &values, 1).unwrap();
        }
        // The simulator keeps a launch as it keeps those of a graph.
        assert!(device.name() == "cuda-sim" || crate::counter::allocations() == before, "{}", device.name());
        assert_eq!(contents(&*device, &values), [202; 64], "{}", device.name());
    }
}

#[test]
fn a_box_of_a_tensor_is_what_the_map_says() {
    // The copy engine of Hopper, and its model in the simulator.
    for device in launching().filter(|device| device.compute_capability().is_none_or(|found| found == (9, 0))) {
        let (name, device) = (device.name(), &*device);
        let numbers: Vec<i32> = (0..64 * 9).collect();
        let (input, out) = (filled(device, &numbers), device.alloc(1024).unwrap());
        // 18 rows of 64 halves; the last two rows of the box from row 12 on are past the end.
        let tensor = Tensor { buffer: &input, sizes: [64, 18, 1, 1], strides: [128, 2304, 2304], tile: [64, 8, 1, 1] };
        let at = [0, 12, 0, 0].map(Arg::from);
        let args = [Arg::pointer(&out, 0), Arg::tensor(&tensor), at[0], at[1], at[2], at[3], 1024u32.into()];
        let (grid, block) = ([1; 3], [32, 1, 1]);
        device.launch(&Launch { module: MODULE, kernel: "box", grid, block, shared_bytes: 2048, args: &args }).unwrap();
        let expected: Vec<i32> = (0..8 * 32)
            .map(|i| {
                let (row, chunk) = (i / 32, (i % 32 / 4) ^ (i / 32 % 8));
                if row < 6 { (12 + row) * 32 + chunk * 4 + i % 4 } else { 0 }
            })
            .collect();
        assert_eq!(contents(device, &out), expected, "{name}");
    }
}

#[test]
fn memory_is_zeroed_and_copies_reach_the_bytes_that_they_name() {
    for device in devices() {
        let (name, device) = (device.name(), &*device);
        let mut a = device.alloc(16).unwrap();
        assert_eq!(contents(device, &a), [0; 4], "{name}");
        let mut source = [7i32, 8];
        device.upload(&mut a, 4, bytes(&source)).unwrap();
        // An upload is done when the call returns.
        source.fill(0);
        let mut b = filled(device, &[1i32, 2, 3, 4, 5]);
        device.copy(&a, 4, &mut b, 8, 8).unwrap();
        assert_eq!(contents(device, &b), [1, 2, 7, 8, 5], "{name}");
        let mut part = [0; 4];
        device.download(&b, 12, &mut part).unwrap();
        assert_eq!(part, 8i32.to_ne_bytes(), "{name}");
        let empty = device.alloc(0).unwrap();
        assert!(contents(device, &empty).is_empty());
        assert!(device.memory().total > 0, "{name}");
        if name != "cuda" {
            let error = device.alloc(usize::MAX / 2).err().unwrap();
            assert!(matches!(error, DeviceError::OutOfMemory { .. }), "{name}: {error}");
        }
    }
}

#[test]
fn host_memory_is_aligned_and_viewed_only_as_whole_elements() {
    let cpu = device::open("cpu", Some(1)).unwrap();
    let mut buffer = cpu.alloc(130).unwrap();
    assert!(buffer.host::<u8>().unwrap().iter().all(|&byte| byte == 0));
    assert_eq!(buffer.host::<u8>().unwrap().as_ptr() as usize % 64, 0);
    let error = buffer.host_mut::<f32>().unwrap_err().to_string();
    assert_eq!(error, "found a buffer of 130 bytes, expected a multiple of 4 bytes, the size of an element");
    let empty = cpu.alloc(0).unwrap();
    assert!(empty.host::<f32>().unwrap().is_empty() && empty.host::<[f32; 0]>().is_err());
}

#[test]
fn copies_outside_of_a_buffer_are_refused_and_change_nothing() {
    for device in devices() {
        let device = &*device;
        let (mut a, mut b) = (filled(device, &[1i32, 2]), filled(device, &[3i32, 4]));
        let mut pinned = device.pinned(8).unwrap();
        let refused = |outcome: Result<(), DeviceError>| {
            let error = outcome.unwrap_err();
            assert!(matches!(error, DeviceError::Outside { len: 8, .. }), "{}: {error}", device.name());
        };
        let error = device.upload(&mut a, 5, &[0; 4]).unwrap_err().to_string();
        assert_eq!(error, "found 4 bytes at offset 5, expected a range inside of a buffer of 8 bytes");
        refused(device.upload(&mut a, 9, &[]));
        refused(device.download(&a, usize::MAX, &mut [0; 4]));
        refused(device.copy(&a, 4, &mut b, 0, 8));
        refused(device.copy(&a, 0, &mut b, 4, 8));
        refused(device.upload_async(Queue::Copy, &pinned, 1, &mut a, 0, 8));
        refused(device.upload_async(Queue::Copy, &pinned, 0, &mut a, 1, 8));
        refused(device.download_async(Queue::Copy, &a, 1, &mut pinned, 0, 8));
        refused(device.download_async(Queue::Copy, &a, 0, &mut pinned, 1, 8));
        assert_eq!((contents(device, &a), contents(device, &b)), (vec![1, 2], vec![3, 4]));
        assert_eq!(pinned.host::<i32>().unwrap(), [0, 0]);
    }
}

#[test]
fn page_locked_memory_can_be_seen_only_after_a_wait_that_covers_its_copy() {
    for device in devices() {
        let (name, device) = (device.name(), &*device);
        let in_flight = |outcome: Result<&[i32], DeviceError>| matches!(outcome, Err(DeviceError::InFlight));
        let mut out = device.pinned(16).unwrap();
        out.host_mut::<i32>().unwrap().copy_from_slice(&[5, 6, 7, 8]);
        let mut buffer = device.alloc(16).unwrap();
        let too_early = device.record(Queue::Copy).unwrap();
        device.upload_async(Queue::Copy, &out, 4, &mut buffer, 0, 12).unwrap();
        assert!(in_flight(out.host()) && out.host_mut::<i32>().is_err(), "{name}");
        too_early.synchronize().unwrap();
        assert!(in_flight(out.host()), "{name}");

        // The copy back is on the other queue, and runs after the upload because it waits for its event.
        let uploaded = device.record(Queue::Copy).unwrap();
        device.wait(Queue::Compute, &uploaded).unwrap();
        let mut back = device.pinned(16).unwrap();
        device.download_async(Queue::Compute, &buffer, 0, &mut back, 0, 16).unwrap();
        let done = device.record(Queue::Compute).unwrap();
        assert!(in_flight(back.host()), "{name}");
        done.synchronize().unwrap();
        assert!(done.is_done().unwrap(), "{name}");
        assert_eq!(back.host::<i32>().unwrap(), [6, 7, 8, 0], "{name}");
        assert_eq!(out.host::<i32>().unwrap(), [5, 6, 7, 8], "{name}: the wait covers what it waited for");

        device.download_async(Queue::Copy, &buffer, 0, &mut back, 0, 4).unwrap();
        assert!(in_flight(back.host()), "{name}");
        device.synchronize().unwrap();
        assert!(back.host::<i32>().is_ok(), "{name}");
        // Dropped while a copy may be running.
        device.download_async(Queue::Copy, &buffer, 0, &mut back, 0, 16).unwrap();
    }
}

#[test]
fn copies_of_one_call_reach_their_ranges_and_are_refused_whole() {
    for device in devices() {
        let (name, device) = (device.name(), &*device);
        let (a, mut b) = (filled(device, &[1i32, 2, 3, 4]), filled(device, &[5i32, 6, 7, 8]));
        let (mut c, mut d) = (device.pinned(16).unwrap(), device.pinned(16).unwrap());
        let range = |from: usize, to: usize, words: usize| CopyRange { from: 4 * from, to: 4 * to, bytes: 4 * words };
        let (from_a, from_b) = ([range(0, 3, 1), range(1, 0, 2), range(0, 0, 0)], [range(3, 1, 1)]);
        let download = |from, to, ranges| Download { from, to, ranges };
        let mut copies = [download(&a, &mut c, &from_a), download(&b, &mut d, &from_b)];
        device.download_ranges(Queue::Copy, &mut copies).unwrap();
        assert!(c.host::<i32>().is_err() && d.host::<i32>().is_err(), "{name}: in flight");
        device.record(Queue::Copy).unwrap().synchronize().unwrap();
        assert_eq!((c.host::<i32>().unwrap(), d.host::<i32>().unwrap()), (&[2, 3, 0, 1][..], &[0, 8, 0, 0][..]));
        let mut upload =
            |ranges: &[CopyRange]| device.upload_ranges(Queue::Copy, &mut [Upload { from: &c, to: &mut b, ranges }]);
        // The other way: nothing is copied if one range is outside.
        let error = upload(&[range(0, 0, 4), range(1, 3, 2)]).unwrap_err();
        assert!(matches!(error, DeviceError::Outside { .. }), "{name}: {error}");
        upload(&[range(3, 0, 1), range(0, 2, 2)]).unwrap();
        upload(&[]).unwrap();
        device.wait(Queue::Compute, &device.record(Queue::Copy).unwrap()).unwrap();
        assert_eq!(contents(device, &b), [1, 6, 2, 3], "{name}");
        device.synchronize().unwrap();
        assert!(c.host::<i32>().is_ok(), "{name}");
    }
}

#[test]
fn fresh_memory_may_be_used_first_by_either_queue_and_dropped_with_work_on_it() {
    for device in devices() {
        let (name, device) = (device.name(), &*device);
        let mut pinned = device.pinned(256).unwrap();
        pinned.host_mut::<i32>().unwrap().fill(9);
        let mut values = device.alloc(256).unwrap();
        device.upload_async(Queue::Copy, &pinned, 0, &mut values, 0, 256).unwrap();
        device.record(Queue::Copy).unwrap().synchronize().unwrap();
        assert_eq!(contents(device, &values), [9; 64], "{name}");
        if name != "cpu" {
            add_one(device, &values, 1).unwrap();
        }
        drop(values);
    }
}

#[test]
fn events_tell_the_time_between_them() {
    for device in devices() {
        let (start, end) = (device.record(Queue::Copy).unwrap(), device.record(Queue::Copy).unwrap());
        let later = device.record(Queue::Compute).unwrap();
        assert!(end.since(&start).unwrap().as_secs_f64() < 10.0, "{}", device.name());
        assert!(later.since(&start).is_ok());
    }
}

#[test]
fn kernels_run_in_order_with_the_copies_of_their_queue() {
    for device in launching() {
        let (name, device) = (device.name(), &*device);
        device.load(MODULE).unwrap();
        let start: Vec<i32> = (0..256).collect();
        let (values, mut copy) = (filled(device, &start), device.alloc(1024).unwrap());
        add_one(device, &values, 4).unwrap();
        device.copy(&values, 0, &mut copy, 0, 1024).unwrap();
        add_one(device, &values, 2).unwrap();
        device.synchronize().unwrap();
        let plus = |i: i32, first: i32| start[i as usize] + first;
        assert_eq!(contents(device, &copy), (0..256).map(|i| plus(i, 1)).collect::<Vec<_>>(), "{name}");
        let twice = (0..256).map(|i| plus(i, if i < 128 { 2 } else { 1 }));
        assert_eq!(contents(device, &values), twice.collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn a_launch_waits_for_an_upload_on_the_other_queue_and_a_download_for_the_launch() {
    for device in launching() {
        let (name, device) = (device.name(), &*device);
        let (mut input, mut output) = (device.pinned(1024).unwrap(), device.pinned(1024).unwrap());
        let mut values = device.alloc(1024).unwrap();
        for round in 0..3 {
            input.host_mut::<i32>().unwrap().fill(round);
            device.upload_async(Queue::Copy, &input, 0, &mut values, 0, 1024).unwrap();
            device.wait(Queue::Compute, &device.record(Queue::Copy).unwrap()).unwrap();
            add_one(device, &values, 4).unwrap();
            device.wait(Queue::Copy, &device.record(Queue::Compute).unwrap()).unwrap();
            device.download_async(Queue::Copy, &values, 0, &mut output, 0, 1024).unwrap();
            device.record(Queue::Copy).unwrap().synchronize().unwrap();
            assert_eq!(output.host::<i32>().unwrap(), [round + 1; 256], "{name}");
        }
    }
}

#[test]
fn several_threads_use_one_device() {
    for device in launching() {
        let device = &*device;
        let shared = filled(device, &[0i32; 64]);
        let mut all: Vec<Buffer> = (0..4).map(|_| filled(device, &[7i32; 64])).collect();
        std::thread::scope(|scope| {
            for own in &mut all {
                scope.spawn(|| {
                    for _ in 0..10 {
                        add_one(device, &shared, 1).unwrap();
                        add_one(device, own, 1).unwrap();
                        device.record(Queue::Compute).unwrap().synchronize().unwrap();
                    }
                    assert_eq!(contents(device, own), [17; 64], "{}", device.name());
                    device.copy(&shared, 0, own, 0, 256).unwrap();
                });
            }
        });
        assert_eq!(contents(device, &shared), [40; 64], "{}", device.name());
    }
}

#[test]
fn a_launch_that_does_not_fit_its_kernel_is_refused_and_changes_nothing() {
    for device in launching() {
        let (name, device) = (device.name(), &*device);
        let values = filled(device, &[0i32; 64]);
        let args = [Arg::pointer(&values, 0)];
        let good =
            Launch { module: MODULE, kernel: "add_one", grid: [1; 3], block: [64, 1, 1], shared_bytes: 0, args: &args };
        let refused = |launch: &Launch<'_>, words: &str| {
            let error = device.launch(launch).unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains('\n'), "{name}: {error}");
        };
        refused(&Launch { kernel: "add_two", ..good }, "no kernel \"add_two\"");
        refused(&Launch { args: &[3i32.into()], ..good }, "found arguments of [4] bytes, expected [8]");
        refused(&Launch { args: &[args[0], args[0]], ..good }, "found arguments of [8, 8] bytes, expected [8]");
        refused(&Launch { args: &[Arg::pointer(&values, 257)], ..good }, "points at byte 257 of a buffer of 256");
        refused(&Launch { module: "no_such_module", ..good }, "no_such_module");
        let cpu = device::open("cpu", Some(1)).unwrap();
        let foreign = cpu.alloc(256).unwrap();
        refused(&Launch { args: &[Arg::pointer(&foreign, 0)], ..good }, "argument 0 is a buffer of device cpu");
        assert_eq!(contents(device, &values), [0; 64], "{name}");
        device.launch(&good).unwrap();
        assert_eq!(contents(device, &values), [1; 64], "{name}");
    }
}

#[test]
fn a_kernel_says_how_many_threads_its_blocks_have_and_how_many_rows_they_compute() {
    for device in launching() {
        assert_eq!(device.tile(MODULE, "waits_first").unwrap(), Tile { threads: 96, rows: 7 }, "{}", device.name());
        assert_eq!(device.tile(MODULE, "add_one").unwrap(), Tile::default(), "{}", device.name());
        assert!(device.tile(MODULE, "add_two").is_err());
    }
    assert!(device::open("cpu", Some(1)).unwrap().tile(MODULE, "add_one").is_err());
}

#[test]
fn memory_of_one_device_is_refused_by_another_and_by_the_cpu() {
    let cpu = device::open("cpu", Some(1)).unwrap();
    for device in launching() {
        let mut own = device.alloc(8).unwrap();
        for error in [own.host::<u8>().err().unwrap(), own.host_mut::<u8>().err().unwrap()] {
            assert!(matches!(error, DeviceError::NotOnHost(name) if name == device.name()), "{error}");
        }
        let mut foreign = cpu.alloc(8).unwrap();
        let mut pinned = cpu.pinned(8).unwrap();
        let event = cpu.record(Queue::Copy).unwrap();
        for outcome in [
            device.copy(&own, 0, &mut foreign, 0, 8),
            device.upload(&mut foreign, 0, &[1; 8]),
            cpu.download(&own, 0, &mut [0; 8]),
            device.upload_async(Queue::Copy, &pinned, 0, &mut own, 0, 8),
            device.download_async(Queue::Copy, &own, 0, &mut pinned, 0, 8),
            device.wait(Queue::Copy, &event),
            device.record(Queue::Copy).unwrap().since(&event).map(|_| ()),
        ] {
            assert!(matches!(outcome, Err(DeviceError::WrongDevice { .. })), "{outcome:?}");
        }
    }
}

#[test]
fn numbers_arrive_through_page_locked_memory_and_fills_are_in_order() {
    for device in launching() {
        let (mut staged, mut buffer) = (device.pinned(8).unwrap(), device.alloc(8).unwrap());
        staged.host_mut::<u8>().unwrap().copy_from_slice(&[0xc0, 0x3f, 0, 0xc0, 0xc0, 0x3f, 0, 0xc0]);
        device.upload_async(Queue::Compute, &staged, 0, &mut buffer, 0, 8).unwrap();
        device.fill(&mut buffer, 2, 4, 0xff).unwrap();
        let mut found = [0; 8];
        device.download(&buffer, 0, &mut found).unwrap();
        assert_eq!(found, [0xc0, 0x3f, 0xff, 0xff, 0xff, 0xff, 0, 0xc0], "{}", device.name());
        assert!(matches!(device.fill(&mut buffer, 5, 4, 0), Err(DeviceError::Outside { .. })));
    }
}

#[test]
fn the_simulator_names_a_kernel_that_writes_outside_of_a_buffer_and_the_line_of_an_error() {
    for device in devices().into_iter().filter(|device| device.name() == "cuda-sim") {
        let short = filled(&*device, &[0i32; 63]);
        let error = add_one(&*device, &short, 1).unwrap_err().to_string();
        assert!(error.starts_with("cuda-sim: kernel add_one wrote outside of the buffer of argument 0"), "{error}");
        let values = device.alloc(512).unwrap();
        let args = [Arg::pointer(&values, 0)];
        let (grid, block) = ([1; 3], [128, 1, 1]);
        let launch = Launch { module: MODULE, kernel: "divergent_barrier", grid, block, shared_bytes: 0, args: &args };
        let error = device.launch(&launch).unwrap_err().to_string();
        assert!(error.contains("mistakes.cu:") && error.contains("divergent barrier"), "{error}");
    }
}

#[test]
fn a_device_that_cannot_be_opened_says_what_was_found_and_what_to_do() {
    let error = |name: &str, options: &Options| device::open_with(name, options).err().unwrap().to_string();
    let unknown = error("gpu", &Options::default());
    assert_eq!(unknown, "--device: found \"gpu\", expected \"auto\", \"cpu\", \"cuda\" or \"cuda-sim\"");
    let empty = tempfile::tempdir().unwrap();
    let options = Options { kernels: Some(empty.path().to_owned()), ..Options::default() };
    let missing = error("cuda-sim", &options);
    assert!(missing.starts_with("cuda-sim: found no libquire_sim_*.so in "), "{missing}");
    assert!(missing.contains("`cargo xtask build-kernels --sim` builds it"), "{missing}");
    let options = Options { kernels: Some("no/such/folder".into()), ..Options::default() };
    assert_eq!(
        error("cuda-sim", &options),
        "cuda-sim: found no libquire_sim_*.so in no/such/folder; `cargo xtask build-kernels --sim` builds it, \
         --kernels-dir names another folder"
    );
    assert_eq!(device::open("auto", Some(1)).unwrap().name(), "cpu");
    let cpu = device::open("cpu", Some(1)).unwrap();
    let error = cpu.load(MODULE).unwrap_err().to_string();
    assert_eq!(
        error,
        "cpu: this device runs no CUDA kernels, and cannot run simt_tests; use --device cuda or cuda-sim"
    );
}

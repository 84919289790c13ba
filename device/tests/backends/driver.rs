//! The `cuda` backend with `driver.cpp`, `blas.cpp` and `nccl.cpp`: a driver, a cuBLASLt and an NCCL in host code. This program runs
//! itself again in an environment where they are the first `libcuda.so.1`, `libcublasLt.so.13` and `libnccl.so.2` that the loader finds. This does not test the
//! behaviour of a real driver.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use device::{Arg, CudaError, DeviceError, Launch, Options, Queue};
use testkit::capability::Capability;
use testkit::{not_run, workspace};

use super::fixture::fake::compile_text;
use super::fixture::{Fake, MODULE, entry, is_fake};

/// Tests after which the driver fails every call, each in a program of its own.
const ALONE: [&str; 2] = ["backends::driver::a_mistake_of_a_kernel", "backends::driver::a_kernel_that_never_ends"];

/// Environment variable that names the wait of `a_kernel_that_never_ends`.
const WAIT: &str = "BACKENDS_WAIT";
const WAITS: [&str; 5] = ["event", "device", "download", "allocation", "drop"];

/// A library with the functions that tell the version of a driver, and no others.
const OLD_FUNCTIONS: &str = r#"
    extern "C" int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
    extern "C" int cuGetErrorString(int, const char** text) { *text = "a text"; return 0; }
"#;

#[test]
fn the_cuda_backend_meets_every_demand_over_a_driver_of_host_code() {
    if is_fake() {
        return;
    }
    let Some(fake) = Fake::get() else { return };
    let output = fake.run("backends::", &["--skip", ALONE[0], "--skip", ALONE[1]], &[]);
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(!said.contains("NOT RUN") && said.contains("kernels_run_in_order"), "{said}");
}

#[test]
fn a_mistake_of_a_kernel_comes_to_light_at_the_next_wait_and_every_call_from_then_on() {
    if is_fake() {
        return;
    }
    let Some(fake) = Fake::get() else { return };
    let output = fake.run(ALONE[0], &["--exact"], &[]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn a_wait_for_a_kernel_that_never_ends_is_an_error_and_so_is_every_later_call() {
    if is_fake() {
        return;
    }
    let Some(fake) = Fake::get() else { return };
    for wait in WAITS {
        let output = fake.run(ALONE[1], &["--exact"], &[("FAKE_HANG", "add_one"), (WAIT, wait)]);
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 passed"), "{wait}: {said}");
    }
}

#[test]
fn the_functions_of_the_libraries_that_the_backend_checks_are_those_that_it_calls() {
    let text = |path: &str| std::fs::read_to_string(workspace::root().join("device").join(path)).unwrap();
    let checked = text("src/driver/symbols.rs");
    let mut checked: Vec<&str> = checked.split('"').filter(|text| text.starts_with("cu")).collect();
    // The libraries of the tests have exactly the functions that the backend calls.
    let libraries = [text("tests/backends/driver.cpp"), text("tests/backends/blas.cpp")].concat();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let declared = libraries.lines().filter_map(|line| {
        let name = line.strip_prefix("CALL(").or_else(|| Some(line.split_once(" size_t ")?.1))?;
        name.split(|c| !is_name(c)).next().filter(|name| name.starts_with("cu"))
    });
    let mut called: Vec<&str> = declared.collect();
    checked.sort_unstable();
    called.sort_unstable();
    assert_eq!(checked, called, "left: checked by device/src/driver/symbols.rs, right: called");
}

#[test]
fn a_library_without_the_functions_of_the_driver_or_of_cublas_is_said_in_one_line() {
    if is_fake() {
        return;
    }
    let Some(fake) = Fake::get() else { return };
    for (source, name, words) in [
        (
            "",
            "libcuda.so.1",
            "--device cuda: found libcuda.so without the function cuDriverGetVersion, expected the one of the NVIDIA driver",
        ),
        (
            OLD_FUNCTIONS,
            "libcuda.so.1",
            "--device cuda: found libcuda.so without the function cuCtxSetCurrent, expected the one of",
        ),
        (
            "",
            "libcublasLt.so.13",
            "--device cuda: found libcublasLt.so without the function cublasLtCreate, expected the one of CUDA 13",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        compile_text(source, &folder.path().join(name));
        let path = [folder.path(), &fake.folder].map(|path| path.display().to_string()).join(":");
        let output = fake.run("backends::driver::opening", &["--exact"], &[("LD_LIBRARY_PATH", &path)]);
        let said = String::from_utf8_lossy(&output.stdout);
        let line = said.lines().find(|line| line.contains(words));
        assert!(output.status.success() && line.is_some(), "{said}");
    }
}

#[test]
fn what_a_driver_lacks_is_said_in_one_line() {
    if is_fake() {
        return;
    }
    let Some(fake) = Fake::get() else { return };
    for (variables, words) in [
        (("FAKE_VERSION", "12080"), "found a driver for CUDA 12.8, expected 13.0 or newer; update"),
        (("FAKE_GPUS", "0"), "the NVIDIA driver finds no GPU"),
        (("FAKE_INIT", "100"), "the NVIDIA driver finds no GPU"),
        (("FAKE_INIT", "999"), "does not start (CUDA_ERROR_UNKNOWN, a text of the driver)"),
        (("FAKE_CAPABILITY", "75"), "found host code of compute capability 7.5, expected 8.0 or newer; select another"),
        (("FAKE_RETAIN", "2"), "host code, 16.0 GiB, is in use and cannot be opened (CUDA_ERROR_OUT_OF_MEMORY, a text"),
        (("FAKE_RETAIN", "46"), "is in use and cannot be opened (CUDA_ERROR_DEVICE_UNAVAILABLE, a text"),
        (("FAKE_RETAIN", "999"), "does not start (CUDA_ERROR_UNKNOWN, a text of the driver)"),
        (("FAKE_BLAS_VERSION", "120805"), "found cuBLASLt 12.8.5, expected 13.0 or newer; install cuBLAS of CUDA 13"),
        (("FAKE_CAPABILITY", "100"), "simt_tests.fatbin: found no code for compute capability 10.0; rebuild it"),
    ] {
        let output = fake.run("backends::driver::opening", &["--exact"], &[variables]);
        let said = String::from_utf8_lossy(&output.stdout);
        let line = said.lines().find(|line| line.contains(words));
        assert!(output.status.success() && line.is_some(), "{variables:?}: {said}");
    }
}

/// Prints why `cuda` cannot be opened; for the test above.
#[test]
#[ignore = "only as a program of its own, over a fake driver"]
fn opening() {
    let open = || {
        let device = device::open("cuda", Some(1))?;
        device.load(MODULE)?;
        device.load_products()
    };
    let outcome: Result<(), DeviceError> = open();
    println!("{}", outcome.err().map_or("opened".into(), |error| error.to_string()));
}

#[test]
fn a_program_without_a_driver_starts_and_says_so() {
    if is_fake() {
        return;
    }
    let Err(DeviceError::Cuda(error)) = device::open("cuda", Some(1)) else {
        return not_run::report(Capability::NoDriver, "found an NVIDIA driver");
    };
    let line = error.to_string();
    assert!(line.starts_with("--device cuda: ") && line.ends_with("or use --device cpu"), "{line}");
}

/// Errors that only this backend can have.
#[test]
#[ignore = "only over a fake driver"]
fn files_and_launches_of_cuda() {
    let device = device::open("cuda", Some(1)).unwrap();
    assert_eq!(device.compute_capability(), Some((9, 0)));
    assert_eq!(device.description(), "host code, compute capability 9.0, 1 multiprocessors, driver for CUDA 13.0");
    let (before, counted) = (device.memory().available, device.allocated().unwrap());
    let values = device.alloc(256).unwrap();
    assert_eq!(device.memory().available, before - 256);
    drop(device.alloc(512).unwrap());
    assert_eq!(device.allocated(), Some(counted + 256));
    device.load_products().unwrap();
    assert_eq!(device.allocated(), Some(counted + 256 + device.product_bytes()));
    assert!(matches!(device.alloc(1 << 35), Err(DeviceError::OutOfMemory { device: "cuda", .. })));
    assert!(matches!(device.pinned(1 << 35), Err(DeviceError::OutOfMemory { device: "cuda", .. })));

    let args = [Arg::pointer(&values, 0)];
    let launch =
        Launch { module: MODULE, kernel: "add_one", grid: [1; 3], block: [64, 1, 1], shared_bytes: 0, args: &args };
    let refused = |launch: &Launch<'_>| device.launch(launch).unwrap_err().to_string();
    // A kernel may use any amount up to the limit of the GPU, and a smaller launch does not lower what a later one may use.
    for shared_bytes in [48 << 10, 200 << 10, 100 << 10, 200 << 10] {
        device.launch(&Launch { shared_bytes, ..launch }).unwrap();
    }
    let error = refused(&Launch { shared_bytes: 228 << 10, ..launch });
    assert_eq!(
        error,
        "kernel add_one: found 233472 bytes of dynamic shared memory, expected at most 232448 on this GPU"
    );
    let error = refused(&Launch { block: [2048, 1, 1], ..launch });
    assert!(error.starts_with("cuda: kernel add_one, grid [1, 1, 1], block [2048, 1, 1], 0 bytes of"), "{error}");
    assert!(error.contains("CUDA_ERROR_INVALID_VALUE"), "{error}");
    let error = refused(&Launch { kernel: "in_the_index_alone", ..launch });
    assert!(error.contains("kernel \"in_the_index_alone\" in the index alone (CUDA_ERROR_NOT_FOUND"), "{error}");
    let error = refused(&Launch { kernel: "no_code", ..launch });
    assert!(error.contains("found no fat binary at byte 8; rebuild it with `cargo xtask build-kernels`"), "{error}");
    for (index, words) in [("add_one 0 88\n", "found line 1 "), ("add_one\t8\t888\n", "and a kernel at 8 to 896")] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("simt_tests.fatbin"), entry(90)).unwrap();
        std::fs::write(folder.path().join("simt_tests.kernels.tsv"), index).unwrap();
        let options = Options { kernels: Some(folder.path().to_owned()), ..Options::default() };
        let error = device::open_with("cuda", &options).unwrap().load(MODULE).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("build-kernels"), "{error}");
    }
}

/// Afterwards its driver fails every call, so it runs alone.
#[test]
#[ignore = "only over a fake driver, alone"]
fn a_mistake_of_a_kernel() {
    let device = device::open("cuda", Some(1)).unwrap();
    let values = device.alloc(512).unwrap();
    let args = [Arg::pointer(&values, 0)];
    let (grid, block) = ([1; 3], [128, 1, 1]);
    let wrong = Launch { module: MODULE, kernel: "divergent_barrier", grid, block, shared_bytes: 0, args: &args };
    device.launch(&wrong).unwrap();
    for error in [device.synchronize().unwrap_err(), device.alloc(8).err().unwrap()] {
        assert!(error.to_string().contains("CUDA_ERROR_LAUNCH_FAILED, unspecified launch failure"), "{error}");
    }
    assert_eq!(device.memory().available, 0);
}

/// A kernel hangs on the compute queue. Afterwards every call fails, so it runs alone.
#[test]
#[ignore = "only over a fake driver, alone"]
fn a_kernel_that_never_ends() {
    let limit = Duration::from_millis(300);
    let kernels = std::env::var_os("QUIRE_KERNELS_DIR").map(PathBuf::from);
    let options = Options { threads: Some(1), kernels, wait_limit: Some(limit), ..Options::default() };
    let device = device::open_with("cuda", &options).unwrap();
    let (values, pinned) = (device.alloc(256).unwrap(), device.pinned(256).unwrap());
    let graph = device.capture(&mut || ()).unwrap();
    device.load_products().unwrap();
    let event = device.record(Queue::Copy).unwrap();
    event.synchronize().unwrap();
    let args = [Arg::pointer(&values, 0)];
    let launch =
        Launch { module: MODULE, kernel: "add_one", grid: [1; 3], block: [64, 1, 1], shared_bytes: 0, args: &args };
    device.launch(&launch).unwrap();
    let is_not_finished = |error: DeviceError| {
        assert!(matches!(error, DeviceError::Cuda(CudaError::NotFinished(found)) if found == limit), "{error}");
        assert!(
            error.to_string().starts_with("cuda: the GPU has not finished within 0.3 s: a kernel hangs"),
            "{error}"
        );
    };
    let behind = device.record(Queue::Compute).unwrap();
    assert!(!behind.is_done().unwrap());
    let start = Instant::now();
    match std::env::var(WAIT).unwrap().as_str() {
        "event" => is_not_finished(behind.synchronize().unwrap_err()),
        "device" => is_not_finished(device.synchronize().unwrap_err()),
        "download" => is_not_finished(device.download(&values, 0, &mut [0; 4]).unwrap_err()),
        "allocation" => is_not_finished(device.alloc(8).err().unwrap()),
        _ => drop(device.pinned(8).unwrap()),
    }
    let waited = start.elapsed();
    assert!(waited >= limit && waited < 10 * limit, "{waited:?}");

    // None of these waits again, also not for the event that was done before.
    let start = Instant::now();
    is_not_finished(device.launch(&launch).unwrap_err());
    is_not_finished(device.synchronize().unwrap_err());
    is_not_finished(device.alloc(8).err().unwrap());
    is_not_finished(device.pinned(8).err().unwrap());
    is_not_finished(device.record(Queue::Copy).err().unwrap());
    is_not_finished(device.replay(&graph).unwrap_err());
    is_not_finished(device.capture(&mut || ()).err().unwrap());
    is_not_finished(event.is_done().unwrap_err());
    is_not_finished(behind.synchronize().unwrap_err());
    assert_eq!(device.memory().available, 0);
    // The driver would abort the program if one of these called what waits for the GPU.
    drop((values, pinned, graph, event, behind, device));
    assert!(start.elapsed() < limit, "{:?}", start.elapsed());
}

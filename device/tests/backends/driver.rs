//! The `cuda` backend with `driver.cpp`, `blas.cpp` and `nccl.cpp`: a driver, a cuBLASLt and an NCCL in host code. This program runs
//! itself again in an environment where they are the first `libcuda.so.1`, `libcublasLt.so.13` and `libnccl.so.2` that the loader finds. This does not test the
//! behaviour of a real driver.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;

use device::sim::Library;
use device::{Arg, DeviceError, Launch, Options};
use testkit::capability::Capability;
use testkit::kernels::{self, host};
use testkit::{not_run, workspace};

use super::fake::{compile, copy};
use super::{MODULE, host_library};

/// Environment variable that tells the started program that its driver is a fake.
const MARK: &str = "BACKENDS_OVER_FAKE_DRIVER";
/// The test after which its driver fails every call.
const ALONE: &str = "backends::driver::a_mistake_of_a_kernel";

pub fn is_fake() -> bool {
    std::env::var_os(MARK).is_some()
}

/// A folder with the fake driver and the kernels.
struct Fake {
    folder: PathBuf,
}

impl Fake {
    /// Builds the fake; without a C++ compiler, or where another device is tested, reports that and returns `None`.
    fn get() -> Option<&'static Fake> {
        static FAKE: OnceLock<Fake> = OnceLock::new();
        host::compiler_for_tests("a driver in host code")?;
        Some(FAKE.get_or_init(Fake::build))
    }

    fn build() -> Fake {
        let library = host_library().unwrap();
        let folder = kernels::target(&workspace::root()).join("tmp/driver");
        std::fs::create_dir_all(&folder).unwrap();
        let path = |name: &str| folder.join(name);
        copy(&library, &path(library.file_name().unwrap().to_str().unwrap()));
        compile("driver.cpp", &library, &path("libcuda.so.1"));
        compile("nccl.cpp", &path("libcuda.so.1"), &path("libnccl.so.2"));
        compile("blas.cpp", &path("libcuda.so.1"), &path("libcublasLt.so.13"));
        // Two fat binaries in one file, as two source files give.
        let part = fat_binary(90);
        std::fs::write(path(&format!("{MODULE}.fatbin")), [part.clone(), part.clone()].concat()).unwrap();
        let place = |index: usize| format!("{}\t{}", index % 2 * part.len(), part.len());
        let kernels = Library::open(&library).unwrap();
        let lines = kernels.kernels().iter().enumerate().map(|(i, kernel)| format!("{}\t{}\n", kernel.name, place(i)));
        let lines = lines.chain([format!("in_the_index_alone\t{}\n", place(0)), "no_code\t8\t88\n".into()]);
        std::fs::write(path(&format!("{MODULE}.kernels.tsv")), lines.collect::<String>()).unwrap();
        Fake { folder }
    }

    /// Runs this program with the fake.
    fn run(&self, test: &str, more: &[&str], variables: &[(&str, &str)]) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([test, "--test-threads=1", "--nocapture", "--include-ignored"]).args(more);
        command.env("LD_LIBRARY_PATH", &self.folder).env("QUIRE_KERNELS_DIR", &self.folder).env(MARK, "1");
        // It has every device.
        command.env_remove("QUIRE_TEST_DEVICE");
        command.envs(variables.iter().copied()).output().unwrap()
    }
}

/// Returns a fat binary with one empty entry.
fn fat_binary(architecture: u32) -> Vec<u8> {
    let mut bytes = [0; 16 + 72];
    for (at, word) in [(0, 0xba55_ed50), (4, 16 << 16 | 1), (8, 72), (16, 2), (20, 64), (24, 8), (44, architecture)] {
        bytes[at..at + 4].copy_from_slice(&u32::to_le_bytes(word));
    }
    bytes.to_vec()
}

#[test]
fn the_cuda_backend_meets_every_demand_over_a_driver_of_host_code() {
    if is_fake() {
        return;
    }
    let Some(fake) = Fake::get() else { return };
    let output = fake.run("backends::", &["--skip", ALONE], &[]);
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(!said.contains("NOT RUN") && said.contains("kernels_run_in_order"), "{said}");
}

#[test]
fn memory_of_gpus_is_exchanged_by_an_nccl_of_host_code() {
    if is_fake() {
        return;
    }
    let Some(fake) = Fake::get() else { return };
    let output = fake.run("collective::nccl::", &["--skip", "an_exchange_that_has_failed"], &[]);
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("4 passed"), "{said}");
    for (variables, words) in [
        (
            ("FAKE_NCCL_ERROR", "1"),
            "NCCL: an earlier exchange: unhandled cuda error, a text of the library; NCCL_DEBUG=INFO prints",
        ),
        (("QUIRE_NCCL_SO_PATH", "/nonexistent/nccl"), "found no NCCL (/nonexistent/nccl: "),
        (
            ("QUIRE_NCCL_SO_PATH", "libcuda.so.1"),
            "libcuda.so.1: found no ncclGetUniqueId, expected NCCL 2.13 or newer; name",
        ),
    ] {
        let output = fake.run("collective::nccl::an_exchange_that_has_failed", &["--exact"], &[variables]);
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(words), "{variables:?}: {said}");
    }
}

#[test]
fn a_mistake_of_a_kernel_comes_to_light_at_the_next_wait_and_every_call_from_then_on() {
    if is_fake() {
        return;
    }
    let Some(fake) = Fake::get() else { return };
    let output = fake.run(ALONE, &["--exact"], &[]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
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
        (("FAKE_CAPABILITY", "100"), "found code for sm_90, expected code for compute capability 10.0"),
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
    let before = device.memory().available;
    let values = device.alloc(256).unwrap();
    assert_eq!(device.memory().available, before - 256);
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
        std::fs::write(folder.path().join("simt_tests.fatbin"), fat_binary(90)).unwrap();
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

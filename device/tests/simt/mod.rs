//! The SIMT simulator, one feature per test: the kernels of `simt/tests/`, built by this machine's C++ compiler and launched
//! from Rust. Without a compiler, or where another device is
//! tested, every test prints one line that begins with `NOT RUN:`.

mod counts;
mod hopper;
mod mistakes;
mod numbers;
mod sanitizers;
mod threads;
mod tiles;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use device::sim::{Library, SimError};
use device::{Arg, Buffer, Element, Launch};
use testkit::kernels::host::{self, Compiler, Instrument};
use testkit::kernels::manifest::Manifest;
use testkit::{kernels, workspace};

/// The natural order and two others.
pub const SEEDS: [u64; 3] = [0, 1, 77];

fn folder() -> PathBuf {
    workspace::root().join("device/simt/tests")
}

fn manifest() -> Manifest {
    kernels::of_devices(&workspace::root(), false).unwrap()
}

fn compiler() -> Option<&'static Compiler> {
    host::compiler_for_tests("the simulator")
}

/// Returns the path of the library of test kernels; without a compiler reports that and returns `None`.
fn library_file() -> Option<&'static Path> {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    let compiler = compiler()?;
    Some(FILE.get_or_init(|| {
        host::library(&workspace::root(), &manifest(), compiler, Instrument::None, kernels::cores()).unwrap()
    }))
}

/// Returns the library of test kernels.
fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    let file = library_file()?;
    Some(LIBRARY.get_or_init(|| Library::open(file).unwrap()))
}

/// Makes a buffer with these contents.
fn buffer<T: Element>(contents: &[T]) -> Buffer {
    let mut buffer = device::open("cpu", Some(1)).unwrap().alloc(size_of_val(contents)).unwrap();
    buffer.host_mut::<T>().unwrap().copy_from_slice(contents);
    buffer
}

/// Makes a buffer of zeros.
fn zeros<T: Element>(count: usize) -> Buffer {
    device::open("cpu", Some(1)).unwrap().alloc(count * size_of::<T>()).unwrap()
}

/// Makes a launch of a one-dimensional grid, with the shared memory that most tests use.
fn launch<'a>(kernel: &'a str, blocks: u32, threads: u32, args: &'a [Arg<'a>]) -> Launch<'a> {
    Launch { module: "simt_tests", kernel, grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 4096, args }
}

/// Runs a kernel of `simt/tests/`.
fn run(library: &Library, launch: &Launch<'_>) -> Result<(), SimError> {
    run_seeded(library, 0, launch)
}

/// As `run`, with a seed for the order of threads.
fn run_seeded(library: &Library, seed: u64, launch: &Launch<'_>) -> Result<(), SimError> {
    // SAFETY: each test passes buffers of the sizes that its kernel reads and writes, and reads them afterwards.
    unsafe { library.launch(launch, seed) }
}

/// Returns the line of an error in `mistakes.cu`, from 1.
fn line_of(name: &str) -> u32 {
    line_in("mistakes.cu", name)[0]
}

/// Returns the lines of an error in a file, from 1; at least one.
fn line_in(file: &str, name: &str) -> Vec<u32> {
    let text = std::fs::read_to_string(folder().join(file)).unwrap();
    let mark = format!("// here: {name}");
    let lines: Vec<u32> = (1..).zip(text.lines()).filter(|(_, line)| line.ends_with(&mark)).map(|(i, _)| i).collect();
    assert!(!lines.is_empty(), "{file} has no error {name}");
    lines
}

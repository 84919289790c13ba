//! The host library: the same sources compiled as C++, with the SIMT shim of `device/simt/` instead of the CUDA headers.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use super::compile::{Compile, run_all};
use super::manifest::{Manifest, Unit};
use super::toolkit::on_path;
use crate::capability::Capability;
use crate::not_run;

const SHIM: &str = "device/simt";
const RUNTIME: [&str; 8] = ["fiber", "arena", "block", "meet", "async", "counter", "launch", "library"];

/// Flags of the C++ compiler.
const FLAGS: &[&str] = &[
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-DQUIRE_SIMT",
    // Kernels read 16 bytes of halves as four words.
    "-fno-strict-aliasing",
    // No sum is fused that the source does not fuse: the same bits on every host.
    "-ffp-contract=off",
    // Each library in a process has its own kernels and its own runtime.
    "-fvisibility=hidden",
    // For `#pragma unroll`.
    "-Wno-unknown-pragmas",
];
/// `extern __shared__` becomes a thread_local that needs no initialisation. clang does not need the flag.
const GCC_FLAG: &str = "-fno-extern-tls-init";

/// Macro with which the attention kernels are compiled for heads of 64, 80, 128 and 256 elements only.
pub const SOME_HEAD_SIZES: &str = "QUIRE_SOME_HEAD_SIZES";

/// A C++ compiler.
#[derive(Clone, Debug)]
pub struct Compiler {
    program: PathBuf,
    version: String,
}

impl Compiler {
    /// Returns whether the compiler is clang, whatever its name is.
    pub fn is_clang(&self) -> bool {
        self.version.contains("clang")
    }

    fn step(&self, action: &'static str, args: Vec<String>, inputs: Vec<PathBuf>, output: PathBuf) -> Compile {
        Compile { action, program: self.program.clone(), version: self.version.clone(), args, inputs, output }
    }
}

/// What a build adds to the kernels. A build with a sanitizer is a program ([`replay`]), because a sanitizer must be active from the
/// first instruction of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instrument {
    /// Nothing.
    None,
    /// Every load and store is counted (`device::sim::Counts`).
    Counts,
    /// The address sanitizer and two checks of the undefined behaviour sanitizer, in one build: accesses out of bounds, indices
    /// outside of arrays of known length, and misaligned loads and stores (of vector types with g++ only: clang does not check copies
    /// of a structure).
    Memory,
    /// The thread sanitizer: unordered accesses of two threads, for example after a missing barrier.
    Thread,
}

impl Instrument {
    /// Returns the name in paths and messages.
    pub fn name(self) -> &'static str {
        match self {
            Instrument::None => "none",
            Instrument::Counts => "counts",
            Instrument::Memory => "memory",
            Instrument::Thread => "thread",
        }
    }

    /// Returns what a machine lacks if [`replay`] does not link there.
    pub fn capability(self) -> Capability {
        match self {
            Instrument::None => Capability::Cxx,
            Instrument::Counts => Capability::Gxx,
            Instrument::Memory => Capability::Asan,
            Instrument::Thread => Capability::Tsan,
        }
    }

    /// Flags for the code under test.
    fn flags(self) -> &'static [&'static str] {
        match self {
            Instrument::None => &[],
            // The calls of the thread sanitizer, which the runtime answers. Loads and stores stay those of the source: the compiler
            // neither splits nor joins them.
            Instrument::Counts => &[
                "-fsanitize=thread",
                "--param=tsan-instrument-func-entry-exit=0",
                "-fno-tree-sra",
                "-fno-tree-vectorize",
                "-fno-store-merging",
                "-DSIMT_COUNT",
            ],
            // The last -O counts. With checks, -O1 takes half the time to compile.
            Instrument::Memory => &["-O1", "-fsanitize=address,alignment,bounds", "-fno-sanitize-recover=all", "-g1"],
            Instrument::Thread => &["-fsanitize=thread", "-g1"],
        }
    }

    /// Linker flags. Counting builds link no sanitizer library, so undefined symbols are errors.
    fn link_flags(self) -> &'static [&'static str] {
        if self == Instrument::Counts { &["-Wl,-z,defs"] } else { self.flags() }
    }

    /// Flags for the runtime of the shim, which only announces its fibers to the sanitizer.
    fn runtime_flags(self) -> &'static [&'static str] {
        match self {
            Instrument::None => &[],
            Instrument::Counts => &["-DSIMT_COUNT"],
            Instrument::Memory => &["-DSIMT_ADDRESS_SANITIZER"],
            Instrument::Thread => &["-DSIMT_THREAD_SANITIZER"],
        }
    }
}

/// Returns the compiler that `CXX` names, or else the first of g++, c++ and clang++ on PATH.
///
/// # Errors
/// There is none, or it does not start.
pub fn compiler() -> Result<Compiler, String> {
    let named = std::env::var_os("CXX").filter(|name| !name.is_empty()).map(PathBuf::from);
    let program = named.or_else(|| ["g++", "c++", "clang++"].into_iter().find_map(on_path)).ok_or(
        "found no C++ compiler: CXX is not set, and g++, c++ and clang++ are not on PATH; install one of them",
    )?;
    let output = Command::new(&program).arg("--version").output();
    let output = output.map_err(|error| format!("CXX: {}: {error}; name a C++ compiler", program.display()))?;
    Ok(Compiler { version: String::from_utf8_lossy(&output.stdout).into_owned(), program })
}

/// Returns whether the compiler has a sanitizer and its library, by building and running an empty program.
pub fn has(instrument: Instrument) -> bool {
    let Ok(compiler) = compiler() else { return false };
    let program = std::env::temp_dir().join(format!("quire-{}-{}", instrument.name(), std::process::id()));
    let mut command = Command::new(&compiler.program);
    command.args(instrument.flags()).args(["-x", "c++", "-", "-o"]).arg(&program);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let compiled = command.spawn().and_then(|mut child| {
        if let Some(mut source) = child.stdin.take() {
            source.write_all(b"int main() { return 0; }")?;
        }
        child.wait()
    });
    let runs = compiled.is_ok_and(|status| status.success())
        && Command::new(&program).output().is_ok_and(|output| output.status.success());
    let _ = std::fs::remove_file(program);
    runs
}

/// Returns the program of [`replay`] for tests, or reports that the sanitizer's library is missing and returns `None`.
///
/// # Panics
/// If something does not compile: the sources are those under test.
pub fn replay_for_tests(manifest: &Manifest, compiler: &Compiler, instrument: Instrument) -> Option<PathBuf> {
    match replay(&crate::workspace::root(), manifest, compiler, instrument, super::cores()) {
        Ok(program) => Some(program),
        // A compiler without the library of its sanitizer compiles, and fails to link.
        Err(problem) if instrument != Instrument::None && problem.contains("did not link") => {
            let line = problem.lines().nth(1).unwrap_or(&problem);
            not_run::report(instrument.capability(), line);
            None
        }
        Err(problem) => panic!("{problem}"),
    }
}

/// Builds `libquire_sim_<crate>.so` and returns its path. With an instrument it is in a folder of that name.
///
/// # Errors
/// The messages of the compiler or the linker.
pub fn library(
    root: &Path,
    manifest: &Manifest,
    compiler: &Compiler,
    instrument: Instrument,
    jobs: usize,
) -> Result<PathBuf, String> {
    let folder = match instrument {
        Instrument::None => super::folder(root),
        other => super::folder(root).join(other.name()),
    };
    library_in(folder, root, manifest, compiler, instrument, jobs)
}

fn library_in(
    folder: PathBuf,
    root: &Path,
    manifest: &Manifest,
    compiler: &Compiler,
    instrument: Instrument,
    jobs: usize,
) -> Result<PathBuf, String> {
    let _lock = super::lock(root)?;
    let shim = root.join(SHIM);
    let cache = super::folder(root).join("cache").join(format!("{}.host.{}", manifest.name, instrument.name()));
    let include = [shim.join("include"), shim.join("include/simt")].into_iter().chain(manifest.include.iter().cloned());
    let mut common = words(FLAGS);
    common.extend((!compiler.is_clang()).then(|| GCC_FLAG.to_owned()));
    common.extend(include.map(|path| format!("-I{}", path.display())));
    let compile = |source: PathBuf, name: String, more: Vec<String>| {
        let args = [common.clone(), more, words(&["-x", "c++", "-c"])].concat();
        compiler.step("compile", args, vec![source], cache.join(format!("{name}.o")))
    };
    let mut compiles: Vec<Compile> = Vec::new();
    for unit in &manifest.units {
        let macros: Vec<String> = unit.macros.iter().map(|name| format!("-D{name}")).collect();
        compiles.push(compile(unit.source.clone(), unit.name.clone(), [words(instrument.flags()), macros].concat()));
    }
    for name in RUNTIME {
        let source = shim.join("runtime").join(format!("{name}.cpp"));
        compiles.push(compile(source, format!("simt.{name}"), words(instrument.runtime_flags())));
    }
    run_all(&compiles, jobs)?;
    let output = folder.join(format!("libquire_sim_{}.so", manifest.name));
    let objects = compiles.into_iter().map(|compile| compile.output).collect();
    let args = [words(instrument.link_flags()), words(&["-shared"])].concat();
    compiler.step("link", args, objects, output.clone()).run()?;
    Ok(output)
}

/// Builds a library that counts, with those sources of a crate for which `keep` is true, and returns its folder, which has the name of the tests that
/// use it. Reports a test that did not run and returns `None` if the compiler cannot do it.
///
/// # Panics
/// If something does not compile: the sources are those under test.
pub fn counts_for_tests(name: &str, tests: &str, keep: impl FnMut(&mut Unit) -> bool) -> Option<PathBuf> {
    let found = compiler_for_tests("what the simulator counts")?;
    if found.is_clang() {
        not_run::report(Capability::Gxx, "clang++ splits loads of vectors before it reports them");
        return None;
    }
    let root = crate::workspace::root();
    let folder = super::folder(&root).join(Instrument::Counts.name()).join(tests);
    let build = || {
        let mut manifests = super::manifests(&root)?;
        manifests.retain(|manifest| manifest.name == name);
        let mut manifest = manifests.pop().ok_or_else(|| format!("found no manifest of {name}"))?;
        manifest.units.retain_mut(keep);
        library_in(folder.clone(), &root, &manifest, found, Instrument::Counts, super::cores())
    };
    match build() {
        Ok(_) => Some(folder),
        Err(problem) => panic!("{problem}"),
    }
}

/// Returns the device that runs the kernels of tests: `cuda` if `QUIRE_TEST_DEVICE` says so, else `cuda-sim`.
pub fn device_for_tests() -> &'static str {
    if std::env::var_os("QUIRE_TEST_DEVICE").is_some_and(|name| name == "cuda") { "cuda" } else { "cuda-sim" }
}

/// Returns the C++ compiler for tests of the simulator itself, once [`simulator_for_tests`] says that they run. Without a compiler or
/// sources, reports a test that did not run and returns `None`.
pub fn compiler_for_tests(what: &str) -> Option<&'static Compiler> {
    simulator_for_tests(what).then(sources_for_tests)?
}

/// As [`compiler_for_tests`], whatever device is tested.
pub fn sources_for_tests() -> Option<&'static Compiler> {
    static COMPILER: OnceLock<Result<Compiler, String>> = OnceLock::new();
    if crate::workspace::bundle().is_some() {
        not_run::report(Capability::Checkout, "a bundle has no sources to compile");
        return None;
    }
    let found = COMPILER.get_or_init(compiler).as_ref();
    found.map_err(|missing| not_run::report(Capability::Cxx, missing)).ok()
}

/// Returns whether tests of the simulator itself run: of what it counts and guards, of its driver, and of kernels under a sanitizer.
/// If they do not, because `QUIRE_TEST_DEVICE` names another device, reports `what` as a test that did not run.
pub fn simulator_for_tests(what: &str) -> bool {
    let other = std::env::var("QUIRE_TEST_DEVICE").ok().filter(|name| name != "cuda-sim");
    if let Some(name) = &other {
        not_run::report(Capability::AnyDevice, &format!("{what}: only on cuda-sim, and QUIRE_TEST_DEVICE is {name}"));
    }
    other.is_none()
}

/// Returns the folder of the kernels for [`device_for_tests`]: [`compiled`](super::compiled) ones where there are some; else for
/// `cuda` the one that `cargo xtask build-kernels` writes, and for `cuda-sim` that of the host libraries of all crates, which are
/// built from the current sources. Without a compiler, reports a test that did not run and returns `None`.
///
/// # Panics
/// If something does not compile: the sources are those under test.
pub fn folder_for_tests() -> Option<PathBuf> {
    if let Some(compiled) = super::compiled() {
        return Some(compiled);
    }
    if device_for_tests() == "cuda" {
        return Some(super::folder(&crate::workspace::root()));
    }
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let build = || {
        let (compiler, root) = (compiler()?, crate::workspace::root());
        for manifest in super::manifests(&root)? {
            if let Err(problem) = library(&root, &manifest, &compiler, Instrument::None, super::cores()) {
                panic!("{problem}");
            }
        }
        Ok(super::folder(&root))
    };
    let built = BUILT.get_or_init(build);
    built.as_ref().map_err(|missing| not_run::report(Capability::Cxx, missing)).ok().cloned()
}

/// Builds the program that runs launches from files (`device/simt/tests/replay.cpp`) with a library of [`library`].
///
/// # Errors
/// The messages of the compiler or the linker, for example that the sanitizer's library is not installed.
pub fn replay(
    root: &Path,
    manifest: &Manifest,
    compiler: &Compiler,
    instrument: Instrument,
    jobs: usize,
) -> Result<PathBuf, String> {
    let library = library(root, manifest, compiler, instrument, jobs)?;
    let _lock = super::lock(root)?;
    let shim = root.join(SHIM);
    let output = library.with_file_name(format!("quire_replay_{}", manifest.name));
    let args = [
        words(instrument.link_flags()),
        words(&["-std=c++17", "-O1", "-Wl,-rpath,$ORIGIN"]),
        vec![format!("-I{}", shim.join("include").display())],
    ];
    compiler.step("link", args.concat(), vec![shim.join("tests/replay.cpp"), library], output.clone()).run()?;
    Ok(output)
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

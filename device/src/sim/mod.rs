//! CUDA kernels on the host: opens and runs the libraries that `cargo xtask build-kernels --sim` compiles from the `.cu`
//! sources.
//!
//! A [`Library`] lists its [`Kernel`]s and runs a [`Launch`] by name, with the argument array of the CUDA driver. A launch
//! runs the whole grid on the calling thread before it returns; several threads may launch at once. A mistake of a kernel
//! (a barrier that some threads miss, a shuffle from a missing lane) is reported as a [`Fault`] with its source line.
//! `device/simt/README.md` lists what is modelled and what is not.
//!
//! Here arguments are in ordinary memory of the process. The `cuda-sim` device is built on this module.
//!
//! ```no_run
//! use device::{Arg, Launch};
//! use device::sim::Library;
//! let library = Library::open("target/kernels/libquire_sim_demo.so".as_ref())?;
//! let values = device::open("cpu", None)?.alloc(4096)?;
//! let args = [Arg::pointer(&values, 0), 1024.into(), 0.5f32.into()];
//! let launch =
//!     Launch { module: "demo", kernel: "scale", grid: [4, 1, 1], block: [256, 1, 1], shared_bytes: 0, args: &args };
//! // SAFETY: `scale` writes the 1024 numbers that its arguments describe, and no view of them exists.
//! unsafe { library.launch(&launch, 0) }?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod api;
mod call;
mod counts;
mod error;
mod libraries;
mod replay;
mod work;

pub use counts::{Counts, SECTOR, Tally};
pub use error::{Fault, FaultKind, SimError};
pub(crate) use libraries::Libraries;
pub(crate) use work::{Part, Work};

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};

use api::Api;
pub(crate) use call::Call;

use crate::{Launch, LaunchError, Tensor, Tile};

/// A kernel of a library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Name by which it is launched.
    pub name: String,
    /// Source file that defines it.
    pub file: String,
    /// Size of each parameter in bytes.
    pub parameter_bytes: Vec<u32>,
    /// Dynamic shared memory in bytes that every launch gets at least.
    pub shared_bytes: u32,
    /// What its blocks compute.
    pub tile: Tile,
}

/// A host library of kernels.
pub struct Library {
    api: Api,
    path: PathBuf,
    /// Sorted by name.
    kernels: Vec<Kernel>,
}

impl Library {
    /// Opens a library that `cargo xtask build-kernels --sim` has built. Opening runs its initialisers, so open only files
    /// that you would execute.
    ///
    /// # Errors
    /// [`SimError::Open`], [`SimError::Interface`].
    pub fn open(path: &Path) -> Result<Library, SimError> {
        let api = Api::load(path)?;
        let text = |text: *const std::ffi::c_char| {
            // SAFETY: the strings of the interface end with a 0 and live as long as the library.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let kernel = |index| {
            let kernel = api.kernel_at(index);
            let sizes = (0..kernel.parameters as usize).map(|i| {
                // SAFETY: the array has one size for each parameter.
                unsafe { *kernel.parameter_bytes.add(i) }
            });
            Kernel {
                name: text(kernel.name),
                file: text(kernel.file),
                parameter_bytes: sizes.collect(),
                shared_bytes: kernel.shared_bytes,
                tile: Tile { threads: kernel.threads, rows: kernel.rows },
            }
        };
        let kernels = (0..api.kernel_count()).map(kernel).collect();
        Ok(Library { api, path: path.to_owned(), kernels })
    }

    /// Path of the library.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The kernels, sorted by name.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// Returns the kernel of that name.
    ///
    /// # Errors
    /// [`LaunchError::UnknownKernel`].
    pub fn kernel(&self, name: &str) -> Result<&Kernel, LaunchError> {
        let index = self.kernels.binary_search_by(|kernel| kernel.name.as_str().cmp(name));
        index.map(|index| &self.kernels[index]).map_err(|_| LaunchError::UnknownKernel {
            module: self.path.display().to_string(),
            kernel: name.to_owned(),
            kernels: self.kernels.len(),
        })
    }

    /// Runs the whole grid. `seed` selects the order in which threads and blocks run; 0 is the natural order. A correct
    /// kernel computes the same bits in every order. [`Launch::module`] is ignored.
    ///
    /// # Errors
    /// After [`SimError::Launch`] nothing has run. After [`SimError::Fault`] the buffers contain what threads wrote before
    /// the fault.
    ///
    /// # Safety
    /// The buffers are memory of this process. With these arguments the kernel accesses only the buffers, and no view of a
    /// buffer that it writes exists.
    pub unsafe fn launch(&self, launch: &Launch<'_>, seed: u64) -> Result<(), SimError> {
        let call = self.prepare(launch)?;
        // SAFETY: the caller's promise.
        unsafe { self.run(&call, seed, None) }
    }

    /// As [`Library::launch`], and counts what the launch does. The library must have been built to count
    /// (`cargo xtask build-kernels --sim --counts`).
    ///
    /// # Errors
    /// As for [`Library::launch`]; [`SimError::Fault`] also if the library does not count.
    ///
    /// # Safety
    /// As for [`Library::launch`].
    pub unsafe fn count(&self, launch: &Launch<'_>, seed: u64) -> Result<Counts, SimError> {
        let call = self.prepare(launch)?;
        let mut counts = Counts::default();
        // SAFETY: the caller's promise.
        unsafe { self.run(&call, seed, Some(&mut counts)) }?;
        Ok(counts)
    }

    /// Checks a launch and lays out its arguments as the kernel expects them.
    pub(crate) fn prepare(&self, launch: &Launch<'_>) -> Result<Call, LaunchError> {
        let kernel = self.kernel(launch.kernel)?;
        let map = |tensor: &Tensor<'_>, address| Ok::<_, LaunchError>(tensor.host_map(address));
        let arguments = launch.pack(&kernel.parameter_bytes, map)?;
        // The name came from a C string, so it contains no 0.
        let name = CString::new(kernel.name.as_str()).unwrap_or_default();
        Ok(Call { name, grid: launch.grid, block: launch.block, shared_bytes: launch.shared_bytes, arguments })
    }

    /// Runs a call that [`Library::prepare`] of this library has returned, and counts what it does if asked to.
    ///
    /// # Safety
    /// As for [`Library::launch`]; also, the buffers still exist.
    pub(crate) unsafe fn run(&self, call: &Call, seed: u64, counts: Option<&mut Counts>) -> Result<(), SimError> {
        // SAFETY: the arguments have the sizes of the parameters; the rest is the caller's promise.
        unsafe { self.api.launch(call, seed, counts) }.map_err(|fault| SimError::Fault(Box::new(fault)))
    }
}

//! Kernels on the host: a library that `cargo xtask build-kernels --sim` made of the `.cu` sources, opened and
//! launched.
//!
//! A [`Library`] lists its [`Kernel`]s and runs a [`Launch`] by name, with the argument array that the CUDA driver
//! takes. A launch runs the whole grid on the calling thread before it returns; several threads may launch at once.
//! What a kernel does wrong (a barrier that some threads miss, a shuffle from a lane that is not there) comes back as a
//! [`Fault`] with the line. `device/simt/README.md` says what is modelled and what is not.
//!
//! This is the library by itself, with arguments in memory that the CPU can see. The `cuda-sim` device is made of it.
//!
//! ```no_run
//! use device::{Arg, Launch, sim::Library};
//! let library = Library::open("target/kernels/libquire_sim_demo.so".as_ref())?;
//! let values = device::open("cpu", None)?.alloc(4096)?;
//! let args = [Arg::pointer(&values, 0), 1024.into(), 0.5f32.into()];
//! let launch =
//!     Launch { module: "demo", kernel: "scale", grid: [4, 1, 1], block: [256, 1, 1], shared_bytes: 0, args: &args };
//! // SAFETY: `scale` writes the 1024 numbers that it is told of, and no view of them is alive.
//! unsafe { library.launch(&launch, 0) }?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod api;
mod call;
mod error;
mod libraries;
mod replay;
mod work;

pub use error::{Fault, FaultKind, SimError};
pub(crate) use libraries::Libraries;
pub(crate) use work::{Part, Work};

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};

use api::Api;
pub(crate) use call::Call;

use crate::{Launch, LaunchError, Tensor};

/// A kernel of a library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// As it is launched.
    pub name: String,
    /// The source that defines it.
    pub file: String,
    /// The size of each parameter, in bytes.
    pub parameter_bytes: Vec<u32>,
}

/// A host library of kernels.
pub struct Library {
    api: Api,
    path: PathBuf,
    /// Sorted by name.
    kernels: Vec<Kernel>,
}

impl Library {
    /// Opens a library that `cargo xtask build-kernels --sim` made. Opening runs its initialisers, as with any library:
    /// do not open a file that you would not execute.
    ///
    /// # Errors
    /// [`SimError::Open`], [`SimError::Interface`].
    pub fn open(path: &Path) -> Result<Library, SimError> {
        let api = Api::load(path)?;
        let text = |text: *const std::ffi::c_char| {
            // SAFETY: the interface gives texts that end in 0 and live as long as the library.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let kernel = |index| {
            let kernel = api.kernel_at(index);
            let sizes = (0..kernel.parameters as usize).map(|i| {
                // SAFETY: the interface gives as many sizes as there are parameters.
                unsafe { *kernel.parameter_bytes.add(i) }
            });
            Kernel { name: text(kernel.name), file: text(kernel.file), parameter_bytes: sizes.collect() }
        };
        let kernels = (0..api.kernel_count()).map(kernel).collect();
        Ok(Library { api, path: path.to_owned(), kernels })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All kernels, sorted by name.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// The kernel of that name.
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

    /// Runs the whole grid. `seed` is of the order in which threads and blocks run: a kernel that is right gives the
    /// same bits under every one. 0 keeps the natural order. The module of the launch is taken to be this library.
    ///
    /// # Errors
    /// Nothing has run after [`SimError::Launch`]; after a [`SimError::Fault`] the buffers hold what the threads wrote
    /// before it.
    ///
    /// # Safety
    /// The buffers are memory of this process. With these arguments the kernel must stay within them, and no view of a
    /// buffer that it writes may be alive.
    pub unsafe fn launch(&self, launch: &Launch<'_>, seed: u64) -> Result<(), SimError> {
        let call = self.prepare(launch)?;
        // SAFETY: the caller's promise.
        unsafe { self.run(&call, seed) }
    }

    /// The launch as a value that borrows nothing, its arguments laid out as the kernel takes them.
    pub(crate) fn prepare(&self, launch: &Launch<'_>) -> Result<Call, LaunchError> {
        let kernel = self.kernel(launch.kernel)?;
        let map = |tensor: &Tensor<'_>, address| Ok::<_, LaunchError>(tensor.host_map(address));
        let arguments = launch.pack(&kernel.parameter_bytes, map)?;
        // The name of a kernel of ours has no 0 in it.
        let name = CString::new(kernel.name.as_str()).unwrap_or_default();
        Ok(Call { name, grid: launch.grid, block: launch.block, shared_bytes: launch.shared_bytes, arguments })
    }

    /// Runs what [`Library::prepare`] of this library has made.
    ///
    /// # Safety
    /// That of [`Library::launch`], and the buffers are alive.
    pub(crate) unsafe fn run(&self, call: &Call, seed: u64) -> Result<(), SimError> {
        // SAFETY: the arguments have the sizes of the parameters, and the caller vouches for what they point to.
        unsafe { self.api.launch(call, seed) }.map_err(|fault| SimError::Fault(Box::new(fault)))
    }
}

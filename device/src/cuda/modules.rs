//! Kernels of a GPU: found by name, loaded at their first use, asked for their parameters.
//!
//! A crate's fat binary is many modules to the driver, and the index says which has a kernel, so a program loads only
//! the code that it launches. Handles stay until the device goes; a lookup is two searches under a lock.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::{CString, c_void};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute, CUresult};

use super::context::Context;
use super::error::{CudaError, Refusal, refused};
use super::fatbin::{self, Place};
use super::memory::DeviceMemory;
use crate::files::KernelFiles;
use crate::graph::Tape;
use crate::{DeviceError, LaunchError, Options};

const COMMAND: &str = "cargo xtask build-kernels";
/// Beyond 48 KiB, its own fixed share included, a kernel must be allowed to have it.
const DYNAMIC_SHARED: Attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;

/// A kernel that can be launched.
#[derive(Clone, Debug)]
pub(super) struct Function {
    pub handle: sys::CUfunction,
    /// Of each parameter.
    pub parameter_bytes: Arc<[u32]>,
    /// Dynamic shared memory that a launch may ask for so far.
    allowed_bytes: u32,
}

/// The fat binary of one crate.
struct Opened {
    path: PathBuf,
    index: BTreeMap<String, Place>,
    loaded: BTreeMap<Place, sys::CUmodule>,
    functions: BTreeMap<String, Function>,
}

/// All crates' kernels on one GPU.
pub(super) struct Modules {
    context: Arc<Context>,
    files: KernelFiles,
    opened: Mutex<BTreeMap<String, Opened>>,
}

// SAFETY: handles of the driver, which any thread may use that has the context current.
unsafe impl Send for Modules {}
// SAFETY: as above, and the lock keeps the maps.
unsafe impl Sync for Modules {}

impl Modules {
    /// Fails if there is no fat binary at all.
    pub fn find(context: &Arc<Context>, options: &Options) -> Result<Modules, DeviceError> {
        let files = KernelFiles::new("cuda", COMMAND, options.kernels.as_deref());
        files.folder_with("", ".fatbin")?;
        Ok(Modules { context: Arc::clone(context), files, opened: Mutex::default() })
    }

    /// Opens a crate's kernels and sees that they run on this GPU: loads the first module.
    pub fn load(&self, module: &str) -> Result<(), DeviceError> {
        self.with(module, |opened| {
            if let Some(place) = opened.index.values().next().copied() {
                opened.module(place, self.context.capability)?;
            }
            Ok(())
        })
    }

    /// A kernel that may ask for so much dynamic shared memory. The GPU is this thread's afterwards. What is not there yet is
    /// loaded, which may wait, and so is refused during a capture.
    pub fn function(
        &self,
        module: &str,
        kernel: &str,
        shared_bytes: u32,
        tape: &Tape<Arc<DeviceMemory>>,
    ) -> Result<Function, DeviceError> {
        self.with(module, |opened| {
            if !opened.functions.contains_key(kernel) {
                tape.refuse("opening kernels")?;
            }
            let mut function = opened.function(kernel, self.context.capability)?;
            if shared_bytes > function.allowed_bytes {
                let most = self.context.shared_bytes;
                if shared_bytes > most {
                    return Err(
                        LaunchError::SharedMemory { kernel: kernel.to_owned(), found: shared_bytes, most }.into()
                    );
                }
                // SAFETY: the function is of a module that stays loaded. The number is below 2^31: a GPU's own limit.
                unsafe {
                    result::function::set_function_attribute(function.handle, DYNAMIC_SHARED, shared_bytes as i32)
                }
                .map_err(refused("allowing a kernel its shared memory"))?;
                function.allowed_bytes = shared_bytes;
                opened.functions.insert(kernel.to_owned(), function.clone());
            }
            Ok(function)
        })
    }

    fn with<R>(&self, module: &str, f: impl FnOnce(&mut Opened) -> Result<R, DeviceError>) -> Result<R, DeviceError> {
        self.context.enter()?;
        // What enters the maps enters whole.
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        match opened.entry(module.to_owned()) {
            Entry::Occupied(known) => f(known.into_mut()),
            Entry::Vacant(new) => f(new.insert(Opened::new(self.files.find(&format!("{module}.fatbin"))?)?)),
        }
    }
}

impl Opened {
    fn new(path: PathBuf) -> Result<Opened, CudaError> {
        let index = path.with_extension("kernels.tsv");
        let text = std::fs::read_to_string(&index).map_err(|error| damaged(&index, error.to_string()))?;
        let index = fatbin::index(&text).map_err(|problem| damaged(&index, problem))?;
        Ok(Opened { path, index, loaded: BTreeMap::new(), functions: BTreeMap::new() })
    }

    fn function(&mut self, kernel: &str, capability: (u32, u32)) -> Result<Function, DeviceError> {
        if let Some(function) = self.functions.get(kernel) {
            return Ok(function.clone());
        }
        let Some(place) = self.index.get(kernel).copied() else {
            let (module, kernels) = (self.path.display().to_string(), self.index.len());
            return Err(LaunchError::UnknownKernel { module, kernel: kernel.to_owned(), kernels }.into());
        };
        let module = self.module(place, capability)?;
        let without = |why: String| damaged(&self.path, format!("kernel {kernel:?} in the index alone ({why})"));
        let name = CString::new(kernel).map_err(|error| without(error.to_string()))?;
        // SAFETY: the module stays loaded.
        let handle = unsafe { result::module::get_function(module, name) };
        let handle = handle.map_err(|error| without(Refusal(error).to_string()))?;
        // SAFETY: the handle is a function's.
        let parameter_bytes = unsafe { parameters(handle) }.map_err(refused("reading a kernel's parameters"))?;
        // SAFETY: the handle is a function's.
        let allowed = unsafe { result::function::get_function_attribute(handle, DYNAMIC_SHARED) };
        let allowed_bytes = allowed.map_err(refused("reading a kernel's shared memory"))?.unsigned_abs();
        let function = Function { handle, parameter_bytes, allowed_bytes };
        self.functions.insert(kernel.to_owned(), function.clone());
        Ok(function)
    }

    /// The module at a place of the file.
    fn module(&mut self, place: Place, capability: (u32, u32)) -> Result<sys::CUmodule, DeviceError> {
        if let Some(module) = self.loaded.get(&place) {
            return Ok(*module);
        }
        let binary = read(&self.path, place).map_err(|error| damaged(&self.path, error.to_string()))?;
        let bytes: Vec<u8> = binary.iter().flat_map(|word| word.to_ne_bytes()).take(place.len).collect();
        let Some(codes) = fatbin::codes(&bytes) else {
            return Err(damaged(&self.path, format!("no fat binary at byte {}", place.offset)).into());
        };
        if let Some(found) = fatbin::lacks(&codes, capability) {
            let file = self.path.clone();
            return Err(CudaError::NoCode { file, found, capability }.into());
        }
        // SAFETY: a fat binary, whole and aligned as its header asks, which the driver copies.
        let module = unsafe { result::module::load_data(binary.as_ptr().cast::<c_void>()) };
        let module = module.map_err(refused("loading kernels"))?;
        self.loaded.insert(place, module);
        Ok(module)
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        let opened = self.opened.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.context.finish_all().is_ok() {
            for module in opened.values().flat_map(|opened| opened.loaded.values()) {
                // SAFETY: loaded once, no kernel of it runs any more, and the functions go with `self`.
                let _ = unsafe { result::module::unload(*module) };
            }
        }
    }
}

/// The size of each parameter.
///
/// # Safety
/// The handle is that of a function.
unsafe fn parameters(function: sys::CUfunction) -> Result<Arc<[u32]>, DriverError> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the pointers are to numbers of the right type.
        match unsafe { sys::cuFuncGetParamInfo(function, sizes.len(), &mut offset, &mut size) }.result() {
            // A kernel has at most 32764 bytes of parameters.
            Ok(()) => sizes.push(size as u32),
            // The driver's way to say that there are no more.
            Err(DriverError(CUresult::CUDA_ERROR_INVALID_VALUE)) => return Ok(sizes.into()),
            Err(error) => return Err(error),
        }
    }
}

/// Words, so that the driver finds its header aligned.
fn read(path: &Path, place: Place) -> std::io::Result<Vec<u64>> {
    let mut file = File::open(path)?;
    let end = file.metadata()?.len();
    if place.offset.checked_add(place.len as u64).is_none_or(|needed| needed > end) {
        let problem = format!("{end} bytes, and a kernel at {} to {}", place.offset, place.offset + place.len as u64);
        return Err(std::io::Error::other(problem));
    }
    file.seek(SeekFrom::Start(place.offset))?;
    let mut bytes = vec![0; place.len.next_multiple_of(8)];
    file.read_exact(&mut bytes[..place.len])?;
    Ok(bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())).collect())
}

fn damaged(file: &Path, problem: String) -> CudaError {
    CudaError::Damaged { file: file.to_owned(), problem }
}

//! CUDA kernels: found by name and loaded on first use, with what a launch must know about each.
//!
//! To the driver the fat binary of a crate is many modules. The index maps each kernel to its module, so only code that is
//! launched is loaded. Modules stay loaded until the device is dropped. Finding a loaded kernel takes no lock and no allocation;
//! the only call to the driver makes the GPU's context current.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::{CString, c_void};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute, CUresult};
use simd::lock;

use super::index::{self, Place};
use crate::append::AppendMap;
use crate::driver::{Context, CudaError, DeviceMemory, Refusal, refused};
use crate::files::KernelFiles;
use crate::graph::Tape;
use crate::{DeviceError, LaunchError, Options, Tile};

const COMMAND: &str = "cargo xtask build-kernels";
/// A kernel may use more than 48 KiB of shared memory, static and dynamic together, only after this attribute was raised.
const DYNAMIC_SHARED: Attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
/// `<kernel>_traits` is the constant of a module that `QUIRE_EXPORT` and the like define.
const TRAITS: &str = "_traits";

/// A kernel that can be launched.
#[derive(Debug)]
pub(super) struct Function {
    pub handle: sys::CUfunction,
    /// Size of each parameter.
    pub parameter_bytes: Box<[u32]>,
    /// Dynamic shared memory that every launch needs at least.
    pub shared_bytes: u32,
    /// Whether its blocks may start before the launches ahead of it are complete: its threads wait for them.
    pub overlaps: bool,
    pub tile: Tile,
    /// Dynamic shared memory that the driver allows a launch so far.
    allowed_bytes: AtomicU32,
}

/// The fat binary of one crate.
struct Opened {
    path: PathBuf,
    index: BTreeMap<String, Place>,
    loaded: BTreeMap<Place, sys::CUmodule>,
}

/// The kernels of all crates on one GPU.
pub(super) struct Modules {
    context: Arc<Context>,
    files: KernelFiles,
    /// By module and name.
    functions: AppendMap<Function>,
    opened: Mutex<BTreeMap<String, Opened>>,
}

// SAFETY: the handles may be used by any thread whose current context is that of the GPU.
unsafe impl Send for Modules {}
// SAFETY: as above; the map of functions may be shared, and the others are behind a lock.
unsafe impl Sync for Modules {}

impl Modules {
    /// Returns an error if no fat binary exists.
    pub fn find(context: &Arc<Context>, options: &Options) -> Result<Modules, DeviceError> {
        let files = KernelFiles::new("cuda", COMMAND, options.kernels.as_deref());
        files.folder_with("", ".fatbin")?;
        Ok(Modules { context: Arc::clone(context), files, functions: AppendMap::new(), opened: Mutex::default() })
    }

    /// Opens the kernels of a crate and loads the first module, which shows that they run on this GPU.
    pub fn load(&self, module: &str) -> Result<(), DeviceError> {
        self.with(module, |opened| {
            if let Some(place) = opened.index.values().next().copied() {
                opened.module(place, self.context.capability)?;
            }
            Ok(())
        })
    }

    /// Returns a kernel that may be launched with `shared_bytes` of dynamic shared memory, or with its own
    /// [`Function::shared_bytes`] where that is more. Makes the GPU's context current. Loading a kernel may block, so it
    /// is refused during a capture.
    pub fn function(
        &self,
        module: &str,
        kernel: &str,
        shared_bytes: u32,
        tape: &Tape<Arc<DeviceMemory>>,
    ) -> Result<&Function, DeviceError> {
        self.context.enter()?;
        let function = match self.functions.get([module, kernel]) {
            Some(known) => known,
            None => {
                tape.refuse("opening kernels")?;
                let found = self.with(module, |opened| opened.function(kernel, self.context.capability))?;
                self.functions.get_or_add([module, kernel], found)
            }
        };
        let shared_bytes = shared_bytes.max(function.shared_bytes);
        if shared_bytes > function.allowed_bytes.load(Ordering::Acquire) {
            self.allow(kernel, function, shared_bytes)?;
        }
        Ok(function)
    }

    /// Lets launches of a kernel use `shared_bytes` bytes of dynamic shared memory.
    fn allow(&self, kernel: &str, function: &Function, shared_bytes: u32) -> Result<(), DeviceError> {
        let most = self.context.shared_bytes;
        if shared_bytes > most {
            return Err(LaunchError::SharedMemory { kernel: kernel.to_owned(), found: shared_bytes, most }.into());
        }
        // No other thread lowers the limit.
        let _order = lock(&self.opened);
        if shared_bytes > function.allowed_bytes.load(Ordering::Acquire) {
            // SAFETY: the function's module stays loaded. The number is at most a GPU's limit, so it fits i32.
            unsafe { result::function::set_function_attribute(function.handle, DYNAMIC_SHARED, shared_bytes as i32) }
                .map_err(refused("allowing a kernel its shared memory"))?;
            function.allowed_bytes.store(shared_bytes, Ordering::Release);
        }
        Ok(())
    }

    fn with<R>(&self, module: &str, f: impl FnOnce(&mut Opened) -> Result<R, DeviceError>) -> Result<R, DeviceError> {
        self.context.enter()?;
        // Entries are complete when they are inserted, so a poisoned lock holds valid maps.
        let mut opened = lock(&self.opened);
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
        let index = index::parse(&text).map_err(|problem| damaged(&index, problem))?;
        Ok(Opened { path, index, loaded: BTreeMap::new() })
    }

    fn function(&mut self, kernel: &str, capability: (u32, u32)) -> Result<Function, DeviceError> {
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
        // SAFETY: the handle is that of a module.
        let traits = unsafe { traits(module, kernel) };
        let [parameters, shared_bytes, overlaps, threads, rows] =
            traits.map_err(|error| without(Refusal(error).to_string()))?;
        // SAFETY: the handle is that of a function.
        let sizes = (0..parameters as usize).map(|index| unsafe { parameter_bytes(handle, index) });
        let parameter_bytes = sizes.collect::<Result<_, _>>().map_err(refused("reading a kernel's parameters"))?;
        // SAFETY: the handle is that of a function.
        let allowed = unsafe { result::function::get_function_attribute(handle, DYNAMIC_SHARED) };
        let allowed_bytes = allowed.map_err(refused("reading a kernel's shared memory"))?.unsigned_abs().into();
        let (overlaps, tile) = (overlaps != 0, Tile { threads, rows });
        Ok(Function { handle, parameter_bytes, shared_bytes, overlaps, tile, allowed_bytes })
    }

    /// Returns the module at a place of the file, loaded.
    fn module(&mut self, place: Place, capability: (u32, u32)) -> Result<sys::CUmodule, DeviceError> {
        if let Some(module) = self.loaded.get(&place) {
            return Ok(*module);
        }
        let binary = read(&self.path, place).map_err(|error| damaged(&self.path, error.to_string()))?;
        let bytes: Vec<u8> = binary.iter().flat_map(|word| word.to_ne_bytes()).take(place.len).collect();
        if !index::is_whole(&bytes) {
            return Err(damaged(&self.path, format!("no fat binary at byte {}", place.offset)).into());
        }
        // SAFETY: the data is a complete fat binary, aligned as its header requires. The driver copies it.
        let module = unsafe { result::module::load_data(binary.as_ptr().cast::<c_void>()) };
        let module = module.map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => CudaError::NoCode { file: self.path.clone(), capability },
            _ => refused("loading kernels")(error),
        })?;
        self.loaded.insert(place, module);
        Ok(module)
    }
}

impl Function {
    /// Enqueues a launch.
    ///
    /// # Safety
    /// The arguments have the sizes of the parameters, and the kernel may access what they point to until the stream is done.
    pub unsafe fn launch(
        &self,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        stream: sys::CUstream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: shared_bytes,
            hStream: stream,
            attrs: &raw mut attribute,
            numAttrs: self.overlaps.into(),
        };
        // SAFETY: the caller's promise; the call copies the configuration and the arguments.
        unsafe { sys::cuLaunchKernelEx(&config, self.handle, arguments.as_mut_ptr(), std::ptr::null_mut()) }.result()
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        let opened = self.opened.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.context.finish_all().is_ok() {
            for module in opened.values().flat_map(|opened| opened.loaded.values()) {
                // SAFETY: the module was loaded once, none of its kernels runs, and its functions are dropped with `self`.
                let _ = unsafe { result::module::unload(*module) };
            }
        }
    }
}

/// Returns what a kernel says of itself: number of parameters, dynamic shared memory, whether it overlaps, threads and rows of a
/// block.
///
/// # Safety
/// The handle is that of a loaded module of the current context.
unsafe fn traits(module: sys::CUmodule, kernel: &str) -> Result<[u32; 5], DriverError> {
    let name = CString::new(format!("{kernel}{TRAITS}")).unwrap_or_default();
    let mut values = [0u32; 5];
    // SAFETY: the caller's promise. `QUIRE_EXPORT` defines an array of this size, and the copy is done when the call returns.
    unsafe {
        let (address, _) = result::module::get_global(module, name)?;
        result::memcpy_dtoh_sync(&mut values, address)?;
    }
    Ok(values)
}

/// Returns the size of a parameter in bytes. Asking past the last one is an error that compute-sanitizer reports, so the number of
/// parameters comes from the kernel's source: `cuFuncGetParamCount` needs CUDA 13.2.
///
/// # Safety
/// The handle is that of a function.
unsafe fn parameter_bytes(function: sys::CUfunction, index: usize) -> Result<u32, DriverError> {
    let (mut offset, mut size) = (0, 0);
    // SAFETY: the pointers lead to numbers of the right types.
    unsafe { sys::cuFuncGetParamInfo(function, index, &mut offset, &mut size) }.result()?;
    // A kernel has at most 32764 bytes of parameters.
    Ok(size as u32)
}

/// Reads a part of a file into words of 8 bytes, the alignment that the driver expects.
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

//! The C interface of a host library, as `simt/include/quire/sim.h` declares it. Only this file calls it.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;

use super::call::Call;
use super::counts::Counts;
use super::error::{Fault, FaultKind, SimError};

/// `QUIRE_SIM_ABI` of the header.
const INTERFACE: u32 = 8;

/// `quire_sim_kernel`.
#[repr(C)]
pub(super) struct RawKernel {
    pub name: *const c_char,
    pub file: *const c_char,
    pub parameter_bytes: *const u32,
    pub parameters: u32,
    pub shared_bytes: u32,
    pub overlapped: u32,
    pub threads: u32,
    pub rows: u32,
}

/// `quire_sim_fault`.
#[repr(C)]
struct RawFault {
    code: i32,
    block: [u32; 3],
    thread: [u32; 3],
    line: i32,
    kernel: *const c_char,
    file: *const c_char,
    message: *const c_char,
}

/// `quire_sim_options`.
#[repr(C)]
struct RawOptions {
    seed: u64,
    counts: *mut Counts,
}

type LaunchFunction =
    unsafe extern "C" fn(*const c_char, *const u32, *const u32, u32, *const *mut c_void, *const RawOptions) -> i32;

/// The functions of an opened library.
pub(super) struct Api {
    kernel_count: unsafe extern "C" fn() -> usize,
    kernel_at: unsafe extern "C" fn(usize) -> RawKernel,
    launch: LaunchFunction,
    last_error: unsafe extern "C" fn() -> RawFault,
    /// Keeps the code in memory. The last field, so that it is dropped last.
    _library: libloading::Library,
}

impl Api {
    pub(super) fn load(path: &Path) -> Result<Api, SimError> {
        let unusable = |problem| SimError::Open { path: path.to_owned(), problem };
        // SAFETY: the initialisers of such a library only enter its kernels into a list.
        let library = unsafe { libloading::Library::new(path) }.map_err(unusable)?;
        // SAFETY: the header declares each symbol with this type, and the version is compared before any other call.
        unsafe {
            let interface = *library.get::<unsafe extern "C" fn() -> u32>(b"quire_sim_abi").map_err(unusable)?;
            let found = interface();
            if found != INTERFACE {
                return Err(SimError::Interface { path: path.to_owned(), found, expected: INTERFACE });
            }
            Ok(Api {
                kernel_count: *library.get(b"quire_sim_kernel_count").map_err(unusable)?,
                kernel_at: *library.get(b"quire_sim_kernel_at").map_err(unusable)?,
                launch: *library.get(b"quire_sim_launch").map_err(unusable)?,
                last_error: *library.get(b"quire_sim_last_error").map_err(unusable)?,
                _library: library,
            })
        }
    }

    pub(super) fn kernel_count(&self) -> usize {
        // SAFETY: the function takes no argument and only reads.
        unsafe { (self.kernel_count)() }
    }

    /// Returns a kernel; `index` must be less than [`Api::kernel_count`].
    pub(super) fn kernel_at(&self, index: usize) -> RawKernel {
        debug_assert!(index < self.kernel_count());
        // SAFETY: the caller passes an index that the library has.
        unsafe { (self.kernel_at)(index) }
    }

    /// Runs a launch.
    ///
    /// # Safety
    /// There are as many arguments as the kernel has parameters, each points to a value of the parameter's size, and the
    /// kernel may access what those values point to.
    pub(super) unsafe fn launch(&self, call: &Call, seed: u64, counts: Option<&mut Counts>) -> Result<(), Fault> {
        let options = RawOptions { seed, counts: counts.map_or(std::ptr::null_mut(), std::ptr::from_mut) };
        // SAFETY: strings and arrays live until the call returns; the rest is the caller's promise.
        let code = unsafe {
            (self.launch)(
                call.name.as_ptr(),
                call.grid.as_ptr(),
                call.block.as_ptr(),
                call.shared_bytes,
                call.arguments.pointers().as_ptr(),
                &options,
            )
        };
        if code == 0 { Ok(()) } else { Err(self.fault()) }
    }

    /// Returns the fault of this thread's last launch.
    fn fault(&self) -> Fault {
        // SAFETY: the function takes no argument and only reads.
        let raw = unsafe { (self.last_error)() };
        let text = |text| {
            // SAFETY: the strings end with a 0 and stay valid until this thread's next launch.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Fault {
            kind: FaultKind::of(raw.code),
            kernel: text(raw.kernel),
            block: raw.block,
            thread: raw.thread,
            file: text(raw.file),
            line: raw.line.unsigned_abs(),
            message: text(raw.message),
        }
    }
}

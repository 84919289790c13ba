//! The functions of `libnccl.so.2`, as `nccl.h` of NCCL 2.32 declares them. Only this file opens the library.

use std::ffi::{CStr, c_char, c_int, c_void};

use device::Dtype;
use libloading::Library;

use super::error::NcclError;
use crate::symbols::{functions, reason};

/// Names the file of the library.
const LIBRARY: &str = "QUIRE_NCCL_SO_PATH";
/// The name in NVIDIA's packages, which have no `libnccl.so`.
const NAME: &str = "libnccl.so.2";

/// `ncclUint8`.
pub(super) const BYTE: c_int = 1;
/// `ncclSum`.
pub(super) const SUM: c_int = 0;

/// `ncclFloat32`, `ncclFloat16` or `ncclBfloat16`.
pub(super) fn type_of(dtype: Dtype) -> c_int {
    match dtype {
        Dtype::F32 => 7,
        Dtype::F16 => 6,
        Dtype::Bf16 => 9,
    }
}

/// `ncclComm_t`.
pub(super) type Handle = *mut c_void;

/// `ncclUniqueId`, which names a communicator to be made.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub [u8; 128]);

functions! {
    /// Functions that return an error code.
    Functions<>
    get_unique_id = "ncclGetUniqueId"(*mut UniqueId);
    comm_init_rank = "ncclCommInitRank"(*mut Handle, c_int, UniqueId, c_int);
    comm_abort = "ncclCommAbort"(Handle);
    comm_destroy = "ncclCommDestroy"(Handle);
    comm_get_async_error = "ncclCommGetAsyncError"(Handle, *mut c_int);
    all_gather = "ncclAllGather"(u64, u64, usize, c_int, Handle, *mut c_void);
    broadcast = "ncclBroadcast"(u64, u64, usize, c_int, c_int, Handle, *mut c_void);
    all_reduce = "ncclAllReduce"(u64, u64, usize, c_int, c_int, Handle, *mut c_void);
    group_start = "ncclGroupStart"();
    group_end = "ncclGroupEnd"();
}

type Text = unsafe extern "C" fn(c_int) -> *const c_char;
type LastText = unsafe extern "C" fn(Handle) -> *const c_char;

/// The open library, which stays in memory until the process ends.
pub(super) struct Api {
    functions: Functions,
    error_string: Text,
    last_error: LastText,
}

impl Api {
    pub fn open() -> Result<Api, NcclError> {
        let file = std::env::var(LIBRARY).unwrap_or_else(|_| NAME.to_owned());
        // SAFETY: the initialisers of NCCL are trusted.
        let library = unsafe { Library::new(&file) }
            .map_err(|error| NcclError::NoLibrary { file: file.clone(), problem: reason(&error) })?;
        let lacks = |symbol| NcclError::Symbol { file: file.clone(), symbol };
        let functions = Functions::load(&library).map_err(lacks)?;
        // SAFETY: the header declares both functions with these types.
        let texts = unsafe { (library.get::<Text>("ncclGetErrorString"), library.get::<LastText>("ncclGetLastError")) };
        let error_string = *texts.0.map_err(|_| lacks("ncclGetErrorString"))?;
        let last_error = *texts.1.map_err(|_| lacks("ncclGetLastError"))?;
        // Its threads run its code.
        std::mem::forget(library);
        Ok(Api { functions, error_string, last_error })
    }

    /// Calls a function.
    pub fn call(&self, what: &'static str, f: impl FnOnce(&Functions) -> c_int) -> Result<(), NcclError> {
        self.checked(what, f(&self.functions))
    }

    /// Returns the error that a code names.
    pub fn checked(&self, what: &'static str, code: c_int) -> Result<(), NcclError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: both return texts that end with a 0 and stay valid until this thread's next call; neither needs a communicator.
        let texts = unsafe { [(self.error_string)(code), (self.last_error)(std::ptr::null_mut())] };
        let texts = texts.into_iter().filter(|text| !text.is_null()).map(|text| {
            // SAFETY: as above.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().split_whitespace().collect::<Vec<_>>().join(" ")
        });
        let problem = texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join(", ");
        Err(NcclError::Call { what, problem })
    }
}

//! The three binary interfaces of MPI libraries on Linux: functions, and constants as data. Nothing else depends on which one it is.
//!
//! | library | handles are | of |
//! |---|---|---|
//! | `libmpi_abi.so.1` | pointers with fixed values | the standard since MPI 5.0: MPICH 5, Intel MPI 2021.19 |
//! | `libmpi.so.12` | `int` | the family of MPICH: MPICH, Intel MPI, MVAPICH, Cray |
//! | `libmpi.so.40` | addresses of objects in the library | Open MPI 4 and 5 |

use std::ffi::{c_char, c_int, c_void};

use libloading::Library;

use super::error::MpiError;
use crate::CollectiveError;
use crate::symbols::functions;

/// A handle of a communicator, type, operation, request or error handler: `int` or pointer.
pub(super) trait Handle: Copy + Send + Sync + 'static {}
impl Handle for c_int {}
impl Handle for usize {}

/// Returns a count for MPI, which is an `int`.
pub(super) fn count(what: &'static str, rank: usize, bytes: usize) -> Result<c_int, CollectiveError> {
    let expected = c_int::MAX as usize;
    c_int::try_from(bytes).map_err(|_| CollectiveError::Size { rank, what, found: bytes, expected })
}

/// `MPI_Status`: 20 bytes in the family of MPICH, 24 in Open MPI, 32 in the standard. Read only by the library.
#[derive(Default)]
#[repr(C, align(8))]
pub(super) struct Status([u8; 32]);

/// Constants of a library. `T` is its handle, or the name of an exported object.
#[derive(Clone, Copy)]
pub(super) struct Constants<T> {
    pub world: T,
    pub byte: T,
    pub errors_return: T,
    pub request_null: T,
    /// `MPI_THREAD_SERIALIZED`; a larger level allows more.
    pub serialized: c_int,
    /// `MPI_THREAD_MULTIPLE`.
    pub multiple: c_int,
}

/// `mpi_abi.h` of MPICH 5.0.2.
const STANDARD: Constants<usize> = Constants {
    world: 0x101,
    byte: 0x247,
    errors_return: 0x143,
    request_null: 0x180,
    serialized: 2048,
    multiple: 4096,
};

/// `mpi.h` of MPICH 5.0.2.
const MPICH: Constants<c_int> = Constants {
    world: 0x4400_0000,
    byte: 0x4c00_010d,
    errors_return: 0x5400_0001,
    request_null: 0x2c00_0000,
    serialized: 2,
    multiple: 3,
};

/// `mpi.h` of Open MPI 5.0.11.
const OPEN_MPI: Constants<&str> = Constants {
    world: "ompi_mpi_comm_world",
    byte: "ompi_mpi_byte",
    errors_return: "ompi_mpi_errors_return",
    request_null: "ompi_request_null",
    serialized: 2,
    multiple: 3,
};

impl<T: Copy> Constants<T> {
    fn try_map<U>(&self, get: impl Fn(T) -> Result<U, MpiError>) -> Result<Constants<U>, MpiError> {
        Ok(Constants {
            world: get(self.world)?,
            byte: get(self.byte)?,
            errors_return: get(self.errors_return)?,
            request_null: get(self.request_null)?,
            serialized: self.serialized,
            multiple: self.multiple,
        })
    }
}

functions! {
    /// Functions of a library with handles `H`; all return an error code.
    Functions<H: Handle>
    init_thread = "MPI_Init_thread"(*mut c_int, *mut c_void, c_int, *mut c_int);
    finalize = "MPI_Finalize"();
    abort = "MPI_Abort"(H, c_int);
    error_string = "MPI_Error_string"(c_int, *mut c_char, *mut c_int);
    comm_rank = "MPI_Comm_rank"(H, *mut c_int);
    comm_size = "MPI_Comm_size"(H, *mut c_int);
    comm_split = "MPI_Comm_split"(H, c_int, c_int, *mut H);
    comm_set_errhandler = "MPI_Comm_set_errhandler"(H, H);
    ibcast = "MPI_Ibcast"(*mut c_void, c_int, H, c_int, H, *mut H);
    iallgatherv = "MPI_Iallgatherv"(*const c_void, c_int, H, *mut c_void, *const c_int, *const c_int, H, H, *mut H);
    isend = "MPI_Isend"(*const c_void, c_int, H, c_int, c_int, H, *mut H);
    irecv = "MPI_Irecv"(*mut c_void, c_int, H, c_int, c_int, H, *mut H);
    iprobe = "MPI_Iprobe"(c_int, c_int, H, *mut c_int, *mut Status);
    get_count = "MPI_Get_count"(*const Status, H, *mut c_int);
    test = "MPI_Test"(*mut H, *mut c_int, *mut Status);
}

/// An open library.
pub(super) struct Api<H> {
    pub functions: Functions<H>,
    pub constants: Constants<H>,
    /// File name and first line of the version.
    pub name: String,
}

/// An open library of any interface.
pub(super) enum Opened {
    Pointers(Api<usize>),
    Integers(Api<c_int>),
}

/// Looks up the functions and constants of an open library. The library stays in memory until the process ends.
pub(super) fn bind(library: Library, file: &str) -> Result<Opened, MpiError> {
    let name = format!("{file} ({})", version(&library, file)?);
    let address = |symbol: &str| {
        // SAFETY: only the address is taken.
        let found = unsafe { library.get::<*const c_void>(symbol) };
        found.map(|object| object.addr()).map_err(|_| lacks(file, symbol))
    };
    let opened = if is_standard(&library) {
        Opened::Pointers(Api { functions: functions(&library, file)?, constants: STANDARD, name })
    } else if address(OPEN_MPI.world).is_ok() {
        let constants = OPEN_MPI.try_map(address)?;
        Opened::Pointers(Api { functions: functions(&library, file)?, constants, name })
    } else {
        Opened::Integers(Api { functions: functions(&library, file)?, constants: MPICH, name })
    };
    // MPI's own threads and exit handlers run its code until the end.
    std::mem::forget(library);
    Ok(opened)
}

fn functions<H: Handle>(library: &Library, file: &str) -> Result<Functions<H>, MpiError> {
    Functions::load(library).map_err(|symbol| lacks(file, symbol))
}

fn lacks(file: &str, symbol: &str) -> MpiError {
    MpiError::Symbol { file: file.to_owned(), symbol: symbol.to_owned() }
}

/// Returns whether the library has the standard's interface: other libraries may have the function, but return -1.
fn is_standard(library: &Library) -> bool {
    let (mut major, mut minor) = (-1, -1);
    // SAFETY: the standard declares the function with this type, and allows the call at any time.
    unsafe {
        let get = library.get::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>("MPI_Abi_get_version");
        get.is_ok_and(|get| get(&mut major, &mut minor) == 0 && major > 0)
    }
}

/// Returns the first line of the library's version.
fn version(library: &Library, file: &str) -> Result<String, MpiError> {
    const SYMBOL: &str = "MPI_Get_library_version";
    // `MPI_MAX_LIBRARY_VERSION_STRING` of every interface is at most this.
    let (mut text, mut length) = (vec![0u8; 8192], 0);
    // SAFETY: the standard declares the function with this type, allows the call at any time, and the text has the room it needs.
    unsafe {
        let get = library.get::<unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int>(SYMBOL);
        get.map_err(|_| lacks(file, SYMBOL))?(text.as_mut_ptr().cast(), &mut length);
    }
    let text = String::from_utf8_lossy(&text[..length.clamp(0, 8192) as usize]).into_owned();
    let line = text.lines().next().unwrap_or_default().split(',').next().unwrap_or_default();
    Ok(line.split_whitespace().collect::<Vec<_>>().join(" "))
}

//! Memory of GPUs, exchanged by NCCL, which is opened at run time. **It has not run on a GPU yet**; tests use a NCCL in host code over
//! a driver in host code.
//!
//! Only [`Collective::all_gather_on`] and [`Collective::sum_on`] are NCCL's: both are enqueued on the compute stream and return at
//! once. Everything else, bytes of the host, is the work of the control group that this one is made from.
//!
//! ```text
//! ranks' rows         NCCL: scratch, rank by rank        a copy for each rank: rows
//! a0   b0                a0 a1 | b0 b1                   a0 b0
//! a1   b1                                                a1 b1
//! ```
//!
//! NCCL gathers whole parts. One row is gathered to where it belongs. More rows pass through memory that is allocated once, in as many
//! pieces as they need, and each piece costs, besides NCCL's kernel, one strided copy per rank: about 3 us of the host each and
//! twice the gathered bytes of memory traffic. Parts of different widths are one broadcast per rank in one group of calls.
//!
//! A GPU has one rank: NCCL refuses two. A device is the first GPU that its process sees, so `CUDA_VISIBLE_DEVICES` differs by rank.

mod api;
mod error;

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};

use device::{Buffer, CudaError, Device, DeviceError, Dtype, Gpu};
use simd::lock;

use super::{Collective, CollectiveError};
use api::{Api, BYTE, Functions, Handle, SUM, UniqueId, type_of};
pub use error::NcclError;

/// Makes a group of the ranks of `control`, whose GPUs exchange memory directly. All ranks call this at the same time. `scratch_bytes` is
/// the size of the memory for gathered rows: a gather of more is done in pieces of whole rows.
///
/// The library is `libnccl.so.2`, or the one that `QUIRE_NCCL_SO_PATH` names.
///
/// # Errors
/// [`CollectiveError::Nccl`] on every rank if one of them has no GPU or no library, so `control` can still be used;
/// [`CollectiveError::Device`] if the memory cannot be allocated; errors of `control`.
pub fn nccl(
    control: Arc<dyn Collective>,
    device: &Arc<dyn Device>,
    scratch_bytes: usize,
) -> Result<Arc<dyn Collective>, CollectiveError> {
    let prepared = prepare(&**device, scratch_bytes);
    let all_can = control.min(u64::from(prepared.is_ok()))? == 1;
    let (api, gpu, scratch) = prepared?;
    if !all_can {
        return Err(NcclError::OtherRank.into());
    }
    gpu.enter()?;
    let mut id = UniqueId([0; 128]);
    let made = match control.rank() {
        // SAFETY: the id is written.
        0 => api.call("naming a group", |nccl| unsafe { (nccl.get_unique_id)(&mut id) }),
        _ => Ok(()),
    };
    // Without an id the other ranks get an empty one.
    let mut bytes = if made.is_ok() { id.0.to_vec() } else { Vec::new() };
    control.broadcast(0, &mut bytes)?;
    made?;
    id.0 = bytes.try_into().map_err(|_| NcclError::OtherRank)?;
    let mut handle: Handle = std::ptr::null_mut();
    let place = [control.size(), control.rank()].map(|number| c_int::try_from(number).unwrap_or(c_int::MAX));
    // SAFETY: the handle is written; every rank passes the same id.
    api.call("making a group", |nccl| unsafe { (nccl.comm_init_rank)(&mut handle, place[0], id, place[1]) })?;
    let (communicator, scratch) = (Mutex::new(Some(Communicator(handle))), Mutex::new(scratch));
    Ok(Arc::new(Nccl { control, device: Arc::clone(device), gpu, api, communicator, scratch }))
}

/// Opens the library and allocates the scratch memory, which says whether the device is a GPU.
fn prepare(device: &dyn Device, scratch_bytes: usize) -> Result<(Api, Gpu, Buffer), CollectiveError> {
    let scratch = device.alloc(scratch_bytes.max(1))?;
    let gpu = Gpu::of(&scratch).ok_or(NcclError::Device(device.name()))?;
    Ok((Api::open()?, gpu, scratch))
}

struct Nccl {
    control: Arc<dyn Collective>,
    device: Arc<dyn Device>,
    gpu: Gpu,
    api: Api,
    /// `None` after an abort.
    communicator: Mutex<Option<Communicator>>,
    /// Gathered rows, rank by rank. Work on the compute stream uses it in order.
    scratch: Mutex<Buffer>,
}

struct Communicator(Handle);

// SAFETY: any thread may use the handle, one at a time, after it has made the context current.
unsafe impl Send for Communicator {}

impl Nccl {
    /// Enqueues something, unless the group has ended or an earlier exchange has failed.
    fn enqueue(
        &self,
        what: &'static str,
        f: impl FnOnce(&Functions, Handle, *mut c_void) -> c_int,
    ) -> Result<(), CollectiveError> {
        let communicator = lock(&self.communicator);
        let Some(Communicator(handle)) = &*communicator else {
            return Err(CollectiveError::Aborted("NCCL was stopped".into()));
        };
        self.gpu.enter()?;
        let mut earlier = 0;
        // SAFETY: the handle is that of a communicator; the code is written.
        self.api.call("asking for errors", |nccl| unsafe { (nccl.comm_get_async_error)(*handle, &mut earlier) })?;
        self.api.checked("an earlier exchange", earlier)?;
        Ok(self.api.call(what, |nccl| f(nccl, *handle, self.gpu.stream()))?)
    }

    /// Enqueues a gather of `parts`, one for each rank, to `to`, one after the other.
    fn gather(&self, own: u64, parts: &[usize], to: u64) -> Result<(), CollectiveError> {
        let first = parts.first().copied().unwrap_or(0);
        if parts.iter().all(|part| *part == first) {
            // SAFETY: the caller has checked that the ranges are inside of buffers, whose drops wait for the stream.
            let gather =
                |nccl: &Functions, group, stream| unsafe { (nccl.all_gather)(own, to, first, BYTE, group, stream) };
            return self.enqueue("gathering", gather);
        }
        self.enqueue("gathering", |nccl, group, stream| {
            // SAFETY: as above; only the root's own part is read.
            unsafe {
                let mut code = (nccl.group_start)();
                let mut to = to;
                for (root, part) in (0..).zip(parts) {
                    if code == 0 && *part > 0 {
                        code = (nccl.broadcast)(own, to, *part, BYTE, root, group, stream);
                    }
                    to += *part as u64;
                }
                let end = (nccl.group_end)();
                if code == 0 { end } else { code }
            }
        })
    }

    /// Enqueues a copy of rows of `part` bytes to columns of a matrix with rows of `width` bytes.
    fn place_columns(&self, from: u64, part: usize, to: u64, width: usize, rows: usize) -> Result<(), CollectiveError> {
        if part == 0 {
            return Ok(());
        }
        // SAFETY: the caller has checked both ranges; drops of buffers wait for the stream.
        Ok(unsafe { self.gpu.copy_columns(from, part, to, width, rows) }?)
    }
}

impl Collective for Nccl {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn size(&self) -> usize {
        self.control.size()
    }

    fn carrier(&self) -> &'static str {
        "nccl"
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Collective>, CollectiveError> {
        let scratch_bytes = lock(&self.scratch).len_bytes();
        nccl(self.control.split(color)?, &self.device, scratch_bytes)
    }

    fn broadcast(&self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError> {
        self.control.broadcast(root, bytes)
    }

    fn all_gather(&self, own: &[u8], rows: usize, widths: &[usize], all: &mut [u8]) -> Result<(), CollectiveError> {
        self.control.all_gather(own, rows, widths, all)
    }

    fn send(&self, to: usize, bytes: &[u8]) -> Result<(), CollectiveError> {
        self.control.send(to, bytes)
    }

    fn receive(&self, from: usize, bytes: &mut [u8]) -> Result<(), CollectiveError> {
        self.control.receive(from, bytes)
    }

    fn abort(&self, reason: &str) {
        // A call that hangs must not prevent the end; the group's processes end in any case.
        if let Ok(mut communicator) = self.communicator.try_lock()
            && let Some(Communicator(handle)) = communicator.take()
            && self.gpu.enter().is_ok()
        {
            // SAFETY: the handle is that of a communicator, and is not used again.
            let _ = self.api.call("stopping", |nccl| unsafe { (nccl.comm_abort)(handle) });
        }
        self.control.abort(reason);
    }

    fn all_gather_on(
        &self,
        device: &dyn Device,
        own: &Buffer,
        rows: usize,
        widths: &[usize],
        all: &mut Buffer,
    ) -> Result<(), CollectiveError> {
        let rank = self.rank();
        let (part, width) = (widths.get(rank).copied().unwrap_or(0), widths.iter().sum::<usize>());
        CollectiveError::check_gather(rank, self.size(), (rows * part, rows * width), rows, widths)?;
        let (own_rows, all_rows) = (self.gpu.address(own, 0, rows * part)?, self.gpu.address(all, 0, rows * width)?);
        let scratch = &mut *lock(&self.scratch);
        // Copies of nothing: a graph that is being captured keeps the memory that it uses.
        device.copy(own, 0, scratch, 0, 0)?;
        device.copy(scratch, 0, all, 0, 0)?;
        let most_rows = scratch.len_bytes() / width.max(1);
        let mut first = 0;
        while first < rows && width > 0 {
            let rows = (rows - first).min(most_rows.max(1));
            let (own, to) = (own_rows + (first * part) as u64, all_rows + (first * width) as u64);
            first += rows;
            if rows == 1 {
                self.gather(own, widths, to)?;
                continue;
            }
            let gathered = self.gpu.address(scratch, 0, rows * width)?;
            self.gather(own, &widths.iter().map(|part| rows * part).collect::<Vec<_>>(), gathered)?;
            let mut column = 0;
            for part in widths {
                let (from, to) = (gathered + (rows * column) as u64, to + column as u64);
                self.place_columns(from, *part, to, width, rows)?;
                column += part;
            }
        }
        Ok(())
    }

    /// The library chooses the order of the additions, by the number of values too.
    fn sum_on(
        &self,
        device: &dyn Device,
        dtype: Dtype,
        values: &mut Buffer,
        count: usize,
    ) -> Result<(), CollectiveError> {
        let address = self.gpu.address(values, 0, count * dtype.bytes())?;
        // As in `all_gather_on`.
        device.copy(&lock(&self.scratch), 0, values, 0, 0)?;
        // SAFETY: inside of the buffer, whose drop waits for the stream.
        self.enqueue("adding", |nccl, group, stream| unsafe {
            (nccl.all_reduce)(address, address, count, type_of(dtype), SUM, group, stream)
        })
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let Some(Communicator(handle)) = lock(&self.communicator).take() else { return };
        let panics = std::thread::panicking();
        let finished = if panics { self.gpu.enter() } else { self.device.synchronize() };
        if let Err(DeviceError::Cuda(CudaError::NotFinished(_))) = finished {
            // The library would wait for the GPU.
        } else if panics || finished.is_err() {
            // SAFETY: the handle is that of a communicator, and is not used again.
            let _ = self.api.call("stopping", |nccl| unsafe { (nccl.comm_abort)(handle) });
        } else {
            // SAFETY: as above; the stream is done with it.
            let _ = self.api.call("ending a group", |nccl| unsafe { (nccl.comm_destroy)(handle) });
        }
    }
}

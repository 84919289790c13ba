//! Groups of ranks that compute one model: the trait [`Collective`] and what carries it.
//!
//! A rank is a thread or a process with a part of the model. All ranks of a group call the same methods in the same order, as in MPI;
//! a method returns on a rank once that rank has what it asked for. Only bits move, but for [`Collective::sum`], which adds in the order of
//! the ranks: its result depends on their number, and on nothing else.
//!
//! | carrier | ranks are | made by |
//! |---|---|---|
//! | `threads` | threads of this process, or one alone | [`threads`], [`single`] |
//! | `mpi` | processes that an MPI launcher started | [`mpi`] |
//! | `nccl` | those of another group, each with its own GPU; memory of GPUs moves directly | [`nccl`]; has not run on a GPU yet |
//!
//! **Failure.** A group is fail-stop. After [`Collective::abort`] every call on every rank fails, or the process ends.
//!
//! ```
//! let ranks = collective::threads(2);
//! std::thread::scope(|scope| {
//!     for rank in &ranks {
//!         scope.spawn(move || assert_eq!(rank.values(rank.rank() as u64 + 5).unwrap(), [5, 6]));
//!     }
//! });
//! ```

mod error;
mod mpi;
mod nccl;
mod sum;
mod symbols;
mod threads;

use std::sync::Arc;

pub use error::CollectiveError;
pub use mpi::{MpiError, launched, mpi};
pub use nccl::{NcclError, nccl};
pub use threads::{single, threads};

use device::{Buffer, Device, Dtype};

/// Most bytes of one [`Collective::broadcast`].
pub const MOST_BROADCAST_BYTES: usize = 64 << 20;

/// Copies rows of `part` bytes to a matrix with rows of `width` bytes, whose columns begin at byte `column`.
fn place_columns(rows: &[u8], part: usize, all: &mut [u8], width: usize, column: usize) {
    if part > 0 {
        let rows = all.chunks_exact_mut(width).zip(rows.chunks_exact(part));
        rows.for_each(|(to, row)| to[column..column + part].copy_from_slice(row));
    }
}

/// One rank's place in a group of ranks.
///
/// Every method is called by one thread of a rank at a time, but for [`Collective::abort`], which any thread may call.
pub trait Collective: Send + Sync {
    /// This rank's number, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// What carries the bytes: `"threads"`, `"mpi"` or `"nccl"`.
    fn carrier(&self) -> &'static str;

    /// Splits the group: ranks that pass the same color form a group, in the order of their ranks here.
    ///
    /// # Errors
    /// As for every method: the group was aborted, the carrier failed, or the ranks called different methods.
    fn split(&self, color: usize) -> Result<Arc<dyn Collective>, CollectiveError>;

    /// Replaces `bytes` of all other ranks with those of `root`.
    ///
    /// # Errors
    /// See [`Collective::split`]. [`CollectiveError::TooLarge`] for more than [`MOST_BROADCAST_BYTES`].
    fn broadcast(&self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError>;

    /// Gathers the columns of a matrix whose rows are cut over the ranks. `own` has `rows` rows of `widths[self.rank()]` bytes;
    /// `all` gets `rows` rows, each with the parts of all ranks in their order.
    ///
    /// # Errors
    /// See [`Collective::split`]. [`CollectiveError::Size`] if the slices have other lengths than these.
    fn all_gather(&self, own: &[u8], rows: usize, widths: &[usize], all: &mut [u8]) -> Result<(), CollectiveError>;

    /// Replaces each value with its sum over all ranks, added in their order: the same on every rank, whatever values are beside it.
    ///
    /// # Errors
    /// See [`Collective::split`].
    fn sum(&self, values: &mut [f32]) -> Result<(), CollectiveError> {
        sum::sum(self, values)
    }

    /// Sends bytes to another rank, in the order of the calls. Does not wait for the receiver.
    ///
    /// # Errors
    /// See [`Collective::split`].
    fn send(&self, to: usize, bytes: &[u8]) -> Result<(), CollectiveError>;

    /// Waits for what another rank sends next to this one, which must have this length.
    ///
    /// # Errors
    /// See [`Collective::split`]. [`CollectiveError::Size`] if it has another length.
    fn receive(&self, from: usize, bytes: &mut [u8]) -> Result<(), CollectiveError>;

    /// Ends the group: every call on every rank fails from now on. With carriers of several processes, all of them end. May be called
    /// by any thread.
    fn abort(&self, reason: &str);

    /// [`Collective::all_gather`] of memory of a device, on its compute queue. The default implementation copies over the host.
    ///
    /// # Errors
    /// See [`Collective::all_gather`]; errors of the copies.
    fn all_gather_on(
        &self,
        device: &dyn Device,
        own: &Buffer,
        rows: usize,
        widths: &[usize],
        all: &mut Buffer,
    ) -> Result<(), CollectiveError> {
        let width = widths.get(self.rank()).copied().unwrap_or(0);
        let (of_own, of_all) = (rows * width, rows * widths.iter().sum::<usize>());
        if let (Ok(own), Ok(all)) = (own.host::<u8>(), all.host_mut::<u8>())
            && let (Some(own), Some(all)) = (own.get(..of_own), all.get_mut(..of_all))
        {
            return self.all_gather(own, rows, widths, all);
        }
        let mut bytes = vec![0; of_own + of_all];
        let (staged, gathered) = bytes.split_at_mut(of_own);
        device.download(own, 0, staged)?;
        self.all_gather(staged, rows, widths, gathered)?;
        Ok(device.upload(all, 0, gathered)?)
    }

    /// [`Collective::sum`] of the first `count` numbers in memory of a device, on its compute queue. The default implementation copies over
    /// the host, and rounds sums of 16 bits once.
    ///
    /// # Errors
    /// See [`Collective::sum`]; errors of the copies.
    fn sum_on(
        &self,
        device: &dyn Device,
        dtype: Dtype,
        values: &mut Buffer,
        count: usize,
    ) -> Result<(), CollectiveError> {
        if dtype == Dtype::F32
            && let Ok(values) = values.host_mut::<f32>()
            && let Some(values) = values.get_mut(..count)
        {
            return self.sum(values);
        }
        let (mut bytes, mut numbers) = (vec![0; count * dtype.bytes()], vec![0.0; count]);
        device.download(values, 0, &mut bytes)?;
        dtype.read_row(&bytes, &mut numbers);
        self.sum(&mut numbers)?;
        dtype.write_row(&numbers, &mut bytes);
        Ok(device.upload(values, 0, &bytes)?)
    }

    /// Returns the value of every rank.
    ///
    /// # Errors
    /// See [`Collective::split`].
    fn values(&self, own: u64) -> Result<Vec<u64>, CollectiveError> {
        let (widths, mut all) = (vec![size_of::<u64>(); self.size()], vec![0; size_of::<u64>() * self.size()]);
        self.all_gather(&own.to_le_bytes(), 1, &widths, &mut all)?;
        Ok(all.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
    }

    /// Returns the smallest value of all ranks.
    ///
    /// # Errors
    /// See [`Collective::split`].
    fn min(&self, own: u64) -> Result<u64, CollectiveError> {
        Ok(self.values(own)?.into_iter().min().unwrap_or(own))
    }

    /// Checks that all ranks have the same value of `what`.
    ///
    /// # Errors
    /// [`CollectiveError::Differs`] on every rank, naming two that differ; see [`Collective::split`].
    fn agree(&self, what: &'static str, own: u64) -> Result<(), CollectiveError> {
        let values = self.values(own)?;
        match values.iter().position(|value| *value != values[0]) {
            Some(rank) => Err(CollectiveError::Differs { what, rank, found: values[rank], expected: values[0] }),
            None => Ok(()),
        }
    }
}

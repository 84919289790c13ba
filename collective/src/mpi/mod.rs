//! Ranks that are processes, and exchange bytes with the MPI library of the machine, which is opened at run time.
//!
//! Every operation is started and then polled ([`backoff`]), so a rank that waits uses little of a core: MPI's own waits use all of
//! it. What ranks do not agree about is found where it costs nothing: a broadcast and each part of an all_gather begin with the
//! number of the call and the size. With `QUIRE_CHECK_COLLECTIVES=1` every call is compared first, which costs a small exchange.
//!
//! | method | MPI | copies of the bytes here |
//! |---|---|---|
//! | `broadcast` | one `Ibcast` of [`FIRST`] bytes, a second one for what does not fit | one |
//! | `all_gather` | one `Iallgatherv` for [`PIECE`] bytes of rows | one of the own rows, one of all rows |
//! | `send`, `receive` | `Isend` of a copy; `Iprobe`, then `Irecv` | one; none |
//!
//! **Failure.** MPI is fail-stop: the launcher ends the other ranks when one ends. After an error of a call, every later call of
//! this rank fails, and dropping the last group ends the job instead of waiting for others; so does a panic.

mod abi;
mod backoff;
mod error;
mod launcher;
mod world;

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use simd::lock;

use super::{Collective, CollectiveError};
use abi::{Api, Handle, Opened, Status, count};
use backoff::Backoff;
pub use error::MpiError;
use launcher::Launcher;
use world::World;

/// Makes every call compare what the ranks call, if it is 1.
const CHECK: &str = "QUIRE_CHECK_COLLECTIVES";
/// Bytes of the first message of a broadcast.
const FIRST: usize = 4096;
/// Number of a call and a size, in front of the bytes of a broadcast and of a part of an all_gather.
const HEADER: usize = 2 * size_of::<u64>();
/// Bytes that one exchange of rows gathers, but for a row that is longer.
const PIECE: usize = 16 << 20;
/// Tag of the messages; they arrive in the order in which they were sent.
const TAG: c_int = 1;

/// Starts the MPI library, once in a process, and returns the group of all ranks that its launcher started.
///
/// The library is the one that `QUIRE_MPI_LIBRARY` names, or else the first that is found of `libmpi_abi.so.1`, `libmpi.so.12` and
/// `libmpi.so.40`; a launcher's own library is tried first.
///
/// # Errors
/// [`CollectiveError::Mpi`]: there is no library, it belongs to another launcher, or it does not start.
pub fn mpi() -> Result<Arc<dyn Collective>, CollectiveError> {
    static STARTED: AtomicBool = AtomicBool::new(false);
    let variable = |name: &str| std::env::var(name).ok();
    let launcher = Launcher::of(variable);
    let opened = launcher.open(variable)?;
    if STARTED.swap(true, Ordering::AcqRel) {
        return Err(MpiError::Started.into());
    }
    let (size, checks) = (launcher.size(variable), variable(CHECK).as_deref() == Some("1"));
    match opened {
        Opened::Pointers(api) => start(api, &launcher, size, checks),
        Opened::Integers(api) => start(api, &launcher, size, checks),
    }
}

/// Returns how many ranks a launcher of MPI says it has started, of which this process is one.
pub fn launched() -> Option<usize> {
    let variable = |name: &str| std::env::var(name).ok();
    Launcher::of(variable).size(variable)
}

fn start<H: Handle>(
    api: Api<H>,
    launcher: &Launcher,
    size: Option<usize>,
    checks: bool,
) -> Result<Arc<dyn Collective>, CollectiveError> {
    let world = Arc::new(World::start(api)?);
    if let Some(expected) = size.filter(|size| *size != world.size) {
        let (launcher, library, found) = (launcher.name, world.api.name.clone(), world.size);
        return Err(MpiError::OtherLauncher { launcher, expected, library, found }.into());
    }
    // Messages of a communicator of our own are not mixed with those of others in this process.
    Ok(Arc::new(Mpi::of(&world, world.api.constants.world, 0, world.rank, checks)?))
}

struct Mpi<H: Handle> {
    world: Arc<World<H>>,
    communicator: H,
    rank: usize,
    size: usize,
    /// Whether every call is compared first.
    checks: bool,
    /// Number of calls that all ranks take part in.
    calls: AtomicU64,
    /// Memory of exchanges, reused.
    scratch: Mutex<Scratch>,
}

#[derive(Default)]
struct Scratch {
    own: Vec<u8>,
    all: Vec<u8>,
    counts: Vec<c_int>,
    starts: Vec<c_int>,
}

/// A method that all ranks call, as its number in a header.
#[derive(Clone, Copy, PartialEq)]
enum Method {
    Split,
    Broadcast,
    AllGather,
}

const METHODS: [&str; 3] = ["split", "broadcast", "all_gather"];

/// What stands in front of bytes: which call this is, and how many bytes it has.
#[derive(Clone, Copy, PartialEq)]
struct Header {
    call: u64,
    bytes: usize,
}

impl Header {
    fn write(self, to: &mut [u8]) {
        to[..8].copy_from_slice(&self.call.to_le_bytes());
        to[8..HEADER].copy_from_slice(&(self.bytes as u64).to_le_bytes());
    }

    fn read(from: &[u8]) -> Header {
        let words = from[..HEADER].as_chunks::<8>().0;
        Header { call: u64::from_le_bytes(words[0]), bytes: u64::from_le_bytes(words[1]) as usize }
    }

    /// Describes the call: `call 3, all_gather`.
    fn describe(self) -> String {
        let method = METHODS.get((self.call & 0xff) as usize).unwrap_or(&"an unknown method");
        format!("call {}, {method}", self.call >> 8)
    }
}

impl<H: Handle> Mpi<H> {
    /// Makes a group of the ranks of `of` that pass the same color.
    fn of(world: &Arc<World<H>>, of: H, color: usize, key: usize, checks: bool) -> Result<Mpi<H>, CollectiveError> {
        let (color, key) = (count("a color", key, color)?, count("a rank", key, key)?);
        // Groups live as long as the process, so no communicator is freed.
        let communicator = world.begin("splitting a group", |mpi, communicator| {
            // SAFETY: the handle is that of a communicator; the new one is written.
            unsafe { (mpi.comm_split)(of, color, key, communicator) }
        })?;
        let (rank, size) = world.place(communicator)?;
        let (world, calls, scratch) = (Arc::clone(world), AtomicU64::new(0), Mutex::default());
        Ok(Mpi { world, communicator, rank, size, checks, calls, scratch })
    }

    /// Numbers a call of this rank and, if wanted, compares it and a size that must be equal with those of the others.
    fn enter(&self, method: Method, bytes: usize) -> Result<u64, CollectiveError> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) << 8 | method as u64;
        if self.checks {
            let scratch = &mut *lock(&self.scratch);
            scratch.shape(self.rank, (0..self.size).map(|_| 0))?;
            self.exchange(Header { call, bytes }, |_| {}, scratch)?;
            for (rank, start) in scratch.starts.iter().enumerate() {
                let found = Header::read(&scratch.all[*start as usize..]).bytes;
                CollectiveError::check(rank, METHODS[method as usize], found, bytes)
                    .map_err(|error| self.world.end(error))?;
            }
        }
        Ok(call)
    }

    /// Gathers a header and the bytes that `fill` writes of every rank, whose counts and starts are in `scratch`, and compares the headers.
    fn exchange(
        &self,
        own: Header,
        fill: impl FnOnce(&mut [u8]),
        scratch: &mut Scratch,
    ) -> Result<(), CollectiveError> {
        let Scratch { own: part, all, counts, starts } = scratch;
        let length = counts[self.rank];
        let part = &mut part[..length as usize];
        own.write(part);
        fill(&mut part[HEADER..]);
        let byte = self.world.api.constants.byte;
        let request = self.world.begin("gathering", |mpi, request| {
            // SAFETY: the part has `length` bytes and `all` those of all counts, one after the other; `scratch` is kept until the
            // request is done.
            unsafe {
                (mpi.iallgatherv)(
                    part.as_ptr().cast(),
                    length,
                    byte,
                    all.as_mut_ptr().cast(),
                    counts.as_ptr(),
                    starts.as_ptr(),
                    byte,
                    self.communicator,
                    request,
                )
            }
        })?;
        self.world.finish("gathering", request)?;
        for (rank, start) in starts.iter().enumerate() {
            self.compare(rank, own, Header::read(&all[*start as usize..]))?;
        }
        Ok(())
    }

    /// Checks that another rank is in the same call. Whether it gave as many bytes is for the caller.
    fn compare(&self, rank: usize, own: Header, found: Header) -> Result<(), CollectiveError> {
        if own.call == found.call {
            return Ok(());
        }
        let (this, own, found) = (self.rank, own.describe(), found.describe());
        Err(self.world.end(CollectiveError::Aborted(format!("rank {this} is in {own}, rank {rank} in {found}"))))
    }

    fn cast(&self, what: &'static str, root: c_int, bytes: &mut [u8]) -> Result<(), CollectiveError> {
        let length = count(what, self.rank, bytes.len())?;
        let request = self.world.begin(what, |mpi, request| {
            let (to, byte) = (bytes.as_mut_ptr().cast(), self.world.api.constants.byte);
            // SAFETY: `bytes` has this length, and is borrowed until the request is done.
            unsafe { (mpi.ibcast)(to, length, byte, root, self.communicator, request) }
        })?;
        self.world.finish(what, request)
    }

    /// Waits for the next message of a rank, and returns its length.
    fn probe(&self, from: c_int) -> Result<usize, CollectiveError> {
        let (waiting, mut status) = (Backoff::new(), Status::default());
        let (mut arrived, mut length) = (0, 0);
        loop {
            self.world.call("waiting for a message", |mpi| {
                // SAFETY: the flag and the status are written.
                unsafe { (mpi.iprobe)(from, TAG, self.communicator, &mut arrived, &mut status) }
            })?;
            if arrived != 0 {
                break;
            }
            self.world.look_after_messages()?;
            waiting.pause();
        }
        self.world.call("asking for a message's length", |mpi| {
            // SAFETY: the status is that of a message.
            unsafe { (mpi.get_count)(&status, self.world.api.constants.byte, &mut length) }
        })?;
        Ok(usize::try_from(length).unwrap_or(usize::MAX))
    }
}

impl Scratch {
    /// Makes room for a header and this many bytes of each rank.
    fn shape(&mut self, rank: usize, parts: impl Iterator<Item = usize>) -> Result<(), CollectiveError> {
        let mut end = 0;
        self.counts.clear();
        self.starts.clear();
        for part in parts {
            self.starts.push(count("gathered bytes", rank, end)?);
            self.counts.push(count("gathered bytes", rank, HEADER.saturating_add(part))?);
            end = end.saturating_add(HEADER).saturating_add(part);
        }
        count("gathered bytes", rank, end)?;
        let own = self.counts[rank] as usize;
        self.own.resize(own.max(self.own.len()), 0);
        self.all.resize(end.max(self.all.len()), 0);
        Ok(())
    }
}

impl<H: Handle> Collective for Mpi<H> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn carrier(&self) -> &'static str {
        "mpi"
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Collective>, CollectiveError> {
        let call = self.enter(Method::Split, 0)?;
        let mut scratch = lock(&self.scratch);
        scratch.shape(self.rank, (0..self.size).map(|_| 0))?;
        // The headers carry the colors. All ranks arrive here before MPI's own split, which waits without pauses.
        self.exchange(Header { call, bytes: color }, |_| {}, &mut scratch)?;
        let color_of = |start: &c_int| Header::read(&scratch.all[*start as usize..]).bytes;
        // Any color is a number that MPI accepts: the first rank that passes it.
        let first = scratch.starts.iter().position(|start| color_of(start) == color).unwrap_or(self.rank);
        Ok(Arc::new(Mpi::of(&self.world, self.communicator, first, self.rank, self.checks)?))
    }

    fn broadcast(&self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError> {
        CollectiveError::check_rank(root, self.size)?;
        let is_root = self.rank == root;
        let length = if is_root { bytes.len() } else { 0 };
        CollectiveError::check_broadcast(self.rank, length)?;
        let call = self.enter(Method::Broadcast, root)?;
        let root_rank = count("a rank", self.rank, root)?;
        let own = Header { call, bytes: length };
        let mut first = [0; FIRST];
        if is_root {
            own.write(&mut first);
            let begins = length.min(FIRST - HEADER);
            first[HEADER..][..begins].copy_from_slice(&bytes[..begins]);
        }
        self.cast("broadcasting", root_rank, &mut first)?;
        let found = Header::read(&first);
        self.compare(root, own, found)?;
        CollectiveError::check_broadcast(root, found.bytes).map_err(|error| self.world.end(error))?;
        let begins = found.bytes.min(FIRST - HEADER);
        if !is_root {
            bytes.clear();
            bytes.extend_from_slice(&first[HEADER..][..begins]);
            bytes.resize(found.bytes, 0);
        }
        match &mut bytes[begins..] {
            [] => Ok(()),
            rest => self.cast("broadcasting", root_rank, rest),
        }
    }

    fn all_gather(&self, own: &[u8], rows: usize, widths: &[usize], all: &mut [u8]) -> Result<(), CollectiveError> {
        let width = CollectiveError::check_gather(self.rank, self.size, (own.len(), all.len()), rows, widths)?;
        let call = self.enter(Method::AllGather, width)?;
        let scratch = &mut *lock(&self.scratch);
        let most_rows = (PIECE / width.max(1)).max(1);
        let (mut own, mut all, mut left) = (own, all, rows);
        loop {
            let rows = left.min(most_rows);
            let (given, gathered);
            (given, own) = own.split_at(rows * widths[self.rank]);
            (gathered, all) = all.split_at_mut(rows * width);
            scratch.shape(self.rank, widths.iter().map(|width| rows * width))?;
            self.exchange(Header { call, bytes: given.len() }, |part| part.copy_from_slice(given), scratch)?;
            let mut column = 0;
            for (rank, (part, start)) in widths.iter().zip(&scratch.starts).enumerate() {
                let from = &scratch.all[*start as usize..];
                CollectiveError::check(rank, "rows given to all_gather", Header::read(from).bytes, rows * part)
                    .map_err(|error| self.world.end(error))?;
                super::place_columns(&from[HEADER..][..rows * part], *part, gathered, width, column);
                column += part;
            }
            left -= rows;
            if left == 0 {
                return Ok(());
            }
        }
    }

    fn send(&self, to: usize, bytes: &[u8]) -> Result<(), CollectiveError> {
        CollectiveError::check_rank(to, self.size)?;
        self.world.send(self.communicator, count("a rank", self.rank, to)?, TAG, bytes)
    }

    fn receive(&self, from: usize, bytes: &mut [u8]) -> Result<(), CollectiveError> {
        CollectiveError::check_rank(from, self.size)?;
        let from = count("a rank", self.rank, from)?;
        CollectiveError::check(self.rank, "a message", self.probe(from)?, bytes.len())
            .map_err(|error| self.world.end(error))?;
        let length = count("a message", self.rank, bytes.len())?;
        let request = self.world.begin("receiving", |mpi, request| {
            let (to, byte) = (bytes.as_mut_ptr().cast(), self.world.api.constants.byte);
            // SAFETY: `bytes` has this length, and is borrowed until the request is done.
            unsafe { (mpi.irecv)(to, length, byte, from, TAG, self.communicator, request) }
        })?;
        self.world.finish("receiving", request)
    }

    fn abort(&self, reason: &str) {
        self.world.abort(reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_bytes_than_mpi_counts_are_refused_before_memory_is_allocated() {
        let mut scratch = Scratch::default();
        for parts in [vec![1 << 31, 1], vec![1 << 30, 1 << 30], vec![usize::MAX, 2], vec![0, usize::MAX - HEADER]] {
            let error =
                scratch.shape(0, parts.iter().copied()).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.starts_with("rank 0: gathered bytes: found "), "{parts:?}: {error}");
            assert_eq!((scratch.own.len(), scratch.all.len()), (0, 0));
        }
        assert!(scratch.shape(1, [5, 0].into_iter()).is_ok());
        assert_eq!((&scratch.counts[..], &scratch.starts[..]), (&[21, 16][..], &[0, 21][..]));
        assert!(count("a message", 0, 1 << 31).is_err());
    }
}

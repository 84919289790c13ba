//! What a server keeps over restarts: responses, conversations, files and batches, as records in transactions.
//!
//! ```text
//! tasks ── changes ──▶ bounded queue ──▶ writer thread ── one transaction for all that wait ──▶ redb ──▶ file, or memory
//!   ▲                                          │
//!   └────────── durable, or why not ◀──────────┘
//! ```
//!
//! A [`Record`] has an owner, a kind, a time to live and a body, whose form is the caller's. It may have numbered parts: the events of
//! a response, the pieces of a file. A [`Change`] is applied with the others of its list, or none of them is. When
//! [`Store::apply`] returns, they are on the disk.
//!
//! | file | what it owns |
//! |---|---|
//! | `record` | records, changes, and their form in the file |
//! | `tables`, `changes` | the tables; what a change does to them |
//! | `writer` | the thread that writes: group commit, removal of what is over its time, repair after a failed write |
//! | `id` | ids that cannot be guessed and tell when they were made |
//! | `clock` | time that does not follow a clock that is moved |
//!
//! - **Durability.** A commit has two phases, so that a later fault of the disk cannot turn the last commit into the one before
//!   it without a word. Tests cut the writes at every byte and reopen the file.
//! - **Size.** Each entry counts as what it can take in the file. A store over [`Limits::max_bytes`] drops the oldest ended
//!   responses, then refuses. Unfinished work reserves room for its end.
//! - **Sharing.** One process at a time: the file is locked.
//!
//! ```
//! use store::{Change, Kind, Limits, NewRecord, OWNER_BYTES, Store, fresh_id};
//!
//! let store = Store::in_memory(Limits::default())?;
//! let (owner, id) = ([0; OWNER_BYTES], fresh_id("resp", store.now())?);
//! let record = NewRecord { kind: Kind::Response, owner, is_open: false, reserved: 0, ttl: None, body: b"{}".to_vec() };
//! store.apply_blocking(vec![Change::Insert { id: id.clone(), record }])?;
//! assert_eq!(store.get(&id)?.map(|record| record.body), Some(b"{}".to_vec()));
//! # Ok::<(), store::StoreError>(())
//! ```

mod changes;
mod clock;
mod error;
mod id;
mod record;
mod tables;
mod writer;

use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

pub use clock::{Clock, unix_seconds};
pub use error::StoreError;
pub use id::{created_at, fresh_id};
pub use record::{Change, Kind, NewRecord, OWNER_BYTES, Record};
pub use redb::StorageBackend;
use redb::backends::{FileBackend, InMemoryBackend};
pub use tables::Page;
use tables::Tables;
use tokio::sync::{mpsc, oneshot};
use writer::{Command, Shared, Writer};

/// Name of the file in the folder of a store.
pub const FILE: &str = "quire.redb";

/// Number of lists of changes that may wait for the writer.
const QUEUE: usize = 256;

/// Limits of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum size of all entries in bytes, each rounded up to what it can take in the file.
    pub max_bytes: u64,
    /// Time after which a record is removed, unless it has its own.
    pub ttl: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { max_bytes: 64 << 20, ttl: Duration::from_secs(30 * 86400) }
    }
}

/// Opens the storage of a store, again after each failed write.
pub type Opener = Box<dyn Fn() -> io::Result<Box<dyn StorageBackend>> + Send>;

/// What a store holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Size of all entries, as [`Limits::max_bytes`] counts them.
    pub bytes: u64,
    /// Room that unfinished work has reserved.
    pub reserved: u64,
    /// Number of records by [`Kind`], in the order of [`Kind::ALL`].
    pub records: [u64; Kind::ALL.len()],
    /// Number of commits since the start.
    pub commits: u64,
    /// Number of changes that they had.
    pub changes: u64,
    /// Number of commits that failed.
    pub failures: u64,
    /// Number of responses that were dropped to make room.
    pub evicted: u64,
}

/// A handle on a store. The store closes when the last one is dropped, or by [`Store::close`].
#[derive(Clone)]
pub struct Store {
    commands: mpsc::Sender<Command>,
    shared: Arc<Shared>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
    limits: Limits,
    clock: Clock,
    secret: [u8; 32],
    was_repaired: bool,
}

impl Store {
    /// Opens the store in a folder, which is made if it does not exist. Only its owner can read it.
    ///
    /// # Errors
    /// The folder cannot be used, another process has it open, or the file is damaged or of a later version.
    pub fn open(folder: &Path, limits: Limits) -> Result<Store, StoreError> {
        let path = folder.join(FILE);
        make_private(folder).map_err(|error| StoreError::Folder(folder.to_owned(), error))?;
        let opener = move || -> io::Result<Box<dyn StorageBackend>> {
            let file = private_file(&path)?;
            match FileBackend::new(file) {
                Ok(backend) => Ok(Box::new(backend)),
                Err(redb::DatabaseError::DatabaseAlreadyOpen) => Err(io::ErrorKind::WouldBlock.into()),
                Err(error) => Err(io::Error::other(error)),
            }
        };
        Store::with(Box::new(opener), limits, Arc::new(unix_seconds))
    }

    /// A store that ends with the process.
    ///
    /// # Errors
    /// The system has no thread or no random numbers.
    pub fn in_memory(limits: Limits) -> Result<Store, StoreError> {
        Store::with(Box::new(|| Ok(Box::new(InMemoryBackend::new()))), limits, Arc::new(unix_seconds))
    }

    /// Opens a store over any storage.
    ///
    /// # Errors
    /// As those of [`Store::open`].
    pub fn with(opener: Opener, limits: Limits, clock: Clock) -> Result<Store, StoreError> {
        let (tables, was_repaired) = Tables::open(&*opener)?;
        let secret = tables.secret()?;
        let (commands, queue) = mpsc::channel(QUEUE);
        let shared = Arc::new(Shared::new(tables)?);
        let writer = Writer::new(queue, shared.clone(), opener, limits, clock.clone());
        let thread = std::thread::Builder::new().name("quire-store".to_string()).spawn(move || writer.run());
        let thread = thread.map_err(|error| StoreError::Io(error.to_string()))?;
        let thread = Arc::new(Mutex::new(Some(thread)));
        Ok(Store { commands, shared, thread, limits, clock, secret, was_repaired })
    }

    /// Applies changes in order, all or none. Ready when they are on the disk.
    ///
    /// # Errors
    /// A change does not fit the records, the store is full, or the disk failed. Only in the last case the changes may still
    /// have been made.
    pub async fn apply(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Apply { changes, reply }).await.map_err(|_| StoreError::Closed)?;
        answer.await.map_err(|_| StoreError::Closed)?
    }

    /// Like [`Store::apply`], outside of async tasks.
    ///
    /// # Errors
    /// As those of [`Store::apply`].
    ///
    /// # Panics
    /// If called from within an async task.
    pub fn apply_blocking(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        let (reply, answer) = oneshot::channel();
        self.commands.blocking_send(Command::Apply { changes, reply }).map_err(|_| StoreError::Closed)?;
        answer.blocking_recv().map_err(|_| StoreError::Closed)?
    }

    /// Removes what is over its time, a bounded number of records. Returns whether there may be more.
    ///
    /// # Errors
    /// The disk failed.
    pub async fn sweep(&self) -> Result<bool, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Sweep { reply }).await.map_err(|_| StoreError::Closed)?;
        answer.await.map_err(|_| StoreError::Closed)?
    }

    fn read<T>(&self, read: impl FnOnce(&Tables) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let done = self.shared.read(read);
        if done.is_err() && self.shared.is_lost() {
            // If the queue is full, what is in it opens the database.
            let _ = self.commands.try_send(Command::Reopen);
        }
        done
    }

    /// A record that is not over its time.
    ///
    /// # Errors
    /// The record is damaged or cannot be read.
    pub fn get(&self, id: &str) -> Result<Option<Record>, StoreError> {
        let (record, now) = (self.read(|tables| tables.get(id))?, self.now());
        let is_over = record.as_ref().is_some_and(|record| record.is_over(now));
        if is_over {
            self.sweep_soon();
        }
        Ok(record.filter(|_| !is_over))
    }

    /// Removes what is over its time, as soon as the writer comes to it: what a client was told to have expired is not found again if
    /// the clock of the next start is behind.
    fn sweep_soon(&self) {
        let (reply, _) = oneshot::channel();
        // If the queue is full, a later sweep does it.
        let _ = self.commands.try_send(Command::Sweep { reply });
    }

    /// Whether a record exists whose work is unfinished.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn is_open(&self, id: &str) -> Result<bool, StoreError> {
        self.read(|tables| tables.is_open(id))
    }

    /// Parts of a record in a list of its own, from a number on, in order: at least one if there are any, and no more once
    /// `max_bytes` are read.
    ///
    /// # Errors
    /// A part is damaged or cannot be read.
    pub fn parts(&self, id: &str, list: u8, from: u64, max_bytes: usize) -> Result<Vec<(u64, Vec<u8>)>, StoreError> {
        self.read(|tables| tables.parts(id, list, from, max_bytes))
    }

    /// The number of the last part of a list that is at most this one.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn part_before(&self, id: &str, list: u8, number: u64) -> Result<Option<u64>, StoreError> {
        self.read(|tables| tables.part_before(id, list, number))
    }

    /// The numbers and sizes of all parts of a list.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn part_numbers(&self, id: &str, list: u8) -> Result<Vec<(u64, usize)>, StoreError> {
        self.read(|tables| tables.part_numbers(id, list))
    }

    /// A page of an owner's records of a kind.
    ///
    /// # Errors
    /// A record is damaged or cannot be read.
    pub fn list(
        &self,
        kind: Kind,
        owner: &[u8; OWNER_BYTES],
        page: &Page<'_>,
    ) -> Result<(Vec<(String, Record)>, bool), StoreError> {
        let now = self.now();
        let (found, has_more, leaves_out) = self.read(|tables| tables.list(kind, owner, page, now))?;
        if leaves_out {
            self.sweep_soon();
        }
        Ok((found, has_more))
    }

    /// The records of unfinished work.
    ///
    /// # Errors
    /// A record is damaged or cannot be read.
    pub fn unfinished(&self) -> Result<Vec<(String, Record)>, StoreError> {
        self.read(Tables::unfinished)
    }

    /// What the store holds and has done.
    pub fn stats(&self) -> Stats {
        self.shared.stats()
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Unix time in seconds.
    pub fn now(&self) -> u64 {
        (self.clock)()
    }

    /// A random number that belongs to the store, for hashes that mean nothing elsewhere.
    pub fn secret(&self) -> &[u8; 32] {
        &self.secret
    }

    /// Whether the file had not been closed in order and was repaired.
    pub fn was_repaired(&self) -> bool {
        self.was_repaired
    }

    /// Whether a record of this time that is missing has been dropped to make room.
    pub fn was_evicted(&self, created: u64) -> bool {
        self.shared.evicted_until() >= created
    }

    /// Writes what waits and closes the file. Later calls fail.
    pub fn close(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            self.shared.close();
            let _ = self.commands.try_send(Command::Close);
            // A panic of the writer has been logged by the runtime.
            let _ = thread.join();
        }
    }
}

/// Makes a folder that only its owner can use.
fn make_private(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
    match fs::DirBuilder::new().recursive(true).mode(0o700).create(folder) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => {}
        Err(error) => return Err(error),
    }
    fs::set_permissions(folder, fs::Permissions::from_mode(0o700))
}

/// Opens the file, which only its owner can read.
fn private_file(path: &Path) -> io::Result<fs::File> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    let file = fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    Ok(file)
}

//! A disk in memory that keeps every write, fails on request and can be cut, and short ways to make changes.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use store::{Change, Clock, Kind, Limits, NewRecord, OWNER_BYTES, Opener, StorageBackend, Store, StoreError};

/// What was done to a disk.
#[derive(Clone, Debug)]
pub enum Done {
    Write(u64, Vec<u8>),
    SetLen(u64),
    Sync,
}

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    log: Vec<Done>,
    /// Number of operations until all fail; `None` never.
    fails_after: Option<u64>,
    /// Whether it is written only once this is over, and how many wait for that.
    is_held: bool,
    waiting: usize,
}

/// A disk that tests share with the store.
#[derive(Clone, Debug, Default)]
pub struct Disk(Arc<(Mutex<State>, Condvar)>);

/// A disk that finishes no write until this is dropped.
pub struct Held(Disk);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.state().is_held = false;
        self.0.0.1.notify_all();
    }
}

impl Disk {
    pub fn of(bytes: Vec<u8>) -> Disk {
        Disk(Arc::new((Mutex::new(State { bytes, ..State::default() }), Condvar::new())))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.0.lock().unwrap()
    }

    /// Makes it finish no write.
    pub fn hold(&self) -> Held {
        self.state().is_held = true;
        Held(self.clone())
    }

    /// Whether someone waits for a write.
    pub fn is_waiting(&self) -> bool {
        self.state().waiting > 0
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.state().bytes.clone()
    }

    /// Takes what was done so far.
    pub fn take_log(&self) -> Vec<Done> {
        std::mem::take(&mut self.state().log)
    }

    pub fn fail_after(&self, operations: Option<u64>) {
        self.state().fails_after = operations;
    }

    pub fn opener(&self) -> Opener {
        let disk = self.clone();
        Box::new(move || Ok(Box::new(disk.clone())))
    }

    fn change(&self, done: Done) -> io::Result<()> {
        let mut state = self.state();
        state.waiting += 1;
        while state.is_held {
            state = self.0.1.wait(state).unwrap();
        }
        state.waiting -= 1;
        match &mut state.fails_after {
            Some(0) => return Err(io::Error::new(io::ErrorKind::StorageFull, "no space left on device")),
            Some(left) => *left -= 1,
            None => {}
        }
        play(&mut state.bytes, &done);
        state.log.push(done);
        Ok(())
    }
}

/// Does to `bytes` what was done to a disk.
pub fn play(bytes: &mut Vec<u8>, done: &Done) {
    match done {
        Done::Write(at, data) => {
            let at = *at as usize;
            if bytes.len() < at + data.len() {
                bytes.resize(at + data.len(), 0);
            }
            bytes[at..at + data.len()].copy_from_slice(data);
        }
        Done::SetLen(len) => bytes.resize(*len as usize, 0),
        Done::Sync => {}
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.state().bytes.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = self.state();
        let found = state.bytes.get(offset as usize..offset as usize + out.len());
        out.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(Done::SetLen(len))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.change(Done::Sync)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.change(Done::Write(offset, data.to_vec()))
    }
}

/// A clock that stands until it is moved.
pub fn clock(now: &Arc<AtomicU64>) -> Clock {
    let now = now.clone();
    Arc::new(move || now.load(Ordering::Relaxed))
}

pub fn open(disk: &Disk, limits: Limits) -> Result<Store, StoreError> {
    Store::with(disk.opener(), limits, clock(&Arc::new(AtomicU64::new(1000))))
}

pub fn owner(name: u8) -> [u8; OWNER_BYTES] {
    [name; OWNER_BYTES]
}

pub fn insert(id: &str, kind: Kind, is_open: bool, body: &[u8]) -> Change {
    let record = NewRecord { kind, owner: owner(1), is_open, reserved: 0, ttl: None, body: body.to_vec() };
    Change::Insert { id: id.to_string(), record }
}

pub fn part(id: &str, number: u64, bytes: &[u8]) -> Change {
    Change::Part { id: id.to_string(), list: 0, number, bytes: bytes.to_vec() }
}

pub fn update(id: &str, body: &[u8], is_open: bool) -> Change {
    Change::Update { id: id.to_string(), body: body.to_vec(), is_open }
}

pub fn delete(id: &str) -> Change {
    Change::Delete { id: id.to_string() }
}

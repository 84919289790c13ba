//! The lock of a blob, which `huggingface_hub` takes in the same way (`flock`), so both may download at once.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// Time after the first attempt to take a lock that is held. It doubles up to the last one.
const POLL: Duration = Duration::from_millis(1);
const MAX_POLL: Duration = Duration::from_millis(100);

/// A lock that is held until this value is dropped, or the process ends.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock. While another holder has it, waits and calls `waiting` before each attempt, which ends the wait with an error.
    ///
    /// # Errors
    /// That of `waiting`, or the file cannot be opened or locked.
    pub fn take<E>(path: &Path, mut waiting: impl FnMut() -> Result<(), E>) -> Result<io::Result<Lock>, E> {
        let mut poll = POLL;
        loop {
            let file = match OpenOptions::new().create(true).truncate(false).write(true).open(path) {
                Ok(file) => file,
                Err(error) => return Ok(Err(error)),
            };
            match file.try_lock() {
                Ok(()) if is_at(&file, path) => return Ok(Ok(Lock { _file: file })),
                // The last holder has removed the file: a newer one is at its place.
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    waiting()?;
                    std::thread::sleep(poll);
                    poll = (poll * 2).min(MAX_POLL);
                }
                Err(TryLockError::Error(error)) => return Ok(Err(error)),
            }
        }
    }
}

/// Whether `path` still names this open file.
fn is_at(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(named)) = (file.metadata(), fs::metadata(path)) else { return false };
    (open.dev(), open.ino()) == (named.dev(), named.ino())
}

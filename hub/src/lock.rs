//! The lock of a blob, which `huggingface_hub` takes in the same way (`flock`), so both may download at once.
//!
//! Some file systems of networks have no `flock`. There the lock is a file of its own, which exists as long as it is held. A process that
//! dies leaves it behind, so a wait for it ends with an error that names it.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time after the first attempt to take a lock that is held. It doubles up to the last one.
const POLL: Duration = Duration::from_millis(1);
const MAX_POLL: Duration = Duration::from_millis(100);

/// A lock that is held until this value is dropped, or, with `flock`, the process ends.
#[derive(Debug)]
pub(crate) enum Lock {
    Flock { _file: File },
    Exists(PathBuf),
}

impl Lock {
    /// Takes the lock. While another holder has it, waits and calls `waiting` before each attempt, which ends the wait with an error.
    ///
    /// # Errors
    /// That of `waiting`, or the file cannot be opened or locked.
    pub fn take<E>(path: &Path, waiting: impl FnMut() -> Result<(), E>) -> Result<io::Result<Lock>, E> {
        Lock::take_with(path, File::try_lock, waiting)
    }

    fn take_with<E>(
        path: &Path,
        try_lock: impl Fn(&File) -> Result<(), TryLockError>,
        mut waiting: impl FnMut() -> Result<(), E>,
    ) -> Result<io::Result<Lock>, E> {
        let mut poll = POLL;
        loop {
            let file = match OpenOptions::new().create(true).truncate(false).write(true).open(path) {
                Ok(file) => file,
                Err(error) => return Ok(Err(error)),
            };
            let attempt = match try_lock(&file) {
                Ok(()) if is_at(&file, path) => return Ok(Ok(Lock::Flock { _file: file })),
                // The last holder has removed the file: a newer one is at its place.
                Ok(()) => continue,
                Err(TryLockError::WouldBlock) => None,
                Err(TryLockError::Error(error)) if is_unsupported(&error) => {
                    let own = Lock::file_of(path);
                    Some(OpenOptions::new().create_new(true).write(true).open(&own).map(|_| own))
                }
                Err(TryLockError::Error(error)) => Some(Err(error)),
            };
            match attempt {
                Some(Ok(own)) => return Ok(Ok(Lock::Exists(own))),
                Some(Err(error)) if error.kind() != ErrorKind::AlreadyExists => return Ok(Err(error)),
                _ => {
                    waiting()?;
                    std::thread::sleep(poll);
                    poll = (poll * 2).min(MAX_POLL);
                }
            }
        }
    }

    /// The file that stands for a lock where there is no `flock`.
    pub fn file_of(path: &Path) -> PathBuf {
        path.with_extension("held")
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if let Lock::Exists(path) = self {
            let _ = fs::remove_file(path);
        }
    }
}

/// Whether the file system has no such locks.
fn is_unsupported(error: &io::Error) -> bool {
    let codes =
        [rustix::io::Errno::NOLCK, rustix::io::Errno::NOTSUP, rustix::io::Errno::OPNOTSUPP, rustix::io::Errno::NOSYS];
    error.kind() == ErrorKind::Unsupported || codes.iter().any(|code| error.raw_os_error() == Some(code.raw_os_error()))
}

/// Whether `path` still names this open file.
fn is_at(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(named)) = (file.metadata(), fs::metadata(path)) else { return false };
    (open.dev(), open.ino()) == (named.dev(), named.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_flock_a_file_is_the_lock() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("etag.lock");
        let unsupported = |_: &File| Err(TryLockError::Error(io::Error::from(rustix::io::Errno::NOLCK)));
        let take = |waiting: &mut dyn FnMut() -> Result<(), &'static str>| Lock::take_with(&path, unsupported, waiting);
        let first = take(&mut || Err("held")).unwrap().unwrap();
        assert!(matches!(&first, Lock::Exists(own) if own.is_file()));
        assert_eq!(take(&mut || Err("held")).unwrap_err(), "held");
        // A wait ends when the holder goes.
        let mut first = Some(first);
        let second = take(&mut || {
            first = None;
            Ok(())
        });
        drop(second.unwrap().unwrap());
        assert!(!Lock::file_of(&path).exists());
        // Other errors are reported.
        let denied = |_: &File| Err(TryLockError::Error(io::Error::from(ErrorKind::PermissionDenied)));
        let refused = Lock::take_with(&path, denied, || Err("held")).unwrap();
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::PermissionDenied);
    }
}

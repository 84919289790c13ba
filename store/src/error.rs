//! Errors of the store, each one line.

use std::io;
use std::path::PathBuf;

/// Why the store did not do it.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The folder cannot be made or opened.
    #[error("{}: {_1}; expected a folder that can be made, read and written", _0.display())]
    Folder(PathBuf, io::Error),
    /// Another process has the file open.
    #[error("another server has it open, expected one server for each folder; stop that one or use another folder")]
    Locked,
    /// The file has another format.
    #[error(
        "found a store of version {found}, expected {expected}; start the version of Quire that wrote it, or use another folder"
    )]
    Version {
        /// Version in the file.
        found: u64,
        /// The version of this program.
        expected: u64,
    },
    /// The contents are not those that were written.
    #[error("the store is damaged: {0}; move its file away to begin an empty one, or restore a copy")]
    Damaged(String),
    /// The disk failed. It may still have made the changes.
    #[error("the store cannot be written or read: {0}; check the disk's space, rights and health")]
    Io(String),
    /// There is no room.
    #[error("found {needed} bytes for it and {used} in use, expected at most {most} in all; delete some")]
    Full {
        /// Size of what was to be added.
        needed: u64,
        /// Size of what is kept, with reserved room.
        used: u64,
        /// [`Limits::max_bytes`](crate::Limits::max_bytes).
        most: u64,
    },
    /// A record of this id exists.
    #[error("a record {0} exists")]
    Exists(String),
    /// No record has this id.
    #[error("no record {0} exists")]
    Missing(String),
    /// The work of the record has ended.
    #[error("the work of {0} has ended")]
    Ended(String),
    /// The system has no random numbers.
    #[error("the system has no random numbers: {0}")]
    Random(String),
    /// The store is closed.
    #[error("the store is closed")]
    Closed,
}

impl From<redb::StorageError> for StoreError {
    fn from(error: redb::StorageError) -> StoreError {
        match error {
            redb::StorageError::Corrupted(what) => StoreError::Damaged(what),
            other => StoreError::Io(other.to_string()),
        }
    }
}

impl From<redb::TableError> for StoreError {
    fn from(error: redb::TableError) -> StoreError {
        match error {
            redb::TableError::Storage(error) => error.into(),
            other => StoreError::Damaged(other.to_string()),
        }
    }
}

impl From<redb::TransactionError> for StoreError {
    fn from(error: redb::TransactionError) -> StoreError {
        match error {
            redb::TransactionError::Storage(error) => error.into(),
            other => StoreError::Io(other.to_string()),
        }
    }
}

impl From<redb::CommitError> for StoreError {
    fn from(error: redb::CommitError) -> StoreError {
        match error {
            redb::CommitError::Storage(error) => error.into(),
            other => StoreError::Io(other.to_string()),
        }
    }
}

impl From<redb::DatabaseError> for StoreError {
    fn from(error: redb::DatabaseError) -> StoreError {
        match error {
            redb::DatabaseError::DatabaseAlreadyOpen => StoreError::Locked,
            redb::DatabaseError::Storage(error) => error.into(),
            redb::DatabaseError::UpgradeRequired(found) => {
                StoreError::Damaged(format!("its file has format {found} of redb"))
            }
            other => StoreError::Io(other.to_string()),
        }
    }
}

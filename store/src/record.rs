//! Records, changes, and their form in the file.
//!
//! ```text
//! record: | checksum 8 | version 1 | kind 1 | open 1 | owner 32 | created 8 | expires 8 | serial 8 | body |
//! part:   | checksum 8 | bytes |
//! ```
//!
//! The checksum covers the key too, so that an entry under a wrong key is found. Numbers are little-endian.

use std::hash::Hasher;
use std::time::Duration;

use siphasher::sip::SipHasher13;

use crate::error::StoreError;

/// Length of an owner's name.
pub const OWNER_BYTES: usize = 32;

/// Version of a record's form.
const VERSION: u8 = 1;
/// Length of a checksum.
const CHECKSUM: usize = 8;
/// Length of a record without its body.
const HEAD: usize = CHECKSUM + 3 + OWNER_BYTES + 24;

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A response. Ended ones are dropped, the oldest first, if the store is full.
    Response,
    /// A conversation.
    Conversation,
    /// A file.
    File,
    /// A batch.
    Batch,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 4] = [Kind::Response, Kind::Conversation, Kind::File, Kind::Batch];

    /// What clients call one.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Response => "response",
            Kind::Conversation => "conversation",
            Kind::File => "file",
            Kind::Batch => "batch",
        }
    }

    /// Its number in the file.
    pub(crate) fn code(self) -> u8 {
        match self {
            Kind::Response => 0,
            Kind::Conversation => 1,
            Kind::File => 2,
            Kind::Batch => 3,
        }
    }

    fn of(code: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.code() == code)
    }
}

/// A record as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// What it is.
    pub kind: Kind,
    /// Whose it is.
    pub owner: [u8; OWNER_BYTES],
    /// Whether its work is unfinished. Such a record is neither dropped nor over its time.
    pub is_open: bool,
    /// When it was made, in seconds.
    pub created: u64,
    /// When it is removed, in seconds.
    pub expires: u64,
    /// Its place in the order of all records.
    pub serial: u64,
    /// The caller's bytes.
    pub body: Vec<u8>,
}

impl Record {
    /// Whether it is of this kind and owner.
    pub fn is_of(&self, kind: Kind, owner: &[u8; OWNER_BYTES]) -> bool {
        self.kind == kind && self.owner == *owner
    }

    /// Whether it is over its time. What is unfinished never is.
    pub(crate) fn is_over(&self, now: u64) -> bool {
        !self.is_open && self.expires <= now
    }
}

/// A record to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewRecord {
    /// What it is.
    pub kind: Kind,
    /// Whose it is.
    pub owner: [u8; OWNER_BYTES],
    /// Whether its work is unfinished.
    pub is_open: bool,
    /// Room that it reserves while it is open, so that its end fits.
    pub reserved: u64,
    /// Time after which it is removed; `None`: that of the store.
    pub ttl: Option<Duration>,
    /// The caller's bytes.
    pub body: Vec<u8>,
}

/// A change of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Adds a record.
    Insert {
        /// Its id, which must be new.
        id: String,
        /// The record.
        record: NewRecord,
    },
    /// Replaces the body of a record whose work is unfinished.
    Update {
        /// Its id.
        id: String,
        /// The new body.
        body: Vec<u8>,
        /// Whether its work is still unfinished.
        is_open: bool,
    },
    /// Replaces the body of any record.
    Replace {
        /// Its id.
        id: String,
        /// The new body.
        body: Vec<u8>,
    },
    /// Sets a part of a record.
    Part {
        /// The record's id.
        id: String,
        /// The list of the part.
        list: u8,
        /// Its number.
        number: u64,
        /// Its bytes.
        bytes: Vec<u8>,
    },
    /// Removes a part of a record, if it exists.
    RemovePart {
        /// The record's id.
        id: String,
        /// The list of the part.
        list: u8,
        /// Its number.
        number: u64,
    },
    /// Sets how long after its making a record is removed.
    Expire {
        /// Its id.
        id: String,
        /// The time.
        after: Duration,
    },
    /// Removes a record with its parts.
    Delete {
        /// Its id.
        id: String,
    },
}

impl Change {
    /// The record that it is about.
    pub fn id(&self) -> &str {
        match self {
            Change::Insert { id, .. }
            | Change::Update { id, .. }
            | Change::Replace { id, .. }
            | Change::Part { id, .. }
            | Change::RemovePart { id, .. }
            | Change::Expire { id, .. }
            | Change::Delete { id } => id,
        }
    }

    /// Size of what it writes.
    pub(crate) fn num_bytes(&self) -> usize {
        match self {
            Change::Insert { record, .. } => record.body.len(),
            Change::Update { body, .. } | Change::Replace { body, .. } => body.len(),
            Change::Part { bytes, .. } => bytes.len(),
            Change::RemovePart { .. } | Change::Expire { .. } | Change::Delete { .. } => 0,
        }
    }
}

impl NewRecord {
    /// The record, made now.
    pub(crate) fn at(self, now: u64, ttl: Duration, serial: u64) -> Record {
        let NewRecord { kind, owner, is_open, ttl: own, body, .. } = self;
        let expires = now.saturating_add(own.unwrap_or(ttl).as_secs().max(1));
        Record { kind, owner, is_open, created: now, expires, serial, body }
    }
}

impl Record {
    /// Its form in the file.
    pub(crate) fn encode(&self, id: &str) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + self.body.len());
        bytes.extend([0; CHECKSUM]);
        bytes.extend([VERSION, self.kind.code(), u8::from(self.is_open)]);
        bytes.extend(self.owner);
        for number in [self.created, self.expires, self.serial] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(&self.body);
        seal(&mut bytes, id.as_bytes());
        bytes
    }

    /// Reads its form in the file.
    pub(crate) fn decode(id: &str, bytes: &[u8]) -> Result<Record, StoreError> {
        let damaged = |what: &str| StoreError::Damaged(format!("record {id}: {what}"));
        unseal(bytes, id.as_bytes()).ok_or_else(|| damaged("its checksum is wrong"))?;
        let number = |at: usize| -> Option<u64> { Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?)) };
        let numbers = CHECKSUM + 3 + OWNER_BYTES;
        let read = || -> Option<Record> {
            let &[version, kind, open] = bytes.get(CHECKSUM..CHECKSUM + 3)? else { return None };
            Some(Record {
                kind: Kind::of(kind).filter(|_| version == VERSION)?,
                is_open: open == 1,
                owner: bytes.get(CHECKSUM + 3..numbers)?.try_into().ok()?,
                created: number(numbers)?,
                expires: number(numbers + 8)?,
                serial: number(numbers + 16)?,
                body: bytes.get(HEAD..)?.to_vec(),
            })
        };
        read().ok_or_else(|| damaged("its form is unknown"))
    }
}

/// The form of a part in the file.
pub(crate) fn encode_part(id: &str, list: u8, number: u64, bytes: &[u8]) -> Vec<u8> {
    let mut sealed = Vec::with_capacity(CHECKSUM + bytes.len());
    sealed.extend([0; CHECKSUM]);
    sealed.extend(bytes);
    seal(&mut sealed, &part_key(id, list, number));
    sealed
}

/// Reads the form of a part in the file.
pub(crate) fn decode_part(id: &str, list: u8, number: u64, sealed: &[u8]) -> Result<Vec<u8>, StoreError> {
    let bytes = unseal(sealed, &part_key(id, list, number));
    let damaged = || StoreError::Damaged(format!("part {number} of {id}: its checksum is wrong"));
    bytes.map(<[u8]>::to_vec).ok_or_else(damaged)
}

/// Length of a part without what the file adds.
pub(crate) fn part_len(sealed: &[u8]) -> usize {
    sealed.len().saturating_sub(CHECKSUM)
}

fn part_key(id: &str, list: u8, number: u64) -> Vec<u8> {
    [id.as_bytes(), &[list], &number.to_le_bytes()].concat()
}

fn checksum(key: &[u8], rest: &[u8]) -> [u8; CHECKSUM] {
    let mut hasher = SipHasher13::new();
    hasher.write(&(key.len() as u64).to_le_bytes());
    hasher.write(key);
    hasher.write(rest);
    hasher.finish().to_le_bytes()
}

fn seal(bytes: &mut [u8], key: &[u8]) {
    let (sum, rest) = bytes.split_at_mut(CHECKSUM);
    sum.copy_from_slice(&checksum(key, rest));
}

fn unseal<'a>(bytes: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let (sum, rest) = bytes.split_at_checked(CHECKSUM)?;
    (sum == checksum(key, rest)).then_some(rest)
}

#[cfg(test)]
#[path = "../tests/unit/record.rs"]
mod tests;

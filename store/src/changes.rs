//! What a change does to the tables.
//!
//! Lists of changes are checked before they are made, so that one that is refused leaves no trace in the transaction that it
//! shares with others.

use std::collections::{HashMap, HashSet};

use redb::{ReadableTable, Table};

use crate::Limits;
use crate::error::StoreError;
use crate::record::{Change, Kind, Record, encode_part, part_len};
use crate::tables::{Totals, lost};

/// What a record takes besides itself: its entries in four other tables.
const INDEXES: u64 = 512;
/// Number of records that one sweep removes.
const SWEPT: usize = 256;

/// Room that an entry takes in the file at most: leaves are at least half full, and longer ones are pages of powers of two.
fn charge(key: usize, value: usize) -> u64 {
    let whole = (key + value + 64) as u64;
    if whole < 2048 { 2 * whole } else { whole.next_power_of_two() }
}

/// A transaction with its tables.
pub(crate) struct Writing<'a> {
    pub records: Table<'a, &'static str, &'static [u8]>,
    pub parts: Table<'a, (&'static str, u8, u64), &'static [u8]>,
    pub owned: Table<'a, (u8, &'static [u8], u64, &'static str), ()>,
    pub expiry: Table<'a, (u64, &'static str), ()>,
    pub open: Table<'a, &'static str, u64>,
    pub ended: Table<'a, (u64, &'static str), ()>,
    pub totals: Totals,
    pub evicted: u64,
    pub limits: &'a Limits,
    pub now: u64,
}

/// Whether a list of changes is made, or refused before it left a trace.
pub(crate) type Applied = Result<(), StoreError>;

impl Writing<'_> {
    /// Makes a list of changes. The outer error is that of the disk.
    pub fn apply(&mut self, changes: &[Change]) -> Result<Applied, StoreError> {
        let needed = match self.check(changes)? {
            Ok(needed) => needed,
            Err(refused) => return Ok(Err(refused)),
        };
        let named: HashSet<&str> = changes.iter().map(Change::id).collect();
        if let Err(refused) = self.make_room(needed, &named)? {
            return Ok(Err(refused));
        }
        changes.iter().try_for_each(|change| self.make(change))?;
        Ok(Ok(()))
    }

    fn record(&self, id: &str) -> Result<Option<Record>, StoreError> {
        self.records.get(id)?.map(|found| Record::decode(id, found.value())).transpose()
    }

    /// Returns the room that the changes need beyond what their records have reserved, or why they cannot be made.
    fn check(&self, changes: &[Change]) -> Result<Result<u64, StoreError>, StoreError> {
        // Whether the records that these changes make, end or remove exist and are open.
        let mut states: HashMap<&str, Option<bool>> = HashMap::new();
        let (mut needed, mut reserved) = (0_u64, HashMap::<&str, u64>::new());
        for change in changes {
            let id = change.id();
            let before = self.records.get(id)?.map(|found| found.value().len());
            let state = match states.get(id) {
                Some(state) => *state,
                None => self.record(id)?.map(|record| record.is_open),
            };
            let (size, next) = match (change, state) {
                (Change::Insert { .. }, Some(_)) => return Ok(Err(StoreError::Exists(id.to_string()))),
                (Change::Insert { record, .. }, None) => {
                    needed += record.reserved;
                    (charge(id.len(), record.body.len()) + INDEXES, Some(record.is_open))
                }
                (_, None) => return Ok(Err(StoreError::Missing(id.to_string()))),
                (Change::Update { .. }, Some(false)) => return Ok(Err(StoreError::Ended(id.to_string()))),
                (Change::Update { body, is_open, .. }, _) => {
                    let old = before.map_or(0, |len| charge(id.len(), len));
                    (charge(id.len(), body.len()).saturating_sub(old), Some(*is_open))
                }
                (Change::Replace { body, .. }, state) => {
                    let old = before.map_or(0, |len| charge(id.len(), len));
                    (charge(id.len(), body.len()).saturating_sub(old), state)
                }
                (Change::Part { bytes, .. }, state) => (charge(id.len(), bytes.len()), state),
                (Change::RemovePart { .. } | Change::Expire { .. }, state) => (0, state),
                (Change::Delete { .. }, _) => (0, None),
            };
            states.insert(id, next);
            let left = match reserved.get(id) {
                Some(left) => *left,
                None => self.open.get(id)?.map_or(0, |left| left.value()),
            };
            reserved.insert(id, left.saturating_sub(size));
            needed += size.saturating_sub(left);
        }
        Ok(Ok(needed))
    }

    /// Drops the oldest ended responses until `needed` bytes fit, except those that are `kept`.
    fn make_room(&mut self, needed: u64, kept: &HashSet<&str>) -> Result<Applied, StoreError> {
        let most = self.limits.max_bytes;
        let used = |totals: &Totals| totals.bytes + totals.reserved;
        let full = |totals: &Totals| StoreError::Full { needed, used: used(totals), most };
        // Nothing is dropped for what can never fit.
        if needed > most {
            return Ok(Err(full(&self.totals)));
        }
        while needed > 0 && used(&self.totals) + needed > most {
            let mut oldest = None;
            for entry in self.ended.iter()? {
                let (key, _) = entry?;
                let (_, id) = key.value();
                if !kept.contains(id) {
                    oldest = Some(id.to_string());
                    break;
                }
            }
            let Some(id) = oldest else { return Ok(Err(full(&self.totals))) };
            let created = self.delete(&id)?;
            self.totals.evicted_until = self.totals.evicted_until.max(created);
            self.evicted += 1;
        }
        Ok(Ok(()))
    }

    /// Makes a change that was checked.
    fn make(&mut self, change: &Change) -> Result<(), StoreError> {
        match change {
            Change::Insert { id, record } => {
                let reserved = record.reserved;
                let record = record.clone().at(self.now, self.limits.ttl, self.totals.next);
                self.totals.next += 1;
                self.totals.bytes += INDEXES;
                self.totals.records[usize::from(record.kind.code())] += 1;
                self.owned.insert((record.kind.code(), &record.owner[..], record.serial, &**id), ())?;
                self.expiry.insert((record.expires, &**id), ())?;
                if record.is_open {
                    self.open.insert(&**id, reserved)?;
                    self.totals.reserved += reserved;
                }
                self.set_record(id, &record)
            }
            Change::Update { id, body, is_open } => {
                let Some(record) = self.record(id)? else { return Err(lost(id)) };
                self.set_record(id, &Record { body: body.clone(), is_open: *is_open, ..record })
            }
            Change::Replace { id, body } => {
                let Some(record) = self.record(id)? else { return Err(lost(id)) };
                self.set_record(id, &Record { body: body.clone(), ..record })
            }
            Change::Part { id, list, number, bytes } => {
                let sealed = encode_part(id, *list, *number, bytes);
                let before = self.parts.insert((&**id, *list, *number), &*sealed)?;
                let before = before.map_or(0, |old| charge(id.len(), part_len(old.value())));
                self.spend(id, charge(id.len(), bytes.len()), before)
            }
            Change::RemovePart { id, list, number } => {
                let before = self.parts.remove((&**id, *list, *number))?;
                self.totals.bytes -= before.map_or(0, |old| charge(id.len(), part_len(old.value())));
                Ok(())
            }
            Change::Expire { id, after } => {
                let Some(record) = self.record(id)? else { return Err(lost(id)) };
                let expires = record.created.saturating_add(after.as_secs().max(1));
                self.expiry.remove((record.expires, &**id))?;
                self.expiry.insert((expires, &**id), ())?;
                self.set_record(id, &Record { expires, ..record })
            }
            Change::Delete { id } => self.delete(id).map(drop),
        }
    }

    /// Writes a record whose other entries exist, and ends its reservation if it is not open.
    fn set_record(&mut self, id: &str, record: &Record) -> Result<(), StoreError> {
        let encoded = record.encode(id);
        let before = self.records.insert(id, &*encoded)?.map_or(0, |old| charge(id.len(), old.value().len()));
        self.spend(id, charge(id.len(), encoded.len()), before)?;
        if !record.is_open {
            if let Some(left) = self.open.remove(id)? {
                self.totals.reserved -= left.value();
            }
            if record.kind == Kind::Response {
                self.ended.insert((record.serial, id), ())?;
            }
        }
        Ok(())
    }

    /// Counts what takes `size` bytes in place of `before`, first from what its record has reserved.
    fn spend(&mut self, id: &str, size: u64, before: u64) -> Result<(), StoreError> {
        self.totals.bytes = self.totals.bytes + size - before;
        let left = self.open.get(id)?.map(|left| left.value());
        if let Some(left) = left.filter(|left| *left > 0) {
            let spent = left.min(size.saturating_sub(before));
            self.open.insert(id, left - spent)?;
            self.totals.reserved -= spent;
        }
        Ok(())
    }

    /// Removes a record with its parts. Returns when it was made.
    fn delete(&mut self, id: &str) -> Result<u64, StoreError> {
        let Some(record) = self.record(id)? else { return Err(lost(id)) };
        let encoded = self.records.remove(id)?.map_or(0, |old| charge(id.len(), old.value().len()));
        let mut freed = encoded + INDEXES;
        for entry in self.parts.extract_from_if((id, 0, 0)..=(id, u8::MAX, u64::MAX), |_, _| true)? {
            freed += charge(id.len(), part_len(entry?.1.value()));
        }
        self.owned.remove((record.kind.code(), &record.owner[..], record.serial, id))?;
        self.expiry.remove((record.expires, id))?;
        if let Some(left) = self.open.remove(id)? {
            self.totals.reserved -= left.value();
        }
        self.ended.remove((record.serial, id))?;
        self.totals.bytes -= freed;
        self.totals.records[usize::from(record.kind.code())] -= 1;
        Ok(record.created)
    }

    /// Removes records that are over their time; open ones stay. Returns whether there may be more.
    pub fn sweep(&mut self) -> Result<bool, StoreError> {
        let mut over = Vec::new();
        for entry in self.expiry.range(..(self.now.saturating_add(1), ""))? {
            let (key, _) = entry?;
            let id = key.value().1;
            if self.open.get(id)?.is_none() {
                over.push(id.to_string());
            }
            if over.len() == SWEPT {
                break;
            }
        }
        for id in &over {
            self.delete(id)?;
        }
        Ok(over.len() == SWEPT)
    }
}

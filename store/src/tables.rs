//! The tables, and what a change does to them.
//!
//! | table | from | to |
//! |---|---|---|
//! | `meta` | a name | the version, the secret, [`Totals`] |
//! | `records` | id | a record |
//! | `parts` | id, list, number | a part |
//! | `owned` | kind, owner, serial, id | nothing: the order of lists |
//! | `expiry` | time, id | nothing: what is over its time first |
//! | `open` | id | room that it still reserves: unfinished work |
//! | `ended` | serial, id | nothing: ended responses, which make room |
//!
//! Lists of changes are checked before they are made, so that one that is refused leaves no trace in the transaction that it
//! shares with others.

use std::collections::{HashMap, HashSet};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use redb::{
    Builder, Database, Durability, ReadableDatabase, ReadableTable, StorageBackend, Table, TableDefinition,
    WriteTransaction,
};

use crate::error::StoreError;
use crate::record::{Change, Kind, OWNER_BYTES, Record, decode_part, encode_part, part_len};
use crate::{Limits, Stats};

const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
const RECORDS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("records");
const PARTS: TableDefinition<'_, (&str, u8, u64), &[u8]> = TableDefinition::new("parts");
const OWNED: TableDefinition<'_, (u8, &[u8], u64, &str), ()> = TableDefinition::new("owned");
const EXPIRY: TableDefinition<'_, (u64, &str), ()> = TableDefinition::new("expiry");
const OPEN: TableDefinition<'_, &str, u64> = TableDefinition::new("open");
const ENDED: TableDefinition<'_, (u64, &str), ()> = TableDefinition::new("ended");

/// Version of the tables.
const VERSION: u64 = 1;
/// Bytes of pages that are kept in memory.
const CACHE: usize = 16 << 20;
/// What a record takes besides itself: its entries in four other tables.
const INDEXES: u64 = 512;
/// What a file of redb begins with.
const MAGIC: &[u8] = b"redb";
/// Length of a page.
const FIRST_PAGE: usize = 4096;
/// No file is longer whose creation was cut off.
const UNBORN: u64 = 8 << 20;
/// Number of records that one sweep removes.
const SWEPT: usize = 256;

/// Part of an owner's list.
pub struct Page<'a> {
    /// Begin behind this record.
    pub after: Option<&'a str>,
    /// Maximum number of records.
    pub limit: usize,
    /// From the newest on.
    pub newest_first: bool,
    /// Leave others out.
    pub keep: &'a dyn Fn(&Record) -> bool,
}

/// Sums over all records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    bytes: u64,
    reserved: u64,
    records: [u64; Kind::ALL.len()],
    /// Serial number of the next record.
    next: u64,
    /// Latest time of a response that was dropped to make room.
    pub evicted_until: u64,
}

impl Totals {
    fn encode(&self) -> Vec<u8> {
        let numbers = [self.bytes, self.reserved, self.next, self.evicted_until].into_iter().chain(self.records);
        numbers.flat_map(u64::to_le_bytes).collect()
    }

    fn decode(bytes: &[u8]) -> Option<Totals> {
        let mut numbers = bytes.chunks_exact(8).map(|part| part.try_into().map(u64::from_le_bytes));
        let mut next = || numbers.next()?.ok();
        let (bytes, reserved, serial, evicted_until) = (next()?, next()?, next()?, next()?);
        let mut records = [0; Kind::ALL.len()];
        for count in &mut records {
            *count = next()?;
        }
        Some(Totals { bytes, reserved, records, next: serial, evicted_until })
    }

    pub fn fill(&self, stats: &mut Stats) {
        (stats.bytes, stats.reserved, stats.records) = (self.bytes, self.reserved, self.records);
    }
}

/// Room that an entry takes in the file at most: leaves are at least half full, and longer ones are pages of powers of two.
fn charge(key: usize, value: usize) -> u64 {
    let whole = (key + value + 64) as u64;
    if whole < 2048 { 2 * whole } else { whole.next_power_of_two() }
}

/// An open database.
pub(crate) struct Tables(Database);

/// A storage of any type.
#[derive(Debug)]
struct Boxed(Box<dyn StorageBackend>);

impl StorageBackend for Boxed {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.0.close()
    }
}

/// Empties a file whose creation was cut off. The magic number is written last, and before it nothing behind the first page.
fn forget_unborn(backend: &dyn StorageBackend) -> io::Result<()> {
    let len = backend.len()?;
    if len == 0 || len > UNBORN {
        return Ok(());
    }
    let mut bytes = vec![0; len as usize];
    backend.read(0, &mut bytes)?;
    let is_unborn = !bytes.starts_with(MAGIC) && bytes.iter().skip(FIRST_PAGE).all(|byte| *byte == 0);
    let is_short = bytes.len() <= FIRST_PAGE && bytes.iter().any(|byte| *byte != 0);
    if is_unborn && !is_short { backend.set_len(0) } else { Ok(()) }
}

/// Runs what reads a file that may be damaged in a way that redb does not expect.
pub(crate) fn guarded<T>(work: impl FnOnce() -> Result<T, StoreError>) -> Result<T, StoreError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
        let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(StoreError::Damaged(said.lines().next().unwrap_or("its pages contradict each other").to_string()))
    })
}

impl Tables {
    /// Opens the storage, checks all of it, and makes the tables if they do not exist. Also returns whether it was repaired.
    pub fn open(opener: &dyn Fn() -> io::Result<Box<dyn StorageBackend>>) -> Result<(Tables, bool), StoreError> {
        let backend = opener().map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => StoreError::Locked,
            _ => StoreError::Io(error.to_string()),
        })?;
        forget_unborn(&*backend).map_err(|error| StoreError::Io(error.to_string()))?;
        guarded(|| {
            let repaired = std::rc::Rc::new(std::cell::Cell::new(false));
            let seen = repaired.clone();
            let mut builder = Builder::new();
            builder.set_cache_size(CACHE).set_repair_callback(move |_| seen.set(true));
            let mut database = builder.create_with_backend(Boxed(backend))?;
            // A repair has checked every page. Otherwise a page may have changed since the file was closed.
            if !repaired.get() {
                database.check_integrity()?;
            }
            let tables = Tables(database);
            tables.prepare()?;
            Ok((tables, repaired.get()))
        })
    }

    fn prepare(&self) -> Result<(), StoreError> {
        let transaction = self.begin()?;
        {
            let mut meta = transaction.open_table(META)?;
            let found = meta.get("version")?.map(|found| found.value().to_vec());
            match found.map(|bytes| bytes.try_into().map(u64::from_le_bytes)) {
                None => {
                    let mut secret = [0; 32];
                    getrandom::fill(&mut secret).map_err(|error| StoreError::Random(error.to_string()))?;
                    meta.insert("version", &VERSION.to_le_bytes()[..])?;
                    meta.insert("secret", &secret[..])?;
                    meta.insert("totals", &*Totals::default().encode())?;
                }
                Some(Ok(VERSION)) => {}
                Some(Ok(found)) => return Err(StoreError::Version { found, expected: VERSION }),
                Some(Err(_)) => return Err(StoreError::Damaged("its version is no number".to_string())),
            }
            transaction.open_table(RECORDS)?;
            transaction.open_table(PARTS)?;
            transaction.open_table(OWNED)?;
            transaction.open_table(EXPIRY)?;
            transaction.open_table(OPEN)?;
            transaction.open_table(ENDED)?;
        }
        Ok(transaction.commit()?)
    }

    fn begin(&self) -> Result<WriteTransaction, StoreError> {
        let mut transaction = self.0.begin_write()?;
        transaction.set_durability(Durability::Immediate).map_err(|error| StoreError::Io(error.to_string()))?;
        transaction.set_two_phase_commit(true);
        Ok(transaction)
    }

    fn meta(&self, name: &str) -> Result<Vec<u8>, StoreError> {
        let found = self.0.begin_read()?.open_table(META)?.get(name)?.map(|found| found.value().to_vec());
        found.ok_or_else(|| StoreError::Damaged(format!("it has no {name}")))
    }

    /// The random number of the store.
    pub fn secret(&self) -> Result<[u8; 32], StoreError> {
        let secret = self.meta("secret")?;
        secret.try_into().map_err(|_| StoreError::Damaged("its secret has another length".to_string()))
    }

    /// The sums.
    pub fn totals(&self) -> Result<Totals, StoreError> {
        totals_of(&self.meta("totals")?)
    }

    pub fn get(&self, id: &str) -> Result<Option<Record>, StoreError> {
        let records = self.0.begin_read()?.open_table(RECORDS)?;
        records.get(id)?.map(|found| Record::decode(id, found.value())).transpose()
    }

    pub fn parts(&self, id: &str, list: u8, from: u64, max_bytes: usize) -> Result<Vec<(u64, Vec<u8>)>, StoreError> {
        let parts = self.0.begin_read()?.open_table(PARTS)?;
        let (mut read, mut found) = (0, Vec::new());
        for entry in parts.range((id, list, from)..=(id, list, u64::MAX))? {
            let (key, value) = entry?;
            let number = key.value().2;
            let bytes = decode_part(id, list, number, value.value())?;
            read += bytes.len();
            found.push((number, bytes));
            if read >= max_bytes {
                break;
            }
        }
        Ok(found)
    }

    pub fn part_before(&self, id: &str, list: u8, number: u64) -> Result<Option<u64>, StoreError> {
        let parts = self.0.begin_read()?.open_table(PARTS)?;
        let last = parts.range((id, list, 0)..=(id, list, number))?.next_back();
        Ok(last.transpose()?.map(|(key, _)| key.value().2))
    }

    pub fn part_numbers(&self, id: &str, list: u8) -> Result<Vec<(u64, usize)>, StoreError> {
        let parts = self.0.begin_read()?.open_table(PARTS)?;
        let number = |entry: Result<
            (redb::AccessGuard<'_, (&str, u8, u64)>, redb::AccessGuard<'_, &[u8]>),
            redb::StorageError,
        >| {
            let (key, value) = entry?;
            Ok((key.value().2, part_len(value.value())))
        };
        parts.range((id, list, 0)..=(id, list, u64::MAX))?.map(number).collect()
    }

    pub fn list(
        &self,
        kind: Kind,
        owner: &[u8; OWNER_BYTES],
        page: &Page<'_>,
        now: u64,
    ) -> Result<(Vec<(String, Record)>, bool), StoreError> {
        let read = self.0.begin_read()?;
        let (owned, records) = (read.open_table(OWNED)?, read.open_table(RECORDS)?);
        let (code, owner) = (kind.code(), &owner[..]);
        let (mut first, mut last) = (0, u64::MAX);
        if let Some(after) = page.after {
            let Some(serial) = self.get(after)?.filter(|record| record.owner == owner).map(|record| record.serial)
            else {
                return Err(StoreError::Missing(after.to_string()));
            };
            if page.newest_first { last = serial } else { first = serial.saturating_add(1) }
        }
        let range = owned.range((code, owner, first, "")..(code, owner, last, ""))?;
        let mut entries: Box<dyn Iterator<Item = _>> =
            if page.newest_first { Box::new(range.rev()) } else { Box::new(range) };
        let mut found = Vec::new();
        while let Some(entry) = entries.next() {
            let (key, _) = entry?;
            let id = key.value().3;
            let Some(record) = records.get(id)? else { return Err(lost(id)) };
            let record = Record::decode(id, record.value())?;
            if (record.is_open || record.expires > now) && (page.keep)(&record) {
                if found.len() == page.limit {
                    return Ok((found, true));
                }
                found.push((id.to_string(), record));
            }
        }
        Ok((found, false))
    }

    pub fn unfinished(&self) -> Result<Vec<(String, Record)>, StoreError> {
        let read = self.0.begin_read()?;
        let (open, records) = (read.open_table(OPEN)?, read.open_table(RECORDS)?);
        let mut found = Vec::new();
        for entry in open.iter()? {
            let (key, _) = entry?;
            let Some(record) = records.get(key.value())? else { return Err(lost(key.value())) };
            found.push((key.value().to_string(), Record::decode(key.value(), record.value())?));
        }
        found.sort_by_key(|(_, record)| record.serial);
        Ok(found)
    }

    /// Makes lists of changes in one transaction. An error of the result is that of the disk and concerns all; those in it are
    /// refusals of single lists.
    pub fn write(
        &self,
        lists: &[Vec<Change>],
        limits: &Limits,
        now: u64,
    ) -> Result<(Vec<Result<(), StoreError>>, Totals, u64), StoreError> {
        self.within(limits, now, |writing| lists.iter().map(|changes| writing.apply(changes)).collect())
    }

    /// Removes records that are over their time. Returns whether there may be more.
    pub fn sweep(&self, limits: &Limits, now: u64) -> Result<(bool, Totals), StoreError> {
        let (more, totals, _) = self.within(limits, now, |writing| writing.sweep())?;
        Ok((more, totals))
    }

    /// Runs `work` in a transaction. Also returns the new sums, and how many responses were dropped.
    fn within<T>(
        &self,
        limits: &Limits,
        now: u64,
        work: impl FnOnce(&mut Writing<'_>) -> Result<T, StoreError>,
    ) -> Result<(T, Totals, u64), StoreError> {
        let transaction = self.begin()?;
        let (done, totals, evicted) = {
            let mut meta = transaction.open_table(META)?;
            let before = meta.get("totals")?.map(|found| totals_of(found.value())).transpose()?;
            let mut writing = Writing {
                records: transaction.open_table(RECORDS)?,
                parts: transaction.open_table(PARTS)?,
                owned: transaction.open_table(OWNED)?,
                expiry: transaction.open_table(EXPIRY)?,
                open: transaction.open_table(OPEN)?,
                ended: transaction.open_table(ENDED)?,
                totals: before.unwrap_or_default(),
                evicted: 0,
                limits,
                now,
            };
            let done = work(&mut writing)?;
            let (totals, evicted) = (writing.totals, writing.evicted);
            meta.insert("totals", &*totals.encode())?;
            (done, totals, evicted)
        };
        transaction.commit()?;
        Ok((done, totals, evicted))
    }
}

fn totals_of(bytes: &[u8]) -> Result<Totals, StoreError> {
    Totals::decode(bytes).ok_or_else(|| StoreError::Damaged("its sums have another form".to_string()))
}

fn lost(id: &str) -> StoreError {
    StoreError::Damaged(format!("record {id} is missing from its table"))
}

/// A transaction with its tables.
struct Writing<'a> {
    records: Table<'a, &'static str, &'static [u8]>,
    parts: Table<'a, (&'static str, u8, u64), &'static [u8]>,
    owned: Table<'a, (u8, &'static [u8], u64, &'static str), ()>,
    expiry: Table<'a, (u64, &'static str), ()>,
    open: Table<'a, &'static str, u64>,
    ended: Table<'a, (u64, &'static str), ()>,
    totals: Totals,
    evicted: u64,
    limits: &'a Limits,
    now: u64,
}

/// Whether a list of changes is made, or refused before it left a trace.
type Applied = Result<(), StoreError>;

impl Writing<'_> {
    /// Makes a list of changes. The outer error is that of the disk.
    fn apply(&mut self, changes: &[Change]) -> Result<Applied, StoreError> {
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
                (Change::RemovePart { .. }, state) => (0, state),
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
    fn sweep(&mut self) -> Result<bool, StoreError> {
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

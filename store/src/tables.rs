//! The tables, and how they are read.
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

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use redb::{
    Builder, Database, Durability, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition, WriteTransaction,
};

use crate::changes::{Applied, Writing};
use crate::error::StoreError;
use crate::record::{Change, Kind, OWNER_BYTES, Record, decode_part, part_len};
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
/// What a file of redb begins with.
const MAGIC: &[u8] = b"redb";
/// Length of a page.
const FIRST_PAGE: usize = 4096;
/// No file is longer whose creation was cut off.
const UNBORN: u64 = 8 << 20;

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

/// Records with their ids.
type Found = Vec<(String, Record)>;

/// Sums over all records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub bytes: u64,
    pub reserved: u64,
    pub records: [u64; Kind::ALL.len()],
    /// Serial number of the next record.
    pub next: u64,
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
        let failed = |error: io::Error| StoreError::Io(error.to_string());
        forget_unborn(&*backend).map_err(failed)?;
        // redb also calls the making of a file a repair.
        let is_new = backend.len().map_err(failed)? == 0;
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
            Ok((tables, repaired.get() && !is_new))
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

    pub fn is_open(&self, id: &str) -> Result<bool, StoreError> {
        Ok(self.0.begin_read()?.open_table(OPEN)?.get(id)?.is_some())
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
        let mut numbers = Vec::new();
        for entry in parts.range((id, list, 0)..=(id, list, u64::MAX))? {
            let (key, value) = entry?;
            numbers.push((key.value().2, part_len(value.value())));
        }
        Ok(numbers)
    }

    /// A page, whether there is more behind it, and whether records were left out that are over their time.
    pub fn list(
        &self,
        kind: Kind,
        owner: &[u8; OWNER_BYTES],
        page: &Page<'_>,
        now: u64,
    ) -> Result<(Found, bool, bool), StoreError> {
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
        let entries: Box<dyn Iterator<Item = _>> =
            if page.newest_first { Box::new(range.rev()) } else { Box::new(range) };
        let (mut found, mut leaves_out) = (Vec::new(), false);
        for entry in entries {
            let (key, _) = entry?;
            let id = key.value().3;
            let Some(record) = records.get(id)? else { return Err(lost(id)) };
            let record = Record::decode(id, record.value())?;
            if record.is_over(now) {
                leaves_out = true;
            } else if (page.keep)(&record) {
                if found.len() == page.limit {
                    return Ok((found, true, leaves_out));
                }
                found.push((id.to_string(), record));
            }
        }
        Ok((found, false, leaves_out))
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
    ) -> Result<(Vec<Applied>, Totals, u64), StoreError> {
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

pub(crate) fn lost(id: &str) -> StoreError {
    StoreError::Damaged(format!("record {id} is missing from its table"))
}

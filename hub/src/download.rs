//! One file: from its metadata to a verified blob and its link, under the blob's lock.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::time::Instant;

use ureq::http::header::CONTENT_RANGE;

use crate::cache::Repo;
use crate::client::{ATTEMPTS, Client, Failure, Metadata, header};
use crate::error::{HubError, at};
use crate::etag::Hasher;
use crate::id::Commit;
use crate::lock::Lock;
use crate::progress::{Event, Progress};

/// Size of the buffer between network, hash and file.
const CHUNK: usize = 256 << 10;
/// When a download gets further than ever before by this many bytes, or by this part of the file, earlier failures no longer count. So a
/// long download survives more of them, and a server that sends a byte per connection does not keep it alive.
const PROGRESS: (u64, u64) = (1 << 20, 64);
/// Attempts to take a lock before the wait is reported. Two equal small files of one model wait for each other for a moment.
const QUIET_POLLS: u32 = 8;

/// What the download of one file needs.
pub(crate) struct Download<'a> {
    pub client: &'a Client<'a>,
    pub repo: &'a Repo,
    pub commit: &'a Commit,
    pub progress: &'a Progress<'a>,
}

impl Download<'_> {
    /// Puts a file into the snapshot, and downloads it if no process has done so.
    pub fn run(&self, wanted: &Metadata) -> Result<(), HubError> {
        let (blob, lock) = (self.repo.blob(&wanted.etag), self.repo.lock(&wanted.etag));
        let mut polls = 0;
        // How far the holder has come, and since when.
        let (mut seen, mut since) = (None, Instant::now());
        let waiting = || {
            if self.client.is_stopped() {
                return Err(self.client.broken("another file failed".to_string()).error);
            }
            polls += 1;
            let now = fs::metadata(self.repo.partial(&wanted.etag)).map(|partial| partial.len()).ok();
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
            if since.elapsed() > self.client.lock_timeout() {
                return Err(HubError::Locked {
                    file: wanted.file.to_string(),
                    lock: lock.clone(),
                    held: Lock::file_of(&lock),
                    seconds: since.elapsed().as_secs(),
                });
            }
            if polls == QUIET_POLLS {
                self.progress.report(Event::Waiting { file: wanted.file.as_str() });
            }
            Ok(())
        };
        let _lock = Lock::take(&lock, waiting)?.map_err(at(&lock))?;
        let mut counted = 0;
        // Whoever held the lock before may have brought the file: as a blob, or moved to where it belongs.
        let in_snapshot = wanted.file.below(&self.repo.snapshot(self.commit));
        if !is_whole(&in_snapshot, wanted) {
            if !is_whole(&blob, wanted) {
                self.blob(wanted, &mut counted)?;
            }
            self.repo.link(&wanted.etag, self.commit, &wanted.file)?;
        }
        self.progress.set(&mut counted, wanted.size);
        Ok(())
    }

    /// Downloads the missing part of a blob, verifies the whole and gives it its name.
    fn blob(&self, wanted: &Metadata, counted: &mut u64) -> Result<(), HubError> {
        let path = self.repo.partial(&wanted.etag);
        let mut partial = Partial::open(&path, wanted).map_err(at(&path))?;
        let (mut failed, mut mismatches, mut furthest) = (0, 0, partial.len);
        let enough = PROGRESS.0.min(wanted.size / PROGRESS.1).max(1);
        loop {
            self.progress.set(counted, partial.len);
            if partial.len < wanted.size {
                let outcome = self.transfer(wanted, &mut partial, counted);
                if partial.len.saturating_sub(furthest) >= enough {
                    (failed, furthest) = (0, partial.len);
                }
                if let Err(failure) = outcome {
                    self.client.pause(failure, &mut failed, ATTEMPTS)?;
                }
                continue;
            }
            let found = partial.finish();
            if found == wanted.etag.as_str() {
                partial.file.sync_data().map_err(at(&path))?;
                let blob = self.repo.blob(&wanted.etag);
                return fs::rename(&path, &blob).map_err(at(blob));
            }
            mismatches += 1;
            if mismatches > 1 {
                fs::remove_file(&path).map_err(at(&path))?;
                let (file, expected) = (wanted.file.to_string(), wanted.etag.to_string());
                return Err(HubError::Hash { file, found, expected });
            }
            partial.restart(wanted).map_err(at(&path))?;
        }
    }

    /// Appends what the server sends. After an error the partial file holds a beginning of the contents, and the next transfer continues
    /// there.
    fn transfer(&self, wanted: &Metadata, partial: &mut Partial, counted: &mut u64) -> Result<(), Failure> {
        let path = self.repo.partial(&wanted.etag);
        let mut answer = self.client.contents(self.commit, &wanted.file, partial.len)?;
        let status = answer.status().as_u16();
        let starts_here = || {
            let range = header(&answer, CONTENT_RANGE)?.strip_prefix("bytes ")?;
            let (start, rest) = range.split_once('-')?;
            let total = rest.split_once('/')?.1;
            Some(start.parse() == Ok(partial.len) && (total == "*" || total.parse() == Ok(wanted.size)))
        };
        let continues = status == 206 && starts_here() == Some(true);
        // 200 answers a range with the whole file; 416, or another range, does not fit what is here.
        if partial.len > 0 && !continues {
            partial.restart(wanted).map_err(at(&path))?;
        }
        if status != 200 && !continues {
            return Err(self.client.broken(format!("{}: the server did not send the rest of it", wanted.file)));
        }
        let left = wanted.size - partial.len;
        if let Some(length) = answer.body().content_length().filter(|length| *length != left) {
            let found = format!("{length} bytes of {}", wanted.file);
            return Err(Failure::soon(self.client.unusable(found, "the size that was announced")));
        }
        // One byte more than expected is enough to notice a body that is too long.
        let mut body = answer.body_mut().as_reader().take(left.saturating_add(1));
        let mut chunk = vec![0; CHUNK];
        loop {
            let read = match body.read(&mut chunk) {
                Ok(read) => chunk.get(..read).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.client.broken(format!("{}: {error}", wanted.file))),
            };
            if self.client.is_stopped() {
                return Err(self.client.broken("another file failed".to_string()).error.into());
            }
            if read.is_empty() {
                break;
            }
            if partial.len + read.len() as u64 > wanted.size {
                partial.restart(wanted).map_err(at(&path))?;
                let found = format!("more than {} bytes of {}", wanted.size, wanted.file);
                return Err(Failure::soon(self.client.unusable(found, "the size that was announced")));
            }
            partial.append(read).map_err(at(&path))?;
            self.progress.receive(read.len() as u64);
            self.progress.set(counted, partial.len);
        }
        if partial.len < wanted.size {
            let problem = format!("{}: the transfer ended at byte {} of {}", wanted.file, partial.len, wanted.size);
            return Err(self.client.broken(problem));
        }
        Ok(())
    }
}

/// Whether a file of the stated size exists, perhaps through links. Its contents were verified when it got its name.
fn is_whole(path: &std::path::Path, wanted: &Metadata) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() == wanted.size)
}

/// The beginning of a blob, and the hash of it.
struct Partial {
    file: File,
    len: u64,
    hasher: Option<Hasher>,
}

impl Partial {
    /// Opens what an earlier transfer left, and hashes it.
    fn open(path: &std::path::Path, wanted: &Metadata) -> std::io::Result<Partial> {
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path)?;
        let mut partial = Partial { file, len: 0, hasher: Some(wanted.etag.hasher(wanted.size)) };
        if partial.file.metadata()?.len() > wanted.size {
            partial.restart(wanted)?;
        }
        let mut chunk = vec![0; CHUNK];
        loop {
            let read = match partial.file.read(&mut chunk) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                other => other?,
            };
            let Some(bytes) = chunk.get(..read).filter(|bytes| !bytes.is_empty()) else { return Ok(partial) };
            partial.len += read as u64;
            partial.update(bytes);
        }
    }

    fn append(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.file.write_all(bytes)?;
        self.len += bytes.len() as u64;
        self.update(bytes);
        Ok(())
    }

    fn update(&mut self, bytes: &[u8]) {
        if let Some(hasher) = &mut self.hasher {
            hasher.update(bytes);
        }
    }

    /// Deletes the contents.
    fn restart(&mut self, wanted: &Metadata) -> std::io::Result<()> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.len = 0;
        self.hasher = Some(wanted.etag.hasher(wanted.size));
        Ok(())
    }

    /// The hash of the contents.
    fn finish(&mut self) -> String {
        self.hasher.take().map_or_else(String::new, Hasher::finish)
    }
}

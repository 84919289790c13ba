//! A folder that several replicas share, such as a network file system: a file per block.
//!
//! ```text
//! "QUIREKV1" | name (32) | number of tokens (8) | number of bytes (8) | tokens | bytes | SHA-256 of all before (32)
//! ```
//!
//! Numbers are little-endian. A file is written under a temporary name and renamed, so others see it whole. Whatever differs from what
//! is expected is not the block: the length is checked before anything is read, then every part.
//!
//! The folder is kept below a number of bytes. The files with the oldest times of modification are removed, and every hit renews this
//! time. The end of a prompt is useless without its beginning, so a block's time lies before the present by [`EARLIER`] for each block in
//! front of it: of what was used together, ends are removed first.

use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use super::{BlockName, Connector, ConnectorError};

const MAGIC: &[u8; 8] = b"QUIREKV1";
const HEADER: usize = 8 + 32 + 8 + 8;
const DIGEST: usize = 32;
const EXTENSION: &str = "kvblock";
const TEMPORARY: &str = "partial";

/// How much older a block counts for each block in front of it: more than it takes to write or read one.
const EARLIER: Duration = Duration::from_millis(100);

/// A [`Connector`] over a folder that all replicas share, with a file per block. A file that is not the block that its name says is
/// ignored and removed.
pub(crate) struct SharedFolder {
    path: PathBuf,
    max_bytes: u64,
    /// Bytes in the folder when it was counted last, and those written since. Other replicas write too, so it is a lower bound.
    bytes: u64,
    /// Random number of this folder's writer: process ids are equal in containers.
    writer: u64,
    /// Number of temporary names.
    written: u64,
}

impl SharedFolder {
    /// Opens the folder, which is created if it does not exist. It is kept below `max_bytes`.
    ///
    /// # Errors
    /// It cannot be created or read.
    pub fn open(path: &Path, max_bytes: u64) -> io::Result<SharedFolder> {
        fs::create_dir_all(path)?;
        let writer = RandomState::new().hash_one(std::process::id());
        let mut folder = SharedFolder { path: path.to_path_buf(), max_bytes, bytes: 0, writer, written: 0 };
        folder.shrink()?;
        Ok(folder)
    }

    fn path_of(&self, name: &BlockName) -> PathBuf {
        self.path.join(format!("{name}.{EXTENSION}"))
    }

    /// Removes a file that is not the block that its name says, so that the block is stored again.
    fn broken(&self, name: &BlockName, why: &'static str) -> ConnectorError {
        let _ = fs::remove_file(self.path_of(name));
        ConnectorError::Broken(why)
    }

    /// Counts the bytes, and removes the oldest files if they are too many.
    fn shrink(&mut self) -> io::Result<()> {
        let mut files: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let path = entry.path();
            // Another replica may have removed it.
            let Ok(data) = entry.metadata() else { continue };
            if data.is_file() && path.extension().is_some_and(|e| e == EXTENSION || e == TEMPORARY) {
                files.push((data.modified()?, data.len(), path));
            }
        }
        self.bytes = files.iter().map(|file| file.1).sum();
        if self.bytes <= self.max_bytes {
            return Ok(());
        }
        files.sort_unstable();
        // Some more than needed, so that not every store counts the folder.
        for (_, bytes, path) in files {
            if self.bytes <= self.max_bytes / 10 * 9 {
                break;
            }
            let _ = fs::remove_file(path);
            self.bytes -= bytes;
        }
        Ok(())
    }

    fn write(mut file: &File, parts: &[&[u8]]) -> io::Result<()> {
        let mut digest = Sha256::new();
        for part in parts {
            digest.update(part);
            file.write_all(part)?;
        }
        file.write_all(&digest.finalize())
    }
}

impl Connector for SharedFolder {
    fn lookup(&self, name: &BlockName) -> bool {
        self.path_of(name).is_file()
    }

    fn load(&self, name: &BlockName, tokens: &[u32], contents: &mut [u8]) -> Result<(), ConnectorError> {
        let mut file = match File::open(self.path_of(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(ConnectorError::NotFound),
            opened => opened?,
        };
        let expected = HEADER + 4 * tokens.len() + contents.len() + DIGEST;
        if file.metadata()?.len() != expected as u64 {
            return Err(self.broken(name, "its length is not that of a block of this model"));
        }
        let mut head = vec![0; HEADER + 4 * tokens.len()];
        file.read_exact(&mut head)?;
        file.read_exact(contents)?;
        let mut found = [0; DIGEST];
        file.read_exact(&mut found)?;
        if head != header(name, tokens, contents.len()) {
            return Err(self.broken(name, "its header is not that of this block"));
        }
        let digest = Sha256::new().chain_update(&head).chain_update(&*contents).finalize();
        if digest[..] != found {
            return Err(self.broken(name, "its checksum is wrong"));
        }
        renew(&file, name);
        Ok(())
    }

    fn store(&mut self, name: &BlockName, tokens: &[u32], contents: &[u8]) -> Result<(), ConnectorError> {
        let path = self.path_of(name);
        let head = header(name, tokens, contents.len());
        let bytes = (head.len() + contents.len() + DIGEST) as u64;
        // One that is broken otherwise is removed when it is loaded.
        if let Ok(file) = File::open(&path)
            && file.metadata().is_ok_and(|data| data.len() == bytes)
        {
            renew(&file, name);
            return Ok(());
        }
        self.written += 1;
        let temporary = self.path.join(format!("{name}-{:016x}-{}.{TEMPORARY}", self.writer, self.written));
        // A file that exists is not this one's to remove.
        let file = File::create_new(&temporary)?;
        let written = SharedFolder::write(&file, &[&head, contents]);
        renew(&file, name);
        let renamed = written.and_then(|()| fs::rename(&temporary, &path));
        if let Err(error) = renamed {
            let _ = fs::remove_file(&temporary);
            return Err(error.into());
        }
        self.bytes += bytes;
        if self.bytes > self.max_bytes {
            self.shrink()?;
        }
        Ok(())
    }
}

/// Sets the time of a block that is used. Without the right to do so it counts as used when it was written.
fn renew(file: &File, name: &BlockName) {
    let earlier = EARLIER.saturating_mul(u32::try_from(name.block).unwrap_or(u32::MAX));
    let _ = SystemTime::now().checked_sub(earlier).map(|time| file.set_modified(time));
}

fn header(name: &BlockName, tokens: &[u32], bytes: usize) -> Vec<u8> {
    let mut head = Vec::with_capacity(HEADER + 4 * tokens.len());
    head.extend(MAGIC);
    head.extend(name.digest);
    head.extend((tokens.len() as u64).to_le_bytes());
    head.extend((bytes as u64).to_le_bytes());
    tokens.iter().for_each(|token| head.extend(token.to_le_bytes()));
    head
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn name(prompt: u8, block: usize) -> BlockName {
        let mut digest = [prompt; 32];
        digest[0] = block as u8;
        BlockName { digest, block }
    }

    fn store(folder: &mut SharedFolder, prompt: u8, blocks: std::ops::Range<usize>) {
        blocks.for_each(|block| folder.store(&name(prompt, block), &[1, 2], &[block as u8; 1000]).unwrap());
    }

    fn found(folder: &SharedFolder, prompt: u8) -> Vec<usize> {
        (0..20).filter(|block| folder.lookup(&name(prompt, *block))).collect()
    }

    fn bytes(path: &Path) -> u64 {
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
    }

    #[test]
    fn it_stays_below_its_size_and_loses_the_ends_of_prompts_and_what_was_used_longest_ago() {
        let path = TempDir::new().unwrap();
        let mut folder = SharedFolder::open(path.path(), 10_000).unwrap();
        // Nine blocks fit, and eight are left when the oldest are removed.
        store(&mut folder, 1, 0..12);
        assert!(bytes(path.path()) <= 10_000);
        let left = found(&folder, 1);
        assert!(left.len() > 3 && left == (0..left.len()).collect::<Vec<_>>(), "the beginning: {left:?}");
        // A hit renews: the other prompt is removed first, although it was stored later.
        store(&mut folder, 2, 0..1);
        std::thread::sleep(Duration::from_millis(20));
        let mut contents = [0; 1000];
        folder.load(&name(1, 0), &[1, 2], &mut contents).unwrap();
        assert_eq!(contents, [0; 1000]);
        for prompt in 3..10 {
            std::thread::sleep(Duration::from_millis(20));
            store(&mut folder, prompt, 0..1);
        }
        assert!(bytes(path.path()) <= 10_000);
        assert_eq!((found(&folder, 1), found(&folder, 2)), (vec![0], vec![]));
        let gone = folder.load(&name(2, 0), &[1, 2], &mut contents);
        assert!(matches!(gone, Err(ConnectorError::NotFound)));
        // A name with other tokens is another block, whatever the name.
        let other = folder.load(&name(1, 0), &[1, 3], &mut contents);
        assert!(matches!(other, Err(ConnectorError::Broken(_))));
    }

    #[test]
    fn writers_in_equal_processes_use_different_temporary_names_and_leave_those_of_others() {
        let path = TempDir::new().unwrap();
        let open = || SharedFolder::open(path.path(), 1 << 20).unwrap();
        let (mut one, other) = (open(), open());
        assert_ne!(one.writer, other.writer);
        // Even if the name is taken, the file of the other is left alone.
        let taken = path.path().join(format!("{}-{:016x}-1.{TEMPORARY}", name(1, 0), one.writer));
        fs::write(&taken, "of another").unwrap();
        assert!(one.store(&name(1, 0), &[1, 2], &[0; 8]).is_err());
        assert_eq!(fs::read_to_string(&taken).unwrap(), "of another");
        one.store(&name(1, 0), &[1, 2], &[0; 8]).unwrap();
        assert!(other.lookup(&name(1, 0)));
    }
}

//! A folder that several replicas share, such as a network file system: a file per block.
//!
//! ```text
//! "QUIREKV1" | name (32) | number of tokens (8) | number of bytes (8) | tokens | bytes | SHA-256 of all before (32)
//! ```
//!
//! Numbers are little-endian. A file is written under a temporary name and renamed, so others see it whole. Whatever differs from what
//! is expected is not the block: the length is checked before anything is read, then every part. The folder is kept below a number
//! of bytes; the files that were written longest ago are removed.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

use super::{BlockName, Connector, ConnectorError};

const MAGIC: &[u8; 8] = b"QUIREKV1";
const HEADER: usize = 8 + 32 + 8 + 8;
const DIGEST: usize = 32;
const EXTENSION: &str = "kvblock";
const TEMPORARY: &str = "partial";

/// A [`Connector`] over a folder that all replicas share, with a file per block. A file that is not the block that its name says is
/// ignored and removed.
pub struct SharedFolder {
    path: PathBuf,
    max_bytes: u64,
    /// Bytes in the folder when it was counted last, and those written since. Other replicas write too, so it is a lower bound.
    bytes: u64,
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
        let mut folder = SharedFolder { path: path.to_path_buf(), max_bytes, bytes: 0, written: 0 };
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

    fn write(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()> {
        let mut file = File::create_new(path)?;
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
        Ok(())
    }

    fn store(&mut self, name: &BlockName, tokens: &[u32], contents: &[u8]) -> Result<(), ConnectorError> {
        let path = self.path_of(name);
        let head = header(name, tokens, contents.len());
        let bytes = (head.len() + contents.len() + DIGEST) as u64;
        // One that is broken otherwise is removed when it is loaded.
        if path.metadata().is_ok_and(|data| data.len() == bytes) {
            return Ok(());
        }
        self.written += 1;
        let temporary = self.path.join(format!("{name}-{}-{}.{TEMPORARY}", std::process::id(), self.written));
        let renamed = self.write(&temporary, &[&head, contents]).and_then(|()| fs::rename(&temporary, &path));
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

fn header(name: &BlockName, tokens: &[u32], bytes: usize) -> Vec<u8> {
    let mut head = Vec::with_capacity(HEADER + 4 * tokens.len());
    head.extend(MAGIC);
    head.extend(name.0);
    head.extend((tokens.len() as u64).to_le_bytes());
    head.extend((bytes as u64).to_le_bytes());
    tokens.iter().for_each(|token| head.extend(token.to_le_bytes()));
    head
}

//! Adapters in host memory.
//!
//! The store holds at most so many adapters (`--max-cpu-loras`), by contents. Of those that are not pinned, the one that was used
//! longest ago makes room for another. An adapter that was dropped can be read again; if its files have changed since, that is an error.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use linear::Arithmetic;
use serde::{Deserialize, Serialize};
use simd::lock;

use super::{Adapter, AdapterError, AdapterLimits};
use crate::Decoder;

/// An adapter as a plain value: its contents, and where to read them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AdapterRef {
    /// [`Adapter::digest`].
    pub digest: String,
    /// Folder of its files.
    pub path: PathBuf,
}

/// Adapters in host memory, shared by those who load and those who compute.
pub struct AdapterStore {
    decoder: Decoder,
    limits: AdapterLimits,
    arithmetic: Arithmetic,
    capacity: usize,
    kept: Mutex<Kept>,
    /// Held while an adapter is read, so that reading takes the memory of one.
    reading: Mutex<()>,
}

#[derive(Default)]
struct Kept {
    /// The one used last comes last.
    adapters: Vec<Arc<Adapter>>,
    /// Digests of those that are in use.
    pinned: Vec<String>,
}

impl AdapterStore {
    /// A store of at most `capacity` adapters for a decoder; `arithmetic` as for [`Adapter::read`].
    pub fn new(decoder: Decoder, limits: AdapterLimits, arithmetic: Arithmetic, capacity: usize) -> AdapterStore {
        let (kept, reading) = (Mutex::default(), Mutex::default());
        AdapterStore { decoder, limits, arithmetic, capacity: capacity.max(1), kept, reading }
    }

    /// Reads the adapter in a folder and keeps it, unless all that are kept are pinned.
    ///
    /// # Errors
    /// Those of [`Adapter::read`].
    pub fn load(&self, path: PathBuf) -> Result<(AdapterRef, Arc<Adapter>), AdapterError> {
        let adapter = self.read(&path)?;
        let found = AdapterRef { digest: adapter.digest().to_string(), path };
        Ok((found, self.keep(adapter)))
    }

    fn read(&self, path: &Path) -> Result<Arc<Adapter>, AdapterError> {
        let _one = lock(&self.reading);
        Ok(Arc::new(Adapter::read(path, &self.decoder, &self.limits, self.arithmetic)?))
    }

    /// Reads an adapter that must have these contents.
    fn reread(&self, wanted: &AdapterRef) -> Result<Arc<Adapter>, AdapterError> {
        let adapter = self.read(&wanted.path)?;
        match adapter.digest() == wanted.digest {
            true => Ok(adapter),
            false => Err(AdapterError::Changed { path: crate::checkpoint::error::one_line(wanted.path.display()) }),
        }
    }

    /// The adapter, which is read again if it is not in memory.
    ///
    /// # Errors
    /// Those of [`Adapter::read`], and its files have changed.
    pub fn get(&self, wanted: &AdapterRef) -> Result<Arc<Adapter>, AdapterError> {
        if let Some(adapter) = self.touch(&wanted.digest) {
            return Ok(adapter);
        }
        Ok(self.keep(self.reread(wanted)?))
    }

    /// Keeps the same adapters as the store of another process, which has just read one of them: drops all but `kept`, and reads that one.
    ///
    /// # Errors
    /// As [`AdapterStore::get`].
    pub fn follow(&self, read: &AdapterRef, kept: &[String]) -> Result<(), AdapterError> {
        lock(&self.kept).adapters.retain(|adapter| kept.iter().any(|digest| digest == adapter.digest()));
        if self.touch(&read.digest).is_none() {
            let adapter = self.reread(read)?;
            if kept.contains(&read.digest) {
                lock(&self.kept).adapters.push(adapter);
            }
        }
        Ok(())
    }

    /// Pins all adapters in memory, so that none of them makes room for another, until [`AdapterStore::pin`]. Returns their digests.
    pub fn pin_all(&self) -> Vec<String> {
        let mut kept = lock(&self.kept);
        kept.pinned = kept.adapters.iter().map(|adapter| adapter.digest().to_string()).collect();
        kept.pinned.clone()
    }

    /// Pins these adapters and no others.
    pub fn pin(&self, digests: Vec<String>) {
        lock(&self.kept).pinned = digests;
    }

    /// Drops an adapter that nobody will ask for again.
    pub fn forget(&self, digest: &str) {
        lock(&self.kept).adapters.retain(|adapter| adapter.digest() != digest);
    }

    /// Digests of the adapters in memory; the one used last comes last.
    pub fn resident(&self) -> Vec<String> {
        lock(&self.kept).adapters.iter().map(|adapter| adapter.digest().to_string()).collect()
    }

    fn touch(&self, digest: &str) -> Option<Arc<Adapter>> {
        let Kept { adapters, .. } = &mut *lock(&self.kept);
        let at = adapters.iter().position(|adapter| adapter.digest() == digest)?;
        let adapter = adapters.remove(at);
        adapters.push(Arc::clone(&adapter));
        Some(adapter)
    }

    fn keep(&self, adapter: Arc<Adapter>) -> Arc<Adapter> {
        if let Some(known) = self.touch(adapter.digest()) {
            return known;
        }
        let Kept { adapters, pinned } = &mut *lock(&self.kept);
        if adapters.len() >= self.capacity {
            let is_free = |kept: &Arc<Adapter>| !pinned.iter().any(|digest| digest == kept.digest());
            let Some(at) = adapters.iter().position(is_free) else { return adapter };
            adapters.remove(at);
        }
        adapters.push(Arc::clone(&adapter));
        adapter
    }
}

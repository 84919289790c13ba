//! Adapters in host memory.
//!
//! The store holds at most so many adapters (`--max-cpu-loras`), by contents. The one that was used longest ago makes room for
//! another. An adapter that was dropped is read again on its next use; if its files have changed since, that is an error.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

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
    capacity: usize,
    /// The one used last comes last.
    adapters: Mutex<Vec<Arc<Adapter>>>,
}

impl AdapterStore {
    /// A store of at most `capacity` adapters for a decoder.
    pub fn new(decoder: Decoder, limits: AdapterLimits, capacity: usize) -> AdapterStore {
        AdapterStore { decoder, limits, capacity: capacity.max(1), adapters: Mutex::default() }
    }

    /// Reads the adapter in a folder and keeps it.
    ///
    /// # Errors
    /// Those of [`Adapter::read`].
    pub fn load(&self, path: PathBuf) -> Result<(AdapterRef, Arc<Adapter>), AdapterError> {
        let adapter = Arc::new(Adapter::read(&path, &self.decoder, &self.limits)?);
        let found = AdapterRef { digest: adapter.digest().to_string(), path };
        Ok((found, self.keep(adapter)))
    }

    /// The adapter, which is read again if it is not in memory.
    ///
    /// # Errors
    /// Those of [`Adapter::read`], and its files have changed.
    pub fn get(&self, wanted: &AdapterRef) -> Result<Arc<Adapter>, AdapterError> {
        if let Some(adapter) = self.touch(&wanted.digest) {
            return Ok(adapter);
        }
        let adapter = Adapter::read(&wanted.path, &self.decoder, &self.limits)?;
        if adapter.digest() != wanted.digest {
            return Err(AdapterError::Changed { path: crate::checkpoint::error::one_line(wanted.path.display()) });
        }
        Ok(self.keep(Arc::new(adapter)))
    }

    /// Drops an adapter that nobody will ask for again.
    pub fn forget(&self, digest: &str) {
        self.lock().retain(|adapter| adapter.digest() != digest);
    }

    /// Digests of the adapters in memory; the one used last comes last.
    pub fn resident(&self) -> Vec<String> {
        self.lock().iter().map(|adapter| adapter.digest().to_string()).collect()
    }

    fn touch(&self, digest: &str) -> Option<Arc<Adapter>> {
        let mut adapters = self.lock();
        let at = adapters.iter().position(|adapter| adapter.digest() == digest)?;
        let adapter = adapters.remove(at);
        adapters.push(Arc::clone(&adapter));
        Some(adapter)
    }

    fn keep(&self, adapter: Arc<Adapter>) -> Arc<Adapter> {
        if let Some(known) = self.touch(adapter.digest()) {
            return known;
        }
        let mut adapters = self.lock();
        if adapters.len() >= self.capacity {
            adapters.remove(0);
        }
        adapters.push(Arc::clone(&adapter));
        adapter
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Adapter>>> {
        self.adapters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

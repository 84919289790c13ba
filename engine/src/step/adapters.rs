//! The adapters that requests may name.
//!
//! A request holds the adapter that its name stood for when it was submitted. So an adapter can be replaced under its name while
//! requests use the old one, and it can be removed once no request holds it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Weak};

use models::lora::{Adapter, AdapterRef, AdapterStore};

use crate::api::AdapterInfo;
use crate::error::{AdapterError, SubmitError};

/// Greatest number of names.
const MOST_NAMES: usize = 4096;

/// An adapter that was read and checked, with where it came from.
pub(crate) type LoadedAdapter = (AdapterRef, Arc<Adapter>);

/// See the [module](self).
#[derive(Default)]
pub(super) struct AdapterNames {
    /// `None` if the engine takes no adapters.
    store: Option<Arc<AdapterStore>>,
    names: BTreeMap<String, Entry>,
}

struct Entry {
    info: AdapterInfo,
    current: Arc<AdapterRef>,
    /// Adapters that had the name before, as long as requests hold them.
    earlier: Vec<Weak<AdapterRef>>,
}

impl Entry {
    /// Whether a request holds an adapter of this name.
    fn is_used(&self) -> bool {
        Arc::strong_count(&self.current) > 1 || self.earlier.iter().any(|adapter| adapter.strong_count() > 0)
    }
}

impl AdapterNames {
    pub fn new(store: Option<Arc<AdapterStore>>) -> AdapterNames {
        AdapterNames { store, names: BTreeMap::new() }
    }

    pub fn store(&self) -> Option<&Arc<AdapterStore>> {
        self.store.as_ref()
    }

    /// Reads the adapter in a folder.
    pub fn read(&self, path: &Path) -> Result<LoadedAdapter, AdapterError> {
        let store = self.store.as_ref().ok_or(AdapterError::Disabled)?;
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        Ok(store.load(path)?)
    }

    /// Whether an adapter can get this name.
    pub fn check(&self, name: &str, replace: bool) -> Result<(), AdapterError> {
        match self.names.get(name) {
            _ if self.store.is_none() => Err(AdapterError::Disabled),
            _ if name.is_empty() => Err(AdapterError::NoName),
            Some(entry) if entry.info.is_unloading => Err(AdapterError::Unloading(name.to_string())),
            Some(_) if !replace => Err(AdapterError::AlreadyLoaded(name.to_string())),
            None if self.names.len() >= MOST_NAMES => Err(AdapterError::TooMany(MOST_NAMES)),
            _ => Ok(()),
        }
    }

    /// Gives an adapter a name.
    pub fn add(&mut self, name: &str, loaded: LoadedAdapter, replace: bool) -> Result<(), AdapterError> {
        self.check(name, replace)?;
        let (current, adapter) = loaded;
        let info = AdapterInfo {
            name: name.to_string(),
            path: current.path.clone(),
            rank: adapter.rank(),
            bytes: adapter.bytes(),
            is_unloading: false,
        };
        let mut entry = Entry { info, current: Arc::new(current), earlier: Vec::new() };
        if let Some(mut before) = self.names.remove(name) {
            entry.earlier = std::mem::take(&mut before.earlier);
            entry.earlier.push(Arc::downgrade(&before.current));
            entry.earlier.retain(|adapter| adapter.strong_count() > 0);
            self.forget(&before);
        }
        self.names.insert(name.to_string(), entry);
        Ok(())
    }

    /// Refuses new requests for an adapter, which [`AdapterNames::remove_unused`] removes once no request holds it.
    pub fn unload(&mut self, name: &str) -> Result<(), AdapterError> {
        let entry = self.names.get_mut(name).ok_or_else(|| AdapterError::NotFound(name.to_string()))?;
        entry.info.is_unloading = true;
        Ok(())
    }

    /// Removes the adapters to unload that no request holds, and returns their names.
    pub fn remove_unused(&mut self) -> Vec<String> {
        let over = self.names.iter().filter(|(_, entry)| entry.info.is_unloading && !entry.is_used());
        let over: Vec<String> = over.map(|(name, _)| name.clone()).collect();
        for entry in over.iter().filter_map(|name| self.names.remove(name)).collect::<Vec<_>>() {
            self.forget(&entry);
        }
        over
    }

    /// The adapter for a new request.
    pub fn find(&self, name: &str) -> Result<Arc<AdapterRef>, SubmitError> {
        match self.names.get(name) {
            Some(entry) if !entry.info.is_unloading => Ok(Arc::clone(&entry.current)),
            _ => Err(SubmitError::UnknownAdapter(name.to_string())),
        }
    }

    /// A name of an adapter with these contents.
    pub fn name_of(&self, digest: &str) -> Option<&str> {
        let named = self.names.iter().find(|(_, entry)| entry.current.digest == digest);
        named.map(|(name, _)| name.as_str())
    }

    pub fn list(&self) -> Vec<AdapterInfo> {
        self.names.values().map(|entry| entry.info.clone()).collect()
    }

    /// Drops contents that no name has any more. A request that still holds them keeps them in its slot, or reads them again.
    fn forget(&self, entry: &Entry) {
        let digest = &entry.current.digest;
        let is_named = self.names.values().any(|other| other.current.digest == *digest);
        if let Some(store) = self.store.as_ref().filter(|_| !is_named) {
            store.forget(digest);
        }
    }
}

//! The adapters that requests may name.
//!
//! A request holds the adapter that its name stood for when it was submitted. So an adapter can be replaced under its name while
//! requests use the old one, and it can be removed once no request holds it.
//!
//! The store in host memory has room for some of them; `adapter_memory.rs` reads the others again.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Weak};
use std::thread::Builder;
use std::time::Duration;

use models::lora::{Adapter, AdapterError as ReadError, AdapterRef, AdapterStore};

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
    /// Digests of the adapters that all ranks have, if this one has them.
    pub shared: Vec<String>,
    /// What is read again.
    reading: Option<Reading>,
}

/// An adapter that is being read on a thread of its own, or has been.
struct Reading {
    adapter: Arc<AdapterRef>,
    outcome: Receiver<Result<(), ReadError>>,
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
        AdapterNames { store, names: BTreeMap::new(), shared: Vec::new(), reading: None }
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
        let mut before_it = None;
        if let Some(mut before) = self.names.remove(name) {
            entry.earlier = std::mem::take(&mut before.earlier);
            entry.earlier.push(Arc::downgrade(&before.current));
            entry.earlier.retain(|adapter| adapter.strong_count() > 0);
            before_it = Some(before.current);
        }
        self.names.insert(name.to_string(), entry);
        // What requests hold stays as long as the store has room for it.
        before_it.filter(|before| Arc::strong_count(before) == 1).into_iter().for_each(|before| self.forget(&before));
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
            self.forget(&entry.current);
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

    /// Drops contents that no name has any more.
    fn forget(&self, adapter: &AdapterRef) {
        let digest = &adapter.digest;
        let is_named = self.names.values().any(|other| other.current.digest == *digest);
        if let Some(store) = self.store.as_ref().filter(|_| !is_named) {
            store.forget(digest);
        }
    }

    /// Begins to read an adapter again, unless one is being read.
    pub fn read_again(&mut self, adapter: &Arc<AdapterRef>) {
        let Some(store) = self.store.clone().filter(|_| self.reading.is_none()) else { return };
        let (send, outcome) = channel();
        let wanted = Arc::clone(adapter);
        let read = move || drop(send.send(store.get(&wanted).map(drop)));
        // Without a thread its outcome never comes, which is a failure like others.
        if let Err(error) = Builder::new().name("quire-adapter".to_string()).spawn(read) {
            tracing::error!("no thread can be started to read an adapter: {error}");
        }
        self.reading = Some(Reading { adapter: Arc::clone(adapter), outcome });
    }

    /// The adapter that has been read, and the outcome. Waits for it for at most `limit`.
    pub fn take_read(&mut self, limit: Duration) -> Option<(Arc<AdapterRef>, Result<(), String>)> {
        let outcome = match self.reading.as_ref()?.outcome.recv_timeout(limit) {
            Ok(outcome) => outcome.map_err(|error| error.to_string()),
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => Err("the thread that read it has ended".to_string()),
        };
        self.reading.take().map(|reading| (reading.adapter, outcome))
    }
}

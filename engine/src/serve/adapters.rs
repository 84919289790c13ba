//! Adapters for handles: reading them off the engine's thread, and the list of those that are loaded.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use models::lora::AdapterStore;
use simd::lock;
use tokio::sync::{Mutex as Turn, oneshot};

use crate::api::AdapterInfo;
use crate::error::AdapterError;
use crate::step::LoadedAdapter;

/// The adapters as of the last change.
#[derive(Clone, Default)]
pub(super) struct AdapterList(Arc<Mutex<Vec<AdapterInfo>>>);

impl AdapterList {
    pub fn set(&self, adapters: Vec<AdapterInfo>) {
        *lock(&self.0) = adapters;
    }
}

/// What handles know about adapters.
pub(super) struct AdapterAccess {
    store: Option<Arc<AdapterStore>>,
    pub list: AdapterList,
    /// One adapter is read at a time, so that reading takes the memory of one.
    turn: Arc<Turn<()>>,
}

impl AdapterAccess {
    pub fn new(store: Option<Arc<AdapterStore>>) -> AdapterAccess {
        AdapterAccess { store, list: AdapterList::default(), turn: Arc::default() }
    }

    pub fn list(&self) -> Vec<AdapterInfo> {
        lock(&self.list.0).clone()
    }

    /// Reads an adapter on a thread of its own.
    pub async fn read(&self, path: PathBuf) -> Result<LoadedAdapter, AdapterError> {
        let store = self.store.clone().ok_or(AdapterError::Disabled)?;
        let path = std::path::absolute(&path).unwrap_or(path);
        let turn = Arc::clone(&self.turn).lock_owned().await;
        let (reply, answer) = oneshot::channel();
        // The thread reads to its end even if the caller has stopped waiting.
        let read = move || {
            let _turn = turn;
            drop(reply.send(store.load(path)));
        };
        let thread = std::thread::Builder::new().name("quire-adapter".to_string()).spawn(read);
        thread.map_err(|_| AdapterError::Closed)?;
        Ok(answer.await.map_err(|_| AdapterError::Closed)??)
    }
}

//! The adapters in memory while requests wait for them.
//!
//! The store has room for some adapters. A request is planned only while the store has its adapter, and so have those of all other ranks.
//! The adapter of the next request is read on a thread of its own while others run. If it cannot be read any more, the requests that
//! wait for it end, and no others. The adapters of running requests stay in memory.

use std::time::Duration;

use models::lora::AdapterRef;
use sched::RequestId;

use super::Engine;
use super::adapters::LoadedAdapter;
use super::request::EngineRequest;
use crate::api::TokenEvent;
use crate::error::AdapterError;

impl Engine {
    /// Gives an adapter that was read a name, once all ranks have it.
    pub(crate) fn add_adapter(&mut self, name: &str, loaded: LoadedAdapter, replace: bool) -> Result<(), AdapterError> {
        self.adapters.check(name, replace)?;
        self.share_adapter(&loaded.0).map_err(AdapterError::OtherRank)?;
        self.adapters.add(name, loaded, replace)
    }

    fn share_adapter(&mut self, adapter: &AdapterRef) -> Result<(), String> {
        let Some(store) = self.adapters.store() else { return Ok(()) };
        let kept = store.resident();
        let outcome = self.worker.share_adapter(adapter, &kept);
        let shared = &mut self.adapters.shared;
        shared.retain(|digest| kept.contains(digest) && *digest != adapter.digest);
        if outcome.is_ok() && kept.contains(&adapter.digest) {
            shared.push(adapter.digest.clone());
        }
        outcome
    }

    /// Ends the requests whose adapter could not be read again. If nothing else is to be done, waits for an adapter for at most `limit`.
    pub(super) fn take_adapter(&mut self, limit: Duration, emit: &mut dyn FnMut(RequestId, TokenEvent)) {
        let Some((adapter, read)) = self.adapters.take_read(limit) else { return };
        let Err(error) = read.and_then(|()| self.share_adapter(&adapter)) else { return };
        if self.ready_adapters().contains(&adapter.digest) {
            // Loaded from another folder meanwhile.
            return;
        }
        tracing::error!("an adapter that requests wait for cannot be read again: {error}");
        let name = self.adapters.name_of(&adapter.digest).map(|name| format!(" {name:?}")).unwrap_or_default();
        let message =
            format!("the adapter{name} could not be read again: its files are gone or have changed; load it again");
        // Equal contents may still be in another folder.
        let is_of = |request: &EngineRequest| request.adapter.as_ref().is_some_and(|it| **it == *adapter);
        let waiting: Vec<RequestId> = self.requests.values().filter(|request| is_of(request)).map(|it| it.id).collect();
        for id in waiting {
            self.end_with_error(id, &message, emit);
        }
    }

    /// The adapters in the memory of all ranks, where they stay until others are pinned.
    fn ready_adapters(&self) -> Vec<String> {
        let mut ready = self.adapters.store().map(|store| store.pin_all()).unwrap_or_default();
        ready.retain(|digest| self.adapters.shared.contains(digest));
        ready
    }

    /// Tells the scheduler which adapters are in memory, where they stay until [`Engine::after_plan`].
    pub(super) fn before_plan(&mut self) {
        if self.adapters.store().is_some() {
            self.scheduler.set_ready_adapters(self.ready_adapters());
        }
    }

    /// Keeps the adapters of running requests in memory, and begins to read the one that the next request needs.
    pub(super) fn after_plan(&mut self) {
        let Some(store) = self.adapters.store() else { return };
        store.pin(self.scheduler.list_running_adapters());
        if let Some(digest) = self.scheduler.adapter_to_read() {
            let mut adapters = self.requests.values().filter_map(|request| request.adapter.as_ref());
            if let Some(adapter) = adapters.find(|adapter| adapter.digest == *digest) {
                self.adapters.read_again(adapter);
            }
        }
    }
}

//! What callers and routers learn of the prefix cache, and how they empty it.

use std::net::SocketAddr;

use kvevents::{Change, Stats};

use super::Engine;
use super::kv_events::{KvEvents, cached};

impl Engine {
    /// Hands the changes since the last call to the publisher of KV events. Never waits.
    pub(super) fn publish_kv_events(&mut self) {
        if let Some(events) = &mut self.kv_events {
            events.publish(&mut self.scheduler, &self.adapters);
        }
    }

    /// Empties the prefix cache. Returns `false` and does nothing while a request owns blocks, unless `reset_running` is set:
    /// then running requests are computed again, unless steps are in flight ([`Engine::finish_steps`]).
    pub fn reset_prefix_cache(&mut self, reset_running: bool) -> bool {
        let is_reset = self.scheduler.reset_prefix_cache(reset_running);
        if let Some(exchange) = self.exchange.as_mut().filter(|_| is_reset) {
            exchange.reset();
        }
        self.publish_kv_events();
        is_reset
    }

    /// The prefixes that the cache holds, as a subscriber to KV events should know them: parents first, one change per block. Takes
    /// a pass over the pool.
    pub fn cached_prefixes(&self) -> Vec<Change> {
        cached(&self.scheduler, &self.adapters, self.kv_events.as_ref().map_or(0, KvEvents::group))
    }

    /// Numbers of the publisher of KV events; `None` without one.
    pub fn kv_event_stats(&self) -> Option<Stats> {
        self.kv_events.as_ref().map(|events| events.publisher().stats())
    }

    /// Address at which KV events are published, and the address for replay, if the sockets listen.
    pub fn kv_event_addresses(&self) -> Option<(Option<SocketAddr>, Option<SocketAddr>)> {
        let publisher = self.kv_events.as_ref()?.publisher();
        Some((publisher.address(), publisher.replay_address()))
    }
}

//! What is stored, as metrics.

use prometheus::{Gauge, GaugeVec, IntCounter, Opts, Registry};
use store::{Kind, Stats};

use super::register;

/// What is stored, and the work whose results will be.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoredStats {
    /// What the store holds.
    pub store: Stats,
    /// Background responses and batches that run.
    pub running: u64,
    /// Those that were taken up at the start.
    pub resumed: u64,
    /// Those that were left, because they need another model.
    pub left: u64,
}

/// Adds them to a registry.
pub fn fill(registry: &Registry, stats: &StoredStats) {
    let StoredStats { store, running, resumed, left } = *stats;
    let help = "Number of stored records by kind.";
    let records = register(registry, GaugeVec::new(Opts::new("quire:stored_records", help), &["kind"]));
    let names = ["response", "conversation", "file", "batch"];
    for ((_, name), count) in Kind::ALL.into_iter().zip(names).zip(store.records) {
        records.with_label_values(&[name]).set(count as f64);
    }
    for (name, help, value) in [
        ("quire:stored_bytes", "Size of what is stored, with reserved room.", store.bytes + store.reserved),
        ("quire:stored_work_running", "Background responses and batches that run.", running),
        ("quire:stored_work_left", "Unfinished work of another model, left to its server.", left),
    ] {
        register(registry, Gauge::new(name, help)).set(value as f64);
    }
    for (name, help, value) in [
        ("quire:stored_work_resumed_total", "Work taken up after the start.", resumed),
        ("quire:store_commits_total", "Commits of the store.", store.commits),
        ("quire:store_failures_total", "Commits of the store that failed.", store.failures),
        ("quire:stored_evicted_total", "Responses dropped to make room.", store.evicted),
    ] {
        register(registry, IntCounter::new(name, help)).inc_by(value);
    }
}

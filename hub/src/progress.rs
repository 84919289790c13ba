//! What a download reports while it runs.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::HubError;

/// Something that happened. Events come from several threads.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Bytes of this model's missing files that have arrived. `total` grows once, when the sizes of the weights are known.
    Bytes {
        /// Bytes that have arrived, earlier transfers included. They become fewer if a transfer has to start again.
        done: u64,
        /// Bytes of all files that were missing.
        total: u64,
        /// Bytes that this call has received, which give the rate.
        received: u64,
    },
    /// Another process downloads this file; this one waits for it.
    Waiting {
        /// Name of the file.
        file: &'a str,
    },
    /// A request failed and is repeated after a pause.
    Retrying {
        /// Why it failed.
        error: &'a HubError,
    },
    /// The hub cannot be reached, so the cached snapshot is used without asking whether there is a newer one.
    Stale {
        /// Why it cannot be reached.
        error: &'a HubError,
    },
}

/// Counts bytes over all threads and reports them.
pub(crate) struct Progress<'a> {
    done: AtomicU64,
    total: AtomicU64,
    received: AtomicU64,
    report: &'a (dyn Fn(Event<'_>) + Sync),
}

impl<'a> Progress<'a> {
    pub fn new(report: &'a (dyn Fn(Event<'_>) + Sync)) -> Progress<'a> {
        Progress { done: AtomicU64::new(0), total: AtomicU64::new(0), received: AtomicU64::new(0), report }
    }

    pub fn report(&self, event: Event<'_>) {
        (self.report)(event);
    }

    pub fn expect(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
        self.bytes();
    }

    /// Counts bytes that came over the network. [`Progress::set`] reports them.
    pub fn receive(&self, bytes: u64) {
        self.received.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Replaces the bytes counted for a file so far.
    pub fn set(&self, counted: &mut u64, bytes: u64) {
        self.done.fetch_add(bytes.wrapping_sub(*counted), Ordering::Relaxed);
        *counted = bytes;
        self.bytes();
    }

    fn bytes(&self) {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (done, total, received) = (load(&self.done), load(&self.total), load(&self.received));
        self.report(Event::Bytes { done, total, received });
    }
}

//! The LoRA adapters of running and of waiting requests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Numbers of running and of waiting requests by adapter; none has only zeros.
type Counts = BTreeMap<String, [usize; 2]>;

const RUNNING: usize = 0;
const WAITING: usize = 1;

/// Counts the requests of adapters.
#[derive(Clone, Debug, Default)]
pub struct AdapterRequests(Arc<Mutex<Counts>>);

/// A request of an adapter, counted until it is dropped.
pub struct AdapterRequest {
    requests: AdapterRequests,
    name: String,
    state: usize,
}

impl AdapterRequests {
    /// Counts a request, which waits.
    pub fn add(&self, name: String) -> AdapterRequest {
        self.lock().entry(name.clone()).or_default()[WAITING] += 1;
        AdapterRequest { requests: self.clone(), name, state: WAITING }
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Numbers of running and of waiting requests of an adapter.
    pub fn of(&self, name: &str) -> [usize; 2] {
        self.lock().get(name).copied().unwrap_or_default()
    }

    /// Names of the adapters of running and of waiting requests, each list with commas between them.
    pub fn names(&self) -> [String; 2] {
        let counts = self.lock();
        [RUNNING, WAITING].map(|state| {
            let used = counts.iter().filter(|(_, counts)| counts[state] > 0);
            used.map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(",")
        })
    }
}

impl AdapterRequest {
    /// The request runs from now on.
    pub fn started(&mut self) {
        if self.state == WAITING
            && let Some(counts) = self.requests.lock().get_mut(&self.name)
        {
            counts[WAITING] -= 1;
            counts[RUNNING] += 1;
            self.state = RUNNING;
        }
    }
}

impl Drop for AdapterRequest {
    fn drop(&mut self) {
        let mut counts = self.requests.lock();
        if let Some(of_name) = counts.get_mut(&self.name) {
            of_name[self.state] -= 1;
            if *of_name == [0, 0] {
                counts.remove(&self.name);
            }
        }
    }
}

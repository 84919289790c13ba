//! `vllm:lora_requests_info`: the LoRA adapters of running and of waiting requests, as labels.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus::{GaugeVec, Opts, Registry};

use super::register;

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

    /// Adds the metric for an engine that runs up to `max_loras` adapters at once. As in vLLM, its value is the time in seconds since
    /// 1970: a reader that finds several samples takes the newest.
    pub fn fill(&self, registry: &Registry, max_loras: usize) {
        let names = |state: usize| {
            let counts = self.lock();
            let names = counts.iter().filter(|(_, counts)| counts[state] > 0).map(|(name, _)| name.as_str());
            names.collect::<Vec<_>>().join(",")
        };
        let options = Opts::new("vllm:lora_requests_info", "LoRA adapters of running and waiting requests as labels.");
        let labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"];
        let info = register(registry, GaugeVec::new(options, &labels));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        let values = [max_loras.to_string(), names(RUNNING), names(WAITING)];
        info.with_label_values(&values).set(now);
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

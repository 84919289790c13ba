//! Which requests may be admitted with regard to their adapters: the running requests have at most
//! [`SchedConfig::max_loras`](crate::SchedConfig::max_loras) different ones, and therefore each step has.
//!
//! A request whose adapter is not among them waits while they are that many. Requests behind it pass it in order: those
//! without an adapter always, because they do not keep an adapter running; those with a running adapter until
//! [`MOST_PASSES`] have passed. Then the running adapters become fewer as their requests end, and it is admitted first.
//! If nothing runs, no adapter does, so the head of the queue never waits for this reason then.
//!
//! A request whose adapter is not in memory is not admitted ([`Scheduler::set_ready_adapters`]). It is passed by all others, but
//! one of the `max_loras` places is kept for its adapter, so that it is admitted as soon as this is read.

use crate::{RequestId, Scheduler};

/// Number of requests with running adapters that may be admitted before a request that waits for its adapter.
const MOST_PASSES: u32 = 32;

/// The adapters of the running requests; `None` if there is no limit.
pub(crate) struct RunningAdapters(Option<Vec<String>>);

impl RunningAdapters {
    fn contains(&self, adapter: &str) -> bool {
        self.0.as_ref().is_some_and(|names| names.iter().any(|name| name == adapter))
    }

    /// Adds the adapter of an admitted request.
    pub fn add(&mut self, adapter: Option<&str>) {
        if let (Some(adapter), false) = (adapter, adapter.is_some_and(|adapter| self.contains(adapter)))
            && let Some(names) = &mut self.0
        {
            names.push(adapter.to_string());
        }
    }
}

impl Scheduler {
    pub(crate) fn running_adapters(&self) -> RunningAdapters {
        if self.config.max_loras == usize::MAX {
            return RunningAdapters(None);
        }
        let mut running = RunningAdapters(Some(Vec::new()));
        self.running_requests().for_each(|live| running.add(live.request.adapter.as_deref()));
        running
    }

    /// Sets the adapters in memory; requests of others are not admitted. Without a call all are. No effect without a limit
    /// ([`SchedConfig::max_loras`](crate::SchedConfig::max_loras)).
    pub fn set_ready_adapters(&mut self, adapters: Vec<String>) {
        self.ready_adapters = Some(adapters);
    }

    /// The adapters of the running requests, at most [`SchedConfig::max_loras`](crate::SchedConfig::max_loras).
    pub fn list_running_adapters(&self) -> Vec<String> {
        self.running_adapters().0.unwrap_or_default()
    }

    /// The adapter that the next request waits for because it is not in memory.
    pub fn adapter_to_read(&self) -> Option<&str> {
        self.choose(&self.running_adapters()).1
    }

    /// Returns the request to admit next. Without requests that wait for an adapter it is the head of the queue; else this
    /// takes a pass over these.
    pub(crate) fn next_to_admit(&self, running: &RunningAdapters) -> Option<RequestId> {
        self.choose(running).0
    }

    /// Returns the request to admit next, and the first adapter in front of it that is to be read.
    fn choose(&self, running: &RunningAdapters) -> (Option<RequestId>, Option<&str>) {
        let mut queue = self.queue();
        let Some(names) = &running.0 else { return (queue.next(), None) };
        let is_ready = |adapter: &String| self.ready_adapters.as_ref().is_none_or(|ready| ready.contains(adapter));
        let (mut may_pass, mut to_read) = (true, Vec::new());
        let next = queue.find(|id| {
            let Some(live) = self.requests.get(id) else { return false };
            let Some(adapter) = &live.request.adapter else { return true };
            if running.contains(adapter) {
                return may_pass;
            }
            if to_read.contains(&adapter.as_str()) {
                return false;
            }
            if names.len() + to_read.len() < self.config.max_loras {
                if is_ready(adapter) {
                    return true;
                }
                to_read.push(adapter.as_str());
                return false;
            }
            may_pass &= live.num_passed < MOST_PASSES;
            false
        });
        (next, to_read.first().copied())
    }

    /// Returns the requests that wait for their adapters while this one, which has an adapter, is admitted.
    pub(crate) fn passed_by(&self, id: RequestId, running: &RunningAdapters) -> Vec<RequestId> {
        let has_adapter = self.requests.get(&id).is_some_and(|live| live.request.adapter.is_some());
        let before = self.queue().take_while(|before| running.0.is_some() && has_adapter && *before != id);
        before.filter(|id| self.requests.get(id).is_some_and(|live| live.request.adapter.is_some())).collect()
    }

    /// Counts an admission for the requests that it passed.
    pub(crate) fn count_passed(&mut self, passed: Vec<RequestId>) {
        for id in passed {
            if let Some(live) = self.requests.get_mut(&id) {
                live.num_passed += 1;
            }
        }
    }
}

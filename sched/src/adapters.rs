//! Which requests may be admitted with regard to their adapters: the running requests have at most
//! [`SchedConfig::max_loras`](crate::SchedConfig::max_loras) different ones, and therefore each step has.
//!
//! A request whose adapter is not among them waits while they are that many. Requests behind it pass it in order: those
//! without an adapter always, because they do not keep an adapter running; those with a running adapter until
//! [`MOST_PASSES`] have passed. Then the running adapters become fewer as their requests end, and it is admitted first.
//! If nothing runs, no adapter does, so the head of the queue never waits for this reason then.

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

    /// Returns the request to admit next. Without requests that wait for an adapter it is the head of the queue; else this
    /// takes a pass over these.
    pub(crate) fn next_to_admit(&self, running: &RunningAdapters) -> Option<RequestId> {
        let mut queue = self.queue();
        let Some(names) = &running.0 else { return queue.next() };
        let mut may_pass = true;
        queue.find(|id| {
            let Some(live) = self.requests.get(id) else { return false };
            let Some(adapter) = &live.request.adapter else { return true };
            if running.contains(adapter) {
                return may_pass;
            }
            if names.len() < self.config.max_loras {
                return true;
            }
            may_pass &= live.num_passed < MOST_PASSES;
            false
        })
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

//! All orders of requests: who is admitted next, who is served first, who gives way.
//!
//! | order | by | decides |
//! |---|---|---|
//! | queue | priority, then arrival; the swapped before the waiting | who is admitted next |
//! | running | admission | in which order spans stand in a plan |
//! | standing | priority, then age, then work, then arrival | who gets tokens and blocks first (the best), who is preempted (the worst) |

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::draft::Choice;
use crate::group::{Group, QueueKey};
use crate::{Policy, RequestId, Scheduler};

/// Preemptions after which a request is no longer judged by its work. Least work lost is the cheaper rule, but
/// it prefers newcomers with long prompts, and under endless arrivals one request could lose every time.
const AGED_AFTER: u32 = 3;

/// How well a running request stands, best first: priority; arrival, if it is aged (the others come after all
/// that are); most work done; arrival.
pub(crate) type Standing = (i32, u64, Reverse<usize>, u64);

impl Group {
    pub fn queue_key(&self, policy: Policy) -> QueueKey {
        (self.priority(policy), self.arrival)
    }

    pub fn standing(&self, policy: Policy) -> Standing {
        let aged = if self.preemptions >= AGED_AFTER { self.arrival } else { u64::MAX };
        (self.priority(policy), aged, Reverse(self.work()), self.arrival)
    }

    pub fn priority(&self, policy: Policy) -> i32 {
        match policy {
            Policy::Fcfs => 0,
            Policy::Priority => self.request.priority,
        }
    }
}

impl Scheduler {
    /// The request that is next to be admitted.
    pub(crate) fn head_of_queue(&self) -> Option<(QueueKey, RequestId)> {
        let first = |queue: &BTreeMap<QueueKey, RequestId>| queue.first_key_value().map(|(key, id)| (*key, *id));
        match (first(&self.swapped), first(&self.waiting)) {
            (Some(swapped), Some(waiting)) if waiting.0.0 < swapped.0.0 => Some(waiting),
            (swapped, waiting) => swapped.or(waiting),
        }
    }

    /// The running request of worst standing, which is preempted next.
    pub(crate) fn victim(&self) -> Option<RequestId> {
        self.running.values().copied().max_by_key(|id| self.groups.get(id).map(|g| g.standing(self.config.policy)))
    }

    /// Brings choices into the order of their requests' standing, the best first; those of one request stay in theirs.
    pub(crate) fn sort_by_standing<T>(&self, items: &mut [T], choice: impl Fn(&T) -> &Choice) {
        items.sort_by_cached_key(|item| self.groups.get(&choice(item).request).map(|g| g.standing(self.config.policy)));
    }
}

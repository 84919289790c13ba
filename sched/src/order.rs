//! The orders of requests: admission, service, preemption.
//!
//! | order | by | decides |
//! |---|---|---|
//! | queue | priority, then arrival; swapped before waiting | who is admitted next |
//! | running | admission | the order of spans in a plan |
//! | rank | priority, then age, then work, then arrival | who gets tokens and blocks first (the best), who is preempted (the worst) |

use std::cmp::Reverse;

use crate::live_request::{LiveRequest, QueueKey};
use crate::step_state::ScheduledSpan;
use crate::{Policy, RequestId, Scheduler};

/// Number of preemptions after which a request is aged: ranked by its arrival instead of its work. Preempting the least
/// work is cheaper, but it prefers newcomers with long prompts, and under endless arrivals one request could lose every
/// time.
const AGED_AFTER: u32 = 3;

/// Rank of a running request, best first: priority; arrival if it is aged (after all aged ones come the others); most
/// work; arrival.
pub(crate) type Rank = (i32, u64, Reverse<usize>, u64);

impl LiveRequest {
    pub fn queue_key(&self, policy: Policy) -> QueueKey {
        (self.priority(policy), self.arrival)
    }

    pub fn rank(&self, policy: Policy) -> Rank {
        let aged = if self.num_preemptions >= AGED_AFTER { self.arrival } else { u64::MAX };
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
    /// Returns the requests that do not run in the order of their admission.
    pub(crate) fn queue(&self) -> impl Iterator<Item = RequestId> + '_ {
        let (mut swapped, mut waiting) = (self.swapped.iter().peekable(), self.waiting.iter().peekable());
        std::iter::from_fn(move || {
            let next = match (swapped.peek(), waiting.peek()) {
                (Some((first, _)), Some((other, _))) if other.0 < first.0 => waiting.next(),
                (Some(_), _) => swapped.next(),
                (None, _) => waiting.next(),
            };
            next.map(|(_, id)| *id)
        })
    }

    /// Returns the running request of worst rank, which is preempted next.
    pub(crate) fn victim(&self) -> Option<RequestId> {
        self.running.values().copied().max_by_key(|id| self.requests.get(id).map(|r| r.rank(self.config.policy)))
    }

    /// Sorts spans by the rank of their requests, the best first. Spans of one request keep their order.
    pub(crate) fn sort_by_rank<T>(&self, items: &mut [T], span: impl Fn(&T) -> &ScheduledSpan) {
        items.sort_by_cached_key(|item| self.requests.get(&span(item).request).map(|r| r.rank(self.config.policy)));
    }
}

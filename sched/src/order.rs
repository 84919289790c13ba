//! The orders of requests: admission, service, preemption.
//!
//! | order | by | decides |
//! |---|---|---|
//! | queue | priority, then arrival | who is admitted next; who of the running gets tokens and blocks first |
//! | running | admission | the order of decodes in a plan |
//! | rank | priority, then age, then work, then arrival | who is preempted (the worst) |
//! | shortest | priority, then tokens left to compute, then arrival | who gets the [second half](crate#a-step) of the prompt tokens |

use std::cmp::Reverse;

use crate::live_request::{LiveRequest, QueueKey};
use crate::step_state::ScheduledSpan;
use crate::{BACKGROUND, Policy, RequestId, Scheduler};

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
            Policy::Fcfs => i32::from(self.request.priority == BACKGROUND),
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
                (Some((first, _)), Some((other, _))) if other < first => waiting.next(),
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

    /// Position in the queue of the request of a span.
    pub(crate) fn key_of(&self, span: &ScheduledSpan) -> Option<QueueKey> {
        self.requests.get(&span.request).map(|live| live.queue_key(self.config.policy))
    }
}

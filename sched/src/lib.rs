//! Who runs next, and with which blocks: continuous batching over a paged KV cache, as pure, deterministic logic.
//!
//! Requests are [submitted](Scheduler::submit); each [`plan`](Scheduler::plan) says what one step computes,
//! as a complete plain value; each [`commit`](Scheduler::commit) says what came of it. Prefill, chunked
//! prefill, decode and resumption are one thing with different counts: a sequence has tokens known and tokens
//! computed, and a step computes some of the difference, within a budget of tokens.
//!
//! It is not an executor: it touches no memory, draws no token, reads no clock and starts no thread. The same
//! history gives the same plans. It does not know when a text is finished either; whoever samples says so.
//!
//! ```
//! use sched::{Outcome, Request, RequestId, SchedConfig, Scheduler, SeqId};
//!
//! let config = SchedConfig { max_num_seqs: 8, max_num_batched_tokens: 64, ..SchedConfig::new(100, 16) };
//! let mut scheduler = Scheduler::new(config)?;
//! let id = RequestId(1);
//! scheduler.submit(Request::new(id, (0..100).collect(), 2))?;
//!
//! let seq = SeqId { request: id, index: 0 };
//! let mut spans = Vec::new();
//! while scheduler.has_work() {
//!     let plan = scheduler.plan();
//!     // ... an executor computes the spans and samples where the plan says ...
//!     let span = &plan.spans[0];
//!     spans.push((span.start, span.tokens.len(), span.sample.clone()));
//!     let sampled = !span.sample.is_empty();
//!     let outcomes: Vec<Outcome> = sampled.then(|| Outcome::token(seq, 42, false)).into_iter().collect();
//!     scheduler.commit(plan.step, &outcomes)?;
//! }
//! // A prompt of 100 in a budget of 64 takes two steps; max_tokens ends the sequence.
//! assert_eq!(spans, [(0, 64, 0..0), (64, 36, 0..1), (100, 1, 0..1)]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A step
//! Decodes come first, one token each; then prefills under way; then the head of the waiting queue, and
//! nobody past it. Because `max_num_batched_tokens > max_num_seqs` is required, prefill always keeps a share;
//! `long_prefill_token_threshold` keeps one long prompt from taking all of it. When blocks run out, the running
//! request of worst standing (lowest priority, then least work to lose, then latest arrival) gives all of its
//! blocks back and waits again at the place of its arrival. Its outputs stay; its keys and values are computed again,
//! or were moved to host memory and come back ([`PreemptionMode`]). Within a priority the swapped come before the
//! waiting.
//!
//! A request of `n` sequences computes its prompt once, forks copy-on-write, and is preempted as a whole. The beams
//! of a search fork in the midst of their output too: each [`Outcome`] names the one that it continues. Where tokens
//! are [proposed](Scheduler::propose) for a sequence, its span computes them with the last known one, and the outcome
//! says how many were right.
//!
//! Layers that look at the same positions form a [`CacheGroup`]; a sequence has a block table for each, and blocks
//! behind a window go back as it moves on. Slots follow the span: a step takes blocks for what it computes and no more, so that
//! of a long prompt a group with a window holds the window and the chunks in flight.
//!
//! # Planning ahead
//! With `max_in_flight` 2 a step is planned while the one before it runs: [`plan`](Scheduler::plan), hand it to
//! the device, [`submitted`](Scheduler::submitted), plan the next, and [`commit`](Scheduler::commit) in order.
//!
//! ```text
//! host      plan 1 | plan 2 |          commit 1, plan 3 |           commit 2, plan 4 |
//! device           | step 1 ........ | step 2 .............. | step 3 ............. |
//! ```
//!
//! Step 2 computes the token that step 1 draws before anybody knows it: its span carries a placeholder and says
//! [which step](Span::awaits) the token comes from. A placeholder is never hashed. Where the token of step 1 ends
//! its sequence, what step 2 computed behind it is dropped. Blocks given up while a step in flight writes to
//! them are issued again only after that step's commit.
//!
//! # Progress
//! **Theorem.** Let the requests be given, with no more arrivals or aborts: `R` requests, of which request `r`
//! has `P_r` prompt tokens, `n_r` sequences and at most `m_r` output tokens each. With `S` the sum of `n_r`, `W`
//! the greatest `P_r + n_r * (m_r - 1)`, `C` distinct priorities (one under FCFS) and `d` steps in flight at
//! most, every sequence ends within `(2d - 1) * S * (C * (R + 1) * W + 1)` plans, if each plan that cannot be
//! followed by another is followed by the oldest commit.
//!
//! *Proof.* Blocks come with spans: a request owns those of the tokens that were in some span, and of a group with a window
//! those that a token to come can see. So each request fits the pool alone, or it is refused at submission: where a span would
//! need more blocks than there are, it ends with the next block, and for such spans each sequence was counted with what its
//! window touches and the next block. Blocks that prompts under way will take are counted against admissions, and against
//! nothing else.
//!
//! Let `d` be 1. While something is live, a plan is not empty: with nothing running the head of the queue is admitted (nothing
//! is counted against it then). Let `M` be the running request of best standing: by priority, then the earliest of the aged
//! (those preempted three times before), then by most computed tokens, its work. `M` is not preempted: it would have to be the
//! worst as well, so alone, and alone it fits. `M` computes at least one token in each step: if one of its sequences decodes,
//! decodes are never left out; if not, `M` is first among the prefills, and at least one token of the budget is left for them.
//! Where its span lacks blocks others are preempted for it, the last of them when `M` is alone. So between two ends of sequences each step betters the standing of the
//! best: whoever is best at the next step is `M` with more work, or stands before it. There are `C` priorities,
//! `R + 1` ages (that of each request, and none), and `W` values of work, so such an interval has at most
//! `C * (R + 1) * W` steps, and there are at most `S` intervals.
//!
//! Let `d` be 2. `M` can be left out of a plan for two reasons. What it would compute depends on an outcome
//! in flight (the end of its prompt, before a fork; its last token; the beams or drafts that live on): the next
//! commit has it. Or the blocks that it lacks come back with the next commit, as a step in flight still writes to them or
//! reads them, `M`'s own behind its windows among them: then no other takes a block nor is admitted in that plan, and after
//! the commit they are free, and `M` is served first. The one may follow the other, so `M` is in at least
//! one of three consecutive plans; and after an end there may be one such round before the first is admitted.
//!
//! Swapping changes none of this: it takes only requests that are not `M`, who come back with the work that they had,
//! and with nothing running the first of them fits as it did before. Beams wait for each other, but each step computes
//! some token of a search. Drafts are verified with tokens and blocks that the running
//! requests and the admissions of that step leave; no more than half of the tokens are kept for them while others wait. ∎
//!
//! **Nobody starves under endless arrivals** of the same priority. The oldest live request `A` is running or at
//! the head of the queue. While it is at the head nobody else is admitted, so those who run end by the theorem,
//! if room for `A` is not found before. Each time that `A` is preempted is one such round, and the third makes it
//! the best standing: aged and the earliest. Then each step computes some of it until it ends. (A request of
//! low priority does wait for ever behind an endless stream of higher ones: that is what priority asks for.)

mod accept;
mod admit;
mod commit;
mod config;
mod draft;
mod fail;
mod flight;
mod group;
mod ids;
mod order;
mod plan;
mod preempt;
mod request;
mod room;
mod scheduler;
mod sizes;
mod spare;
mod stats;
mod step;
mod view;

pub use accept::CommitError;
pub use config::{ConfigError, Policy, PreemptionMode, SchedConfig};
pub use kvblock::{BlockId, CacheGroup, HostBlockId, Media, MemOp, PrefixStats};
pub use plan::{GroupSpan, Outcome, Span, StepId, StepPlan, TableDelta};
pub use request::{Refusal, Request, RequestId, SeqId};
pub use scheduler::Scheduler;
pub use stats::{SchedulerStats, SpecStats};
pub use view::{RequestState, RequestView};

/// Compiles and runs the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

//! Request scheduler for continuous batching over a paged KV cache, as pure, deterministic logic.
//!
//! Requests are [submitted](Scheduler::submit). Each [`plan`](Scheduler::plan) returns what one step computes, as a
//! complete plain value. Each [`commit`](Scheduler::commit) reports the step's results. Prefill, chunked prefill,
//! decode and recomputation are the same operation with different counts: a sequence has known tokens and computed
//! tokens, and a step computes part of the difference, within a budget of tokens.
//!
//! The scheduler does not execute anything: it accesses no memory, draws no token, reads no clock and starts no thread.
//! Equal histories give equal plans. It does not detect the end of a text; the caller that samples reports it.
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
//!     // ... an executor computes the spans and samples as planned ...
//!     let span = &plan.spans[0];
//!     spans.push((span.start, span.tokens.len(), span.sample.clone()));
//!     let sampled = !span.sample.is_empty();
//!     let outcomes: Vec<Outcome> = sampled.then(|| Outcome::token(seq, 42, false)).into_iter().collect();
//!     scheduler.commit(plan.step, &outcomes)?;
//! }
//! // A prompt of 100 tokens takes two steps with a budget of 64. max_tokens ends the sequence.
//! assert_eq!(spans, [(0, 64, 0..0), (64, 36, 0..1), (100, 1, 0..1)]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A step
//! Decodes come first, one token each and accepted drafts that are computed again; then prefills in progress; then
//! admissions from the head of the waiting queue, in order. Because `max_num_batched_tokens > max_num_seqs` is required, prefills always get part of the budget;
//! `long_prefill_token_threshold` keeps one long prompt from taking all of it, and the
//! [prompt budget](Scheduler::set_prompt_budget), which the caller can change before each plan, keeps prompts from delaying decodes. If blocks run out, the running request
//! of worst rank (lowest priority, then least work to lose, then latest arrival) is preempted: it loses all of its
//! blocks and waits again at its position by arrival. Its outputs are kept. Its keys and values are computed again, or
//! swapped to host memory and back ([`PreemptionMode`]). Within a priority, swapped requests are admitted before
//! waiting ones.
//!
//! The running requests have at most `max_loras` different adapters. A request of another adapter waits, and a bounded
//! number of requests with running adapters passes it ([`SchedConfig::max_loras`]).
//!
//! A request with `n` sequences computes its prompt once, forks copy-on-write, and is preempted as a whole. The beams
//! of a search also fork between output tokens: each [`Outcome`] names the beam that it continues. If draft tokens are
//! [proposed](Scheduler::propose) for a sequence, its span computes them together with the last known token, and the
//! outcome reports how many were right. For models with recurrent states, whose pages the rows of drafts must not
//! change, accepted drafts are then [computed again](SchedConfig::recompute_drafts) at the start of the next span.
//!
//! Layers that read the same positions form a [`CacheGroup`]. A sequence has one block table per group, and blocks
//! behind a window are freed as the sequence advances. A step allocates blocks only for the tokens that it computes, so
//! a long prompt owns in a sliding group only the blocks of the window and the chunks in flight.
//!
//! # Planning ahead
//! With `max_in_flight` 2, a step is planned while the one before it runs: call [`plan`](Scheduler::plan), enqueue the
//! plan on the device, call [`submitted`](Scheduler::submitted), plan the next step, and [`commit`](Scheduler::commit)
//! in order.
//!
//! ```text
//! host      plan 1 | plan 2 |          commit 1, plan 3 |           commit 2, plan 4 |
//! device           | step 1 ........ | step 2 .............. | step 3 ............. |
//! ```
//!
//! Step 2 computes the token that step 1 draws before the host knows it: its span has a placeholder and names [the
//! step](Span::awaits) that draws the token. A placeholder never enters the prefix cache. If the token of step 1 ends
//! its sequence, the results of step 2 for that sequence are dropped. Blocks that are released while a step in flight
//! writes to them are reused only after that step's commit.
//!
//! # Pipelines
//! If the layers are divided into `S` stages ([`SchedConfig::pipeline`], `max_in_flight` is `S`), up to `S` steps are in
//! flight, each in another stage. The host knows the tokens of a step only when it is committed, so nothing is awaited: a
//! sequence whose next token a step in flight draws is not planned before that step's commit, nor are its drafts. Chunks of
//! a prompt follow each other through the stages. So that one step does not take all sequences, each takes a share of
//! those that decode: `N / S` of `N`, and one more in `N mod S` of the steps.
//!
//! ```text
//! stage 0   step 1 | step 2 | step 3 | step 4 | step 5 |       S = 3, three streams a, b, c:
//! stage 1          | step 1 | step 2 | step 3 | step 4 |       steps 1 and 4 decode a, 2 and 5 decode b, 3 decodes c
//! stage 2                   | step 1 | step 2 | step 3 |
//! ```
//!
//! # Progress
//! **Theorem.** Let a set of requests be given, without further arrivals or aborts: `R` requests, where request `r` has
//! `P_r` prompt tokens and `n_r` sequences of at most `m_r` output tokens each. Let `S` be the sum of `n_r`, `W` the
//! greatest `P_r + n_r * (m_r - 1)`, `C` the number of distinct priorities (1 under FCFS) and `d` the greatest number
//! of steps in flight. Then every sequence ends within `(2d - 1) * S * (C * (R + 1) * W + 1)` plans, if the oldest step
//! is committed whenever nothing further can be planned.
//!
//! *Proof.* Blocks are allocated for spans. A request owns the blocks of the tokens that were in some span; in a
//! sliding group only of those that a later token can read. A request that does not fit the pool alone is refused at
//! submission. A request that runs alone always fits: where a span would need more blocks than there are, it ends with
//! the next block, and for such spans the submission check counts, for each sequence, the blocks that its window
//! touches and the next one. Blocks that partly computed prompts will need count only against admissions.
//!
//! Let `d` be 1. While a request is live, no plan is empty: if nothing runs, the head of the queue is admitted, because
//! then nothing counts against it. Let `M` be the running request of best rank: by priority, then the earliest of the
//! aged ones (those preempted three times), then by most computed tokens, its work. `M` is not preempted: it would have
//! to have the worst rank too, so it would be alone, and alone it fits. `M` computes at least one token in each step.
//! If one of its sequences decodes, that is because decodes are never left out. If not, `M` is first among the
//! prefills, and at least one token of the budget is left for prefills, whatever the prompt budget is. If its span lacks blocks, other requests are
//! preempted for it until `M` is alone. So between two ends of sequences each step improves the best rank: the best
//! request of the next step is `M` with more work, or one of better rank. There are `C` priorities, `R + 1` ages (one
//! per request, and none), and `W` values of work. So such an interval has at most `C * (R + 1) * W` steps, and there
//! are at most `S` intervals.
//!
//! Let `d` be greater than 1. `M` can be left out of a plan for two reasons. First, what it would compute depends on an
//! outcome in flight: the end of its prompt before a fork, its last token, the beams or drafts that survive, or in a
//! pipeline its next token. The commits of the at most `d - 1` steps in flight provide that outcome. Second, the blocks
//! that it lacks are freed by these commits, because a step in flight still writes or reads them; those behind `M`'s own
//! windows are among them. Until then no other request gets a block or is admitted, and after the commits the blocks are
//! free and `M` is served first. Before each of these commits there is at most one plan. The two reasons can follow each
//! other, so `M` is in at least one of `2d - 1` consecutive plans. After the end of a sequence one such round may pass
//! before the first admission. The share of a step in a pipeline always contains a sequence of the request of best rank
//! among those that can decode.
//!
//! Swapping changes none of this. It affects only requests other than `M`, which return with the work that they had,
//! and if nothing runs the first of them fits as it did before. Beams wait for each other, but each step computes some
//! token of a search. Drafts are verified with tokens and blocks that the running requests and the admissions of the
//! step leave, and at most half of the remaining tokens are kept for them while requests wait. ∎
//!
//! **No starvation under endless arrivals** of the same priority. The oldest live request `A` is running or at the head
//! of the queue. While it is at the head no other request is admitted, so the running requests end by the theorem,
//! unless `A` fits earlier. Each preemption of `A` causes one such round, and after the third `A` has the best rank:
//! aged and the earliest. From then on each step computes some of it until it ends. (A request of low priority can wait
//! forever behind an endless stream of requests of higher priority. That is the meaning of priority.)
//!
//! *With adapters.* Requests may pass `A` while it waits for its adapter. Once a constant number with adapters have, only
//! requests without an adapter are admitted before `A`. They arrived later and have less work, so those that run with
//! adapters get tokens and blocks before them and end or are preempted, and with them their adapters leave; then `A` is at
//! the head of the queue as above. The theorem holds as it stands, because if nothing runs, no adapter does.

mod accept;
mod adapters;
mod admit;
mod commit;
mod config;
mod fail;
mod ids;
mod live_request;
mod order;
mod plan;
mod preempt;
mod request;
mod running;
mod scheduler;
mod share;
mod sizes;
mod stats;
mod step;
mod step_state;
mod view;

pub use accept::CommitError;
pub use config::{ConfigError, Policy, PreemptionMode, SchedConfig};
pub use kvblock::{BlockEvent, BlockId, CacheGroup, HostBlockId, Media, MemOp, PrefixStats, Tier};
pub use plan::{GroupSpan, Outcome, Span, StepId, StepPlan, TableDelta};
pub use request::{Refusal, Request, RequestId, SeqId};
pub use scheduler::Scheduler;
pub use stats::{SchedulerStats, SpecStats};
pub use view::{RequestState, RequestView};

/// Compiles and runs the example in the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

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
//! admissions from the head of the queue, in order of arrival within a priority. Because
//! `max_num_batched_tokens > max_num_seqs` is required, prefills and admissions always get part of the budget. These prompt
//! tokens are divided so that short prompts are not behind long ones, and long ones not forever behind short ones:
//!
//! ```text
//! first half      running prefills, the oldest first
//! second half     admissions, then running prefills, the shortest first: those with the fewest tokens left
//! ```
//!
//! What the first half leaves goes to the second, and the other way round. Admissions take nothing from a prefill of a
//! better priority. The [prompt budget](Scheduler::set_prompt_budget), which the caller can change before each plan, keeps
//! prompts from delaying decodes.
//!
//! If blocks run out, the running request of worst rank (lowest priority, then least work to lose, then latest arrival) is
//! preempted: it loses all of its blocks and waits again at its position by arrival. Its outputs are kept. Its keys and
//! values are computed again, or swapped to host memory and back ([`PreemptionMode`]). A request that was preempted three
//! times is aged: among these the earliest has the best rank, whatever work others would lose.
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
//! Let `P` be the prompt tokens of a request, and `n` its sequences of at most `m` output tokens each. Let `W` be the greatest
//! `P + n * (m - 1)`, the tokens to compute; `N` the greatest number of requests that run at once, at most `max_num_seqs`; and
//! `d` the greatest number of steps in flight. A request is *first* if no live one has a better priority, or the same and an
//! earlier arrival.
//!
//! **Theorem.** If no step fails, the oldest is committed whenever nothing further can be planned, and no sequence is
//! [held](Scheduler::hold), a request ends within
//! `4 * (2d - 1) * ((N + 1) * W + 1)` plans after it has become first, whatever arrives behind it. So `R` requests without
//! further arrivals of better priority end within `R` times as many plans.
//!
//! *Proof.* Blocks are allocated for spans. A request owns the blocks of the tokens that were in some span; in a
//! sliding group only of those that a later token can read. A request that does not fit the pool alone is refused at
//! submission. A request that runs alone always fits: where a span would need more blocks than there are, it ends with
//! the next block, and for such spans the submission check counts, for each sequence, the blocks that its window
//! touches and the next one. Blocks that partly computed prompts will need count only against admissions.
//!
//! *Of a set of running requests of which none is preempted, the first computes a token in at least one of `2d - 1` consecutive
//! plans.* Let it be `A`, and `d` be 1. If one of its sequences decodes, that is because decodes are never left out. If not,
//! `A` is first in the first half of the prompt tokens, which has at least one, whatever the prompt budget is. If spans lack
//! blocks, requests are preempted until those of the others fit, and `A` alone fits. Let `d` be greater than 1. `A` can be
//! left out of a plan for two reasons. First, what it would compute depends on an outcome in flight: the end of its prompt
//! before a fork, its last token, the beams or drafts that survive, or in a pipeline its next token. The commits of the at most
//! `d - 1` steps in flight provide that outcome. Second, the blocks that it lacks are freed by these commits, because a step
//! in flight still writes or reads them; those behind windows are among them, as far as they are behind whatever drafts are
//! right. Until then no other request gets a block or is admitted, and after the commits the blocks are free and `A` is
//! served first. Before each of these commits there is at most one plan. The two reasons can follow each other. The share of
//! a step in a pipeline always contains a sequence of the first request among those that can decode.
//!
//! *A request computes at most `W` tokens between two preemptions*, not counting drafts that were wrong: each span has a token
//! that was known, and it stays computed. Accepted drafts that are computed again are such tokens. The beams of a search wait
//! for each other, and each draw adds one token to each of at most `n`, also if a beam has ended and is forked again.
//!
//! *The first request is preempted at most three times.* Then it is aged, and no other has a better rank. It would have to
//! have the worst rank too, so it would be alone, and alone it fits.
//!
//! So let `A` be first, and consider the time until its next preemption or its end. While it waits, or is in host memory, it is
//! the head of the queue, and no other request is admitted. Of those that run, the first computes a token in one of `2d - 1`
//! plans, or some are preempted and do not return before `A`. So all have left after `(2d - 1) * N * W` plans, unless `A` fits
//! earlier, and then nothing counts against `A`; one round of `2d - 1` plans may pass before its admission. While it runs, it
//! computes a token in one of `2d - 1` plans, `W` in all. There are at most four such times. ∎
//!
//! Nothing else adds a case. A swapped request returns with the work that it had; if the host has no blocks for it, it is
//! computed again. A hit in the prefix cache, on the device or on the host, shortens a prompt. Blocks that a connector takes in
//! are host blocks that nobody owns, and a request whose blocks are still being fetched has not arrived. States of recurrent
//! layers are a window of two tokens. Drafts get tokens and blocks that the running requests and the admissions of the step
//! leave, and at most half of the remaining tokens are kept for them while requests wait.
//!
//! *With adapters.* Requests may pass `A` while it waits for its adapter. Once a constant number with adapters have, only
//! requests without an adapter are admitted before `A`. All but those that were waiting by then arrive after the requests that
//! run with adapters. So these get tokens and blocks first and end or are preempted, and with them their adapters leave; then
//! `A` is at the head of the queue as above. If nothing runs, no adapter does.
//!
//! **A short prompt is not behind long ones.** If the prompt tokens of each step are at least `2h`, each plan that preempts and
//! defers nothing has `h` tokens for admissions, whatever runs at the same or a lower priority. So it admits the head of the
//! queue, as soon as a sequence, an adapter and blocks are free: with `q` requests before it, a request starts in the
//! `q + 1`st of these plans at the latest. A prompt of at most `h` tokens is then computed at once. A longer one gets `h` tokens in
//! each plan that admits nobody, once no prompt has fewer tokens left.
//!
//! A request of low priority can wait forever behind an endless stream of requests of higher priority. That is the meaning of
//! priority.

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
pub use request::{BACKGROUND, Refusal, Request, RequestId, SeqId};
pub use scheduler::Scheduler;
pub use stats::{SchedulerStats, SpecStats};
pub use view::{RequestState, RequestView};

/// Compiles and runs the example in the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

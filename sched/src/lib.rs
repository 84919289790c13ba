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
//! use sched::{Outcome, Policy, Request, RequestId, SchedConfig, Scheduler, SeqId};
//!
//! let mut scheduler = Scheduler::new(SchedConfig {
//!     block_size: 16,
//!     num_blocks: 100,
//!     max_num_seqs: 8,
//!     max_num_batched_tokens: 64,
//!     max_model_len: 512,
//!     enable_prefix_caching: true,
//!     enable_chunked_prefill: true,
//!     policy: Policy::Fcfs,
//!     hash_seed: None,
//! })?;
//! let id = RequestId(1);
//! scheduler.submit(Request {
//!     id,
//!     prompt: (0..100).collect(),
//!     n: 1,
//!     max_tokens: 2,
//!     priority: 0,
//!     cache_salt: None,
//!     read_prefix_cache: true,
//! })?;
//!
//! let seq = SeqId { request: id, index: 0 };
//! let mut spans = Vec::new();
//! while scheduler.has_work() {
//!     let plan = scheduler.plan();
//!     // ... an executor computes the spans and samples where the plan says ...
//!     let span = &plan.spans[0];
//!     spans.push((span.start, span.tokens.len(), span.sample.clone()));
//!     let sampled = !span.sample.is_empty();
//!     let outcome = Outcome { seq, tokens: vec![42; sampled.into()], finished: false };
//!     scheduler.commit(plan.step, &[outcome])?;
//! }
//! // A prompt of 100 in a budget of 64 takes two steps; max_tokens ends the sequence.
//! assert_eq!(spans, [(0, 64, 0..0), (64, 36, 0..1), (100, 1, 0..1)]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A step
//! Decodes come first, one token each; then prefills under way; then the head of the waiting queue, and
//! nobody past it. Because `max_num_batched_tokens > max_num_seqs` is required, prefill always keeps a share.
//! When blocks run out, the running request of worst standing (lowest priority, then least work to lose, then
//! latest arrival) gives all of its blocks back and waits again at the place of its arrival; its outputs stay
//! and its tokens are computed again. A group of `n` sequences computes its prompt once, forks copy-on-write,
//! and is preempted as a whole.
//!
//! # Progress
//! **Theorem.** Let the requests be given, with no more arrivals or aborts: request `r` with `P_r` prompt
//! tokens, `n_r` sequences and at most `m_r` output tokens each. With `S` the sum of `n_r`, `W` the greatest
//! `P_r + n_r * (m_r - 1)` and `C` distinct priorities (one under FCFS), every sequence ends within
//! `S * C * W` steps.
//!
//! *Proof.* Each request fits the pool alone, or it is refused at submission. While something is live, a plan
//! is not empty: with nothing running the head of the queue is admitted (no watermark then). Let `M` be the
//! running request of best standing, and call a request's work its computed tokens. `M` is not preempted: it
//! would have to be the worst as well, so alone, and alone it fits. `M` computes at least one token in each
//! step: if one of its sequences decodes, decodes are never left out; if not, `M` is first among the
//! prefills, and at least one token of the budget is left for them. So between two ends of sequences each
//! step betters (priority of `M`, work of `M`): at equal priority whoever stands best at the next step has at
//! least the work that `M` has by then. Work is at most `W`, so such an interval has at most `C * W` steps,
//! and there are at most `S` intervals. ∎

mod commit;
mod config;
mod group;
mod plan;
mod request;
mod scheduler;
mod stats;
mod step;

pub use commit::CommitError;
pub use config::{ConfigError, Policy, SchedConfig};
pub use kvblock::BlockId;
pub use plan::{MemOp, Outcome, Span, StepId, StepPlan, TableDelta};
pub use request::{Refusal, Request, RequestId, SeqId};
pub use scheduler::Scheduler;
pub use stats::SchedStats;

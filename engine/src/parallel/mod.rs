//! Replicas of several ranks: one program on several devices, NUMA nodes or machines.
//!
//! ```text
//! rank 0            engine ─▶ StepInput ─┬─ broadcast ─────────────────┐
//!                                        ▼                             ▼
//! every rank                       LocalWorker ◀─ gathers of rows ─▶ LocalWorker
//!                                        └── hash of the outcome must be equal ──┘
//! ```
//!
//! Rank 0 has the server, the scheduler and the sources of drafts. It broadcasts every [`StepInput`](crate::worker::StepInput) with its
//! number, and all ranks run the same worker on it, each with its part of the weights ([`models::Decoder::shard`]). Since all ranks of a
//! group get the same logits, every rank draws the same tokens, and none has to be told what another drew. After each step the ranks
//! compare hashes of their outcomes: a rank that differs ends the group, and both ranks are named.
//!
//! With several stages of layers ([`models::Decoder::stage`]), rows go from stage to stage. The ranks of the last stage alone draw, and the
//! first of them sends the outcome to rank 0. The ranks of a stage compare theirs.
//!
//! | file | what it owns |
//! |---|---|
//! | [`rank`] | this process's rank and its groups; what all ranks must agree on before they load |
//! | [`pieces`] | orders of any length as broadcasts |
//! | [`worker`] | rank 0's worker, which broadcasts its inputs |
//! | [`follow`] | the loop of the other ranks |
//!
//! **Failure.** A group is fail-stop. A rank that cannot go on aborts it; then every request ends with an error, the server reports that
//! it is not healthy, and the process ends with an error, for a supervisor to start it again.

mod follow;
mod pieces;
mod rank;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod worker;

pub(crate) use follow::{EndOnPanic, obey};
pub use rank::Group;
pub(crate) use rank::{Rank, together};
pub(crate) use worker::GroupWorker;

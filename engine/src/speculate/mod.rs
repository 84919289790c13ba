//! Speculative decoding that never changes a token.
//!
//! A [`Proposer`] guesses the next tokens of a sequence, its *drafts*. One step computes the sequence's last token and its drafts,
//! so it has a row of logits for each of them, and from every row a token is drawn exactly as it would be without drafts:
//!
//! ```text
//! tokens of the span   [ last | d1 | d2 | d3 ]          drafts: d1 d2 d3
//! drawn from the rows     t1    t2   t3   t4            t1 = d1, t2 = d2, t3 ≠ d3: the outcome is t1 t2 t3
//! ```
//!
//! A draw has no state: its noise is a function of the request's seed and the index of the token. So a draft is right exactly if it
//! equals the token drawn at its position, verification is a comparison, and the output has the bits of an engine without
//! speculation at every temperature and with every filter, penalty and grammar. Rows behind the first draft that was wrong are
//! ignored, and the scheduler cuts their slots off the block table before anything is hashed. In a model with recurrent layers it
//! cuts off the slots of accepted drafts too, and the next span begins with them.
//!
//! A `Speculator` decides how many drafts a sequence gets (`control`) and asks the proposer for them. A proposer cannot affect an
//! answer, only its speed, so its failure is no failure of a request: it is reported once, and speculation is off from then on.
//!
//! This module knows token ids only: no model, no grammar, no block. Drafts of a second model are computed by the
//! [worker](crate::worker::Worker::draft), in the blocks of the step that verifies them. Its proposer gives only their number, as
//! placeholders, and they are replaced when the step is planned.

mod by_worker;
mod config;
mod control;
mod ngram;
mod prompts;
mod proposer;
mod speculator;
mod suffix;

pub use config::{DraftCheckpoint, MAX_SPECULATIVE_TOKENS, SpeculativeConfig, SpeculativeMethod};
pub use ngram::Ngram;
pub use proposer::{DraftScope, Proposal, ProposeError, Proposer};
pub use speculator::Speculation;
pub(crate) use speculator::Speculator;
pub use suffix::{Suffix, SuffixLimits};

//! The interface of a source of drafts.

use sched::SeqId;

/// What a request's drafts may depend on besides its own tokens: only texts of the same scope.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct DraftScope {
    /// The cache salt of the request.
    pub cache_salt: Option<String>,
    /// Digest of its adapter.
    pub adapter: Option<String>,
}

/// The drafts of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// The sequence.
    pub seq: SeqId,
    /// Greatest number of drafts.
    pub most: usize,
    /// The drafts, which the proposer adds. None at all is a valid answer.
    pub drafts: Vec<u32>,
}

/// A source of drafts cannot go on. Displays as one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ProposeError(pub String);

/// Guesses the next tokens of sequences. Wrong guesses cost time and change nothing else.
///
/// A step asks once for all of its sequences, so that a proposer with a model of its own can compute them together.
pub trait Proposer: Send {
    /// Whether its drafts are placeholders, which the worker replaces when their step is planned
    /// ([`Worker::draft`](crate::worker::Worker::draft)).
    fn by_worker(&self) -> bool {
        false
    }

    /// A sequence has drawn its first token: `prompt` is followed by the tokens of [`Proposer::extend`].
    fn begin(&mut self, seq: SeqId, scope: &DraftScope, prompt: &[u32]);

    /// A sequence has drawn a token.
    fn extend(&mut self, seq: SeqId, token: u32);

    /// A sequence has ended. It may be unknown.
    fn end(&mut self, seq: SeqId);

    /// Adds drafts that follow the last token of each sequence.
    ///
    /// # Errors
    /// The proposer cannot go on. It is not called again.
    fn propose(&mut self, wanted: &mut [Proposal]) -> Result<(), ProposeError>;
}

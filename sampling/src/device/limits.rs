//! What a device sampler is made for, the memory that takes, and what it refuses.

use device::DeviceError;

use super::layout::{CHUNK, CHUNK_BYTES, CUT_BYTES, PARAM_WORDS, RESULT_WORDS, TOP_WORDS};

/// Masses of more tokens might not fit 64 bits.
const MAX_VOCAB: usize = 1 << 22;
/// Slots of a device sampler, at most: rows of a launch are the grid's second dimension.
pub const MAX_SLOTS: usize = 65_535;

/// The greatest step of a [`DeviceSampler`](super::DeviceSampler), and how much a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Slots, and rows of a step: 1 to 65,535.
    pub max_num_seqs: usize,
    /// Logits of a row: 1 to 2²².
    pub vocab: usize,
    /// Alternatives of a token, at most.
    pub max_logprobs: usize,
    /// Words of a slot's list: two for each entry of `logit_bias`, one for each stop id, and for each of `bad_words` one
    /// more than its tokens.
    pub list_words: usize,
    /// Tokens of a bad word before its last.
    pub bad_word_tokens: usize,
    /// Tokens of prompt and output together of a sequence with penalties.
    pub history_tokens: usize,
}

impl Limits {
    /// For so many sequences of at most `max_model_len` tokens, with room for what requests usually ask: 20 alternatives,
    /// 1,024 words, 31 tokens.
    pub fn new(max_num_seqs: usize, vocab: usize, max_model_len: usize) -> Limits {
        Limits {
            max_num_seqs,
            vocab,
            max_logprobs: 20,
            list_words: 1024,
            bad_word_tokens: 31,
            history_tokens: max_model_len,
        }
    }

    /// Device memory in bytes, most of it two words per slot and token of the vocabulary: counts and adjusted logits.
    pub fn device_bytes(&self) -> usize {
        self.sizes().iter().sum()
    }

    /// Page-locked host memory in bytes.
    pub fn pinned_bytes(&self) -> usize {
        2 * (self.stage_words() + self.result_words()) * size_of::<u32>()
    }

    /// Refuses limits that kernels cannot serve. [`DeviceSampler::new`](super::DeviceSampler::new) does the same.
    ///
    /// # Errors
    /// What is over or zero.
    pub fn check(&self) -> Result<(), SampleError> {
        at_most("slots", self.max_num_seqs, MAX_SLOTS)?;
        at_most("tokens of the vocabulary", self.vocab, MAX_VOCAB)?;
        match (self.max_num_seqs, self.vocab) {
            (0, _) => Err(SampleError::None("slots")),
            (_, 0) => Err(SampleError::None("tokens of the vocabulary")),
            _ => Ok(()),
        }
    }

    /// Blocks that share a row.
    pub(super) fn splits(&self) -> usize {
        self.vocab.div_ceil(CHUNK)
    }

    /// Words of a mask.
    pub(super) fn mask_words(&self) -> usize {
        self.vocab.div_ceil(32)
    }

    /// Last output tokens that a slot keeps; the kernels divide by it.
    pub(super) fn tail_tokens(&self) -> usize {
        self.bad_word_tokens.max(1)
    }

    /// Words of all results: the tokens, then the alternatives.
    pub(super) fn result_words(&self) -> usize {
        self.max_num_seqs * (RESULT_WORDS + self.max_logprobs * TOP_WORDS)
    }

    /// Words that a step uploads where every row changes and one brings the longest history.
    pub(super) fn stage_words(&self) -> usize {
        let slot = PARAM_WORDS + self.list_words + 2 * self.mask_words();
        self.max_num_seqs * (4 + slot) + self.history_tokens
    }

    /// Bytes of each buffer, in the order of `Buffers`.
    pub(super) fn sizes(&self) -> [usize; 14] {
        let seqs = self.max_num_seqs;
        [
            seqs * 2 * 4,
            seqs * PARAM_WORDS * 4,
            seqs * self.list_words * 4,
            seqs * self.mask_words() * 4,
            seqs * self.mask_words() * 4,
            seqs * self.vocab * 4,
            seqs * (1 + self.tail_tokens()) * 4,
            seqs * self.vocab * 4,
            seqs * self.splits() * CHUNK_BYTES,
            seqs * CUT_BYTES,
            seqs * RESULT_WORDS * 4,
            seqs * self.max_logprobs * TOP_WORDS * 4,
            self.history_tokens * 4,
            seqs * 2 * 4,
        ]
    }
}

/// Refuses more than there is room for.
pub(super) fn at_most(what: &'static str, found: usize, most: usize) -> Result<(), SampleError> {
    if found <= most { Ok(()) } else { Err(SampleError::TooMany { what, found, most }) }
}

/// Why a call was refused. Nothing has changed, unless the device itself failed.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// More than [`Limits`] has room for; where it is a request's, the host's sampler takes it.
    #[error("sampling on the device: found {found} {what}, expected at most {most}; sample such a row on the host")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        found: usize,
        /// How many there may be.
        most: usize,
    },
    /// Limits of nothing.
    #[error("sampling on the device: found no {0}, expected at least one")]
    None(&'static str),
    /// A slot that was not set, or has been cleared.
    #[error("sampling on the device: slot {0} holds no sequence; call set_row or fork first")]
    NotSet(u32),
    /// A slot that two rows of a step name, or that is to become a copy of itself.
    #[error("sampling on the device: slot {0} is named twice; a sequence has one row in a step")]
    Twice(u32),
    /// Logits that do not lie in their buffer.
    #[error("sampling on the device: row {row} of the logits ends at byte {end} of a buffer of {bytes}")]
    Logits {
        /// Which row.
        row: u32,
        /// Where it ends.
        end: usize,
        /// The size of the buffer.
        bytes: usize,
    },
    /// A token that is to go where there is none.
    #[error("sampling on the device: a token is to go to place {at} of {places}")]
    Place {
        /// Where.
        at: u32,
        /// How many places there are.
        places: usize,
    },
    /// Results that a later step has replaced.
    #[error("sampling on the device: the results of step {0} are gone; collect a step before the second one after it")]
    Gone(u64),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

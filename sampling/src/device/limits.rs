//! The limits of a device sampler, the memory they take, and its errors.

use device::DeviceError;

use super::args::{CHUNK, CHUNK_BYTES, CUT_BYTES, LIST, Row, RowParams, RowResult, SEGMENT, TokenCopy, Top};

/// A probability mass of more tokens could overflow 64 bits.
const MAX_VOCAB: usize = 1 << 22;
/// Greatest number of slots of a device sampler: rows of a launch are the grid's second dimension.
pub const MAX_SLOTS: usize = 65_535;
const WORD: usize = size_of::<u32>();
/// Last position of the first token of a row: 16 bytes are at most 8 logits.
const MAX_PHASE: usize = 7;

/// The largest step of a [`DeviceSampler`](super::DeviceSampler), and the capacity of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Number of slots: 1 to 65,535.
    pub max_num_seqs: usize,
    /// Most rows of a step, 1 to 65,535. A sequence with drafts has one for each of them, and one more.
    pub max_rows: usize,
    /// Logits per row: 1 to 2²².
    pub vocab: usize,
    /// Most alternatives of a token.
    pub max_logprobs: usize,
    /// Words of a slot's list: two for each entry of `logit_bias`, one for each stop id, and for each of `bad_words`
    /// one more than its tokens.
    pub list_words: usize,
    /// Most tokens of a bad word before its last.
    pub bad_word_tokens: usize,
    /// Most tokens of prompt and output together of a sequence with penalties.
    pub history_tokens: usize,
}

impl Limits {
    /// Limits for `max_num_seqs` sequences of at most `max_model_len` tokens, with as many rows. The other limits suit usual
    /// requests: 20 alternatives, 1,024 list words, 31 tokens of a bad word before its last.
    pub fn new(max_num_seqs: usize, vocab: usize, max_model_len: usize) -> Limits {
        Limits {
            max_num_seqs,
            max_rows: max_num_seqs,
            vocab,
            max_logprobs: 20,
            list_words: 1024,
            bad_word_tokens: 31,
            history_tokens: max_model_len,
        }
    }

    /// Device memory in bytes. Most of it is a word per slot and token of the vocabulary, its counts, and one per row and
    /// token, the adjusted logits.
    pub fn device_bytes(&self) -> usize {
        self.array_bytes().iter().sum()
    }

    /// Page-locked host memory in bytes.
    pub fn pinned_bytes(&self) -> usize {
        2 * (self.staging_bytes() + self.result_bytes() + self.top_bytes())
    }

    /// Checks that the kernels can serve these limits, as [`DeviceSampler::new`](super::DeviceSampler::new) does.
    ///
    /// # Errors
    /// [`SampleError::TooMany`] or [`SampleError::Zero`], for the first limit that is too large or zero.
    pub fn check(&self) -> Result<(), SampleError> {
        at_most("slots", self.max_num_seqs, MAX_SLOTS)?;
        at_most("rows of a step", self.max_rows, MAX_SLOTS)?;
        at_most("tokens of the vocabulary", self.vocab, MAX_VOCAB)?;
        let numbers =
            [("slots", self.max_num_seqs), ("rows of a step", self.max_rows), ("tokens of the vocabulary", self.vocab)];
        numbers.into_iter().try_for_each(|(what, found)| if found == 0 { Err(SampleError::Zero(what)) } else { Ok(()) })
    }

    /// Number of blocks that share a row. Its first token may be at any of eight positions.
    pub(super) fn splits(&self) -> usize {
        (self.vocab + MAX_PHASE).div_ceil(CHUNK)
    }

    /// Elements from one row of adjusted logits to the next.
    pub(super) fn scaled_stride(&self) -> usize {
        (self.vocab + MAX_PHASE).next_multiple_of(4)
    }

    /// Words of a mask with one bit per token.
    pub(super) fn mask_words(&self) -> usize {
        self.vocab.div_ceil(32)
    }

    /// Number of last output tokens that a slot keeps. At least 1, because the kernels divide by it.
    pub(super) fn tail_tokens(&self) -> usize {
        self.bad_word_tokens.max(1)
    }

    pub(super) fn result_bytes(&self) -> usize {
        self.max_rows * size_of::<RowResult>()
    }

    pub(super) fn top_bytes(&self) -> usize {
        self.max_rows * self.max_logprobs * size_of::<Top>()
    }

    /// Bytes uploaded for a slot that is set, without its history.
    pub(super) fn slot_bytes(&self) -> usize {
        size_of::<RowParams>() + WORD * (self.list_words + 2 * self.mask_words())
    }

    /// Bytes uploaded by a step in which every slot is set and one brings the longest history.
    pub(super) fn staging_bytes(&self) -> usize {
        let slots = self.max_num_seqs * (size_of::<TokenCopy>() + self.slot_bytes());
        self.max_rows * size_of::<Row>() + slots + self.history_tokens * WORD
    }

    /// Bytes of each array, in the order of [`Array`](super::arrays::Array).
    pub(super) fn array_bytes(&self) -> [usize; 16] {
        let (seqs, rows) = (self.max_num_seqs, self.max_rows);
        [
            rows * size_of::<Row>(),
            seqs * size_of::<RowParams>(),
            seqs * self.list_words * WORD,
            seqs * self.mask_words() * WORD,
            seqs * self.mask_words() * WORD,
            seqs * self.vocab * WORD,
            seqs * (1 + self.tail_tokens()) * WORD,
            rows * self.scaled_stride() * WORD,
            rows * self.splits() * (CHUNK / SEGMENT) * WORD,
            rows * LIST * size_of::<u64>(),
            rows * self.splits() * CHUNK_BYTES,
            rows * CUT_BYTES,
            self.result_bytes(),
            self.top_bytes(),
            self.history_tokens * WORD,
            seqs * size_of::<TokenCopy>(),
        ]
    }
}

/// Refuses `found` above `most`.
pub(super) fn at_most(what: &'static str, found: usize, most: usize) -> Result<(), SampleError> {
    if found <= most { Ok(()) } else { Err(SampleError::TooMany { what, found, most }) }
}

/// Why a call was refused. It changed nothing, unless the device itself failed.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// A count is above a limit. The host's sampler can serve such a request.
    #[error("sampling on the device: found {found} {what}, expected at most {most}; sample such a row on the host")]
    TooMany {
        /// Name of what was counted.
        what: &'static str,
        /// The count.
        found: usize,
        /// The limit.
        most: usize,
    },
    /// A limit is zero.
    #[error("sampling on the device: found 0 {0}, expected at least 1")]
    Zero(&'static str),
    /// The slot was never set, or has been cleared.
    #[error("sampling on the device: slot {0} holds no sequence; call set_row or fork first")]
    NotSet(u32),
    /// Two rows of a step name this slot, or it would become a fork of itself.
    #[error(
        "sampling on the device: slot {0} is named twice; a sequence has one row in a step, or one more than drafts"
    )]
    DuplicateSlot(u32),
    /// The rows of this slot's drafts are incomplete or not consecutive.
    #[error("sampling on the device: rows of slot {0} do not follow each other; make them with Row::with_drafts")]
    Drafts(u32),
    /// A row of logits does not lie within its buffer.
    #[error(
        "sampling on the device: row {row} of the logits ends at byte {end}, expected at most {bytes}, the size of the \
         buffer"
    )]
    Logits {
        /// Index of the row.
        row: u32,
        /// Byte at which it ends.
        end: usize,
        /// Size of the buffer in bytes.
        bytes: usize,
    },
    /// A token would be copied to behind the end of the array.
    #[error(
        "sampling on the device: found token index {index}, expected an index below {len}, the length of the array"
    )]
    TokenIndex {
        /// The index.
        index: u32,
        /// Number of tokens in the array.
        len: usize,
    },
    /// A later step has overwritten the results.
    #[error(
        "sampling on the device: the results of step {0} have been overwritten; collect a step before the second one \
         after it"
    )]
    Overwritten(u64),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

//! The structs and constants that host and kernels share: field for field those of `csrc/args.cuh`.

use device::kernel_structs;

/// The module of the kernels: the `sampling` in the names of the compiled files.
pub(super) const MODULE: &str = "sampling";

/// Positions of a row per block of the adjust, filter and draw kernels.
pub(super) const CHUNK: usize = 8192;
/// Positions of a row that share a peak.
pub(super) const SEGMENT: usize = 128;
/// Entries of a row's list of undecided tokens.
pub(super) const LIST: usize = 4096;
/// Threads per block of the adjust, filter and draw kernels.
pub(super) const CHUNK_THREADS: u32 = 256;
/// Threads per block of the kernels with one block per row.
pub(super) const ROW_THREADS: u32 = 512;

/// Sizes in bytes of the structs `Chunk` and `Cut`, which only the kernels access.
pub(super) const CHUNK_BYTES: usize = 48;
pub(super) const CUT_BYTES: usize = 88;

/// [`Row::slot`] of a row of padding.
pub(super) const NO_SLOT: u32 = u32::MAX;
/// Most drafts of a slot in a step.
pub const MAX_DRAFTS: usize = 32;

/// Bits of [`RowParams::flags`].
pub(super) mod flag {
    pub const GREEDY: u32 = 1;
    pub const CONSTRAINED: u32 = 2;
    pub const ALLOWED: u32 = 4;
    pub const PENALISED: u32 = 8;
    pub const LOGPROBS: u32 = 16;
}

kernel_structs! {
    /// A row of a step: which sequence draws, and from which row of the logits. Several sequences may draw from one
    /// row. A sequence with drafts has several rows ([`Row::with_drafts`]).
    pub struct Row: 16 bytes {
        /// The sequence's slot.
        pub slot: u32,
        /// Index of the row in the logits.
        pub logits_row: u32,
        /// Number of drafts before the token of this row. They are those of the rows before it.
        pub num_drafts: u32,
        /// What the token of this row is compared with; [`Row::NO_DRAFT`] in the last row of a sequence.
        pub draft: u32,
    }

    /// A copy of the last token of a slot's sequence to an array of tokens.
    pub struct TokenCopy: 8 bytes {
        /// The sequence's slot.
        pub slot: u32,
        /// Index in the array.
        pub index: u32,
    }

    /// Shape of `sample_accept`.
    pub(super) struct AcceptShape: 12 bytes {
        pub rows: u32,
        pub vocab: u32,
        pub tail_tokens: u32,
    }

    /// The parameters of a slot's request.
    pub(super) struct RowParams: 80 bytes {
        pub flags: u32,
        pub temperature: f32,
        pub top_p: f32,
        pub typical_p: f32,
        pub ln_min_p: f32,
        pub top_k: u32,
        pub repetition_penalty: f32,
        pub presence_penalty: f32,
        pub frequency_penalty: f32,
        pub min_tokens: u32,
        pub num_biases: u32,
        pub num_stops: u32,
        pub bad_words: u32,
        pub num_top: u32,
        /// Low word, high word.
        pub seed: [u32; 2],
        pub sequence: u32,
        pub padding: [u32; 3],
    }

    /// The token of a row, with the log-probability and rank that were requested.
    pub(super) struct RowResult: 16 bytes {
        pub token: u32,
        pub logprob: f32,
        pub rank: u32,
        pub num_top: u32,
    }

    /// One of the likeliest tokens of a row.
    pub(super) struct Top: 8 bytes {
        pub token: u32,
        pub logprob: f32,
    }

    /// Shape of a step's four kernels.
    pub(super) struct SampleShape: 32 bytes {
        pub logits_stride: u64,
        pub vocab: u32,
        pub splits: u32,
        pub list_words: u32,
        pub tail_tokens: u32,
        pub top_stride: u32,
        pub scaled_stride: u32,
    }

    /// Shape of `sample_history`.
    pub(super) struct HistoryShape: 32 bytes {
        pub slot: u32,
        pub vocab: u32,
        pub tail_tokens: u32,
        pub penalised: u32,
        pub prompt_tokens: u32,
        pub last_tokens: u32,
        pub output_len: u32,
        pub padding: u32,
    }

    /// Shape of `sample_fork`.
    pub(super) struct ForkShape: 24 bytes {
        pub from: u32,
        pub to: u32,
        pub sequence: u32,
        pub vocab: u32,
        pub list_words: u32,
        pub tail_tokens: u32,
    }

    /// Shape of `sample_copy_tokens`.
    pub(super) struct CopyShape: 8 bytes {
        pub copies: u32,
        pub tail_tokens: u32,
    }
}

impl Row {
    /// No draft.
    pub const NO_DRAFT: u32 = u32::MAX;

    /// The only row of a sequence.
    pub fn new(slot: u32, logits_row: u32) -> Row {
        Row { slot, logits_row, num_drafts: 0, draft: Row::NO_DRAFT }
    }

    /// The rows of a sequence with drafts, of which there are at most [`MAX_DRAFTS`]: one before each draft and one behind the last,
    /// in consecutive rows of the logits. Each token is drawn as if the drafts before it were the sequence's output. Only the tokens
    /// up to the first that differs from its draft count: they alone change the slot, and the caller ignores the others.
    pub fn with_drafts(slot: u32, first_logits_row: u32, drafts: &[u32]) -> impl Iterator<Item = Row> {
        let compared = drafts.iter().copied().chain([Row::NO_DRAFT]);
        let row = move |(draft, num_drafts)| Row { slot, logits_row: first_logits_row + num_drafts, num_drafts, draft };
        compared.zip(0..).map(row)
    }

    /// Whether it may stand behind that row of a step, or at its beginning.
    pub(super) fn follows(&self, before: Option<&Row>) -> bool {
        match before {
            Some(before) if before.draft != Row::NO_DRAFT => {
                self.slot == before.slot && self.num_drafts == before.num_drafts + 1
            }
            _ => self.num_drafts == 0,
        }
    }
}

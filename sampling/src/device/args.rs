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
    /// row.
    pub struct Row: 8 bytes {
        /// The sequence's slot.
        pub slot: u32,
        /// Index of the row in the logits.
        pub logits_row: u32,
    }

    /// A copy of the last token of a slot's sequence to an array of tokens.
    pub struct TokenCopy: 8 bytes {
        /// The sequence's slot.
        pub slot: u32,
        /// Index in the array.
        pub index: u32,
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
